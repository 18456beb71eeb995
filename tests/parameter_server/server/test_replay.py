"""A log replayed is the state that the shard had, bit for bit, under every optimizer, rule and codec."""

from __future__ import annotations

import json
import random

import pytest
import torch
from support.memory_disk import MemoryDisk
from support.shard_world import APPLY, Worker, World, spec

from psengine.codecs.registry import resolve_codec
from psengine.parameter_server.chunk_codecs import gradient_codec
from psengine.parameter_server.server.durability.replay import Replay
from psengine.parameter_server.server.log.log import LogStart, SegmentWriter, ShardLog
from psengine.parameter_server.server.log.reading import LogReader
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import MessageType

OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.05}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
RULES = {
    "async": APPLY,
    "stale": APPLY | {"max_staleness": 1},
    "inverse": APPLY | {"staleness_scaling": "inverse"},
    "compensated": APPLY | {"max_staleness": 2, "delay_compensation": 0.5},
    "adaptive": APPLY | {"delay_compensation": 0.5, "compensation_decay": 0.9},
    "merge": {"name": "merge", "quorum": 2, "grace": 0.5},
}
CODECS = ["", "bf16", "int8", "fp4", "onebit", "topk:ratio=0.25"]
SPECS = [spec(0, 70), spec(1, 33), spec(2, 5, kind=ChunkKind.BUFFER)]


class Logged:
    """A shard with a log, its history, and the snapshots that were cut."""

    def __init__(self, rule, optimizer=None, seed=0):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.world = World(lease_s=4.0)
        self.disk = MemoryDisk()
        self.log = ShardLog(LogStart(0, 1, 0, 7))
        self.writer = SegmentWriter(self.disk, 0)
        self.world.shard.jobs.journal.append = self.log.append
        self.cuts = [(1, 0, [])]
        self.rule, self.optimizer = rule, optimizer
        self.workers = [Worker(self.world, rank, rule=rule, world_size=3) for rank in range(3)]
        self.sequences = {}
        self.workers[0].initialise(SPECS, {one.key: self.values(one) for one in SPECS})
        if optimizer is not None:
            for key, numel in ((0, 70), (1, 33)):
                runs = [[0, 20, 0], [20, numel, 1]]
                answer = self.workers[0].configure(key, numel, optimizer[0], self.groups(), runs)
                assert answer.type is MessageType.OK, answer.body
        for worker in self.workers[1:]:
            assert worker.hello() == "ready"

    def groups(self, learning_rate=0.03):
        name, hyperparameters = self.optimizer
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
        groups[0]["lr"] = learning_rate
        return wire_groups(getattr(torch.optim, name)(groups, **hyperparameters))

    def values(self, one):
        return torch.randn(one.numel, generator=self.generator)

    def cut(self):
        segment = self.log.cut()
        self.cuts.append((segment, self.log.end, self.world.shard.durable.capture_whole()))

    def gradient(self, one):
        values = self.values(one)
        if self.random.random() < 0.03:
            values[0] = float("nan")
        codec = resolve_codec(self.rule["compress"]) if "compress" in self.rule else None
        if codec is None or one.kind is not ChunkKind.PARAMETER:
            return values
        codec = gradient_codec(codec, one)
        form = codec.payload_spec(one.numel, one.dtype)
        payload = torch.empty(form.numel, dtype=form.dtype)
        codec.encode(values, payload, None)
        return payload

    def push(self, worker):
        one = self.random.choice(SPECS)
        place = worker.nonce, one.key
        sequence = self.sequences.get(place, 0) + 1
        is_repeat = sequence > 1 and self.random.random() < 0.1
        body = {}
        if self.rule["name"] == "merge" and one.kind is ChunkKind.PARAMETER:
            body["weight"] = float(self.random.randint(1, 8))
        if self.optimizer is not None and one.kind is ChunkKind.PARAMETER and self.random.random() < 0.3:
            body["groups"] = self.groups(self.random.random())
        if sequence > 1 and "compress" in self.rule and self.random.random() < 0.9:
            body["held"] = sequence - 1
        rules = self.world.shard.jobs.find("demo").chunks.rules
        version = max(0, rules[one.key].version - self.random.randint(0, 2))
        sequence -= is_repeat
        for answer in worker.push(one.key, sequence, self.gradient(one), version, body=body):
            assert answer.type is not MessageType.ERROR or answer.body["code"] == "credit", answer.body
            if answer.type is MessageType.ERROR:
                return
        self.sequences[place] = sequence

    def act(self):
        world, chance = self.world, self.random.random()
        worker = self.random.choice(self.workers)
        if chance < 0.7:
            self.push(worker)
        elif chance < 0.75:
            key = self.random.choice(SPECS).key
            sequence = self.sequences.get((worker.nonce, key), 1)
            self.random.choice([worker.probe, worker.repeat])(key, max(1, sequence))
        elif chance < 0.8:
            worker.pull(self.random.choice(SPECS).key)
        elif chance < 0.82:
            one = self.random.choice(SPECS)
            worker.send(MessageType.STORE, key=one.key, payload=self.values(one), version=3)
        elif chance < 0.84:
            rank = worker.rank
            worker.send(MessageType.BYE)
            self.workers[rank] = Worker(world, rank, rule=self.rule, world_size=3)
            self.workers[rank].hello()
        elif chance < 0.87:
            world.advance(5, *(other for other in self.workers if other is not worker))
            worker.hello(worker.incarnation)
        elif chance < 0.9:
            self.cut()
        else:
            world.advance(self.random.random(), *self.workers)
        for one in self.workers:
            one.take()

    def write(self):
        while (batch := self.log.pending()) is not None:
            self.writer.write(batch)
            self.writer.sync()
            self.log.synced(batch.upto)

    def replayed(self, cut):
        """The state that the log leads to from a cut on; and how many records did."""
        segment, first, states = cut
        replay = Replay(states)
        reader = LogReader(self.disk, 0, segment, first)
        replay.take(reader)
        assert (reader.end, reader.notes) == (self.log.end, [])
        return replay.states(is_whole=True), replay.records


def assert_same(states, expected):
    assert [state.name for state in states] == [state.name for state in expected]
    for state, other in zip(states, expected, strict=True):
        assert json.dumps(state.meta) == json.dumps(other.meta)
        assert [chunk.key for chunk in state.chunks] == [chunk.key for chunk in other.chunks]
        for chunk, twin in zip(state.chunks, other.chunks, strict=True):
            assert json.dumps(chunk.meta) == json.dumps(twin.meta)
            assert chunk.tensors.keys() == twin.tensors.keys()
            for name, tensor in chunk.tensors.items():
                wanted = twin.tensors[name]
                assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
                assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), (chunk.key, name)


def run(rule, optimizer, codec, seed, actions):
    rule = rule | ({"compress": codec} if codec else {})
    logged = Logged(rule, optimizer, seed)
    for _ in range(actions):
        logged.act()
    logged.write()
    expected = logged.world.shard.durable.capture_whole()
    assert expected[0].chunks[0].meta["version"] > 0
    for cut in {0: logged.cuts[0], 1: logged.cuts[-1]}.values():
        assert_same(logged.replayed(cut)[0], expected)
    return logged


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec or "none")
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_codec_comes_back_bit_for_bit(rule, codec):
    """With one optimizer after the other."""
    for seed, optimizer in enumerate(OPTIMIZERS.values()):
        run(RULES[rule], optimizer, codec, seed, 60)
