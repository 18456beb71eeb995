"""A server with a follower: who leads is found, and who led before is not believed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.scripted_peer import SPECS, Peer, T
from support.shard_world import APPLY
from support.waiting import eventually

from psengine.errors import ConfigurationError, ServerLostError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.parameter_server.client.known_server import MAX_LEARNED, KnownServer
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession
from psengine.protocol.messages import Message

LEASE_S = 0.6


class Member(Peer):
    """A peer that may lead; else it refuses."""

    def __init__(self, *, term, epoch, leads):
        self.term, self.leads, self.replicas = term, leads, []
        super().__init__()
        self.epoch = epoch

    def reply(self, request, kind, **fields):
        return super().reply(request, kind, **{"term": self.term, **fields})

    def answer(self, message):
        if not self.leads:
            return self.reply(message, T.ERROR, body={"code": "not_leading", "text": "this server follows another"})
        answer = super().answer(message)
        if message.type is T.RESUME:
            answer.body["missing"] = [key for key, _ in message.body.get("open", ())]
        return answer

    def view(self, message):
        view = super().view(message)
        view.term = self.term
        return view

    def welcome(self):
        return {**super().welcome(), "lease_s": LEASE_S, "heartbeat_s": LEASE_S / 5}

    def resumed(self):
        return {**super().resumed(), **({"replicas": self.replicas} if self.replicas else {})}


@contextlib.contextmanager
def pair():
    """Who leads in term 1, and its follower."""
    with contextlib.ExitStack() as stack:
        members = Member(term=1, epoch=1, leads=True), Member(term=1, epoch=2, leads=False)
        for member in members:
            stack.callback(member.close)
        yield members
    assert [member.error for member in members] == [None, None]


def entered(stack, name, **options):
    options = {"addresses": parse_addresses(name), "rule": APPLY, "rank": 0, "timeout_s": 10.0, **options}
    session = stack.enter_context(WorkerSession(SessionOptions(**options)))
    session.enter(SPECS, lambda spec: torch.zeros(spec.numel))
    return session


def push(session):
    out = torch.zeros(SPECS[0].numel)
    return session.push(0, torch.ones(SPECS[0].numel), [out]), out


def test_who_leads_is_asked_whichever_address_is_named_first():
    with pair() as (lead, follower), contextlib.ExitStack() as stack:
        session = entered(stack, f"{follower.address}|{lead.address}")
        pushed, out = push(session)
        pushed.wait()
        assert bool((out == 2).all())
        assert follower.seen[T.PUSH] == 0


def test_a_worker_that_was_told_of_the_follower_goes_there_with_what_is_open():
    with pair() as (lead, follower), contextlib.ExitStack() as stack:
        lead.replicas = [follower.address]
        lead.script[T.PUSH] = lambda *_: None
        session = entered(stack, lead.address)
        pushed, out = push(session)
        follower.term, follower.leads = 2, True
        lead.close()
        pushed.wait()
        assert bool((out == 2).all())
        assert session.job_connection.control.address == follower.address


def test_what_a_former_lead_says_later_is_not_read():
    with pair() as (lead, follower), contextlib.ExitStack() as stack:
        session = entered(stack, f"{lead.address}|{follower.address}")
        link = session.job_connection.links[0]
        # The process that leads is stopped. The coordinator's silence is noticed, and its shards are left too.
        lead.script |= dict.fromkeys(T, lambda *_: None)
        follower.term, follower.leads = 2, True
        eventually(lambda: link.address == follower.address and link.is_up)
        late = Message(T.UPDATED, key=0, sequence=1, epoch=1, term=1, payload=torch.zeros(SPECS[0].numel))
        follower.script[T.PUSH] = lambda peer, route, m: [*([late] if peer.seen[T.PUSH] == 1 else ()), peer.answer(m)]
        pushed, out = push(session)
        pushed.wait()
        assert bool((out == 2).all())
        assert "expected term 2, got 1" in link.last_problem


def test_a_shard_that_leaves_pushes_open_for_a_lease_is_looked_for_elsewhere():
    with pair() as (lead, follower), contextlib.ExitStack() as stack:
        session = entered(stack, f"{lead.address}|{follower.address}")
        lead.script = {T.PUSH: lambda *_: None, T.WAITS: lambda *_: None}
        pushed, out = push(session)
        eventually(lambda: follower.seen[T.RESUME])
        lead.script = {}
        pushed.wait()
        assert bool((out == 2).all())
        assert (lead.seen[T.HELLO], follower.seen[T.HELLO]) == (1, 0)


def test_errors_name_both_addresses_and_what_the_last_one_said():
    with pair() as (lead, follower), contextlib.ExitStack() as stack:
        lead.leads = False
        with pytest.raises(ServerLostError) as caught:
            entered(stack, f"{lead.address}|{follower.address}", connect_timeout_s=1.0)
        assert f"{lead.address}|{follower.address} did not answer" in str(caught.value)
        assert any(f"{one.address}: this server follows another" in str(caught.value) for one in (lead, follower))


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ("tcp://a:7077|", "malformed .*got ''"),
        ("tcp://a:7077|b:7077", "Did you mean tcp://b:7077"),
        ("tcp://a:1|tcp://b:1|tcp://c:1", "one address, or two"),
        ("tcp://a:1|tcp://a:1", "one address, or two"),
    ],
)
def test_alternatives_that_are_none_are_refused(servers, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_addresses(servers)


class TestWhatIsKnown:
    A, B = ["tcp://a:1", "tcp://a:2"], ["tcp://b:1", "tcp://b:2"]

    def resumed(self, shards, term=1, epoch=1, **body):
        return Message(T.RESUMED, term=term, epoch=epoch, body={"shards": shards, **body})

    def server(self, **first):
        server = KnownServer("tcp://a:1|tcp://b:1")
        server.heard(self.resumed(self.A, **first), "tcp://a:1", 0)
        return server

    def test_addresses_are_those_of_who_led_last_of_its_follower_and_as_named(self):
        server = self.server(replicas=["tcp://c:1", "tcp://c:2"])
        assert server.places == [self.A, ["tcp://c:1", "tcp://c:2"], ["tcp://b:1"]]
        assert server.heard(self.resumed(["tcp://*:1", "tcp://0.0.0.0:2"], term=2, epoch=2), "tcp://b:1", 0)
        assert server.places[0] == self.B
        assert [server.next_to(address, 1) for address in ("tcp://b:2", "tcp://a:2", "tcp://c:2")] == [
            "tcp://a:2",
            "tcp://c:2",
            "tcp://b:2",
        ]
        for number in range(9):
            server.heard(self.resumed(self.B, 2, 2, replicas=[f"tcp://d:{number + 1}"] * 2), "tcp://b:1", 0)
        assert len(server.places) == MAX_LEARNED + 1  # the named one too

    def test_what_is_no_address_is_not_connected_to(self):
        assert self.server(replicas=["tcp://*:1", "nonsense"]).places == [self.A, ["tcp://b:1"]]

    def test_a_server_without_a_term_has_no_second(self):
        assert self.server(term=0).next_to("tcp://a:1", 0) == "tcp://a:1"

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ({"term": 0}, "leads no more"),
            ({"term": 1}, "another process"),
            ({"term": 1, "type": T.ERROR, "body": {"code": "state_lost"}}, "another process"),
            ({"term": 2, "body": {"shards": ["tcp://b:1"]}}, "expected 2 shards, got 1"),
            ({"term": 2}, ""),
        ],
    )
    def test_another_server_is_not_believed(self, message, words):
        given = {"type": T.RESUMED, "epoch": 5, "body": {"shards": self.B}, **message}
        problem = self.server().objection(Message(**given))
        assert words in problem
        assert bool(problem) == bool(words)
