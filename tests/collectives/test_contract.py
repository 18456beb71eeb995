"""The contract every collective keeps, and what a lost rank looks like from the others.

A collective of yours, which ``my_module`` registers as "my-name", is tried from here by::

    PYTHONPATH=FOLDER_OF_MY_MODULE PSENGINE_TEST_COLLECTIVES=my_module:my-name \\
        python -m pytest tests/collectives/test_contract.py -k "test_contract and my-name"
"""

import gc
import importlib
import os
import random
import resource
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles.ring_order import add_in_ring_order
from support.counting_collective import CountingCollective
from support.expectations import raises
from support.marks import slow
from support.native_extension import SHARED_MEMORY, needs_shared_memory
from support.other_user import live_on_host, needs_root
from support.processes import in_ranks, run_ranks, run_ranks_to_any_end
from support.tensors import SUMMED, addend, digest
from support.waiting import eventually

import psengine
from psengine.collectives.base import Collective, Work
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.registry import collective_for, default_group
from psengine.errors import CollectiveError, ConfigurationError, PeerLostError, SharedMemoryUnavailableError

CPU = torch.device("cpu")
# A collective joins the contract by a line here: its name, and with how many ranks it is tried.
CONTRACT = {"solo": [1], "c10d": [1, 3], "shared_memory": [1, 3], "auto": [2], "counting": [2], "hierarchical": [1, 3]}
OURS = set(CONTRACT)
for chosen in os.environ.get("PSENGINE_TEST_COLLECTIVES", "").split():
    module, _, registered = chosen.partition(":")
    importlib.import_module(module)
    CONTRACT[registered] = [1, 2, 3]
COPIED = [*SUMMED, torch.bool, torch.uint8, torch.int16]
NUMELS = [0, 1, 3, 1001, 300_001]


def contract_cases() -> list[Any]:
    marks = {"shared_memory": [needs_shared_memory], "hierarchical": [needs_shared_memory]}
    return [pytest.param(n, w, marks=marks.get(n, [])) for n, sizes in CONTRACT.items() for w in sizes]


def make(name: str) -> Collective:
    return collective_for(None if name == "solo" else default_group(), "auto" if name == "solo" else name)


def sums(collective: Collective) -> list[str]:
    """All-reduces; the same bits on every rank, and of one in place as of one elsewhere."""
    rank, world_size = collective.rank, collective.world_size
    found = []
    for dtype in SUMMED:
        for numel in NUMELS:
            addends = [addend(rank, numel, dtype) for rank in range(world_size)]
            flat = collective.allocate(numel, dtype, CPU)
            assert (flat.shape, flat.dtype) == ((numel,), dtype)
            flat.copy_(addends[rank])
            collective.all_reduce(flat, what="test").wait()
            found.append(digest(flat))
            at_once = addends[rank].clone()
            collective.sum(at_once, what="test")
            assert digest(at_once) == found[-1], "all_reduce and sum are one operation"
            if not (dtype.is_floating_point or dtype.is_complex):
                assert torch.equal(flat, sum(addends))
            elif numel > 0:
                wide = torch.complex128 if dtype.is_complex else torch.float64
                # world_size - 1 roundings in the dtype's own precision, relative to the largest addend.
                bound = world_size**2 * torch.finfo(dtype).eps * max(a.abs().max().item() for a in addends)
                assert (flat.to(wide) - sum(a.to(wide) for a in addends)).abs().max() <= bound
    return found


def copies(collective: Collective) -> None:
    rank, world_size = collective.rank, collective.world_size
    for dtype in COPIED:
        for numel in NUMELS:
            output, expected = torch.empty(world_size, numel, dtype=dtype), torch.empty(world_size, numel, dtype=dtype)
            for other in range(world_size):
                expected[other] = addend(other, numel, dtype)
            collective.all_gather(output, addend(rank, numel, dtype), what="test").wait()
            assert torch.equal(output, expected)
            output.zero_()
            output[rank] = expected[rank]
            collective.all_gather(output, output[rank]).wait()
            assert torch.equal(output, expected), "this rank's part is where it belongs already"
    strided = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    expected = [torch.arange(6.0).view(2, 3).t() * (other + 1) for other in range(world_size)]
    assert torch.equal(torch.stack(collective.gather(strided)), torch.stack(expected))
    last = world_size - 1
    tensors = [addend(rank, 6, dtype) for dtype in COPIED]
    tensors += [torch.full((3, 2), float(rank)).t(), torch.empty(0), torch.tensor(float(rank))]
    collective.broadcast(tensors, source_rank=last, what="test").wait()
    expected = [addend(last, 6, dtype) for dtype in COPIED]
    expected += [torch.full((2, 3), float(last)), torch.empty(0), torch.tensor(float(last))]
    assert all(torch.equal(got, sent) for got, sent in zip(tensors, expected, strict=True))


def parts_for_each_rank(collective: Collective) -> None:
    """Of different sizes, some of them empty; all ranks send, the last one alone, or all but the last."""
    rank, world_size = collective.rank, collective.world_size
    ranks = list(range(world_size))
    for sizes in (ranks, [1000 + other for other in ranks], [0] * world_size):
        for senders in (ranks, ranks[-1:], ranks[:-1]):
            flats = {other: torch.arange(sum(sizes), dtype=torch.float64) + 0.25 * other for other in senders}
            output = torch.empty(len(senders), sizes[rank], dtype=torch.float64)
            collective.all_to_all(output, flats.get(rank, output.new_empty(0)), sizes, senders, what="test").wait()
            assert all(map(torch.equal, output, (flats[sender].split(sizes)[rank] for sender in senders)))


def dealt(world_size: int, count: int, seed: int) -> list[tuple[int, int]]:
    """Owners of so many contributions; some ranks may have none."""
    drawn = random.Random(seed)
    ranks = [drawn.randrange(world_size) for _ in range(count)]
    places = {rank: [v for v in range(count) if ranks[v] == rank] for rank in range(world_size)}
    for numbers in places.values():
        drawn.shuffle(numbers)
    return [(rank, places[rank].index(v)) for v, rank in enumerate(ranks)]


def begin_contributions(
    collective: Collective, count: int, numel: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """The memory, the sum under way (yields works), and what row 0 is to be."""
    owners = dealt(collective.world_size, count, count * 1000 + numel % 997)
    addends = [addend(v, numel, dtype) for v in range(count)]
    own = {number: v for v, (rank, number) in enumerate(owners) if rank == collective.rank}
    memory = collective.allocate((1 + len(own)) * numel, dtype, CPU).view(1 + len(own), numel)
    for number, v in own.items():
        memory[1 + number] = addends[v]
    expected = torch.empty(1 + len(own), numel, dtype=dtype)
    expected[1:] = memory[1:]
    add_in_ring_order(addends, expected[0])
    return memory, collective.sum_contributions(memory, owners, what="test"), expected


def contributions(collective: Collective) -> list[str]:
    """gloo's bits of as many ranks as there are contributions, whoever has them."""
    found = []
    cases = [(count, dtype, 1001) for count in (1, 2, 5) for dtype in SUMMED]
    cases += [(3, torch.float32, numel) for numel in NUMELS] + [(8, torch.bfloat16, 700_001)]
    for count, dtype, numel in cases:
        memory, sum_under_way, expected = begin_contributions(collective, count, numel, dtype)
        for work in sum_under_way:
            assert work.wait(lambda: False)
        assert digest(memory) == digest(expected), (count, dtype, numel)
        found.append(digest(memory[0]))
    # Two under way.
    begun = [begin_contributions(collective, count, 100_003, torch.float32) for count in (4, 7)]
    works = [next(sum_under_way) for _, sum_under_way, _ in begun]
    for (memory, sum_under_way, expected), work in zip(begun, works, strict=True):
        work.wait()
        for one in sum_under_way:
            one.wait()
        assert torch.equal(memory, expected)
    return found


def one_memory(collective: Collective, name: str) -> None:
    memory = collective.common_memory(8 * collective.world_size)
    if memory is None:
        assert name != "shared_memory"
        return
    seen = torch.frombuffer(memory, dtype=torch.int64, count=collective.world_size)
    assert not seen.any()
    collective.barrier().wait()
    seen[collective.rank] = collective.rank + 5
    collective.barrier().wait()
    assert seen.tolist() == [rank + 5 for rank in range(collective.world_size)]
    other = torch.frombuffer(collective.common_memory(8), dtype=torch.int64, count=1)
    assert not other.any(), "another call, another memory"
    collective.barrier().wait()


def bytes_of_any_length(collective: Collective) -> None:
    rank, world_size = collective.rank, collective.world_size
    assert collective.gather_bytes(b"x" * 1000 * rank, CPU) == [b"x" * 1000 * other for other in range(world_size)]
    assert collective.gather_bytes(b"", CPU) == [b""] * world_size
    for source in range(world_size):
        assert collective.broadcast_bytes(bytes([rank]) * 3 * rank, source, CPU) == bytes([source]) * 3 * source


def several_under_way(collective: Collective) -> None:
    """Nobody waits between the calls, and then in the other order."""
    rank, world_size = collective.rank, collective.world_size
    first, second = torch.full((100,), rank + 1.0), torch.full((7,), 10.0 * rank)
    gathered, sent = torch.empty(world_size, 2), torch.full((5,), float(rank))
    works: list[Work] = [
        collective.all_reduce(first, 0.5),
        collective.all_reduce(second),
        collective.all_gather(gathered, torch.full((2,), float(rank))),
        collective.broadcast([sent], source_rank=world_size - 1),
        collective.barrier(),
    ]
    collective.progress()
    for work in reversed(works):
        work.wait()
    total = sum(range(1, world_size + 1))
    assert (first == 0.5 * total).all()
    assert (second == 10.0 * (total - world_size)).all()
    assert gathered[:, 0].tolist() == list(range(world_size))
    assert (sent == world_size - 1).all()
    collective.progress()


def refusals(collective: Collective) -> None:
    """Before anything is sent: the ranks go on together."""
    here, world_size = f"failed on rank {collective.rank} of {collective.world_size}", collective.world_size
    for begin in (
        lambda: collective.all_reduce(torch.ones(4)[::2], what="this"),
        lambda: collective.all_gather(torch.zeros(4 * world_size)[::2], torch.zeros(2), what="this"),
    ):
        with raises(CollectiveError, "of this " + here, "expected a contiguous tensor"):
            begin()
    with raises(CollectiveError, "integers are summed, not scaled", here):
        collective.all_reduce(torch.ones(3, dtype=torch.int64), 0.5)
    with raises(CollectiveError, here, f"expected {3 * world_size} elements of torch.float32, got {3 * world_size} of"):
        collective.all_gather(torch.zeros(3 * world_size, dtype=torch.float64), torch.zeros(3))


def meet_after_asking(collective: Collective, meet: Callable[[], object]) -> None:
    """One rank asks alone what needs no other; then all meet, and the answer is the same everywhere."""
    if collective.rank == 0:
        assert collective.scales_for_free in (True, False)
    meet()
    collective.connect()
    collective.connect()
    answers = collective.gather(torch.tensor(collective.scales_for_free))
    assert len({answer.item() for answer in answers}) == 1


def contract(rank: int, world_size: int, name: str) -> list[str]:
    meet = dist.barrier if dist.is_initialized() else lambda: None
    collective = make(name)
    assert (collective.rank, collective.world_size) == (rank, world_size)
    meet_after_asking(collective, meet)
    found = sums(collective)
    copies(collective)
    parts_for_each_rank(collective)
    found += contributions(collective)
    one_memory(collective, name)
    bytes_of_any_length(collective)
    several_under_way(collective)
    if name in OURS:
        refusals(collective)
    if name != "solo":
        store = dist.distributed_c10d._get_default_store()
        store.compare_set(f"{name}/{rank}", "", "before the barrier")  # set() would return before the store has it
        collective.barrier().wait()
        assert store.check([f"{name}/{other}" for other in range(world_size)])
    meet()
    collective.close()
    collective.close()
    return found


def contract_on_hosts(rank: int, world_size: int, layout: tuple[int, ...]) -> list[str]:
    live_on_host(layout[rank])
    return contract(rank, world_size, "hierarchical")


@needs_shared_memory
@needs_root
@pytest.mark.parametrize("layout", [(0, 0, 1), slow((0, 1, 0, 1)), slow((0, 1)), slow((0, 1, 2, 2, 2))], ids=str)
def test_contract_on_several_hosts(layout):
    """``layout``: by rank, its host."""
    results = run_ranks(contract_on_hosts, len(layout), layout)
    assert all(result == results[0] for result in results), "ranks have different bits"


@needs_shared_memory
@in_ranks(2)
def test_common_memory_is_had_by_all_ranks_or_none(rank: int, world_size: int) -> None:
    """The fault: one rank cannot map what rank 0 made. All raise, and can go on."""
    collective = collective_for(default_group(), "shared_memory")
    collective.connect()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    with raises(SharedMemoryUnavailableError, "ranks [1] cannot reach the others"):
        collective.common_memory(64 * 1024 * 1024)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(collective.common_memory(8)) >= 8


@pytest.mark.parametrize(("name", "world_size"), contract_cases())
def test_contract(name, world_size):
    results = run_ranks(contract, world_size, name, init_group=name != "solo")
    assert all(result == results[0] for result in results), "ranks have different bits"


@in_ranks(2)
def test_everybody_asks_one_collective(rank, world_size):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3), torch.nn.Linear(3, 1))
    model = psengine.DistributedDataParallel(module)
    other = psengine.DistributedDataParallel(torch.nn.Linear(3, 1))
    group = dist.new_group()
    assert model._collective is other._collective is collective_for(default_group())
    assert collective_for(group) is not model._collective
    assert collective_for(group) is collective_for(group)
    assert collective_for(group, "c10d") is collective_for(group, "c10d", torch.device("cuda"))
    assert collective_for(group, "c10d") is collective_for(group, "auto", torch.device("cuda"))
    # Models share it, in whatever order they are used, with whoever else exchanges something.
    for wrapped in (other, model, other):
        wrapped(torch.randn(4, 3)).sum().backward()
        assert psengine.sum(1) == world_size
    model._update_process_group(group)
    assert model._collective is collective_for(group)


@pytest.mark.parametrize("name", ["c10d", SHARED_MEMORY])
@in_ranks(2)
def test_a_destroyed_group_takes_its_collective_along(rank: int, world_size: int, name: str) -> None:
    group = dist.new_group()
    lives = weakref.ref(group)
    first = collective_for(group, name)
    first.all_reduce(torch.ones(3)).wait()
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    if name == "shared_memory":
        assert first.has_ended
        with raises(CollectiveError, "the collective is closed"):
            first.barrier()
    second = collective_for(dist.new_group(), name)
    assert second is not first
    del first
    gc.collect()
    assert lives() is None, "who keeps a group keeps its store, and the store's port"
    assert [part.item() for part in second.gather(torch.tensor(rank))] == list(range(world_size))


@needs_shared_memory
@in_ranks(2)
def test_a_collective_that_failed_on_one_rank_is_replaced_on_all(rank: int, world_size: int) -> None:
    """Only rank 1 waits, and fails; rank 0 learns of it when it asks for the collective."""
    failed = collective_for(default_group(), "shared_memory")
    failed.connect()
    if rank == 1:
        with raises(PeerLostError, "Lost rank 0"):
            failed.all_reduce(torch.ones(3)).wait(timeout_s=0.1)
    dist.barrier()
    assert failed.has_ended
    again = collective_for(default_group(), "shared_memory")
    assert again is not failed
    assert not again.has_ended
    assert [part.item() for part in again.gather(torch.tensor(rank))] == list(range(world_size))


@in_ranks(2)
def test_backward_moves_exchanges_along(rank, world_size):
    layers = [torch.nn.Linear(200, 200) for _ in range(3)]
    model = psengine.DistributedDataParallel(torch.nn.Sequential(*layers), collective="counting", bucket_cap_mb=0.1)
    assert isinstance(model._collective, CountingCollective)
    counts = []
    for _ in range(3):
        model(torch.ones(1, 200)).sum().backward()
        counts.append(model._collective.progress_calls)
    # Buckets of one layer: when the second and the third layer's gradients come, one is under way.
    assert counts[2] - counts[1] >= 2


def wait_for_others_at_most(seconds: int) -> None:
    """From here on; to start may take a rank longer."""
    C10dCollective().barrier().wait()
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def lose_a_rank(rank: int, world_size: int, name: str, fate: str, told: Path) -> tuple[Any, ...]:
    """``told``: once the others know of a silent rank."""
    if fate == "silent":
        wait_for_others_at_most(1)
    collective = make(name)
    collective.all_reduce(torch.ones(1)).wait()
    if rank == 1:
        if fate == "silent":
            eventually(told.exists)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collective.all_reduce(torch.ones(60_000), what="gradient bucket 3 (layer.weight)").wait()
    except PeerLostError as error:
        told.touch()
        return str(error), error.ranks
    raise AssertionError("the operation succeeded without rank 1")


@pytest.mark.parametrize("name", ["c10d", SHARED_MEMORY])
def test_killed_rank_is_named_by_all_others(tmp_path, name):
    # The group's timeout is 60 s.
    results = run_ranks_to_any_end(lose_a_rank, 3, name, "killed", tmp_path / "told", deadline_s=55)
    assert results[1].exit_code == -signal.SIGKILL
    for result in results[:1] + results[2:]:
        assert result.error is None, result.error
        message, ranks = result.value
        assert ranks == (1,)
        assert "Lost rank 1 (process " in message
        assert "which has exited" in message
    assert "gradient bucket 3 (layer.weight)" in results[0].value[0]


@pytest.mark.parametrize("name", ["c10d", SHARED_MEMORY])
def test_silent_rank_is_named_within_the_timeout(tmp_path, name):
    results = run_ranks_to_any_end(lose_a_rank, 2, name, "silent", tmp_path / "told", deadline_s=40)
    message, ranks = results[0].value
    assert ranks == (1,)
    assert "Lost rank 1" in message


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


def choose_otherwise(rank: int, world_size: int) -> None:
    psengine.DistributedDataParallel(torch.nn.Linear(2, 2), collective="auto" if rank else "c10d")


def test_ranks_with_different_collectives_are_told():
    errors = [str(result.error) for result in run_ranks_to_any_end(choose_otherwise, 2)]
    assert any("all ranks have the same collective" in e and "'auto'" in e and "'c10d'" in e for e in errors), errors


def wait_for_each_other(rank: int, world_size: int) -> None:
    wait_for_others_at_most(2)
    C10dCollective().broadcast([torch.ones(3)], 1 - rank, what=f"branch {rank}").wait()


def test_ranks_that_wait_in_different_operations_are_told():
    errors = [str(result.error) for result in run_ranks_to_any_end(wait_for_each_other, 2)]
    assert any("rank 0: broadcast of branch 0" in e and "rank 1: broadcast of branch 1" in e for e in errors), errors


def test_unknown_collective_is_refused():
    expected = r"'auto', 'c10d', 'counting', 'hierarchical', 'shared_memory'\], got 'carrier-pigeon'"
    with pytest.raises(ConfigurationError, match=expected):
        collective_for(None, "carrier-pigeon")
