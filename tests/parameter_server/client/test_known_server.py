"""A server with a follower: where it is, and whom clients believe."""

import contextlib

import pytest
from support.scripted_peer import Peer, T
from support.shard_world import APPLY

from psengine.errors import ConfigurationError, ServerLostError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.parameter_server.client.known_server import MAX_PLACES, KnownServer
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession
from psengine.protocol.messages import Message

A, B = ["tcp://a:1", "tcp://a:2"], ["tcp://b:1", "tcp://b:2"]


class Follower(Peer):
    """A peer that never leads."""

    def answer(self, message):
        return self.reply(message, T.ERROR, body={"code": "not_leading", "text": "this server follows another"}, term=1)


def test_errors_name_both_addresses_and_what_the_last_one_said():
    with contextlib.closing(Follower()) as first, contextlib.closing(Follower()) as second:
        pair = first, second
        addresses = parse_addresses("|".join(one.address for one in pair))
        options = SessionOptions(addresses=addresses, rule=APPLY, rank=0, connect_timeout_s=3.0)
        with pytest.raises(ServerLostError) as caught:
            WorkerSession(options).start()
    assert "|".join(one.address for one in pair) + " did not answer" in str(caught.value)
    assert any(f"{one.address}: this server follows another" in str(caught.value) for one in pair)


@pytest.mark.parametrize("servers", ["tcp://a:1|", "tcp://a:1|tcp://a:1", "tcp://a:1|tcp://b:1|tcp://c:1"])
def test_alternatives_that_are_none_are_refused(servers):
    with pytest.raises(ConfigurationError, match=r"malformed|one address, or two"):
        parse_addresses(servers)


def known(**first):
    server = KnownServer("tcp://a:1|tcp://b:1")
    server.heard(Message(T.RESUMED, **{"term": 1, "epoch": 1, "body": {"shards": A}, **first}), A[0], 0)
    return server


def test_addresses_are_those_of_who_led_last_of_its_follower_and_as_named():
    server = known(body={"shards": A, "replicas": ["tcp://c:1", "tcp://c:2"]})
    assert server.places == [A, ["tcp://c:1", "tcp://c:2"], B[:1]]
    wild = {"shards": ["tcp://*:1", "tcp://0.0.0.0:2"]}
    assert server.heard(Message(T.RESUMED, term=2, epoch=2, body=wild), B[0], 0)
    assert [server.next_to(address, 1) for address in (B[1], A[1], "tcp://c:2")] == [A[1], "tcp://c:2", B[1]]
    for number in range(9):
        server.heard(Message(T.OK, term=2, body={"replicas": [f"tcp://d:{number + 1}"] * 2}), B[0], 0)
    assert len(server.places) == MAX_PLACES
    assert known(body={"shards": A, "replicas": ["tcp://*:1", "nonsense"]}).places == [A, B[:1]]
    assert known(term=0).next_to(A[0], 0) == A[0]  # a server without a term has no second


def test_another_server_is_not_believed():
    def problem(kind=T.RESUMED, term=1, shards=B, **body):
        return known().objection(Message(kind, term=term, epoch=5, body=body or {"shards": shards}))

    assert "leads no more" in problem(term=0)
    assert "another process" in problem()
    assert "another process" in problem(T.ERROR, code="state_lost")
    assert "expected 2 shards, got 1" in problem(term=2, shards=B[:1])
    assert not problem(term=2)
