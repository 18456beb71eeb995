"""Gradients are added while others are still awaited; the bits are those of adding all at the end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shard_world import spec

from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.exchange import Contribution

NUMEL = 37
RANKS = 6


def gathering(dtype=torch.float32, numel=NUMEL):
    return ContributionSet(spec(0, numel, dtype))


def combined(gathered, dtype=torch.float32, numel=NUMEL):
    """The average, in memory that nobody has cleared."""
    return gathered.combine(lambda: Place(torch.full((numel,), 7).to(dtype))).values


def contribution(rank, dtype, weight=None, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    values = torch.randn(NUMEL, generator=generator, dtype=torch.float64) * 10.0 ** (rank - 2)
    return Contribution(rank, 50, 1, 0, values.to(dtype), weight=weight)


def added_at_the_end(contributions):
    """The average as it is written down: one after the other by rank, in float32 at least, then divided."""
    ordered = [one.values for one in sorted(contributions, key=lambda one: one.rank)]
    dtype = ordered[0].dtype
    total = ordered[0].to(torch.float32 if dtype.itemsize == 2 else dtype, copy=True)
    for values in ordered[1:]:
        total += values.to(total.dtype)
    return (total / len(ordered)).to(dtype)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]),
    st.lists(
        st.tuples(st.sampled_from(["come", "come", "come", "die", "leave"]), st.integers(0, RANKS - 1)), max_size=25
    ),
)
def test_the_bits_are_those_of_adding_at_the_end_whoever_comes_dies_and_returns(dtype, script):
    """ "leave": nobody awaits the worker any more, and its contribution is taken out a little later, or never."""
    gathered, live = gathering(dtype), set(range(RANKS))
    for salt, (what, rank) in enumerate(script):
        if what == "come" and rank not in gathered.by_rank:
            live.add(rank)
            gathered.add(contribution(rank, dtype, salt=salt), sorted(live))
        elif what == "die" and rank in gathered.by_rank:
            live.discard(rank)
            gathered.remove(rank)
        elif what == "leave":
            live.discard(rank)
    if gathered.by_rank:
        assert torch.equal(combined(gathered, dtype), added_at_the_end(gathered.by_rank.values()))


def test_what_is_lowest_is_added_before_the_others_are_here():
    gathered = gathering()
    size = 4 * NUMEL
    gathered.add(contribution(3, torch.float32), range(4))
    gathered.add(contribution(1, torch.float32), range(4))
    assert gathered.size_bytes == 2 * size  # 0 is awaited, and comes before both
    gathered.add(contribution(0, torch.float32), range(4))
    assert gathered.size_bytes == 4 * size  # three contributions, and the sum of 0 and 1
    gathered.remove(1)
    assert gathered.size_bytes == 2 * size
    gathered.add(contribution(2, torch.float32), (0, 2, 3))
    assert torch.equal(combined(gathered), added_at_the_end(gathered.by_rank.values()))


def test_weights_scale_out_of_what_gradients_are_added_in():
    gathered = gathering(numel=4)
    for rank, value, weight in ((0, 1e30, 1e12), (1, -1e30, 5e11)):
        gathered.add(Contribution(rank, 50, 1, 0, torch.full((4,), value), weight=weight), range(2))
    assert combined(gathered, numel=4).tolist() == pytest.approx([1e30 / 3] * 4, rel=1e-6)
