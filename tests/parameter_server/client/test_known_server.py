"""A server with a follower: who leads is found, and who led before is not believed."""

import contextlib

import pytest
import torch
from support.scripted_peer import SPECS, Peer, T
from support.shard_world import APPLY
from support.waiting import eventually

from psengine.errors import ConfigurationError, ServerLostError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.parameter_server.client.known_server import MAX_PLACES, KnownServer
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession
from psengine.protocol.messages import Message

LEASE_S = 0.6
A, B = ["tcp://a:1", "tcp://a:2"], ["tcp://b:1", "tcp://b:2"]


class Member(Peer):
    """A peer that may lead; else it refuses."""

    def __init__(self, epoch, *, leads):
        self.term, self.leads = 1, leads
        super().__init__()
        self.epoch = epoch

    def reply(self, request, kind, **fields):
        return super().reply(request, kind, **{"term": self.term, **fields})

    def answer(self, message):
        if not self.leads:
            return self.reply(message, T.ERROR, body={"code": "not_leading", "text": "this server follows another"})
        answer = super().answer(message)
        if message.type is T.HELLO:
            answer[0].body |= {"lease_s": LEASE_S, "heartbeat_s": LEASE_S / 5}
            answer[1].term = self.term
        elif message.type is T.RESUME:
            answer.body["missing"] = [key for key, _ in message.body.get("open", ())]
        return answer


@pytest.fixture
def pair():
    """Who leads in term 1, and its follower."""
    with contextlib.closing(Member(1, leads=True)) as lead, contextlib.closing(Member(2, leads=False)) as follower:
        yield lead, follower
    assert [lead.error, follower.error] == [None, None]


def session_of(*members, **options):
    addresses = parse_addresses("|".join(member.address for member in members))
    return WorkerSession(SessionOptions(addresses=addresses, rule=APPLY, rank=0, timeout_s=10.0, **options))


def test_a_process_that_leads_and_stops_is_left_and_not_believed_when_it_goes_on(pair):
    lead, follower = pair
    with session_of(follower, lead) as session:
        session.enter(SPECS, lambda spec: torch.zeros(spec.numel))
        link = session.job_connection.links[0]
        # The coordinator is silent; its shards are left too.
        lead.script |= dict.fromkeys(T, lambda *_: None)
        follower.term, follower.leads = 2, True
        eventually(lambda: link.address == follower.address and link.is_up)
        late = Message(T.UPDATED, key=0, sequence=1, epoch=1, term=1, payload=torch.zeros(SPECS[0].numel))
        follower.script[T.PUSH] = lambda peer, route, m: [*([late] if peer.seen[T.PUSH] == 1 else ()), peer.answer(m)]
        out = torch.zeros(SPECS[0].numel)
        session.push(0, torch.ones_like(out), [out]).wait()
        assert bool((out == 2).all())
        assert "expected term 2, got 1" in link.last_problem


def test_errors_name_both_addresses_and_what_the_last_one_said(pair):
    pair[0].leads = False
    with pytest.raises(ServerLostError) as caught:
        session_of(*pair, connect_timeout_s=1.0).start()
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
