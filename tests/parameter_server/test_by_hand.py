"""Trainings in one process: coordinators, shards, and workers whose messages are made by hand. No sockets."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.shard_world import APPLY, AVERAGE, MERGE, SGD, WALL_S, spec

from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.interfaces import Clocks, Sender, ShardSettings
from psengine.parameter_server.server.shard.shard import Shard
from psengine.protocol.frames import decode, encode, payload_tensor
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, Message, MessageType
from psengine.protocol.views import view_of

JOB = "demo"
SERVERS = ["tcp://one:1", "tcp://two:2"]
SPECS = [spec(0, 8), spec(1, 8)]  # a shard each


def through_codec(message):
    return decode([bytes(frame) for frame in encode(message)])


class Hand:
    """Two servers with a shard each; the first one leads."""

    def __init__(self, rule, workers):
        settings = ShardSettings(software="test")
        self.now_s = 100.0
        clocks = Clocks(wall_s=lambda: WALL_S + self.now_s, measure_s=lambda: self.now_s)
        note = lambda *arguments, **options: None  # noqa: E731
        self.coordinators = Coordinators(1 << 40, settings, clocks, note)
        self.shards = [Shard(0, 11 + index, settings, clocks, note, bool) for index in range(2)]
        self.rule, self.world_size = rule, workers
        self.workers = [HandWorker(self, rank) for rank in range(workers)]

    def control(self, worker, message):
        self.post(self.coordinators.handle(through_codec(message), Sender(worker.control), self.now_s))

    def data(self, worker, shard, message):
        route = worker.data(shard)
        self.post(self.shards[shard].apply(through_codec(message), Sender(route)))

    def post(self, outgoing):
        routes = {worker.control: worker for worker in self.workers}
        routes |= {worker.data(shard): worker for worker in self.workers for shard in range(2)}
        for one in outgoing:
            message = one.message
            if message.type is MessageType.RESUMED:
                message.body["shards"] = SERVERS
            routes[one.route].inbox.append((one.route, through_codec(message)))

    def pump(self, seconds=0.0):
        """Workers take in what came, until nothing comes; then time passes."""
        end_s = self.now_s + seconds
        while True:
            while any(worker.inbox for worker in self.workers):
                for worker in self.workers:
                    worker.take()
            if self.now_s >= end_s:
                return
            self.now_s += 0.1
            for worker in self.workers:
                worker.say(MessageType.HEARTBEAT, body={"completed": worker.completed, "blocked": False})
            self.post(self.coordinators.tick(self.now_s))


class HandWorker:
    """What a client does, without patience."""

    def __init__(self, hand, rank):
        self.hand, self.rank = hand, rank
        self.worker, self.incarnation = NOBODY, 0
        self.control = f"control-{rank}".encode()
        self.inbox = []
        self.state, self.view, self.frozen = None, None, False
        self.completed = 0
        self.answers = {}  # (key, step) -> values
        self._ids = itertools.count(1)

    def data(self, shard):
        return f"data-{self.rank}-{shard}".encode()

    def message(self, kind, **fields):
        fields = {"worker": self.worker, "incarnation": self.incarnation, "job": job_number(JOB)} | fields
        fields.setdefault("view", 0 if self.view is None else self.view.number)
        fields.setdefault("sequence", next(self._ids))
        payload = fields.get("payload")
        if payload is not None:
            fields["dtype"], fields["numel"] = payload.dtype, payload.numel()
        return Message(kind, **fields)

    def say(self, kind, **fields):
        self.hand.control(self, self.message(kind, **fields))

    def tell(self, shard, kind, **fields):
        self.hand.data(self, shard, self.message(kind, **fields))

    def hello(self):
        body = {"job": JOB, "run": "", "nonce": 100 + self.rank, "host": "h", "pid": self.rank + 1, "software": "t"}
        body |= {"servers": SERVERS, "rank": self.rank, "world_size": self.hand.world_size, "rule": self.hand.rule}
        self.say(MessageType.HELLO, body=body)

    def take(self):
        arrived, self.inbox = self.inbox, []
        for _, message in arrived:
            assert message.type is not MessageType.ERROR, message.body
            getattr(self, f"_on_{message.type.name.lower()}", lambda message: None)(message)

    def _on_welcome(self, message):
        self.state, self.worker, self.incarnation = message.body["state"], message.worker, message.incarnation
        if self.state == "initialise":
            self.register(message.body)

    def register(self, welcome):
        rule = self.hand.rule
        begin = {"job": JOB, "rule": rule, "registration": welcome["registration"], "key": welcome["key"]}
        for shard, one in enumerate(SPECS):
            self.tell(shard, MessageType.RESUME, body=begin)
            body = {name: value for name, value in one.to_body().items() if name in ("kind", "segments")}
            self.tell(shard, MessageType.REGISTER, key=one.key, body=body, payload=torch.zeros(one.numel))
            if rule["name"] != "average":
                body = {"optimizer": "SGD", "groups": [SGD], "runs": [[0, one.numel, 0]]}
                self.tell(shard, MessageType.CONFIGURE, key=one.key, body=body)
        body = {"what": "registered", "registration": welcome["registration"], "fingerprint": 5}
        body |= {"epochs": [shard.epoch for shard in self.hand.shards], "chunks": 2}
        self.say(MessageType.COMMIT, body=body)

    def _on_prepare(self, message):
        self.frozen = True
        self.say(MessageType.COMMIT, body={"what": "prepared", "view": message.view, "completed": self.completed})

    def _on_view(self, message):
        self.view, self.frozen = view_of(message.body), False
        member = self.view.member(self.rank)
        if member is not None:
            self.worker, self.incarnation = member.rank, member.incarnation
        for shard in range(2):
            self.tell(shard, MessageType.VIEW, body=message.body)
            self.tell(shard, MessageType.RESUME, body={"open": []})

    def _on_release(self, message):
        for shard in range(2):
            self.tell(shard, MessageType.RELEASE, body=message.body)

    def _on_updated(self, message):
        self.answers[message.key, message.sequence] = payload_tensor(message).clone()
        while all((one.key, self.completed + 1) in self.answers for one in SPECS):
            self.completed += 1

    def push(self, step, values):
        """Both chunks; with a decision the step is committed then."""
        for shard, one in enumerate(SPECS):
            self.tell(shard, MessageType.PUSH, key=one.key, sequence=step, payload=values)
        decided = self.hand.rule.get("quorum") is not None or self.hand.rule.get("max_staleness") is not None
        if decided:
            self.say(MessageType.COMMIT, body={"what": "step", "step": step, "abstained": False})


def started(rule, workers=2):
    hand = Hand(rule, workers)
    for worker in hand.workers:
        worker.hello()
        hand.pump()
    hand.pump(0.5)
    for worker in hand.workers:
        assert worker.view is not None, worker.state
        assert [member.rank for member in worker.view.members] == list(range(workers))
    return hand


def values(rank, step):
    return torch.full((8,), float(10 * rank + step))


def test_averages():
    hand = started(AVERAGE)
    for step in range(1, 4):
        for worker in hand.workers:
            worker.push(step, values(worker.rank, step))
        hand.pump()
        for worker in hand.workers:
            assert worker.completed == step
            assert all(torch.equal(worker.answers[key, step], values(0.5, step)) for key in (0, 1))


def test_a_quorum_has_the_same_contributors_in_all_chunks():
    hand = started({"name": "average", "quorum": 2}, 3)
    for worker in hand.workers[:2]:
        worker.push(1, values(worker.rank, 1))
    hand.pump(0.5)
    for worker in hand.workers[:2]:
        assert all(torch.equal(worker.answers[key, 1], values(0.5, 1)) for key in (0, 1))
    hand.workers[2].push(1, values(2, 1))
    hand.pump(0.5)
    assert all(torch.equal(hand.workers[2].answers[key, 1], values(0.5, 1)) for key in (0, 1))


def test_gradients_are_applied_as_they_come():
    hand = started(APPLY)
    total = torch.zeros(8)
    for step in range(1, 4):
        for worker in hand.workers:
            worker.push(step, values(worker.rank, step))
            hand.pump()
            total -= 0.1 * values(worker.rank, step)
            assert all(torch.allclose(worker.answers[key, step], total) for key in (0, 1))


@pytest.mark.parametrize("bound", [0, 1])
def test_a_bound_holds_who_is_ahead(bound):
    hand = started({**APPLY, "max_staleness": bound})
    first, second = hand.workers
    for step in range(1, bound + 2):
        first.push(step, values(0, step))
        hand.pump(0.3)
    assert first.completed == bound
    second.push(1, values(1, 1))
    hand.pump(0.3)
    assert first.completed == bound + 1
    assert second.completed == 1


def test_merges():
    hand = started(MERGE)
    for step in range(1, 4):
        for worker in hand.workers:
            worker.push(step, torch.ones(8))
        hand.pump(1.0)
        for worker in hand.workers:
            assert worker.completed == step
            assert all(torch.allclose(worker.answers[key, step], torch.full((8,), -0.1 * step)) for key in (0, 1))
