"""gloo's order of addition: the rule, gloo itself and shared memory give the same bits."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from oracles.ring_order import MAX_SEGMENT_BYTES, add_in_ring_order
from support.marks import slow
from support.native_extension import needs_shared_memory
from support.processes import in_ranks, run_ranks
from support.tensors import FLOATS, addend, digest

from psengine.collectives.registry import collective_for, default_group

CPU = torch.device("cpu")
DTYPES = [*FLOATS, torch.int32, torch.int64, torch.complex64, torch.complex128]


def sizes(dtype: torch.dtype, world_size: int, *, is_thorough: bool) -> list[int]:
    """Numels: small ones, ones where chunks are cut, ones around the limits of a segment."""
    segment = MAX_SEGMENT_BYTES // dtype.itemsize
    small = [1, 2, world_size, 2 * world_size - 1, 2 * world_size + 1, 1001, 8191 * world_size, 65_537]
    if not is_thorough:
        return [*small, segment + 3] if dtype in FLOATS else [1, 1001, 65_537]
    edges = [many * segment + step for many in (1, 2 * world_size, 3 * world_size) for step in (-1, 0, 1)]
    is_example = dtype in (torch.float32, torch.bfloat16)
    return [*small, 4096, 8192, 300_001, *edges] if is_example else [*small, edges[4]]


def compare_with_gloo(rank: int, world_size: int, is_thorough: bool) -> int:
    """The rule, and shared memory in place and with memory of its own, against ``dist.all_reduce``."""
    compared = 0
    over_gloo = collective_for(default_group(), "c10d")
    shared = collective_for(default_group(), "shared_memory")
    for dtype in DTYPES:
        for numel in sizes(dtype, world_size, is_thorough=is_thorough):
            addends = over_gloo.gather(addend(rank, numel, dtype))
            expected = addends[rank].clone()
            dist.all_reduce(torch.view_as_real(expected) if dtype.is_complex else expected)
            found = torch.empty_like(expected)
            add_in_ring_order(addends, found)
            assert digest(found) == digest(expected), f"{dtype}, {numel} elements"
            in_place = shared.allocate(numel, dtype, CPU)  # complex: not in shared memory
            for flat in (in_place, torch.empty_like(expected)):
                flat.copy_(addends[rank])
                shared.all_reduce(flat).wait()
                assert digest(flat) == digest(expected), (
                    f"shared memory, in place: {flat is in_place}, {dtype}, {numel}"
                )
            compared += 1
    return compared


@needs_shared_memory
@pytest.mark.parametrize(
    ("world_size", "is_thorough"),
    [(3, False), slow(2, True), slow(3, True), slow(4, True), slow(5, True), slow(8, True)],
)
def test_the_rule_and_shared_memory_have_gloos_bits(world_size: int, is_thorough: bool) -> None:
    compared = run_ranks(compare_with_gloo, world_size, is_thorough, deadline_s=300.0 if is_thorough else 90.0)
    assert min(compared) >= 40


def any_bits(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Numbers of every kind: normal, subnormal, zero, infinite and not numbers, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    finfo = torch.finfo(dtype)
    special = [0.0, -0.0, finfo.tiny, -finfo.tiny / 2, finfo.tiny * finfo.eps, finfo.max, -finfo.max]
    special += [float("inf"), float("-inf"), float("nan")]
    place = torch.randint(0, numel, (numel // 4,), generator=generator)
    drawn[place] = torch.tensor(special, dtype=dtype)[torch.randint(0, len(special), place.shape, generator=generator)]
    near_subnormal = torch.randn(numel // 4, generator=generator, dtype=torch.float64) * finfo.tiny
    drawn[torch.randint(0, numel, near_subnormal.shape, generator=generator)] = near_subnormal.to(dtype)
    return drawn


@needs_shared_memory
@in_ranks(3)
def test_numbers_of_every_kind_have_gloos_bits(rank: int, world_size: int) -> None:
    """In place, and small. Which NaN a sum gives is the processor's choice (IEEE 754, 6.2.3); that it is one is not."""
    shared, gloo = (collective_for(default_group(), name) for name in ("shared_memory", "c10d"))
    for dtype, numel, scale in product(FLOATS, (100_001, 3000), (1.0, 0.5)):
        data = any_bits(dtype, numel, seed=rank)
        found, expected = shared.allocate(numel, dtype, CPU).copy_(data), data.clone()
        shared.all_reduce(found, scale).wait()
        gloo.all_reduce(expected, scale).wait()
        is_nan = expected.isnan()
        assert is_nan.any()
        assert expected.isinf().any()
        assert torch.equal(found.isnan(), is_nan)
        assert digest(found[~is_nan]) == digest(expected[~is_nan]), (dtype, numel, scale)
