"""A log applied to the snapshot that it goes on from is the state that the shard had, bit for bit."""

import random

import pytest
import torch
from support.shard_world import APPLY, World, assert_same_states, spec, team

from psengine.codecs.registry import resolve_codec
from psengine.errors import SnapshotError
from psengine.parameter_server.chunk_codecs import gradient_codec
from psengine.parameter_server.server.durability.restoring import place_into, recover
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import BEGINNING, ShardLog, segment_name
from psengine.parameter_server.server.log.reading import WITHOUT_LOG
from psengine.parameter_server.server.log.records import Record, RecordKind
from psengine.parameter_server.server.snapshots.files import ServerState
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.frames import encode
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.layout import ChunkKind, job_number
from psengine.protocol.messages import Message, MessageType

OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.05}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
# Bounds and merges are the simulator's.
RULES = {
    "async": APPLY,
    "inverse": APPLY | {"staleness_scaling": "inverse"},
    "compensated": APPLY | {"delay_compensation": 0.5},
    "adaptive": APPLY | {"delay_compensation": 0.5, "compensation_decay": 0.9},
}
CODECS = ["", "bf16", "int8", "fp4", "onebit", "topk:ratio=0.25"]
SPECS = [spec(0, 70), spec(1, 33), spec(2, 5, kind=ChunkKind.BUFFER)]
EPOCH = 7


class Logged:
    """A shard with a log and snapshots on real files, and three workers of one job; ``steps`` by rank."""

    def __init__(self, directory, rule, optimizer, seed=0):
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.world = World(epoch=EPOCH)
        self.store = Generations(DirectoryDisk(directory))
        self.store.begin()
        self.rule, self.optimizer = rule, optimizer
        self.begin_log()
        values = {one.key: self.values(one) for one in SPECS}
        self.workers = team(self.world, 3, SPECS, values=values, rule=rule, optimizer=self.configured())
        self.steps = [0] * 3

    def begin_log(self, epoch=EPOCH, last=BEGINNING):
        self.log = ShardLog(self.store.disk, 0, epoch, last)
        self.write()
        self.world.shard.append = self.log.append

    def write(self):
        while self.log.has_unwritten:
            self.log.write()
            self.log.sync()

    def snapshot(self):
        place, states = self.log.cut(), self.world.shard.capture()
        self.write()
        assert self.log.begun == place.segment
        self.store.save(ServerState([states], {0: place}, {"job": self.log.end}))

    def configured(self):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
        name, hyperparameters = self.optimizer
        return {"name": name, "groups": wire_groups(getattr(torch.optim, name)(groups, **hyperparameters))}

    def values(self, one):
        return torch.randn(one.numel, generator=self.generator)

    def gradient(self, one):
        values = self.values(one)
        if self.random.random() < 0.03:
            values[0] = float("nan")
        if "compress" not in self.rule:
            return values
        codec = gradient_codec(resolve_codec(self.rule["compress"]), one)
        form = codec.payload_spec(one.numel, one.dtype)
        payload = torch.empty(form.numel, dtype=form.dtype)
        codec.encode(values, payload, None)
        return payload

    def push(self, worker):
        """A whole step of one worker."""
        self.steps[worker.rank] += 1
        for one in SPECS[:2]:
            [job] = self.world.shard.jobs.values()
            version = max(0, job.version - self.random.randint(0, 2))
            for _ in range(1 + (self.random.random() < 0.1)):  # perhaps once more
                worker.push(one.key, self.steps[worker.rank], self.gradient(one), version)

    def act(self):
        chance, worker = self.random.random(), self.random.choice(self.workers)
        if chance < 0.7:
            self.push(worker)
        elif chance < 0.8:
            worker.pull(self.random.choice(SPECS).key)
        elif chance < 0.85:
            one = self.random.choice(SPECS)
            worker.send(MessageType.STORE, key=one.key, payload=self.values(one), version=3)
        elif chance < 0.9:
            worker.connect()
            worker.resume([(one.key, self.steps[worker.rank]) for one in SPECS[:2] if self.steps[worker.rank]])
        elif chance < 0.93:
            self.world.publish(self.workers)
        else:
            self.snapshot()
        for one in self.workers:
            one.take()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec or "none")
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_codec_comes_back_bit_for_bit(tmp_path, rule, codec):
    """With one optimizer after the other, from the newest generation and from the one before."""
    for seed, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        directory = tmp_path / name
        directory.mkdir()
        logged = Logged(directory, RULES[rule] | ({"compress": codec} if codec else {}), optimizer, seed)
        logged.snapshot()
        for count in range(30):
            logged.act()
            if count == 15:
                logged.snapshot()
        logged.write()
        expected = logged.world.shard.capture()
        assert expected[0].chunks[0].meta["version"] > 0
        found = recover(logged.store)
        assert_same_states([found.shards[0]], [expected])
        assert (found.generation, found.ends[0].number, found.notes) == (logged.store.newest, logged.log.end, [])
        logged.store.disk.delete(f"generation-{found.generation:012d}")
        assert_same_states(recover(logged.store).shards, [expected])


@pytest.fixture
def logged(tmp_path):
    one = Logged(tmp_path, APPLY, OPTIMIZERS["adam"])
    one.snapshot()
    for _ in range(3):
        one.push(one.workers[0])
    one.write()
    return one


def test_coordinators_and_dropped_jobs_come_back(logged):
    for content in (b'{"a":1}', b'{"b":2}'):
        logged.log.append(Record(RecordKind.COORDINATOR, frames=[content]))
    logged.world.shard.drop(job_number("demo"))
    logged.write()
    found = recover(logged.store)
    assert found.coordinators == {"job": 9, "a": 1, "b": 2}
    assert found.shards == [[]]


def test_a_log_that_is_gone_is_refused_until_somebody_says_that_it_is_lost(logged, tmp_path):
    name = segment_name(0, logged.log.begun)
    (tmp_path / name).unlink()
    with pytest.raises(SnapshotError, match=f"(?s){name} .*empty file {tmp_path}/{WITHOUT_LOG}"):
        recover(logged.store)
    (tmp_path / WITHOUT_LOG).touch()
    found = recover(logged.store)
    assert (found.generation, found.records) == (1, 0)
    assert f"there is a file {WITHOUT_LOG}" in found.notes[-1]


def test_a_command_that_cannot_be_applied_is_refused_with_its_place(logged):
    logged.log.append(Record(RecordKind.MESSAGE, 77, encode(Message(MessageType.PULL, 77, key=0))))
    logged.write()
    with pytest.raises(SnapshotError, match=rf"{segment_name(0, 2)}: the record at byte \d+ cannot be applied"):
        recover(logged.store)


def test_what_does_not_fit_the_memory_is_refused(logged):
    found = recover(logged.store)
    small = World(max_memory_bytes=100)
    with pytest.raises(SnapshotError, match=r"Generation 1 does not fit --max-memory-bytes \(expected at most 100"):
        place_into(found, small.shards, "Generation 1")


def test_another_number_of_shards_is_refused_and_an_empty_server_may_have_any(logged):
    found, three = recover(logged.store), World(shards=3)
    with pytest.raises(SnapshotError, match=r"it is of another number of shards \(expected --shards 1, got 3\)"):
        place_into(found, three.shards, "it")
    found.shards = [[]]
    place_into(found, three.shards, "it")
