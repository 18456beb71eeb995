"""Mean, sum and gather of training metrics across ranks: the loss and the accuracy that people average by hand.

Every call is one block of 256 bytes from each rank, which carries up to 216 bytes of values too, some 26 numbers; more
follow in one collective operation per kind of number, however many metrics the value holds::

    value ── leaves, in key order ──┬── what I hold, hashed ─────┐
                                    └── one flat tensor per kind ┴── all-gather ── all equal? else name the difference
                                        (float64; int64 halves;        │
                                        bytes)                         └── added ── the value's structure

A rank that cannot take part (a leaf is no number) still sends its header, so that the others raise at once instead of
waiting. No rank unpickles bytes of another.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from psengine.data.value_exchange import ValueExchange
from psengine.errors import ConfigurationError
from psengine.tensors.leaves import (
    CPU,
    as_float64,
    as_halves,
    from_float64,
    from_halves,
    from_payload,
    is_integral,
    kind_for_gather,
    kind_for_mean,
    kind_for_sum,
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
@torch.no_grad()
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
    addends = [as_float64(leaf) for leaf in exchange.leaves]
    if weight is not None:
        addends = [torch.zeros_like(a) if share == 0 else a * share for a in addends]
    addends.append(torch.tensor([share], dtype=torch.float64, device=CPU))
    ((*totals, total_share),) = exchange.all_reduce(kind_for_mean, addends)
    divisor = total_share.item()
    if divisor == 0:
        raise ConfigurationError(
            "mean(weight=) needs a rank with something to average (expected a weight above 0 on at least one rank, got"
            f" 0 on all {exchange.world_size}). Skip the call where no rank has samples, or leave weight= out."
        )
    return exchange.rebuild([from_float64(leaf, t / divisor) for leaf, t in zip(exchange.leaves, totals, strict=True)])


@torch.no_grad()
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
    leaves = exchange.leaves
    integral = [i for i, leaf in enumerate(leaves) if is_integral(leaf)]
    floating = [i for i, leaf in enumerate(leaves) if not is_integral(leaf)]
    addends = [as_float64(leaves[i]) for i in floating], [as_halves(leaves[i]) for i in integral]
    float_totals, halves_totals = exchange.all_reduce(kind_for_sum, *addends)
    totals: dict[int, Any] = {}
    for i, total in zip(floating, float_totals, strict=True):
        totals[i] = from_float64(leaves[i], total)
    for i, halves in zip(integral, halves_totals, strict=True):
        totals[i] = from_halves(leaves[i], halves, exchange.paths[i])
    return exchange.rebuild([totals[i] for i in range(len(leaves))])  # type: ignore[no-any-return]


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
