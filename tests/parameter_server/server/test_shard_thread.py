"""A shard's thread between its socket, the coordinators, the shard and the log: who gets a message, and what waits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from support.waiting import eventually

from psengine.parameter_server.server.interfaces import Outgoing, ShardSettings
from psengine.parameter_server.server.transport.endpoint import Endpoint
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import CoordinatedJob, ServerFacts, ShardStatus
from psengine.protocol.frames import decode, encode
from psengine.protocol.layout import job_number
from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import View, message_of

RULE = {"name": "average", "quorum": None}
HELLO = {"job": "a job", "run": "", "nonce": 1, "host": "here", "pid": 1}
WELCOME = {"state": "wait", "registration": 1, "key": b"k" * 32, "lease_s": 5.0, "heartbeat_s": 1.0}
RESUMED = {"chunks": 1, "version": 7, "view": 1, "view_epoch": 7, "missing": []}
VIEW = message_of(View(1, 1, (), (1,)), b"k" * 32, 0)


class Fake:
    """A shard, or coordinators, that answer what they are told to."""

    def __init__(self, index=0):
        self.index, self.epoch, self.settings, self.jobs, self.changes, self.is_draining = (
            index, 5, ShardSettings(), {}, 0, False,
        )  # fmt: skip
        self.answers, self.heard, self.pauses = [], [], []
        self.changed = None

    def apply(self, message, sender, now_s=0.0):
        self.heard.append(message.type.name)
        return [Outgoing(sender.route, answer) for answer in self.answers]

    handle = apply

    def tick(self, now_s):
        return []

    def stood_still(self, pause_s):
        self.pauses.append(pause_s)

    def take_changed(self):
        changed, self.changed = self.changed, None
        return changed

    def status(self, now_s=None):
        return ShardStatus(index=0) if now_s is None else {"a job": CoordinatedJob(rule=RULE, lost="why")}


class World:
    """A thread on a real socket, and a peer of it; the log is durable up to ``durable``, of records up to ``end``."""

    def __init__(self, context, index=0):
        self.shard, self.coordinators = Fake(index), Fake()
        self.log = SimpleNamespace(end=0, durable=0, failure="")
        endpoint = Endpoint(context, "tcp://127.0.0.1:*")
        self.thread = ShardThread(
            self.shard,
            endpoint,
            ["tcp://here:1", "tcp://here:2"],
            coordinators=None if index else self.coordinators,
            facts=None if index else lambda: ServerFacts(host="here"),
            on_admin=lambda *order: None,
        )
        self.thread.answers.log = self.log
        self.shard.append = self._append
        self.peer = context.socket(zmq.DEALER)
        self.peer.setsockopt(zmq.LINGER, 0)
        self.peer.connect(endpoint.address)
        self.thread.start()

    def _append(self, record: Any) -> None:
        self.log.end += 1

    def ask(self, kind: str, **fields: Any) -> list[Message]:
        """What comes within a moment."""
        self.peer.send_multipart(encode(Message(MessageType[kind], **fields)))
        return self.answers()

    def answers(self) -> list[Message]:
        found = []
        while self.peer.poll(300):
            found.append(decode(self.peer.recv_multipart()))
        return found

    def make_durable(self) -> None:
        self.log.durable = self.log.end
        self.thread.answers.wake()

    def close(self) -> None:
        self.thread.end()
        self.thread.join(timeout=5.0)
        self.peer.close()


@pytest.fixture
def worlds() -> Iterator[Any]:
    made: list[World] = []
    with zmq.Context() as context:
        yield lambda index=0: made.append(World(context, index)) or made[-1]
        for world in made:
            world.close()


def names(messages: list[Message]) -> list[str]:
    return [message.type.name for message in messages]


def test_control_messages_go_to_the_coordinators_of_the_first_shard_and_all_else_to_the_shard(worlds):
    world = worlds()
    world.ask("HELLO", body=HELLO, job=job_number("a job"))
    for kind, fields in (("HEARTBEAT", {}), ("LEAVE", {"body": {"completed": 1}}), ("LIST", {"body": {"after": -1}})):
        world.ask(kind, **fields)
    assert world.coordinators.heard == ["HELLO", "HEARTBEAT", "LEAVE"]
    assert world.shard.heard == ["LIST"]
    other = worlds(1)
    (refused,) = other.ask("HEARTBEAT")
    assert "the first shard of the job's first server" in refused.body["text"]


def test_only_a_member_says_by_its_push_that_it_has_read_an_answer(worlds):
    world, found = worlds(), []
    world.thread.segments.find = found.append
    members = [(0, 50, "")]
    world.shard.jobs[7] = SimpleNamespace(is_member=lambda *said: said in members)
    for job, incarnation in ((7, 51), (8, 50), (7, 50)):
        world.ask("PUSH", job=job, worker=0, incarnation=incarnation, key=0, sequence=9)
    assert world.shard.heard == ["PUSH"] * 3
    assert [(push.job, push.incarnation) for push in found] == [(7, 50)]


def test_what_says_nothing_of_updates_does_not_wait_for_the_log(worlds):
    world = worlds()
    world.log.end = 1
    world.shard.answers = [Message(MessageType.RESUMED, body=dict(RESUMED)), Message(MessageType.OK)]
    (resumed,) = world.ask("RESUME")
    assert resumed.body["version"] == RESUMED["version"]
    assert resumed.body["shards"] == ["tcp://here:1", "tcp://here:2"]
    for welcome, kinds in (({}, ["WELCOME"]), ({"state": "initialise"}, [])):
        world.coordinators.answers = [Message(MessageType.WELCOME, body=WELCOME | welcome)]
        assert names(world.ask("HEARTBEAT")) == kinds
    world.coordinators.answers = [Message(MessageType.OK), VIEW]
    assert names(world.ask("HEARTBEAT")) == ["OK"]
    assert names(world.ask("LEAVE", body={"completed": 1})) == []
    payload = torch.arange(3.0)
    (echoed,) = world.ask("ECHO", payload=payload)
    assert echoed.type is MessageType.ECHOED
    (report,) = world.ask("STATUS")
    status = json.loads(bytes(report.payload))
    assert status["server"]["host"] == "here"
    assert status["coordinated"]["a job"]["lost"] == "why"
    world.make_durable()
    assert names(world.answers()) == ["OK", "WELCOME", "VIEW", "OK", "VIEW"]
    world.shard.answers = [Message(MessageType.RESUMED, body=dict(RESUMED))]
    (resumed,) = world.ask("RESUME")
    assert resumed.body["version"] == 7


def test_orders_that_change_no_job_are_answered_without_the_log(worlds):
    world = worlds()
    world.log.end, routes = 1, []
    world.coordinators.handle = lambda message, sender, now_s: routes.append(sender.route) or []
    world.ask("LEAVE", body={"completed": 1})
    for action in ("snapshot", "forget", "shutdown"):
        world.thread.answer(routes[0], Message(MessageType.ADMIN, body={"action": action}), {"text": action})
    assert [answer.body["text"] for answer in world.answers()] == ["snapshot", "shutdown"]
    world.make_durable()
    assert [answer.body["text"] for answer in world.answers()] == ["forget"]


def test_a_decision_waits_until_it_is_in_the_log(worlds):
    world = worlds()
    world.coordinators.answers, world.coordinators.changed = [VIEW], {"jobs": []}
    assert world.ask("LEAVE", body={"completed": 1}) == []
    assert world.shard.changes == 1
    world.make_durable()
    assert names(world.answers()) == ["VIEW"]


def test_the_coordinators_are_told_of_a_pause(worlds):
    world = worlds()
    world.thread.ask(lambda: time.sleep(2.5)).result(10.0)
    eventually(lambda: world.coordinators.pauses)
    assert 2.0 < world.coordinators.pauses[0] < 5.0
