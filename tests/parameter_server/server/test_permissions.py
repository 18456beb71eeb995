"""Who may send what: one table, applied to every message before anything is done."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import APPLY, NOBODY, ErrorCode, Worker, World, codes, spec, team

from psengine.parameter_server.server.core.answers import KEPT_FACTOR, StatusReport
from psengine.parameter_server.server.events import LINES_INTERVAL_S, MAX_LINES
from psengine.parameter_server.server.core.permissions import MAY_SEND, PeerState
from psengine.protocol.messages import SENT_BY_SERVERS, MessageType

# What each type needs besides the numbers that every message has.
FIELDS = {
    MessageType.REGISTER: {"key": 1, "payload": torch.ones(4), "body": spec(1, 4).to_body()},
    MessageType.SEAL: {"body": {"chunks": 0, "fingerprint": 1}},
    MessageType.CONFIGURE: {"key": 0, "body": {"optimizer": "SGD", "groups": [], "runs": []}},
    MessageType.LIST: {"body": {"after": -1}},
    MessageType.PUSH: {"key": 0, "sequence": 1, "payload": torch.ones(4)},
    MessageType.PROBE: {"key": 0, "sequence": 1},
    MessageType.PULL: {"key": 0},
    MessageType.STORE: {"key": 0, "payload": torch.ones(4)},
    MessageType.ADMIT: {"body": {"rank": 0, "incarnation": 1}},
    MessageType.RESULT: {"key": 0, "sequence": 1, "payload": torch.ones(4)},
    MessageType.ECHO: {"payload": torch.ones(4)},
}
CLIENT_TYPES = sorted(set(MessageType) - SENT_BY_SERVERS - {MessageType.HELLO})


def test_every_type_belongs_to_one_side():
    said = set().union({MessageType.HELLO}, *MAY_SEND.values())
    # ADMIN does not reach a shard: who may send it is the transport's to know.
    assert said == set(MessageType) - SENT_BY_SERVERS - {MessageType.ADMIN}
    assert set(MAY_SEND) == set(PeerState)


@pytest.fixture
def world():
    made = World()
    made.wishes = []
    made.shard.want_snapshot = lambda route, message: made.wishes.append(route)
    return made


def say(worker, kind):
    """The codes of the errors it is answered with."""
    return codes(worker.send(kind, codec=False, **FIELDS.get(kind, {"key": 0, "sequence": 1})))


def reader(world):
    worker = Worker(world, rule=APPLY, role="reader")
    worker.hello()
    worker.worker = NOBODY
    return worker


@pytest.mark.parametrize("kind", CLIENT_TYPES)
def test_who_is_no_worker_here_changes_nothing_whatever_it_says(world, kind):
    team(world, 1, [spec(0, 4)], rule=APPLY)
    before = world.state_hash()
    liar = Worker(world, 5, rule=APPLY)
    liar.worker, liar.incarnation = 5, 77
    assert say(liar, kind) == [ErrorCode.NOT_MEMBER]
    assert world.state_hash() == before
    assert not world.wishes


@pytest.mark.parametrize("kind", CLIENT_TYPES)
def test_a_reader_does_what_the_table_has_for_readers(world, kind):
    team(world, 1, [spec(0, 4)], rule=APPLY)
    before = world.state_hash()
    expected = [] if kind in MAY_SEND[PeerState.READER] else [ErrorCode.BAD_MESSAGE]
    assert say(reader(world), kind) == expected
    assert world.state_hash() == before
    assert not world.wishes


@pytest.mark.parametrize("kind", sorted(SENT_BY_SERVERS))
def test_nobody_speaks_for_the_server(world, kind):
    (member,) = team(world, 1, [spec(0, 4)], rule=APPLY)
    before = world.state_hash()
    for worker in (reader(world), member):
        (error,) = [m for m in worker.send(kind, codec=False, key=0, body={}) if m.type is MessageType.ERROR]
        assert f"{kind.name} is for servers to send" in error.body["text"]
    assert world.state_hash() == before


def test_snapshots_are_for_workers(world):
    (member,) = team(world, 1, [spec(0, 4)], rule=APPLY)
    assert say(member, MessageType.SNAPSHOT) == []
    assert world.wishes == [member.route]


@pytest.mark.parametrize("kind", CLIENT_TYPES)
def test_a_type_that_the_table_does_not_have_is_refused_from_everybody(world, kind, monkeypatch):
    """As a new one would be that somebody forgot to enter."""
    (member,) = team(world, 1, [spec(0, 4)], rule=APPLY)
    greeted = Worker(world, 1, job="another", rule=APPLY)
    greeted.hello()
    people = [reader(world), greeted, member]
    before = world.state_hash()
    for standing, legal in MAY_SEND.items():
        monkeypatch.setitem(MAY_SEND, standing, legal - {kind})
    assert [len(say(worker, kind)) for worker in people] == [1, 1, 1]
    assert world.state_hash() == before
    assert not world.wishes


def test_a_costly_report_is_told_again_for_a_while():
    now_s = [0.0]
    made = []

    def describe():
        made.append(len(made))
        now_s[0] += cost_s
        return made[-1]

    report = StatusReport(describe, lambda: now_s[0])
    cost_s = 0.0001
    assert [bytes(report.payload().numpy()) for _ in range(2)] == [b"0", b"1"]
    cost_s = 0.01
    assert [bytes(report.payload().numpy()) for _ in range(5)] == [b"2"] * 5
    now_s[0] += KEPT_FACTOR * cost_s
    assert bytes(report.payload().numpy()) == b"3"


def test_who_comes_and_goes_leaves_no_line_each_in_the_log(world, caplog):
    for rank in range(3 * MAX_LINES):
        Worker(world, rank, rule=APPLY).hello()
    world.advance(6)
    assert world.shard.jobs.member_count == 0
    assert len([text for text in caplog.messages if "is out" in text]) == MAX_LINES
    world.advance(LINES_INTERVAL_S)
    Worker(world, 0, rule=APPLY).hello()
    world.advance(6)
    assert caplog.messages[-1].endswith(f"({2 * MAX_LINES} more unmentioned)")
