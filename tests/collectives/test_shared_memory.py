"""Shared memory between real processes: waits, faults, and what is left behind."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.native_extension import needs_shared_memory
from support.processes import in_ranks, run_ranks, run_ranks_to_any_end
from support.waiting import eventually

from psengine.collectives.c10d import C10dCollective
from psengine.collectives.registry import collective_for
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.environment.processes import process_state
from psengine.errors import CollectiveError, PeerLostError, SharedMemoryUnavailableError
from psengine.kernels import native

pytestmark = needs_shared_memory

CPU = torch.device("cpu")
MIB = 1024 * 1024


@contextmanager
def sending(number: int) -> Iterator[None]:
    """Another process sends a signal to this one, once it sleeps."""
    this_process = os.getpid()
    sender = os.fork()
    if sender == 0:
        eventually(lambda: process_state(this_process) == "S")
        os.kill(this_process, number)
        os._exit(0)
    try:
        yield
    finally:
        os.waitpid(sender, 0)


def shared_memory(**options: Any) -> SharedMemoryCollective:
    return SharedMemoryCollective(C10dCollective(**options))


def connect(**options: Any) -> SharedMemoryCollective:
    """A collective whose ranks have met, over gloo."""
    collective = shared_memory(**options)
    collective.connect()
    return collective


def await_sleeper(collective: SharedMemoryCollective, rank: int = 0) -> None:
    """Until ``rank`` sleeps, in an operation that this rank has not begun."""

    def sleeps() -> bool:
        states = collective._extension.shared_memory_states(collective._group)
        return states[rank][1] > states[collective.rank][1] and process_state(states[rank][0]) == "S"

    eventually(sleeps, f"rank {rank} sleeps")


def mapped_segments() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "psengine-segment" in line]


def kib_of(path: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(name + ":"))


# ---- waiting ---------------------------------------------------------------------------------------------------------


@in_ranks(2)
def test_a_long_wait_sleeps(rank, world_size):
    collective = connect()
    collective.sum(torch.ones(3))
    for _ in range(3):
        cpu_s, began_s = time.thread_time(), time.monotonic()
        if rank == 1:
            await_sleeper(collective)
            time.sleep(0.2)
        collective.sum(torch.ones(3))
        if rank == 0:
            assert time.thread_time() - cpu_s < 0.25 * (time.monotonic() - began_s), "it spins, and burns a core"


# ---- faults ----------------------------------------------------------------------------------------------------------


def leave(rank: int, world_size: int, way: str) -> tuple[tuple[int, ...], str]:
    collective = shared_memory()
    flats = [torch.ones(10), torch.ones(300_000), collective.allocate(400_000, torch.float32, CPU).fill_(1.0)]
    works = [collective.all_reduce(flat) for flat in flats]
    if rank == 1:
        for work in works:
            work.wait()
        if way == "closes":
            time.sleep(0.3)  # the others wait by then, or will
            collective.close()
            with raises(CollectiveError, "the collective is closed"):
                collective.barrier().wait()
            return (), ""
        os._exit(0)  # an interpreter that ends in order may close the collective first: then the rank has left
    if rank == 2:
        time.sleep(0.5)  # rank 1 is gone, or will be; it may need this rank first
    for work, flat in zip(works, flats, strict=True):
        work.wait()
        assert (flat == world_size).all()
    try:
        collective.barrier().wait()
    except PeerLostError as error:
        return error.ranks, str(error)
    raise AssertionError("the barrier came to an end without rank 1")


@pytest.mark.parametrize(("way", "fate"), [("closes", "has left the group"), ("exits", "has exited")])
def test_a_rank_that_leaves_is_missed_where_it_is_needed(way, fate):
    results = run_ranks_to_any_end(leave, 3, way, leave_together=way == "closes")
    for result in (results[0], results[2]):
        assert result.error is None, result.error
        assert result.value[0] == (1,)
        assert fate in result.value[1]


@in_ranks(3)
def test_different_calls_are_named_on_every_rank(rank, world_size):
    """Rank 1 calls something else than the others; everybody is told what."""

    def all_reduce(numel: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Callable[..., None]:
        return lambda collective: collective.all_reduce(torch.ones(numel, dtype=dtype), scale).wait()

    def broadcast(numel: int, source: int) -> Callable[..., None]:
        return lambda collective: collective.broadcast([torch.ones(numel)], source).wait()

    def in_place(collective: SharedMemoryCollective) -> None:
        collective.all_reduce(collective.allocate(90_000, torch.float32, CPU)).wait()

    def contributions(*owners: tuple[int, int]) -> Callable[..., None]:
        def begin(collective: SharedMemoryCollective) -> None:
            memory = collective.allocate(3 * 500, torch.float32, CPU).view(3, 500)
            rows = 1 + sum(owner == collective.rank for owner, _ in owners)
            for work in collective.sum_contributions(memory[:rows], owners):
                work.wait()

        return begin

    def gather(collective: SharedMemoryCollective) -> None:
        collective.gather(torch.ones(7))

    def barrier(collective: SharedMemoryCollective) -> None:
        collective.barrier().wait()

    def outstanding(numel: int) -> Callable[..., None]:
        def call(collective: SharedMemoryCollective) -> None:
            works = [collective.all_reduce(torch.ones(n)) for n in (10, 600_000, numel)]
            for work in works:
                work.wait()

        return call

    cases = [
        (all_reduce(3), all_reduce(4), "3 elements of float32", "4 elements of float32"),
        (all_reduce(4), all_reduce(4, torch.int32), "4 elements of float32", "4 elements of int32"),
        (all_reduce(4, scale=0.5), all_reduce(4, scale=0.25), "times 0.5", "times 0.25"),
        (all_reduce(4), barrier, "all_reduce of 4 elements", "barrier"),
        (gather, broadcast(7, 0), "all_gather of 28 bytes", "broadcast of 28 bytes from rank 0"),
        (broadcast(7, 0), broadcast(7, 1), "from rank 0", "from rank 1"),
        (in_place, all_reduce(90_000), "times 1.000000 in memory from allocate()", "all_reduce of 90000 elements"),
        (contributions((0, 0), (1, 0)), contributions((1, 0), (0, 0)), "of 500 elements of float32 each", "digest"),
        (outstanding(500), outstanding(501), "500 elements", "501 elements"),
    ]
    for number, (others_call, rank_1_calls, *texts) in enumerate(cases):
        collective = shared_memory(timeout_s=20)
        collective.all_reduce(torch.ones(1)).wait()
        with raises(CollectiveError, "same operations in the same order", "rank 1 called", *texts):
            (rank_1_calls if rank == 1 else others_call)(collective)
            collective.barrier().wait()  # a source of a broadcast does not wait for the others
            raise AssertionError(f"case {number} went unnoticed")
        dist.barrier()


@in_ranks(3)
def test_a_forked_child_is_told_and_does_no_harm(rank, world_size):
    collective = connect()
    # Connected, but no other rank has mapped this memory when the child lets go of it.
    flat = collective.allocate(400_000, torch.float32, CPU).fill_(rank + 1.0)
    work = collective.all_reduce(torch.ones(300_000)) if rank == 0 else None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with raises(CollectiveError, "a forked child cannot use its parent's collective"):
                collective.all_reduce(torch.ones(3))
            with raises(CollectiveError, "a forked child cannot use its parent's collective"):
                collective.all_reduce(flat)
            if work is not None:
                with raises(CollectiveError, "a forked child cannot use its parent's collective"):
                    work.wait()
            collective.close()
            del flat, collective, work
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    if work is None:
        work = collective.all_reduce(torch.ones(300_000))
    work.wait()
    collective.all_reduce(flat).wait()
    assert (flat == sum(range(1, world_size + 1))).all()


@in_ranks(2)
def test_ctrl_c_ends_a_wait(rank: int, world_size: int) -> None:
    collective = connect()
    flat = torch.ones(3)
    if rank == 1:
        dist.barrier()
        collective.all_reduce(flat).wait()
        return
    work = collective.all_reduce(flat)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with raises(KeyboardInterrupt), sending(signal.SIGINT):
        work.wait()
    dist.barrier()  # until here rank 1 has not come
    work.wait()  # the interrupt ended the wait, not the operation
    assert (flat == 2).all()


@in_ranks(2)
def test_signals_disturb_no_wait(rank: int, world_size: int, tmp_path: Path) -> None:
    """Signals at a high rate, as a sampling profiler sends them, whose handler uses the collective's lock itself."""
    collective, has_waited = connect(), tmp_path / "has waited"
    if rank == 1:
        eventually(has_waited.exists)
    else:
        sampled = []

        def sample(*_: Any) -> None:
            sampled.append(collective._extension.shared_memory_progress(collective._group))
            if len(sampled) == 2000:
                has_waited.touch()

        signal.signal(signal.SIGALRM, sample)
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        # A system call that a signal broke off says nothing of rank 1.
        while len(sampled) < 1000:
            assert all(is_running for *_, is_running in collective._extension.shared_memory_states(collective._group))
    collective.barrier().wait()
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)


@in_ranks(2)
def test_threads_of_one_rank(rank: int, world_size: int) -> None:
    """While one thread waits, another allocates and frees, and two more wait for one another's operations."""
    collective = connect()
    is_over = threading.Event()

    def allocate_and_free() -> None:
        while not is_over.is_set():
            collective.allocate(300_000, torch.float32, CPU)

    churning = threading.Thread(target=allocate_and_free)
    churning.start()
    if rank == 1:
        await_sleeper(collective)
    flats = [torch.ones(n) for n in (10, 500_000, 20, 300_000)]
    works = [collective.all_reduce(flat) for flat in flats]
    waiting = [threading.Thread(target=work.wait) for work in reversed(works)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(timeout=60)
    is_over.set()
    churning.join()
    assert not any(thread.is_alive() for thread in waiting)
    assert all((flat == 2).all() for flat in flats)


# ---- many, large, late -----------------------------------------------------------------------------------------------


def reduce_gigabytes(rank: int, world_size: int) -> None:
    """More than 2**31 bytes and elements' bytes beyond every 32-bit offset, in place and staged."""
    collective = shared_memory()
    numel = 5 * 2**28 + 77  # 2.5 GiB of float16
    for is_shared in (True, False):
        allocate = collective.allocate if is_shared else super(SharedMemoryCollective, collective).allocate
        flat = allocate(numel, torch.float16, CPU)
        for number, part in enumerate(flat.tensor_split(40)):
            part.fill_(number + rank)
        collective.all_reduce(flat).wait()
        for number, part in enumerate(flat.tensor_split(40)):
            assert part[0] == part[-1] == 2 * number + 1
            assert (part == 2 * number + 1).all()
        del flat, part


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tensors_beyond_32_bits():
    if kib_of("/proc/meminfo", "MemAvailable") < 9 * MIB:
        pytest.skip("needs 9 GiB of memory")
    run_ranks(reduce_gigabytes, 2, deadline_s=300, group_timeout_s=200)


# ---- what is left behind ---------------------------------------------------------------------------------------------


def shrink_own_memory(rank: int, world_size: int) -> list[str]:
    collective = connect()
    late = collective.allocate(1000, torch.float32, CPU)  # a segment that others hear of at once
    refused = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            if "psengine" in os.readlink(f"/proc/self/fd/{entry}"):
                with pytest.raises(PermissionError):
                    os.truncate(f"/proc/self/fd/{entry}", 0)
                refused.append(os.readlink(f"/proc/self/fd/{entry}"))
    collective.all_reduce(late.fill_(1.0)).wait()
    return refused


def test_what_others_read_cannot_be_shrunk():
    for refused in run_ranks(shrink_own_memory, 2):
        assert any("psengine-segment" in name for name in refused)
        assert all(name.startswith("/memfd:") for name in refused), "the kernel frees it with its last process"


def rebuild_buckets(rank: int, world_size: int) -> None:
    collective = shared_memory()
    descriptors, resident_kib = [], []
    for _ in range(15):
        buckets = [collective.allocate(2 * MIB, torch.float32, CPU).fill_(1.0) for _ in range(3)]
        for work in [collective.all_reduce(bucket) for bucket in buckets]:
            work.wait()
        del buckets, work
        descriptors.append(len(os.listdir("/proc/self/fd")))
        resident_kib.append(kib_of("/proc/self/status", "RssShmem"))
    # A rank maps its own 24 MiB and the others'; a generation may linger until the next operation begins.
    assert max(resident_kib) < 2 * world_size * 24 * 1024 + 64 * 1024
    assert max(descriptors[5:]) <= descriptors[5] + 2
    dist.barrier()
    collective.barrier().wait()
    assert mapped_segments() == []
    # Control block and slots alone.
    assert kib_of("/proc/self/status", "RssShmem") < 24 * 1024


def test_memory_comes_back_after_buckets_are_rebuilt():
    names = set(os.listdir("/dev/shm"))
    run_ranks(rebuild_buckets, 3)
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "psengine" in name]


# ---- ranks that cannot share -----------------------------------------------------------------------------------------


def try_to_share() -> str:
    """What both kinds of collective make of two ranks that cannot share memory; returns the reason.

    Who requires shared memory is refused each time, and who did not goes on in the same group.
    """
    collective = collective_for(dist.group.WORLD, "auto")
    reasons = []
    for _ in range(2):
        with pytest.raises(SharedMemoryUnavailableError) as refused:
            collective_for(dist.group.WORLD, "shared_memory").all_reduce(torch.ones(3))
        reasons.append(str(refused.value))
    for flat in (torch.ones(3), collective.allocate(90_000, torch.float32, CPU).fill_(1.0)):
        collective.all_reduce(flat, 0.5).wait()
        assert (flat == 1).all()
    collective.barrier().wait()
    return reasons[0]


def share_without_extension(rank: int, world_size: int) -> str:
    if rank == 1:
        native.extension = None
    return try_to_share()


def test_a_rank_without_the_extension_speaks_for_all():
    results = run_ranks(share_without_extension, 2)
    assert results[0] == results[1]
    assert "each with the native extension" in results[0]
