"""Shares of an epoch against one process's batches and torch's own samplers."""

import math
from fractions import Fraction
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import in_ranks
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import psengine
from psengine.data.samplers import split_proportionally
from psengine.errors import ConfigurationError


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


SHARES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def samplers(count: int, shares: list[float], **options) -> list[psengine.ProportionalSampler]:
    return [
        psengine.ProportionalSampler(range(count), shares, num_replicas=len(shares), rank=rank, **options)
        for rank in range(len(shares))
    ]


@settings(max_examples=50, deadline=None)
@given(shares=SHARES, extra=st.integers(0, 200))
def test_a_split_is_within_one_sample_of_the_shares_and_leaves_nobody_out(shares, extra):
    exact = [Fraction(share) for share in shares]
    count = len(shares) + extra
    split = split_proportionally(count, exact)
    assert sum(split) == count
    assert min(split) >= 1
    # Whoever has more than the one sample that everybody gets has at most its quota, rounded up.
    assert all(n == 1 or n <= math.ceil(count * share / sum(exact)) for n, share in zip(split, exact, strict=True))
    assert all(a <= b for a, s in zip(split, exact, strict=True) for b, t in zip(split, exact, strict=True) if s < t)


@settings(max_examples=50, deadline=None)
@given(
    shares=SHARES, extra=st.integers(0, 60), beyond=st.integers(0, 20), epoch=st.integers(0, 3), shuffle=st.booleans()
)
def test_batches_are_together_those_of_one_process(shares, extra, beyond, epoch, shuffle):
    count, world_size = len(shares) + extra, len(shares)
    batch_size = world_size + beyond
    ranks = [s.batches(batch_size) for s in samplers(count, shares, shuffle=shuffle, seed=7)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    one_process = DistributedSampler(range(count), 1, 0, shuffle=shuffle, seed=7)
    one_process.set_epoch(epoch)
    expected = list(BatchSampler(one_process, batch_size, drop_last=False))
    if len(expected) > 1 and len(expected[-1]) < world_size:
        last = expected.pop()
        expected[-1] += last

    together = [list(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]
    assert together == expected
    assert all(batch for sampler in ranks for batch in sampler), "nobody gets an empty batch"
    assert [len(sampler) for sampler in ranks] == [len(expected)] * world_size


@pytest.mark.parametrize("shuffle", [True, False])
def test_equal_shares_are_torch_s_distributed_sampler(shuffle):
    for rank in range(3):
        ours = psengine.ProportionalSampler(range(12), num_replicas=3, rank=rank, shuffle=shuffle, seed=3)
        native = DistributedSampler(range(12), 3, rank, shuffle=shuffle, seed=3)
        for epoch in (0, 5):
            ours.set_epoch(epoch)
            native.set_epoch(epoch)
            assert list(ours) == list(native)


def test_indices_cover_the_dataset_once_in_proportion():
    ranks = samplers(41, [1, 3, 4], seed=1)
    assert sorted(chain.from_iterable(ranks)) == list(range(41))
    assert [len(sampler) for sampler in ranks] == [len(list(sampler)) for sampler in ranks] == [5, 15, 21]
    # In order, a small share sees the whole dataset too.
    assert list(samplers(8, [1, 3], shuffle=False)[0]) == [1, 5]


def test_data_loaders_with_workers_that_stay():
    dataset = TensorDataset(torch.arange(10))
    sampler = psengine.ProportionalSampler(dataset, [1, 3], num_replicas=2, rank=1)
    batches = sampler.batches(4)
    loaders = [
        DataLoader(
            dataset, batch_sampler=batches, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        ),
        DataLoader(dataset, sampler=batches, batch_size=None),
    ]
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected = list(batches)
        epochs.append(expected)
        for loader in loaders:
            assert len(loader) == 3
            assert [batch.tolist() for (batch,) in loader] == expected
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 9])
def test_an_evaluation_counts_every_sample_once(count):
    ranks = [psengine.EvaluationSampler(range(count), 3, rank) for rank in range(3)]
    assert sorted(chain.from_iterable(ranks)) == list(range(count))
    assert [len(sampler) for sampler in ranks] == [len(list(sampler)) for sampler in ranks]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shares": [1]}, ConfigurationError, "one number for each rank"),
        ({"shares": [1, 0]}, ConfigurationError, "finite numbers above 0"),
        ({"shares": [1, math.inf]}, ConfigurationError, "got inf for rank 1"),
        ({"rank": 2}, ValueError, "rank"),
        ({"dataset": range(1)}, ConfigurationError, "at least 2 in the dataset"),
        ({"dataset": Endless()}, TypeError, "len"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        psengine.ProportionalSampler(**{"dataset": range(9), "num_replicas": 2, "rank": 0, **options})


@in_ranks(2)
def test_the_place_is_the_default_group_s(rank, world_size):
    assert list(psengine.ProportionalSampler(range(6), [1, 2], shuffle=False)) == ([1, 4], [0, 2, 3, 5])[rank]
    assert list(psengine.EvaluationSampler(range(3))) == ([0, 2], [1])[rank]


def test_the_place_is_the_launcher_s_without_a_group(monkeypatch):
    assert list(psengine.EvaluationSampler(range(3))) == [0, 1, 2]
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert list(psengine.EvaluationSampler(range(3))) == [1]
    with pytest.raises(ConfigurationError, match="expected 2"):
        psengine.ProportionalSampler(range(3), [1, 2, 3])


def test_frameworks_see_that_samples_are_dealt_out():
    """By the type that Lightning and others look for; and no ``drop_last`` invites them to make batches anew."""
    shares = psengine.ProportionalSampler(range(9), [1, 2], num_replicas=2, rank=1, drop_last=True)
    evaluation, batches = psengine.EvaluationSampler(range(9), 2, 1), shares.batches(4)
    for sampler in (shares, batches, evaluation):
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.num_replicas, sampler.rank) == (2, 1)
    assert [len(sampler) for sampler in (shares, evaluation)] == [6, 4]
    assert [len(batch) for batch in batches] == [3, 3]
    with pytest.raises(ConfigurationError):
        shares.batches(1)
    assert not hasattr(batches, "drop_last")
