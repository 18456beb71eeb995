"""Trainings in one process: coordinators, shards, and workers whose messages are made by hand. No sockets."""

from __future__ import annotations

import itertools
import json

import msgspec
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
QUORUM = {"name": "average", "quorum": 2}
LEASE_S = 5.0


def through_codec(message):
    return decode([bytes(frame) for frame in encode(message)])


class Hand:
    """Two servers with a shard each; the first one leads."""

    def __init__(self, rule, workers):
        self.now_s = 100.0
        clocks = Clocks(wall_s=lambda: WALL_S + self.now_s, measure_s=lambda: self.now_s)
        settings = ShardSettings(software="test", lease_s=LEASE_S)
        self.interfaces = settings, clocks, lambda *arguments, **options: None
        self.rule, self.world_size = rule, workers
        self.coordinators = Coordinators(1 << 40, *self.interfaces, lambda: bytes(32))
        self.shards = [Shard(0, 11 + index, *self.interfaces, self.is_connected) for index in range(2)]
        self.workers = [HandWorker(self, rank) for rank in range(workers)]

    def is_connected(self, route):
        """Workers that are not here any more have died."""
        return any(route == worker.data(shard) for worker in self.workers for shard in range(2))

    def restart_shard(self, index, states=()):
        """The server of a shard is killed, and starts again from these states; its connections are new ones."""
        self.shards[index] = Shard(0, self.shards[index].epoch + 100, *self.interfaces, self.is_connected)
        self.shards[index].restore(states)
        for worker in self.workers:
            worker.resume(index)

    def restart_coordinators(self, meta=None):
        """The lead's coordinators start again, with what was on the disk."""
        self.coordinators = Coordinators((1 << 40) + 1000, *self.interfaces, lambda: bytes([1] * 32))
        if meta is not None:
            self.coordinators.restore(meta, self.now_s)
        for worker in self.workers:
            worker.hello()

    def control(self, worker, message):
        self.post(self.coordinators.handle(through_codec(message), Sender(worker.control), self.now_s))

    def data(self, worker, shard, message):
        self.post(self.shards[shard].apply(through_codec(message), Sender(worker.data(shard))))

    def post(self, outgoing):
        routes = {worker.control: (worker, None) for worker in self.workers}
        routes |= {worker.data(shard): (worker, shard) for worker in self.workers for shard in range(2)}
        for one in outgoing:
            if one.message.type is MessageType.RESUMED:
                one.message.body["shards"] = SERVERS
            if one.route in routes:  # else its worker is dead
                worker, shard = routes[one.route]
                worker.inbox.append((shard, through_codec(one.message)))

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
                if worker.worker != NOBODY:
                    body = {"completed": worker.completed, "blocked": bool(worker.open)}
                    worker.say(MessageType.HEARTBEAT, body=body)
            self.post(self.coordinators.tick(self.now_s))


class HandWorker:
    """What a client does, without patience. Its weights are not here: tests look at ``answers``.

    Attributes:
        open: payloads of pushes by (key, step), whose steps are not complete.
        answers: by (key, step).
        is_deaf: what shards answer is lost.
    """

    def __init__(self, hand, rank, nonce=None):
        self.hand, self.rank = hand, rank
        self.nonce = 100 + rank if nonce is None else nonce
        self.worker, self.incarnation = NOBODY, 0
        self.inbox = []
        self.welcome, self.view = {}, None
        self.completed = 0
        self.is_frozen = self.is_deaf = False
        self.open, self.answers = {}, {}
        self._ids = itertools.count(1)

    @property
    def averages(self):
        return self.hand.rule["name"] == "average"

    @property
    def control(self):
        return f"control-{self.nonce}".encode()

    def data(self, shard):
        return f"data-{self.nonce}-{shard}".encode()

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

    def commit(self, what, **body):
        self.say(MessageType.COMMIT, body={"what": what, **body})

    def tell(self, shard, kind, **fields):
        self.hand.data(self, shard, self.message(kind, **fields))

    def hello(self):
        body = {"job": JOB, "run": "", "nonce": self.nonce, "host": "h", "pid": self.nonce, "software": "t"}
        body |= {"servers": SERVERS, "rank": self.rank, "world_size": self.hand.world_size, "rule": self.hand.rule}
        if self.view is not None:
            self.is_frozen = True
            body |= {"view": msgspec.to_builtins(self.view), "key": self.welcome["key"], "completed": self.completed}
        self.say(MessageType.HELLO, body=body)

    def take(self):
        arrived, self.inbox = self.inbox, []
        for shard, message in arrived:
            assert message.type is not MessageType.ERROR, message.body
            handle = getattr(self, f"_on_{message.type.name.lower()}", None)
            if handle is not None:
                handle(message, shard)

    # ---- what comes ----------------------------------------------------------------------------------------------

    def _on_welcome(self, message, shard):
        self.worker, self.incarnation = message.worker, message.incarnation
        self.welcome |= message.body
        if message.body["state"] == "initialise":
            self.register()
        elif message.body["state"] == "join" and self.view is None:
            self.commit("join")

    def register(self):
        for shard, one in enumerate(SPECS):
            self.register_at(shard, payload=torch.zeros(one.numel))
            if not self.averages:
                body = {"optimizer": "SGD", "groups": [SGD], "runs": [[0, one.numel, 0]]}
                self.tell(shard, MessageType.CONFIGURE, key=one.key, body=body)
        epochs, registration = [shard.epoch for shard in self.hand.shards], self.welcome["registration"]
        self.commit("registered", registration=registration, epochs=epochs, chunks=[1, 1])

    def register_at(self, shard, **fields):
        body = {name: self.welcome[name] for name in ("registration", "key")}
        body |= {"job": JOB, "rule": self.hand.rule}
        self.tell(shard, MessageType.RESUME, body=body, sequence=1 << 50)
        one = SPECS[shard]
        body = {name: value for name, value in one.to_body().items() if name in ("kind", "segments")}
        self.tell(shard, MessageType.REGISTER, key=one.key, body=body, dtype=one.dtype, numel=one.numel, **fields)

    def _on_prepare(self, message, shard):
        self.is_frozen = True
        self.commit("prepared", view=message.view, completed=self.completed)

    def _on_view(self, message, shard):
        self.view, self.is_frozen = view_of(message.body), False
        member = self.view.member(self.rank)
        self.incarnation = member.incarnation
        self.completed = max(self.completed, member.first_step - 1) if self.averages else self.completed
        if self.averages:
            taken_back = [place for place in self.answers if place[1] >= max(self.view.from_step, self.completed + 1)]
            for place in taken_back:
                del self.answers[place]
        for each in range(2):
            self.tell(each, MessageType.VIEW, body=message.body)
            self.resume(each)
        self._complete()
        if self.averages:
            for key, step in sorted(self.open):
                self._push_again(key, step)
        for step in sorted({step for _, step in self.open}):
            self._commit_step(step)
        step = self.view.from_step - 1
        if self.view.donor == self.rank and (0, step) in self.answers:
            for each, one in enumerate(SPECS):
                payload, body = self.answers[one.key, step], {"contributors": 2}
                if self.hand.shards[each].epoch > 100:  # it has restarted
                    self.tell(each, MessageType.RESULT, key=one.key, sequence=step, payload=payload, body=body)

    def resume(self, shard):
        pushes = [[key, step] for key, step in sorted(self.open) if key == SPECS[shard].key]
        self.tell(shard, MessageType.RESUME, body={"open": pushes})

    def _on_resumed(self, message, shard):
        if self.view is None or message.sequence == 1 << 50:
            return
        if message.epoch != self.view.shards[shard]:
            body = {name: message.body[name] for name in ("chunks", "version", "view")}
            if self.averages:
                self.register_at(shard)
                body["chunks"] = 1
            self.commit("life", shard=shard, epoch=message.epoch, **body)
        elif not self.averages:
            for key, step in sorted(self.open):
                if key in message.body["missing"]:
                    self._push_again(key, step)

    def _on_release(self, message, shard):
        for each in range(2):
            self.tell(each, MessageType.RELEASE, body=message.body)

    def _on_state_wanted(self, message, shard):
        if not self.is_frozen:
            epochs = [each.epoch for each in self.hand.shards]
            self.commit("donated", step=self.completed, epochs=epochs, **message.body)

    def _on_updated(self, message, shard):
        if self.is_deaf:
            return
        self.answers.setdefault((message.key, message.sequence), payload_tensor(message).clone())
        self._complete()

    def _complete(self):
        while not self.is_frozen and all((one.key, self.completed + 1) in self.answers for one in SPECS):
            self.completed += 1
            for one in SPECS:
                self.open.pop((one.key, self.completed), None)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def push(self, step, values):
        """Both chunks; where the coordinator decides, the step is committed then."""
        for one in SPECS:
            self.open[one.key, step] = values
            self._push_again(one.key, step)
        self._commit_step(step)

    def _commit_step(self, step):
        if self.hand.rule.get("quorum") is not None or self.hand.rule.get("max_staleness") is not None:
            self.commit("step", step=step, abstained=False)

    def _push_again(self, key, step):
        if (key, step) not in self.answers:
            self.tell(key, MessageType.PUSH, key=key, sequence=step, payload=self.open[key, step])


def started(rule, workers=2):
    hand = Hand(rule, workers)
    for worker in hand.workers:
        worker.hello()
        hand.pump()
    hand.pump(0.5)
    for worker in hand.workers:
        assert [member.rank for member in worker.view.members] == list(range(workers))
    return hand


def values(rank, step):
    return torch.full((8,), float(10 * rank + step))


def push_all(hand, step, workers=None):
    for worker in hand.workers if workers is None else workers:
        worker.push(step, values(worker.rank, step))


def assert_all_have(workers, step, expected):
    for worker in workers:
        assert worker.completed == step
        for one in SPECS:
            assert torch.equal(worker.answers[one.key, step], expected), worker.answers[one.key, step]


# ---- every rule --------------------------------------------------------------------------------------------------


def test_averages():
    hand = started(AVERAGE)
    for step in range(1, 4):
        push_all(hand, step)
        hand.pump()
        assert_all_have(hand.workers, step, values(0.5, step))


def test_a_quorum_has_the_same_contributors_in_all_chunks():
    hand = started(QUORUM, 3)
    push_all(hand, 1, hand.workers[:2])
    hand.pump(0.5)
    assert_all_have(hand.workers[:2], 1, values(0.5, 1))
    hand.workers[2].push(1, values(2, 1))
    hand.pump(0.5)
    assert_all_have(hand.workers, 1, values(0.5, 1))


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


# ---- deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [AVERAGE, QUORUM], ids=["all", "quorum"])
def test_the_others_go_on_without_a_worker_that_died_in_a_step(rule):
    hand = started(rule, 3)
    push_all(hand, 1)
    hand.pump(0.5)
    dead = hand.workers.pop()
    hand.data(dead, 0, dead.message(MessageType.PUSH, key=0, sequence=2, payload=values(2, 2)))
    push_all(hand, 2)
    hand.pump(LEASE_S + 2)
    assert_all_have(hand.workers, 2, values(0.5, 2))
    assert [member.rank for member in hand.workers[0].view.members] == [0, 1]


def test_a_worker_that_died_comes_back_as_another_process():
    hand = started(AVERAGE, 2)
    push_all(hand, 1)
    hand.pump(0.5)
    hand.workers[1] = HandWorker(hand, 1, nonce=7)
    hand.workers[1].hello()
    hand.pump(LEASE_S + 2)
    joiner = hand.workers[1]
    assert joiner.view.member(1).first_step == 2
    push_all(hand, 2)
    hand.pump(0.5)
    assert_all_have(hand.workers, 2, values(0.5, 2))


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_without_a_disk_restarts_between_two_answers_of_a_step(index):
    hand = started(AVERAGE, 2)
    push_all(hand, 1)
    hand.pump(0.5)
    hand.workers[1].is_deaf = True
    push_all(hand, 2)
    hand.pump()
    assert [worker.completed for worker in hand.workers] == [2, 1]
    hand.restart_shard(index)
    hand.workers[1].is_deaf = False
    hand.pump(1.0)
    assert_all_have(hand.workers, 2, values(0.5, 2))
    push_all(hand, 3)
    hand.pump(1.0)
    assert_all_have(hand.workers, 3, values(0.5, 3))


def test_a_shard_restarts_in_a_step():
    hand = started(AVERAGE, 2)
    hand.workers[0].push(1, values(0, 1))
    hand.restart_shard(1)
    hand.pump(1.0)
    hand.workers[1].push(1, values(1, 1))
    hand.pump(1.0)
    assert_all_have(hand.workers, 1, values(0.5, 1))


@pytest.mark.parametrize("rule", [APPLY, {**APPLY, "max_staleness": 0}, MERGE], ids=["apply", "bound", "merge"])
def test_a_shard_restarts_with_its_weights_and_takes_nothing_twice(rule):
    hand = started(rule, 2)
    for worker in hand.workers:
        worker.is_deaf = True
        worker.push(1, torch.ones(8))
    for index in range(2):
        hand.restart_shard(index, hand.shards[index].capture())
    for worker in hand.workers:
        worker.is_deaf = False
    hand.pump(2.0)
    assert [worker.completed for worker in hand.workers] == [1, 1]
    updates = 1 if rule is MERGE else 2
    for index, shard in enumerate(hand.shards):
        version, weights = shard.jobs[job_number(JOB)].chunks.rules[index].read()
        assert version == updates
        assert torch.allclose(weights, torch.full((8,), -0.1 * updates))


@pytest.mark.parametrize(
    ("rule", "has_disk"),
    # Without a disk the lead's weights are gone with it.
    [
        (AVERAGE, False),
        (QUORUM, False),
        (AVERAGE, True),
        (QUORUM, True),
        ({**APPLY, "max_staleness": 0}, True),
        (MERGE, True),
    ],
    ids=["average", "quorum", "average from disk", "quorum from disk", "bound from disk", "merge from disk"],
)
def test_coordinators_that_restart_go_on(rule, has_disk):
    hand = started(rule, 2)
    push_all(hand, 1)
    hand.pump(1.0)
    hand.workers[0].push(2, values(0, 2))
    hand.restart_coordinators(json.loads(json.dumps(hand.coordinators.to_meta())) if has_disk else None)
    hand.pump(LEASE_S + 1)
    hand.workers[1].push(2, values(1, 2))
    hand.pump(1.0)
    assert [worker.completed for worker in hand.workers] == [2, 2]
    push_all(hand, 3)
    hand.pump(1.0)
    assert [worker.completed for worker in hand.workers] == [3, 3]
