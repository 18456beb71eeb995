"""Mean, sum and gather of training metrics across ranks: the loss and the accuracy that people average by hand.

Every call is one block of 256 bytes from each rank, which carries up to 216 bytes of values too: 27 numbers of 8 bytes,
of which ``mean`` needs one for the weight. They are packed and added without torch. More numbers follow in one
collective operation per kind of number, however many metrics the value holds::

    value ── leaves, in key order ──┬── what I hold, hashed ───────────┐
                                    └── a few numbers, or one flat ────┴── all-gather ── all equal? else name the
                                        tensor per kind (float64;              │         difference
                                        int64 halves; bytes)                   └── added ── the value's structure

A rank that cannot take part (a leaf is no number) still sends its header, so that the others raise at once instead of
waiting. No rank unpickles bytes of another.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from psengine.data.value_exchange import ValueExchange
from psengine.errors import ConfigurationError
from psengine.tensors.leaves import (
    CPU,
    Leaf,
    as_float64,
    as_halves,
    from_float64,
    from_floats,
    from_halves,
    from_ints,
    from_payload,
    is_integral,
    kind_for_gather,
    kind_for_mean,
    kind_for_sum,
    numbers_in,
    to_numbers,
    to_payload,
)

Value = TypeVar("Value")


@overload
def mean(
    value: float, process_group: dist.ProcessGroup | None = None, *, weight: float | torch.Tensor | None = None
) -> float: ...
@overload
def mean(
    value: Value, process_group: dist.ProcessGroup | None = None, *, weight: float | torch.Tensor | None = None
) -> Value: ...
def mean(
    value: Any, process_group: dist.ProcessGroup | None = None, *, weight: float | torch.Tensor | None = None
) -> Any:
    """Return the mean of ``value`` over the ranks; every rank of the group calls it and gets the same.

    Args:
        value: a tensor, a number, or dicts, lists and tuples of them, nested at will; not mutated.
        process_group: the ranks that take part; None means the default group, or this process alone without one.
        weight: how much this rank's value counts, such as its number of samples: the result is sum(weight * value) /
            sum(weight). The value of a rank of weight 0 is ignored, also where it is nan (the mean of an empty batch).

    Returns:
        ``value``'s structure with numbers as Python floats and tensors detached, of the same shape, device and dtype;
        integer and bool tensors come back in ``torch.get_default_dtype()``. Everything is added in float64 (complex128)
        and rounded once.

    Raises:
        ArgumentTypeError: a leaf of this rank is no number or dense tensor of numbers.
        ConfigurationError: the weights are negative, not finite, or all zero; or, as for ``barrier``, no group.
        ReplicaMismatchError: the ranks' values differ in keys, nesting, dtype or shape.
    """
    exchange = ValueExchange("mean", value, process_group)
    share = exchange.check_weight(weight)
    add = _weighted_numbers if exchange.fits_block(_count(exchange.leaves) + 1) else _weighted_tensors
    total_share, mean_leaves = add(exchange, share, has_weight=weight is not None)
    if total_share == 0:
        raise ConfigurationError(
            "mean(weight=) needs a rank with something to average (expected a weight above 0 on at least one rank, got"
            f" 0 on all {exchange.world_size}). Skip the call where no rank has samples, or leave weight= out."
        )
    return exchange.rebuild(mean_leaves())


def _count(leaves: Sequence[Leaf]) -> int:
    return builtins.sum(map(numbers_in, leaves))


def _weighted_numbers(
    exchange: ValueExchange, share: float, *, has_weight: bool
) -> tuple[float, Callable[[], list[Any]]]:
    """The sum of the ranks' shares, and what returns the means of the leaves."""
    counts = [numbers_in(leaf) for leaf in exchange.leaves]
    addends = [float(number) for leaf in exchange.leaves for number in to_numbers(leaf)]
    if has_weight:
        addends = [0.0 if share == 0 else addend * share for addend in addends]
    (*totals, total_share), _ = exchange.add_numbers(kind_for_mean, [*addends, share], [])

    def means() -> list[Any]:
        quotients = iter([total / total_share for total in totals])
        return [from_floats(leaf, list(islice(quotients, n))) for leaf, n in zip(exchange.leaves, counts, strict=True)]

    return total_share, means


@torch.no_grad()
def _weighted_tensors(
    exchange: ValueExchange, share: float, *, has_weight: bool
) -> tuple[float, Callable[[], list[Any]]]:
    """As ``_weighted_numbers``, of any size."""
    addends = [as_float64(leaf) for leaf in exchange.leaves]
    if has_weight:
        addends = [torch.zeros_like(a) if share == 0 else a * share for a in addends]
    addends.append(torch.tensor([share], dtype=torch.float64, device=CPU))
    ((*totals, total_share),) = exchange.all_reduce(kind_for_mean, addends)
    divisor = total_share.item()

    def means() -> list[Any]:
        return [from_float64(leaf, t / divisor) for leaf, t in zip(exchange.leaves, totals, strict=True)]

    return divisor, means


def sum(value: Value, process_group: dist.ProcessGroup | None = None) -> Value:
    """Return the sum of ``value`` over the ranks; every rank of the group calls it and gets the same.

    Integers are added exactly: a Python int comes back as the exact Python int, and a tensor's sum that does not fit
    its dtype is an error, never a wrapped number. Floats are added in float64 and rounded once.

    ``value`` and ``process_group`` are those of ``mean``.

    Returns:
        ``value``'s structure with tensors detached, of the same shape, device and dtype; a bool counts as 0 or 1 and
        comes back as int, a bool tensor as int64.

    Raises:
        ArgumentTypeError: a leaf of this rank is no number or dense tensor of numbers.
        ConfigurationError: an int lies outside int64, or the sum of an integer tensor outside its dtype.
        ReplicaMismatchError: the ranks' values differ in keys, nesting, types, dtype or shape.
    """
    exchange = ValueExchange("sum", value, process_group)
    add = _sum_numbers if exchange.fits_block(_count(exchange.leaves)) else _sum_tensors
    integral = [i for i, leaf in enumerate(exchange.leaves) if is_integral(leaf)]
    floating = [i for i, leaf in enumerate(exchange.leaves) if not is_integral(leaf)]
    totals = add(exchange, floating, integral)
    return exchange.rebuild([totals[i] for i in range(len(exchange.leaves))])  # type: ignore[no-any-return]


def _sum_numbers(exchange: ValueExchange, floating: Sequence[int], integral: Sequence[int]) -> dict[int, Any]:
    """By index of the leaf its sum over the ranks."""
    leaves = exchange.leaves
    floats = [number for i in floating for number in to_numbers(leaves[i])]
    integers = [int(number) for i in integral for number in to_numbers(leaves[i])]
    sums = exchange.add_numbers(kind_for_sum, floats, integers)
    float_totals, integer_totals = iter(sums[0]), iter(sums[1])
    totals: dict[int, Any] = {}
    for i in floating:
        totals[i] = from_floats(leaves[i], list(islice(float_totals, numbers_in(leaves[i]))))
    for i in integral:
        totals[i] = from_ints(leaves[i], list(islice(integer_totals, numbers_in(leaves[i]))), exchange.paths[i])
    return totals


@torch.no_grad()
def _sum_tensors(exchange: ValueExchange, floating: Sequence[int], integral: Sequence[int]) -> dict[int, Any]:
    """As ``_sum_numbers``, of any size."""
    leaves = exchange.leaves
    addends = [as_float64(leaves[i]) for i in floating], [as_halves(leaves[i]) for i in integral]
    float_totals, halves_totals = exchange.all_reduce(kind_for_sum, *addends)
    totals: dict[int, Any] = {}
    for i, total in zip(floating, float_totals, strict=True):
        totals[i] = from_float64(leaves[i], total)
    for i, halves in zip(integral, halves_totals, strict=True):
        totals[i] = from_halves(leaves[i], halves, exchange.paths[i])
    return totals


@torch.no_grad()
def gather(value: Any, process_group: dist.ProcessGroup | None = None) -> Any:
    """Return ``value``'s structure with each leaf replaced by the list of all ranks' leaves, in rank order.

    Tensors of a leaf must agree in dtype and number of dimensions; their sizes may differ from rank to rank, as batches
    do (``torch.cat(gathered)`` joins batches). All leaves travel as one flat tensor of bytes, padded to the largest
    rank's.

    ``value`` and ``process_group`` are those of ``mean``.

    Returns:
        lists of world_size Python numbers, or of world_size detached tensors on this rank's leaf's device; no tensor
        shares memory with another or with ``value``.

    Raises:
        ArgumentTypeError, ConfigurationError, ReplicaMismatchError: as ``sum``; ranks' sizes may differ, though.
    """
    exchange = ValueExchange("gather", value, process_group)
    payload = to_payload(exchange.leaves, exchange.device)
    leaves_of_ranks = [from_payload(exchange.leaves, flat) for flat in exchange.gather(kind_for_gather, payload)]
    return exchange.rebuild([list(leaves) for leaves in zip(*leaves_of_ranks, strict=True)])
