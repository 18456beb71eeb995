"""Groups that are left while somebody hangs in them; the others go on in another group, with the same bits."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles.ring_order import add_in_ring_order
from support.expectations import raises
from support.marks import slow
from support.native_extension import needs_shared_memory
from support.processes import in_ranks, run_ranks_to_any_end
from support.waiting import eventually

from psengine.collectives.base import Collective
from psengine.collectives.own_group import form_collective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.errors import CollectiveError

CPU = torch.device("cpu")
NUMEL = 300_001
COUNT = 5  # of contributions
SOON_S = 15.0  # on a busy machine; what waits for its timeout takes 30 s
WAYS = [pytest.param(True, marks=needs_shared_memory, id="shared_memory"), pytest.param(False, id="gloo")]


def never() -> bool:
    return False


def form(folder: Path, name: str, workers: Sequence[int], worker: int, *, shares_memory: bool) -> Collective:
    store = dist.FileStore(str(folder / name), len(workers))
    rank = workers.index(worker)
    made = form_collective(store, name, rank, len(workers), 30.0, never, shares_memory=shares_memory)
    assert made is not None
    assert isinstance(made, SharedMemoryCollective) == (shares_memory and len(workers) > 1)
    return made


def contribution(step: int, number: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + number))


def sum_of(step: int) -> torch.Tensor:
    expected = torch.empty(NUMEL)
    add_in_ring_order([contribution(step, number) for number in range(COUNT)], expected)
    return expected


class Memory:
    """This rank's contributions, dealt out evenly."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.owners = [(number % collective.world_size, number // collective.world_size) for number in range(COUNT)]
        self.own = [number for number, (rank, _) in enumerate(self.owners) if rank == collective.rank]
        self.rows = collective.allocate((1 + len(self.own)) * NUMEL, torch.float32, CPU).view(-1, NUMEL)

    def compute(self, step: int, former: Memory | None = None) -> None:
        """Compute contributions, or copy those that the former group's memory has."""
        for row, number in enumerate(self.own, start=1):
            if former is not None and number in former.own:
                self.rows[row] = former.rows[1 + former.own.index(number)]
                assert torch.equal(self.rows[row], contribution(step, number)), "a contribution has changed"
            else:
                self.rows[row] = contribution(step, number)

    def begin(self, step: int) -> Any:
        return self.collective.sum_contributions(self.rows, self.owners, what=f"step {step}")

    def add_up(self, step: int, is_interrupted: Callable[[], bool] = never) -> bool:
        """Sum contributions, and check the bits; False if interrupted."""
        for work in self.begin(step):
            if not work.wait(is_interrupted):
                return False
        assert torch.equal(self.rows[0], sum_of(step))
        return True


def lose_rank_1_at_any_moment(rank: int, world_size: int, folder: Path, shares_memory: bool, delay_s: float) -> int:
    """Returns the step after which the others met again."""
    memory = Memory(form(folder, "first", range(world_size), rank, shares_memory=shares_memory))
    if rank == 1:
        threading.Timer(delay_s, kill_and_tell, [folder / "killed"]).start()
    is_killed = (folder / "killed").exists
    completed, has_all = 0, True
    while has_all:
        try:
            memory.compute(completed + 1)
            has_all = memory.add_up(completed + 1, is_killed)
            completed += has_all
        except CollectiveError:
            has_all = False
    memory.collective.abandon()
    former = memory
    memory = Memory(form(folder, "second", [0, 2], rank, shares_memory=shares_memory))
    # Whoever has the sums of this step has none of the next one.
    steps = [int(step) for step in memory.collective.gather(torch.tensor(completed))]
    assert max(steps) - min(steps) <= 1
    memory.compute(completed + 1, former)
    for step in range(min(steps) + 1, min(steps) + 4):
        memory.compute(step)
        memory.add_up(step)
    memory.collective.barrier().wait()
    return min(steps)


def kill_and_tell(told: Path) -> None:
    """Another process does, as fast as a coordinator would."""
    process_id = os.getpid()
    if os.fork() == 0:
        os.kill(process_id, signal.SIGKILL)
        told.touch()
        os._exit(0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [[0, 1], slow(range(2, 20))])
@pytest.mark.parametrize("shares_memory", WAYS)
def test_a_rank_is_killed_at_any_moment(tmp_path, shares_memory, seeds):
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        delay_s = 0.3 * random.Random(seed).random()
        results = run_ranks_to_any_end(
            lose_rank_1_at_any_moment, 3, folder, shares_memory, delay_s, init_group=False, may_have_children=True
        )
        assert results[1].exit_code == -signal.SIGKILL
        for result in (results[0], results[2]):
            assert result.error is None, result.error
        assert results[0].value == results[2].value


@pytest.mark.parametrize("shares_memory", WAYS)
@in_ranks(3, init_group=False)
def test_an_expelled_rank_that_goes_on_changes_nothing(
    rank: int, world_size: int, tmp_path: Path, shares_memory: bool
) -> None:
    """It is stopped in the middle of a sum, expelled, and goes on when the others use other memory."""
    memory = Memory(form(tmp_path, "first", range(world_size), rank, shares_memory=shares_memory))
    memory.compute(1)
    memory.add_up(1)
    memory.compute(2)
    works = memory.begin(2)
    works = itertools.chain([next(works)], works)
    stopped, has_ended = tmp_path / "stopped", tmp_path / "has ended"
    if rank == 1:
        (tmp_path / "process").write_text(str(os.getpid()))
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    eventually(stopped.exists)
    until_s = time.monotonic() + (60 if rank == 1 else 0.3)
    try:
        for work in works:
            if not work.wait(lambda: time.monotonic() > until_s):
                break
    except CollectiveError:
        assert rank == 1
    if rank == 1:
        with raises(CollectiveError, "barrier failed on rank 1"):
            memory.collective.barrier().wait()
        has_ended.touch()
        return
    assert time.monotonic() < until_s + SOON_S
    memory.collective.abandon()
    former = memory
    memory = Memory(form(tmp_path, "second", [0, 2], rank, shares_memory=shares_memory))
    memory.compute(2, former)
    began_s = time.monotonic()
    del former, works, work
    gc.collect()
    assert time.monotonic() < began_s + SOON_S, "dropping a group waits for its works"
    if rank == 0:
        os.kill(int((tmp_path / "process").read_text()), signal.SIGCONT)
    step = 1
    while not all(memory.collective.gather(torch.tensor(has_ended.exists()))):
        step += 1
        memory.compute(step)
        memory.add_up(step)
    memory.collective.barrier().wait()


def leave_within_a_message(rank: int, world_size: int, folder: Path) -> None:
    collective = form(folder, "first", range(world_size), rank, shares_memory=False)
    ranks = collective.gather(torch.tensor(os.getpid()))
    message = torch.full((50_000_000,), float(1 - rank))
    work = collective.broadcast([message])
    if rank == 0:
        work.wait()
        return
    while not message[0]:
        time.sleep(0.001)
    os.kill(int(ranks[0]), signal.SIGSTOP)
    collective.abandon()
    began_s = time.monotonic()
    with raises(CollectiveError, "barrier failed on rank 1"):
        collective.barrier().wait()
    del collective, work
    gc.collect()
    assert time.monotonic() < began_s + SOON_S, "dropping a group waits for the rest of a message"
    os.kill(int(ranks[0]), signal.SIGKILL)


def test_a_group_is_left_within_a_message(tmp_path):
    """gloo fails no receive that has a part of its message (torch 2.13), and its destructor waits for it."""
    results = run_ranks_to_any_end(leave_within_a_message, 2, tmp_path, init_group=False)
    assert results[1].error is None, results[1].error


@pytest.mark.parametrize("shares_memory", WAYS)
@in_ranks(2, init_group=False)
def test_a_group_takes_its_files_and_threads_along(
    rank: int, world_size: int, tmp_path: Path, shares_memory: bool
) -> None:
    found = []
    for number in range(4):
        memory = Memory(form(tmp_path, str(number), range(world_size), rank, shares_memory=shares_memory))
        memory.compute(1)
        memory.add_up(1)
        has_sum = tmp_path / f"rank 1 has sum {number}"
        if rank == 1:
            has_sum.touch()
        eventually(has_sum.exists)
        if rank == 0:
            hanging = memory.collective.all_reduce(torch.ones(1))
            memory.collective.abandon()
            del hanging
        del memory
        gc.collect()
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert found[-1] == found[1], found


@pytest.mark.parametrize("shares_memory", WAYS)
@in_ranks(3, init_group=False)
def test_a_meeting_to_which_somebody_does_not_come_is_left(
    rank: int, world_size: int, tmp_path: Path, shares_memory: bool
) -> None:
    """Rank 1 does not come; the others are told so, and meet without it."""
    if rank == 1:
        return
    store = dist.FileStore(str(tmp_path / "first"), world_size)
    is_told_s = time.monotonic() + 0.5
    interrupted = lambda: time.monotonic() > is_told_s  # noqa: E731
    made = form_collective(store, "first", rank, world_size, 30.0, interrupted, shares_memory=shares_memory)
    assert time.monotonic() < is_told_s + SOON_S
    assert made is None
    memory = Memory(form(tmp_path, "second", [0, 2], rank, shares_memory=shares_memory))
    memory.compute(1)
    memory.add_up(1)
    memory.collective.barrier().wait()
