"""A snapshot of an asynchronous job is cut between its workers' steps: a step is in all its chunks, or in none."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.server_process import APPLY as SERVER_APPLY
from support.server_process import SGD as SERVER_SGD
from support.server_process import running_server
from support.shard_world import APPLY, SGD, Worker, World, spec, team
from support.waiting import eventually

from psengine.errors import SnapshotError
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.parameter_server.server.core.capture import CopyBarrier
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.snapshots.files import read_generation
from psengine.protocol.messages import MessageType

CHUNKS = 3


class Cut(World):
    """One shard whose copies are taken as the daemon takes them."""

    def cut(self):
        return self.shard.meet_and_capture(CopyBarrier(1))


def crew(world: World, size: int, *, rule=APPLY, optimizer=SGD, name="SGD") -> list[Worker]:
    workers = team(world, size, [spec(key) for key in range(CHUNKS)], rule=rule)
    for key in range(CHUNKS):
        workers[0].configure(key, 4, name, [optimizer])
    return workers


def push(worker: Worker, key: int, step: int, parts: int = CHUNKS, is_whole: bool = True, value: float = 1.0) -> None:
    worker.push(key, step, torch.full((4,), value), body={"step": [step, parts, is_whole]})
    worker.take()


def sequences(states, rank: int) -> list[int]:
    """The last exchange of a worker, by chunk."""
    [job] = states
    return [chunk.meta["last_sequence"].get(str(rank), 0) for chunk in job.chunks]


def values(states) -> list[float]:
    [job] = states
    return [chunk.tensors["values"][0].item() for chunk in job.chunks]


def test_a_step_under_way_comes_to_all_chunks_of_the_copy_and_what_follows_to_none():
    world = Cut()
    first, second = crew(world, 2)
    push(first, 0, 1)
    capture = world.cut()
    push(second, 0, 1, value=10.0)
    push(second, 1, 1, value=10.0)
    push(first, 1, 1)
    push(second, 2, 1, value=10.0)
    assert not capture.states.done()
    push(first, 2, 1)
    push(first, 0, 2)
    states = capture.states.result(0)
    assert (sequences(states, 0), sequences(states, 1)) == ([1] * 3, [0] * 3)
    assert values(states) == [pytest.approx(-0.1)] * 3
    assert [chunk.meta["version"] for chunk in states[0].chunks] == [1] * 3
    # The job itself goes on.
    assert values(world.shard.durable.capture()) == [pytest.approx(-1.2), pytest.approx(-1.1), pytest.approx(-1.1)]


@pytest.mark.parametrize("end", ["leaves", "dies", "fails", "is replaced"])
def test_a_step_that_never_ends_holds_nothing_up(end):
    world = Cut()
    first, second = crew(world, 2)
    push(first, 0, 1)
    capture = world.cut()
    if end == "leaves":
        first.send(MessageType.BYE)
    elif end == "dies":
        world.advance(6.0, second)
    elif end == "fails":
        push(first, 0, 2)
    else:
        Worker(world, 0, rule=APPLY, world_size=2).claim(second)
    assert capture.states.done()
    assert sequences(capture.states.result(0), 0) == [1, 0, 0]


def test_repeats_and_refusals_count_once():
    world = Cut()
    first, _ = crew(world, 2)
    push(first, 0, 1)
    push(first, 0, 1)
    push(first, 1, 1, value=float("nan"))
    capture = world.cut()
    push(first, 1, 1, value=float("nan"))
    assert not capture.states.done()
    push(first, 2, 1)
    states = capture.states.result(0)
    assert sequences(states, 0) == [1] * 3
    assert [chunk.meta["version"] for chunk in states[0].chunks] == [1, 0, 1]


def test_a_copy_is_what_a_server_goes_on_from_with_momenta_and_bounds():
    rule = {**APPLY, "max_staleness": 1, "delay_compensation": 0.1}
    optimizer = {**SGD, "momentum": 0.9}
    world = Cut()
    first, second = crew(world, 2, rule=rule, optimizer=optimizer)
    for step in (1, 2):
        for worker in (first, second):
            for key in range(CHUNKS):
                push(worker, key, step)
    push(first, 0, 3)
    capture = world.cut()
    for key in range(CHUNKS):
        push(second, key, 3)
    for key in (1, 2):
        push(first, key, 3)
    states = capture.states.result(0)
    assert [sequences(states, rank) for rank in (0, 1)] == [[3] * 3, [2] * 3]
    chunks = states[0].chunks
    momenta = [chunk.tensors["slot/momentum_buffer"] for chunk in chunks]
    assert torch.equal(momenta[1], momenta[2])
    world.start(8, states)
    assert values(world.shard.durable.capture()) == values(states)


def test_each_push_that_names_no_step_is_one():
    world = Cut()
    first, _ = crew(world, 2)
    first.push(0, 1, torch.ones(4))
    assert sequences(world.cut().states.result(0), 0) == [1, 0, 0]


def test_a_server_that_ends_waits_for_no_step():
    world = Cut()
    first, _ = crew(world, 2)
    push(first, 0, 1)
    world.shard.is_draining = True
    assert world.cut().states.done()


def test_shards_have_the_same_steps():
    """Of two shards that meet one has begun step 2 of worker 0 and the other has not: it is awaited there."""
    worlds = [Cut(), Cut()]
    workers = [crew(world, 1)[0] for world in worlds]
    for worker in workers:
        for key in range(CHUNKS):
            push(worker, key, 1)
    push(workers[0], 0, 2)
    barrier, captures = CopyBarrier(2), {}

    def meet(index: int) -> None:
        captures[index] = worlds[index].shard.meet_and_capture(barrier)

    threads = [threading.Thread(target=meet, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not captures[1].states.done()
    for worker in workers:
        for key in range(CHUNKS):
            push(worker, key, 2)
    assert [sequences(captures[index].states.result(0), 0) for index in range(2)] == [[2] * 3] * 2


# ---- real servers ----------------------------------------------------------------------------------------------------


def train(address: str, rank: int, ends: threading.Event, failures: list[BaseException], chunks: int) -> None:
    try:
        options = SessionOptions(
            addresses=(address,), job="job", rule=SERVER_APPLY, rank=rank, world_size=3, timeout_s=20.0
        )
        with WorkerSession(options) as session:
            session.enter([spec(key, 4) for key in range(chunks)], lambda one: torch.zeros(one.numel))
            body = {"optimizer": "SGD", "groups": [{**SERVER_SGD, "lr": 1.0}], "runs": [[0, 4, 0]]}
            wait_all([session.configure(key, body) for key in range(chunks)])
            while not ends.is_set():
                session.begin_step(range(chunks), is_whole=True)
                wait_all([session.push(key, torch.ones(4), []) for key in range(chunks)])
    except BaseException as error:
        failures.append(error)


def uneven(directory: Path) -> int:
    """Workers whose step the newest generation has in some chunks only, over all shards; -1 where it is gone again."""
    newest = max(int(path.name.removeprefix("generation-")) for path in directory.glob("generation-*"))
    try:
        shards = read_generation(DirectoryDisk(directory / f"generation-{newest:012d}"), newest)
    except (OSError, SnapshotError):
        return -1
    chunks = [chunk for shard in shards for job in shard for chunk in job.chunks]
    ranks = {rank for chunk in chunks for rank in chunk.meta["last_sequence"]}
    return sum(len({chunk.meta["last_sequence"].get(rank, 0) for chunk in chunks}) > 1 for rank in ranks)


def test_snapshots_of_busy_workers_are_cut_between_steps(tmp_path):
    chunks, address, directory = 30, f"ipc://{tmp_path}/socket", tmp_path / "s"
    ends, failures, found = threading.Event(), [], []
    with running_server(bind=address, shards=2, snapshot_dir=directory, snapshot_interval_s=0.05) as server:
        workers = [threading.Thread(target=train, args=(address, rank, ends, failures, chunks)) for rank in range(3)]
        for worker in workers:
            worker.start()
        try:
            eventually(lambda: (jobs := server.job("job")) and all(len(job["workers"]) == 3 for job in jobs))
            while len(found) < 3:
                assert not failures
                before = server.status()["snapshot"]["generation"]
                eventually(lambda before=before: server.status()["snapshot"]["generation"] != before, interval_s=0.01)
                found += [count for count in [uneven(directory)] if count >= 0]
        finally:
            ends.set()
            for worker in workers:
                worker.join(20)
        assert "torn" not in {event["kind"] for event in server.status()["events"]}
    assert not failures
    assert found == [0] * 3
