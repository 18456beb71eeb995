"""A shard: who is let in, what is refused and that a refusal changes nothing, lists, blobs, memory, snapshots."""

from __future__ import annotations

import json

import pytest
import torch
from support.shard_world import (
    APPLY,
    SGD,
    WALL_S,
    Worker,
    World,
    codes,
    push_all,
    spec,
    team,
    world_of,
)

from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import ErrorCode, MessageType

MOMENTUM = SGD | {"momentum": 0.9}


def applying(world, size=1, specs=None, **options):
    specs = specs or [spec(0, 4)]
    workers = team(world, size, specs, rule=APPLY | options)
    for one in specs:
        for worker in workers:
            worker.configure(one.key, one.numel, groups=[MOMENTUM])
    return workers


class TestStrangers:
    """Whose HELLO is refused, and who it says to be, leaves nothing behind."""

    def test_a_job_begins_with_its_first_worker(self, world_of_one):
        for count in range(300):
            assert Worker(world_of_one, 70_000 + count, job=f"job {count}").hello() == ErrorCode.BAD_VALUE
        assert list(world_of_one.shard.status(world_of_one.now_s).jobs) == ["demo"]
        assert Worker(world_of_one, 0, job="job 1").hello() == "initialise"

    def test_their_refusals_do_not_push_out_what_happened(self, world_of_one):
        for rank in range(250):
            assert Worker(world_of_one, 70_000 + rank, job="new").hello() == ErrorCode.BAD_VALUE
            assert Worker(world_of_one, 1 + rank, rule=APPLY).hello() == ErrorCode.RULE_MISMATCH
        kinds = [event.kind for event in world_of_one.shard.events.events()]
        assert kinds == ["joined", "refused", "refused"]

    @pytest.fixture
    def world_of_one(self):
        world = World()
        team(world, 1, [spec(0, 4)])
        return world


def test_every_payload_of_a_job_counts_once_and_measuring_does_not():
    world = World()
    (worker,) = applying(world)
    reader = Worker(world, role="reader")
    reader.hello()
    for act, expected in (
        (lambda: None, (16, 0)),
        (lambda: worker.push(0, 1, torch.ones(4)), (32, 16)),
        (lambda: worker.push(0, 2, None), (32, 32)),
        (lambda: reader.pull(0), (32, 48)),
        (lambda: [one.ask(MessageType.ECHO, payload=torch.ones(64)) for one in (worker, reader)], (32, 48)),
        (lambda: [one.ask(MessageType.STATUS) for one in (worker, reader)], (32, 48)),
    ):
        act()
        worker.take()
        job = world.shard.status(world.now_s).jobs["demo"]
        assert (job.bytes_in, job.bytes_out) == expected


class TestRefusals:
    """Each leaves values, versions and sequence tables as they were."""

    @pytest.fixture
    def world(self):
        return World()

    @pytest.fixture
    def workers(self, world):
        workers = applying(world, 2, [spec(0, 4), spec(1, 2, kind=ChunkKind.PARAMETER)])
        push_all(workers, 1, torch.ones(4))
        for worker in workers:
            worker.take()
        return workers

    CASES = {
        "unknown key": (lambda w: w.push(9, 1, torch.ones(4)), ErrorCode.UNKNOWN_KEY),
        "wrong numel": (lambda w: w.push(0, 2, torch.ones(5)), ErrorCode.BAD_MESSAGE),
        "wrong dtype": (lambda w: w.push(0, 2, torch.ones(4).double()), ErrorCode.BAD_MESSAGE),
        "no such segment": (lambda w: w.push(0, 2, torch.ones(4), body={"absent": [3]}), ErrorCode.BAD_MESSAGE),
        "wrong job": (lambda w: w.push(0, 2, torch.ones(4), job=12345), ErrorCode.NOT_MEMBER),
        "wrong epoch": (lambda w: w.push(0, 2, torch.ones(4), epoch=99), ErrorCode.NOT_MEMBER),
        "unknown rank": (lambda w: w.push(0, 2, torch.ones(4), worker=7), ErrorCode.NOT_MEMBER),
        "register late": (lambda w: [w.register(spec(0, 4))], ErrorCode.STATE_LOST),
        "seal otherwise": (lambda w: w.seal([spec(0, 4)]), ErrorCode.BAD_MESSAGE),
        "another optimizer": (lambda w: [w.configure(0, 4, "Adagrad", [ADAGRAD])], ErrorCode.RULE_MISMATCH),
        "other runs": (lambda w: [w.configure(0, 4, runs=[[0, 2, 0], [2, 4, 0]])], ErrorCode.RULE_MISMATCH),
        "more groups": (lambda w: [w.configure(0, 4, groups=[SGD, SGD])], ErrorCode.RULE_MISMATCH),
        "runs too short": (lambda w: [w.configure(0, 4, runs=[[0, 3, 0]])], ErrorCode.BAD_VALUE),
        "unknown slot": (lambda w: [w.pull(0, slot="nothing")], ErrorCode.BAD_VALUE),
        "unknown blob": (lambda w: [w.pull(0, blob="nothing")], ErrorCode.UNKNOWN_KEY),
        "store too much": (lambda w: w.send(MessageType.STORE, key=0, payload=torch.ones(5)), ErrorCode.BAD_MESSAGE),
        "blob of floats": (
            lambda w: w.send(MessageType.STORE, key=0, payload=torch.ones(4), body={"blob": "b"}),
            ErrorCode.BAD_MESSAGE,
        ),
        "result": (lambda w: w.send(MessageType.RESULT, key=0, sequence=1, payload=torch.ones(4)), "bad_message"),
        "join": (lambda w: w.send(MessageType.JOIN), ErrorCode.BAD_MESSAGE),
        "snapshot": (lambda w: w.send(MessageType.SNAPSHOT), ErrorCode.SNAPSHOT_FAILED),
        "another rule": (lambda w: hello_with(w, rule=APPLY | {"max_staleness": 3}), ErrorCode.RULE_MISMATCH),
        "a rank too large": (lambda w: hello_with(w, rank=70_000), ErrorCode.BAD_VALUE),
        "too many workers": (lambda w: hello_with(w, world_size=10**9), ErrorCode.BAD_VALUE),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_it_changes_nothing(self, world, workers, case):
        act, code = self.CASES[case]
        before = world.state_hash()
        assert codes(act(workers[0])) == [code]
        assert world.state_hash() == before

    def test_only_the_initialiser_registers_and_seals(self, world):
        first, second = Worker(world, 0), Worker(world, 1)
        first.hello()
        second.hello()
        assert codes([second.register(spec(0, 4))]) == [ErrorCode.BAD_MESSAGE]
        assert codes(second.seal([])) == [ErrorCode.BAD_MESSAGE]
        assert codes(first.seal([spec(0, 4)])) == [ErrorCode.BAD_MESSAGE]
        assert first.hello() == "initialise"

    def test_another_key_cannot_speak_for_a_worker_or_take_its_answers(self, world):
        worker = Worker(world, 0, rule=APPLY, user_id="alice")
        worker.initialise([spec(0, 4)])
        worker.configure(0, 4)
        mallory = Worker(world, 0, rule=APPLY, user_id="mallory")
        assert mallory.hello() == ErrorCode.DUPLICATE_RANK
        mallory.worker, mallory.incarnation, mallory.epoch = 0, worker.incarnation, worker.epoch
        assert codes(mallory.push(0, 1, torch.ones(4))) == [ErrorCode.FENCED]
        member = next(iter(world.shard.jobs.by_number.values())).membership.members[0]
        assert member.route == worker.route


ADAGRAD = {
    "lr": 0.1,
    "lr_decay": 0.0,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "eps": 1e-10,
    "maximize": False,
}


def hello_with(worker, **changes):
    return worker.send(MessageType.HELLO, epoch=0, incarnation=0, body=worker.hello_body(**changes))


class TestMemory:
    def test_chunks_optimizers_and_blobs_have_one_limit(self):
        world = World(max_memory_bytes=100)
        worker = Worker(world, 0, rule=APPLY)
        worker.hello()
        assert worker.register(spec(0, 16)).type is MessageType.OK
        refused = worker.register(spec(1, 10))
        assert codes([refused]) == [ErrorCode.MEMORY]
        assert "36" in refused.body["text"]
        assert "100" in refused.body["text"]
        assert worker.register(spec(0, 20)).type is MessageType.OK, "in place of the first"
        assert codes([worker.register(spec(0, 26))]) == [ErrorCode.MEMORY]
        worker.seal([spec(0, 20)])
        assert codes([worker.configure(0, 20)]) == [ErrorCode.MEMORY]
        blob = {"blob": "b", "pieces": 2}
        fits = worker.send(MessageType.STORE, key=0, payload=torch.zeros(20, dtype=torch.uint8), body=blob)
        assert not codes(fits)
        more = worker.send(MessageType.STORE, key=1, payload=torch.zeros(1, dtype=torch.uint8), body=blob)
        assert codes(more) == [ErrorCode.MEMORY]
        assert world.shard.jobs.memory_bytes() == 100


class TestReading:
    def test_lists_come_in_pages(self):
        world = World()
        many = [
            ChunkSpec(
                key, ChunkKind.PARAMETER, torch.float32, 40,
                tuple(Segment(f"layer.{key}.{i}" + "x" * 400, (1,), (1,), 0, 1) for i in range(40)),
            )
            for key in range(9)
        ]  # fmt: skip
        (worker,) = team(world, 1, many)
        after, found, pages = -1, [], 0
        while True:
            page = worker.ask(MessageType.LIST, body={"after": after}).body
            found += [ChunkSpec.from_body(entry) for entry in page["chunks"]]
            after, pages = found[-1].key, pages + 1
            assert page["total"] == 9
            if not page["more"]:
                break
        assert found == many
        assert pages > 2
        assert worker.ask(MessageType.LIST, body={"after": 8}).body == {"chunks": [], "more": False, "total": 9}

    def test_slots_can_be_read_and_overwritten(self):
        world = World()
        (worker,) = applying(world)
        assert worker.configure(0, 4, groups=[MOMENTUM]).body == {"slots": ["momentum_buffer"]}
        worker.push(0, 1, torch.full((4,), 2.0))
        answer = worker.pull(0, slot="momentum_buffer")
        assert payload_tensor(answer).tolist() == [2.0] * 4
        assert answer.body["steps"] == [1.0]
        body = {"slot": "momentum_buffer", "steps": [1.0]}
        worker.ask(MessageType.STORE, key=0, payload=torch.full((4,), 10.0), body=body)
        (answer,) = worker.push(0, 2, torch.zeros(4), 1)
        assert payload_tensor(answer)[0].item() == pytest.approx(-0.2 - 0.1 * 9.0)

    def test_a_repeated_store_does_not_undo_what_came_after_it(self):
        world = World()
        (worker,) = applying(world)
        worker.send(MessageType.STORE, key=0, payload=torch.full((4,), 8.0), sequence=500)
        (answer,) = worker.push(0, 1, torch.ones(4), 1)
        assert [m.type for m in worker.send(MessageType.STORE, key=0, payload=torch.full((4,), 8.0), sequence=500)] == [
            MessageType.OK
        ]
        assert torch.equal(payload_tensor(worker.pull(0)), payload_tensor(answer))

    def test_blobs_are_replaced_piece_by_piece(self):
        (worker,) = team(World(), 1, [spec(0, 4)])
        for pieces in (3, 2):
            for key in range(pieces):
                payload = torch.full((5,), 10 * pieces + key, dtype=torch.uint8)
                worker.ask(MessageType.STORE, key=key, payload=payload, body={"blob": "b", "pieces": pieces})
        answers = [worker.pull(key, blob="b") for key in range(2)]
        assert [(bytes(a.payload)[0], a.body["pieces"]) for a in answers] == [(20, 2), (21, 2)]
        assert codes([worker.pull(2, blob="b")]) == [ErrorCode.UNKNOWN_KEY]


class TestReaders:
    def test_they_may_look_and_nothing_else(self):
        world = World()
        (worker,) = applying(world)
        reader = Worker(world, role="reader")
        assert reader.hello() == "ready"
        assert payload_tensor(reader.pull(0)).tolist() == [0.0] * 4
        assert len(reader.ask(MessageType.LIST, body={"after": -1}).body["chunks"]) == 1
        assert reader.ask(MessageType.HEARTBEAT).body["members"] == [0]
        before = world.state_hash()
        refused = [
            reader.push(0, 1, torch.ones(4)),
            reader.send(MessageType.STORE, key=0, payload=torch.ones(4)),
            [reader.register(spec(1, 4))],
            reader.seal([]),
            [reader.configure(0, 4)],
            reader.send(MessageType.JOIN),
        ]
        assert [codes(answers) for answers in refused] == [[ErrorCode.BAD_MESSAGE]] * len(refused)
        assert reader.ask(MessageType.BYE).type is MessageType.OK
        assert world.state_hash() == before
        assert worker.push(0, 1, torch.ones(4))

    def test_weights_of_an_averaging_job_that_has_begun_are_elsewhere(self):
        world, (worker,) = world_of(1, [spec(0, 4)])
        reader = Worker(world, role="reader")
        assert reader.hello() == "ready"
        assert reader.pull(0).type is MessageType.VALUES
        worker.push(0, 1, torch.ones(4))
        assert codes([reader.pull(0)]) == [ErrorCode.NOT_READY]

    def test_status_is_json(self):
        world = World()
        workers = applying(world, 2, max_staleness=0)
        workers[0].push(0, 1, torch.ones(4))
        report = json.loads(bytes(Worker(world, role="reader").ask(MessageType.STATUS).payload))
        job = report["jobs"]["demo"]
        assert [(w["rank"], w["state"], w["pushes"], w["waiting_for"]) for w in job["workers"]] == [
            (0, "live", 1, [1]),
            (1, "live", 0, []),
        ]
        assert (job["applied"], job["version_max"], job["chunks"]) == (1, 1, 1)
        report = json.loads(bytes(workers[0].ask(MessageType.STATUS).payload))
        assert (report["epoch"], report["software"]) == (7, "test")
        assert report["unix_s"] == WALL_S + world.now_s

    def test_whom_workers_wait_for_is_told_of_all_chunks_together(self):
        world, workers = world_of(70, [spec(0, 4), spec(1, 4)])
        for key, ranks in ((0, range(66)), (1, [*range(3), *range(6, 70)])):
            for rank in ranks:
                workers[rank].push(key, 1, torch.ones(4))
        found = world.shard.status(world.now_s).jobs["demo"].workers
        waiting = {worker.rank: list(worker.waiting_for) for worker in found}
        first, second = [66, 67, 68, 69], [3, 4, 5]
        assert waiting[0] == second + first
        assert (waiting[3], waiting[68]) == (first, second)
