"""gloo's order of addition: the rule, gloo itself and shared memory give the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from support.processes import run_ranks

from psengine.collectives.ring_order import MAX_SEGMENT_BYTES, add_in_ring_order, chunk_numel, stretches

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int32, torch.int64, torch.complex64, torch.complex128]


def sizes(dtype: torch.dtype, world_size: int, *, is_thorough: bool) -> list[int]:
    """Numels: small ones, ones where chunks are cut, ones around the limits of a segment."""
    segment = MAX_SEGMENT_BYTES // dtype.itemsize
    small = [1, 2, world_size, 2 * world_size - 1, 2 * world_size + 1, 1001, 65_537]
    if not is_thorough:
        return [*small, segment + 3] if dtype in FLOATS else [1, 1001, 65_537]
    edges = [many * segment + step for many in (1, 2 * world_size, 3 * world_size) for step in (-1, 0, 1)]
    return [*small, 4096, 8192, 300_001, *edges] if dtype in FLOATS else [*small, *edges[:4]]


def addend(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many magnitudes, so that almost every other order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank * 1000 + numel % 977)
    if dtype.is_complex:
        part = torch.float64 if dtype == torch.complex128 else torch.float32
        return torch.complex(addend(rank, numel, part), addend(rank + 50, numel, part))
    values = torch.randn(numel, generator=generator) * torch.exp2(torch.randint(-4, 5, (numel,), generator=generator))
    return (values * 100).to(dtype)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def compare_with_gloo(rank: int, world_size: int, is_thorough: bool) -> int:
    compared = 0
    for dtype in DTYPES:
        for numel in sizes(dtype, world_size, is_thorough=is_thorough):
            addends = [addend(rank, numel, dtype) for rank in range(world_size)]
            expected = addends[rank].clone()
            dist.all_reduce(torch.view_as_real(expected) if dtype.is_complex else expected)
            found = torch.empty_like(expected)
            add_in_ring_order(addends, found)
            assert is_same(found, expected), f"{dtype}, {numel} elements"
            compared += 1
    return compared


@pytest.mark.parametrize("world_size", [3])
def test_the_rule_has_gloos_bits(world_size: int) -> None:
    assert min(run_ranks(compare_with_gloo, world_size, False)) >= 40


@slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_the_rule_has_gloos_bits_at_every_world_size(world_size: int) -> None:
    assert min(run_ranks(compare_with_gloo, world_size, True)) >= 100


def test_a_part_of_a_tensor_is_added_like_the_whole() -> None:
    addends = [addend(rank, 70_001, torch.float32) for rank in range(5)]
    whole = torch.empty(70_001)
    add_in_ring_order(addends, whole)
    for first, last in [(0, 1), (13_999, 14_003), (5, 60_000), (70_000, 70_001), (3, 3)]:
        part = torch.empty(last - first)
        add_in_ring_order([one[first:last] for one in addends], part, 70_001, first)
        assert is_same(part, whole[first:last])
    complex_addends = [addend(rank, 1001, torch.complex64) for rank in range(3)]
    whole = torch.empty(1001, dtype=torch.complex64)
    add_in_ring_order(complex_addends, whole)
    part = complex_addends[1][300:700].clone()
    add_in_ring_order([complex_addends[0][300:700], part, complex_addends[2][300:700]], part, 1001, 300)
    assert is_same(part, whole[300:700])


@pytest.mark.parametrize(("numel", "element_bytes", "world_size"), [(1, 4, 3), (70_001, 2, 5), (3_000_000, 8, 4)])
def test_stretches_cover_every_element_once(numel: int, element_bytes: int, world_size: int) -> None:
    found = list(stretches(numel, element_bytes, world_size))
    assert [one.first for one in found] == [0, *(one.last for one in found[:-1])]
    assert found[-1].last == numel
    assert all(one.last - one.first <= chunk_numel(numel, element_bytes, world_size) for one in found)
    assert all(sorted(one.ranks) == list(range(world_size)) for one in found)
