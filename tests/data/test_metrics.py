"""mean, sum and gather against plain arithmetic, and the errors that keep ranks with different metrics from hanging."""

import collections
import math
import warnings
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from support.expectations import assert_identical, raises
from support.processes import in_ranks, run_ranks
from support.tensors import addend

from psengine.data import metrics
from psengine.errors import ArgumentTypeError, ConfigurationError, ReplicaMismatchError

Scores = collections.namedtuple("Scores", ["loss", "correct"])
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
]


def numbers_and_structures(rank: int, world_size: int) -> None:
    warnings.simplefilter("error")
    n, total = world_size, world_size * (world_size - 1) // 2
    nested = {"list": [1, rank * 2.0, []], "scores": Scores(1.5, rank), "empty": {}}
    value = {"loss": 0.5 + rank, "steps": rank, "done": rank == 0, "nested": nested, 2: Fraction(1, 2)}
    means = {"list": [1.0, 2.0 * total / n, []], "scores": Scores(1.5, total / n), "empty": {}}
    assert_identical(
        metrics.mean(value),
        {"loss": 0.5 + total / n, "steps": total / n, "done": 1 / n, "nested": means, 2: 0.5},
    )
    sums = {"list": [n, 2.0 * total, []], "scores": Scores(1.5 * n, total), "empty": {}}
    assert_identical(
        metrics.sum(value), {"loss": 0.5 * n + total, "steps": total, "done": 1, "nested": sums, 2: 0.5 * n}
    )
    assert_identical(
        metrics.gather({"loss": 0.5 + rank, "steps": [rank], "done": rank == 0}),
        {"loss": [0.5 + r for r in range(n)], "steps": [list(range(n))], "done": [True] + [False] * (n - 1)},
    )
    assert_identical(metrics.mean({}), {})
    assert_identical(metrics.gather(()), ())
    # Keys are paired by name, whatever order a rank added them in; the result keeps this rank's order.
    keys = ["b", "a"] if rank else ["a", "b"]
    assert_identical(metrics.sum({k: ord(k) for k in keys}), {k: ord(k) * n for k in keys})
    averaged = metrics.mean(collections.defaultdict(float, {"x": 1.0}))
    assert averaged["unseen"] == 0.0
    # A rank without data says int 0.
    assert_identical(metrics.mean(1.0 if rank else 0), (n - 1) / n)
    assert_identical(metrics.mean([math.nan, math.inf if rank else 1.0]), [math.nan, math.inf])


@in_ranks(2)
def test_integers_are_exact(rank: int, world_size: int) -> None:
    n = world_size
    assert_identical(metrics.sum(2**63 - 1), (2**63 - 1) * n)
    assert_identical(metrics.sum(-(2**63)), -(2**63) * n)
    assert_identical(metrics.sum(-1 if rank else 2**40), 2**40 - (n - 1))
    # Carries between the halves, both signs, up to the limits of the dtype.
    limits = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max])
    assert_identical(metrics.sum(limits if rank == 0 else torch.zeros_like(limits)), limits)
    assert_identical(metrics.sum(limits // n), limits // n * n)
    with raises(ConfigurationError, "value['count'] does not fit", "torch.int64"):
        metrics.sum({"count": torch.tensor([1, 2**62])})
    with raises(ConfigurationError, "value does not fit", "-128 <= sum <= 127", "torch.int8"):
        metrics.sum(torch.tensor([100], dtype=torch.int8))
    # An int beyond int64 on one rank: that rank says so, the others hear of it.
    with (
        raises(ConfigurationError, "value['n'] does not fit int64")
        if rank == 1
        else raises(ReplicaMismatchError, "value['n']", "an int beyond int64 on rank 1")
    ):
        metrics.sum({"n": 2**63 if rank == 1 else 0})


def tensors(rank: int, world_size: int) -> None:
    warnings.simplefilter("error")
    value = {str(dtype): addend(rank, 6, dtype).view(2, 3) for dtype in DTYPES}
    before = {key: tensor.clone() for key, tensor in value.items()}
    everyone = [{str(dtype): addend(r, 6, dtype).view(2, 3) for dtype in DTYPES} for r in range(world_size)]
    means, sums, gathered = metrics.mean(value), metrics.sum(value), metrics.gather(value)
    assert_identical(value, before)
    for dtype in DTYPES:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = torch.stack([v[str(dtype)].to(wide) for v in everyone]).sum(0)
        mean_dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.float32
        # Addition in float64 of up to four numbers in any order differs by parts in 1e16; rounded to narrower dtypes
        # that is at most one unit in the last place, and almost always none.
        torch.testing.assert_close(means[str(dtype)], (total / world_size).to(mean_dtype))
        torch.testing.assert_close(sums[str(dtype)], total.to(torch.int64 if dtype is torch.bool else dtype))
        assert_identical(gathered[str(dtype)], [v[str(dtype)] for v in everyone])


def awkward_tensors(rank: int, world_size: int) -> None:
    warnings.simplefilter("error")
    n = world_size
    base = torch.arange(6.0).view(2, 3) + rank
    strided = {
        "transposed": base.t(),
        "slice": base[:, ::2],
        "expanded": base[:, :1].expand(2, 4),
        "scalar": base[0, 0],
    }
    shift = (n - 1) / 2
    assert_identical(metrics.mean(strided), {k: v - rank + shift for k, v in strided.items()})
    assert_identical(metrics.gather(strided)["transposed"], [base.t() - rank + r for r in range(n)])
    conjugate = torch.tensor([1 + 2j]).conj()
    negative = torch.tensor([1 + 2j]).conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    assert_identical(metrics.sum([conjugate, negative]), [torch.tensor([n * (1 - 2j)]), torch.tensor([-2.0 * n])])
    assert_identical(metrics.gather([conjugate, negative])[0][1], torch.tensor([1 - 2j]))
    with torch.device("meta"):
        assert_identical(metrics.mean({"a": 1.0, "b": 2.0}), {"a": 1.0, "b": 2.0})


def weights(rank: int, world_size: int) -> None:
    # A rank without samples has no say, not even with the nan that an empty batch's loss is.
    odd = [math.nan if rank == 0 else 3.0, torch.tensor(math.inf if rank == 0 else 3.0)]
    assert_identical(metrics.mean(odd, weight=rank), [3.0, torch.tensor(3.0)])
    n = world_size
    correct, count = rank, rank + 1
    expected = sum(range(n)) / sum(r + 1 for r in range(n))
    for weight in (count, torch.tensor([float(count)], requires_grad=True)):
        # One rounding in the division, one in the product.
        assert math.isclose(metrics.mean(correct / count, weight=weight), expected, rel_tol=1e-15)
    by_weight = metrics.mean({"t": torch.tensor([1.0 * rank, 1.0]), "c": torch.tensor(1j * rank)}, weight=rank)
    squares, total = sum(r * r for r in range(n)), sum(range(n))
    torch.testing.assert_close(by_weight["t"], torch.tensor([squares / total, 1.0]))
    torch.testing.assert_close(by_weight["c"], torch.tensor(1j * squares / total))
    with raises(ConfigurationError, "above 0 on at least one rank", "skip the call"):
        metrics.mean(1.0, weight=0)
    for bad, error in ((-1, ConfigurationError), (math.nan, ConfigurationError), ("3", ArgumentTypeError)):
        with raises(error, "weight=") if rank == 1 else raises(ReplicaMismatchError, "weight", "on rank 1"):
            metrics.mean(1.0, weight=bad if rank == 1 else 1)
    with raises(ReplicaMismatchError, "the call", "mean with a weight on rank"):
        metrics.mean(1.0, weight=1 if rank else None)


def uneven_gather(rank: int, world_size: int) -> None:
    n = world_size
    value = {"batch": torch.full((rank, 2), float(rank)), "other": [torch.full((2, 3 - rank % 2), rank)], "loss": rank}
    expected = {
        "batch": [torch.full((r, 2), float(r)) for r in range(n)],
        "other": [[torch.full((2, 3 - r % 2), r) for r in range(n)]],
        "loss": list(range(n)),
    }
    assert_identical(metrics.gather(value), expected)
    with raises(ReplicaMismatchError, "value", "with 2 dimensions on rank 1"):
        metrics.gather(torch.zeros([1] * (1 + (rank == 1))))


@pytest.mark.parametrize("function", [numbers_and_structures, tensors, awkward_tensors, weights, uneven_gather])
def test_across_ranks(function):
    run_ranks(function, 3)


def structures_that_differ(rank: int, world_size: int) -> None:
    odd = rank == 1
    float32, float64 = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    cases = [
        # (this rank's value on rank 1, on the others, what the message must hold)
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, ["value['b']", "got nothing on rank 1"]),
        ({"a": {"b": [1.0]}}, {"a": {"b": [1.0, 2.0]}}, ["value['a']['b'][1]", "nothing on rank 1"]),
        ({"a": float64}, {"a": float32}, ["value['a']", "torch.float32", "torch.float64", "on rank 1"]),
        ({"a": 1.0}, {"a": torch.tensor(1.0)}, ["value['a']", "a Python", "on rank 1"]),
    ]
    for ours, theirs, texts in cases:
        for verb in (metrics.mean, metrics.sum):
            with raises(ReplicaMismatchError, *texts, f"seen on rank {rank}"):
                verb(ours if odd else theirs)
    for ours, theirs, texts in cases[:3]:
        with raises(ReplicaMismatchError, *texts):
            metrics.gather(ours if odd else theirs)
    with raises(ReplicaMismatchError, "value['n'] to be a Python int as on rank 0", "a Python float on rank 1"):
        metrics.sum({"n": 1.0 if odd else 1})
    with raises(ReplicaMismatchError, "the call to be mean as on rank 0", "sum on rank 1"):
        (metrics.sum if odd else metrics.mean)(1.0)
    value = {0: 1.0, 1: torch.zeros(1), 2: torch.zeros(2), 3: torch.zeros(1)}[rank]
    with raises(ReplicaMismatchError, "shape [1] on rank 1 and 3", "shape [2] on rank 2"):
        metrics.mean({"x": value})
    # The group is in step after each of these.
    assert metrics.sum(1) == world_size


def leaves_that_are_no_numbers(rank: int, world_size: int) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    bad = {"NoneType": None, "complex": 1j, "sparse": torch.eye(2).to_sparse(), "quint8": quantized}
    for kind, leaf in bad.items():
        for verb in (metrics.mean, metrics.sum, metrics.gather):
            # On one rank only: the others must not wait for it.
            with (
                raises(ArgumentTypeError, "value['a'][1]", kind)
                if rank == 1
                else raises(ReplicaMismatchError, "value['a'][1]", kind, "on rank 1")
            ):
                verb({"a": [1.0, leaf if rank == 1 else 1.0]})
    assert metrics.sum(1) == world_size


@pytest.mark.parametrize(("function", "world_size"), [(structures_that_differ, 4), (leaves_that_are_no_numbers, 2)])
def test_differences_are_named_on_every_rank(function, world_size):
    run_ranks(function, world_size)


def test_without_a_process_group():
    value = {"a": 1, "b": [True, 0.5, torch.tensor([1, 2])]}
    assert_identical(metrics.mean(value), {"a": 1.0, "b": [1.0, 0.5, torch.tensor([1.0, 2.0])]})
    assert_identical(metrics.sum(value), {"a": 1, "b": [1, 0.5, torch.tensor([1, 2])]})
    assert_identical(metrics.gather(value), {"a": [1], "b": [[True], [0.5], [torch.tensor([1, 2])]]})
    tensor = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for result in (metrics.mean(tensor), metrics.sum(tensor), metrics.gather(tensor)[0]):
        assert result.data_ptr() != tensor.data_ptr()
        assert not result.requires_grad


@in_ranks(4)
def test_subgroups(rank, world_size):
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    assert metrics.sum(rank, mine) == (2 if rank % 2 == 0 else 4)
    assert metrics.gather(rank, mine) == [rank % 2, rank % 2 + 2]
    assert metrics.mean(float(rank)) == 1.5
    with raises(TypeError, "process_group", "new_group()"):
        metrics.mean(1.0, other)
