"""The contract every collective keeps, and what a lost rank looks like from the others."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.native_extension import SHARED_MEMORY
from support.processes import RanksFailedError, run_ranks, run_ranks_to_any_end

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.liveness.roll_call import is_process_running
from psengine.collectives.registry import resolve_collective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.errors import CollectiveError, ConfigurationError, PeerLostError

COLLECTIVES = {"c10d": C10dCollective, "shared_memory": SharedMemoryCollective}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]


def addend(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + numel)
    if dtype is torch.complex64:
        return torch.complex(*torch.randn(2, numel, generator=generator))
    return (torch.randn(numel, generator=generator) * 10).to(dtype)


def contract(rank: int, world_size: int, name: str) -> dict[str, Any]:
    collective: Collective = COLLECTIVES[name]()
    assert (collective.rank, collective.world_size) == (rank, world_size)
    found = {}
    for dtype in DTYPES:
        for numel in (1, 3, 1001, 300_001):
            flat = collective.allocate(numel, dtype, torch.device("cpu"))
            assert flat.shape == (numel,)
            assert flat.dtype == dtype
            flat.copy_(addend(rank, numel, dtype))
            collective.all_reduce(flat, what="test").wait()
            found[dtype, numel] = flat.clone()
    # Two under way at once, waited for in the other order.
    first, second = torch.full((100,), rank + 1.0), torch.full((7,), 10.0 * rank)
    works = [collective.all_reduce(first, 0.5), collective.all_reduce(second)]
    for work in reversed(works):
        work.wait()
    found["scaled"], found["second"] = first, second
    mixed = [torch.full((2, 2), float(rank)), torch.full((3,), rank), torch.tensor([complex(rank, -rank)])]
    collective.broadcast(mixed, source_rank=world_size - 1)
    found["broadcast"] = mixed
    found["gathered"] = collective.all_gather(torch.tensor([rank, rank * rank]))
    collective.barrier()
    collective.close()
    collective.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["c10d", SHARED_MEMORY])
def test_contract(name, world_size):
    results = run_ranks(contract, world_size, name)
    for dtype in DTYPES:
        for numel in (1, 3, 1001, 300_001):
            addends = [addend(rank, numel, dtype) for rank in range(world_size)]
            wide = torch.complex128 if dtype is torch.complex64 else torch.float64
            reference = sum(a.to(wide) for a in addends)
            for result in results:
                got = result[dtype, numel]
                assert torch.equal(got, results[0][dtype, numel]), "ranks differ"
                if dtype is torch.int64:
                    assert torch.equal(got, sum(addends))
                else:
                    # world_size - 1 roundings in the dtype's own precision, relative to the largest addend.
                    bound = world_size * torch.finfo(dtype).eps * max(a.abs().max().item() for a in addends)
                    assert (got.to(wide) - reference).abs().max() <= bound * world_size
    total = sum(range(1, world_size + 1))
    for result in results:
        assert torch.equal(result["scaled"], torch.full((100,), 0.5 * total))
        assert torch.equal(result["second"], torch.full((7,), 10.0 * sum(range(world_size))))
        last = world_size - 1
        assert torch.equal(result["broadcast"][0], torch.full((2, 2), float(last)))
        assert torch.equal(result["broadcast"][1], torch.full((3,), last))
        assert torch.equal(result["broadcast"][2], torch.tensor([complex(last, -last)]))
        assert [t.tolist() for t in result["gathered"]] == [[r, r * r] for r in range(world_size)]


def lose_a_rank(rank: int, world_size: int, name: str, fate: str, operation: str) -> tuple[Any, ...]:
    if fate == "silent":
        C10dCollective().barrier()  # to start may take a rank longer than this timeout
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    collective: Collective = COLLECTIVES[name]()
    collective.all_reduce(torch.ones(1)).wait()
    if rank == 1:
        if fate == "silent":
            time.sleep(4)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    flat = torch.ones(50_000)
    try:
        if operation == "all_reduce":
            collective.all_reduce(flat, what="gradient bucket 3 (layer.weight)").wait()
        elif operation == "broadcast":
            collective.broadcast([flat], source_rank=1, what="buffers")
        elif operation == "all_gather":
            collective.all_gather(flat)
        else:
            collective.barrier()
    except PeerLostError as error:
        return time.monotonic() - started, str(error), error.ranks
    raise AssertionError("the operation succeeded without rank 1")


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather", "barrier"])
@pytest.mark.parametrize("name", ["c10d", SHARED_MEMORY])
def test_killed_rank_is_named_by_all_others(name, operation):
    results = run_ranks_to_any_end(lose_a_rank, 4, name, "killed", operation, group_timeout_s=30)
    assert results[1].exit_code == -signal.SIGKILL
    for result in results[:1] + results[2:]:
        assert result.error is None, result.error
        seconds, message, ranks = result.value
        assert ranks == (1,)
        assert "Lost rank 1 (process " in message
        assert "which has exited" in message
        assert seconds < 25
    if operation == "all_reduce":
        assert "gradient bucket 3 (layer.weight)" in results[0].value[1]


@pytest.mark.parametrize("name", ["c10d", SHARED_MEMORY])
def test_silent_rank_is_named_within_the_timeout(name):
    results = run_ranks_to_any_end(lose_a_rank, 2, name, "silent", "all_reduce", deadline_s=40)
    seconds, message, ranks = results[0].value
    assert ranks == (1,)
    assert "Lost rank 1" in message
    assert 0.9 <= seconds < 3.9  # before rank 1 wakes up


def late_but_alive(rank: int, world_size: int) -> float:
    collective = C10dCollective()
    if rank == 1:
        time.sleep(2.5)  # longer than a wait slice: the others look for alarms and find none
    flat = torch.ones(3)
    collective.all_reduce(flat).wait()
    return float(flat[0])


def test_a_late_rank_is_waited_for():
    assert run_ranks(late_but_alive, 2) == [2.0, 2.0]


def two_alarms(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    collective = C10dCollective(timeout_s=5)
    failure = None
    if rank == 0:
        failure = collective.diagnose(RuntimeError("a false alarm"), "something")
    flat = torch.ones(3)
    collective.all_reduce(flat).wait() if rank == 0 else (time.sleep(0.5), collective.all_reduce(flat).wait())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collective.all_reduce(flat).wait()
    except PeerLostError as error:
        return type(failure).__name__, error.ranks
    raise AssertionError("went on without rank 1")


def test_a_false_alarm_does_not_answer_for_the_next_one():
    results = run_ranks_to_any_end(two_alarms, 2, group_timeout_s=20)
    assert results[0].value[1] == (1,), results[0]


def host_a_store_and_stop(rank: int, world_size: int, port: int) -> tuple[float, str]:
    """Rank 0 hosts the store and is stopped: neither its collectives nor its store answer."""
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=4)
    )
    collective = C10dCollective()
    collective.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    try:
        collective.all_reduce(torch.ones(3)).wait()
    except CollectiveError as error:
        return time.monotonic() - started, str(error)
    raise AssertionError("went on without rank 0")


@pytest.mark.slow
def test_a_stopped_store_does_not_hang_the_others():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(RanksFailedError, match=r"ranks \[0\] still ran") as caught:
        run_ranks_to_any_end(host_a_store_and_stop, 2, port, init_group=False, deadline_s=20)
    assert "store does not answer" in str(caught.value)
    assert "Lost rank 0" in str(caught.value)


def mismatched_sizes(rank: int, world_size: int) -> str:
    collective = C10dCollective(timeout_s=5)
    try:
        collective.all_reduce(torch.ones(10 + 100_000 * rank), what="gradient bucket 0").wait()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_sizes_that_differ_are_an_error_not_a_hang():
    results = run_ranks_to_any_end(mismatched_sizes, 2, group_timeout_s=5, deadline_s=60)
    messages = [r.value for r in results if r.value]
    assert any("gradient bucket 0 failed on rank" in m for m in messages), results


def test_process_states():
    assert is_process_running(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 10
    while is_process_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_process_running(child), "a zombie counts as gone"
    os.waitpid(child, 0)
    assert not is_process_running(child)


def test_unknown_collective_is_refused():
    expected = r"\('auto', 'c10d', 'shared_memory'\) or an object, got 'carrier-pigeon'"
    with pytest.raises(ConfigurationError, match=expected):
        resolve_collective("carrier-pigeon", None, torch.device("cpu"))
