"""Mean, sum and gather of training metrics across ranks: the loss and the accuracy that people average by hand.

::

    value ── leaves, in the order of their paths ──┬── what I hold, hashed ── all-gather ── all equal? else name the
                                                   │                                        difference
                                                   └── one flat tensor per dtype ── all-reduce ── the value's structure

A rank that cannot take part (a leaf is no number) still sends its header, so that the others raise at once instead of
waiting.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from psengine.data.value_exchange import ValueExchange
from psengine.environment.launchers import read_worker
from psengine.environment.variables import inherited_variables
from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.tensors import leaves
from psengine.tensors.objects import from_bytes, to_bytes

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


def _begin(verb: str, value: Any, process_group: Any) -> tuple[leaves.Leaves, ValueExchange]:
    found = leaves.Leaves(value)
    exchange = ValueExchange(verb, process_group, found.leaves)
    exchange.faults |= found.faults
    if process_group is None and exchange.collective.world_size == 1:
        _warn_alone(verb)
    return found, exchange


@functools.cache
def _warn_alone(verb: str) -> None:
    """Say once that an independent worker has nobody to exchange values with."""
    worker, workers = read_worker(inherited_variables())
    if worker is not None and workers != 1:
        logger.warning(
            "psengine.%s() counts the value of worker %d alone: independent workers meet at the servers and exchange"
            " nothing else (expected a value of all%s, got one). Fix: add up what each worker prints, or train without"
            " --independent.",
            *(verb, worker, "" if workers is None else f" {workers}"),
        )


@torch.no_grad()
def mean(
    value: Any, process_group: dist.ProcessGroup | None = None, *, weight: float | torch.Tensor | None = None
) -> Any:
    """Return the mean of ``value`` over the ranks; every rank of the group calls it and gets the same.

    Args:
        value: a tensor, a number, or dicts, lists and tuples of them, nested at will; not mutated. Ranks need the same
            keys and indices; where one has a list and another a tuple, each gets its own kind back.
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
    found, exchange = _begin("mean", value, process_group)
    share = 1.0
    if weight is not None:
        exchange.verb = "mean with a weight"
        share = _checked_weight(weight, exchange)
    addends = [leaves.as_float64(leaf) for leaf in found.leaves]
    if weight is not None:
        addends = [torch.zeros_like(a) if share == 0 else a * share for a in addends]
    addends.append(torch.tensor([share], dtype=torch.float64, device="cpu"))
    ((*totals, total_share),) = exchange.all_reduce(found.kinds(leaves.kind_to_average), addends)
    divisor = total_share.item()
    if divisor == 0:
        raise ConfigurationError(
            "mean(weight=) needs a rank with something to average (expected a weight above 0 on at least one rank, got"
            f" 0 on all {exchange.collective.world_size}). Fix: skip the call where no rank has samples."
        )
    return found.rebuild([leaves.from_float64(leaf, t / divisor) for leaf, t in zip(found.leaves, totals, strict=True)])


def _checked_weight(weight: Any, exchange: ValueExchange) -> float:
    """The weight as a number; one that is refused is a fault of this rank's call."""
    is_number = isinstance(weight, numbers.Real) or leaves.is_real_scalar(weight)
    share = leaves.to_float(weight) if is_number else math.nan
    if not 0 <= share < math.inf:
        error = ConfigurationError if is_number else ArgumentTypeError
        rule = "mean(weight=) is how much a rank counts, such as its number of samples"
        exchange.faults["weight"] = repr(weight), error(f"{rule} (expected a finite number >= 0, got {weight!r})")
    return share


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
    found, exchange = _begin("sum", value, process_group)
    floats, integers = exchange.all_reduce(
        found.kinds(leaves.kind_to_add),
        [leaves.as_float64(leaf) for leaf in found.leaves if not leaves.is_integral(leaf)],
        [leaves.as_halves(leaf) for leaf in found.leaves if leaves.is_integral(leaf)],
    )
    next_float, next_integer = iter(floats), iter(integers)
    return found.rebuild(  # type: ignore[no-any-return]
        [
            leaves.from_halves(leaf, next(next_integer), path)
            if leaves.is_integral(leaf)
            else leaves.from_float64(leaf, next(next_float))
            for leaf, path in zip(found.leaves, found.paths, strict=True)
        ]
    )


@torch.no_grad()
def gather(value: Any, process_group: dist.ProcessGroup | None = None) -> Any:
    """Return ``value``'s structure with each leaf replaced by the list of all ranks' leaves, in rank order.

    Tensors of a leaf must agree in dtype and number of dimensions; their sizes may differ from rank to rank, as batches
    do (``torch.cat(gathered)`` joins batches). All leaves travel together, through ``torch.save``
    and ``torch.load(weights_only=True)``.

    ``value`` and ``process_group`` are those of ``mean``.

    Returns:
        lists of world_size Python numbers, or of world_size detached tensors on this rank's leaf's device; no tensor
        shares memory with another or with ``value``.

    Raises:
        ArgumentTypeError, ConfigurationError, ReplicaMismatchError: as ``sum``; ranks' sizes may differ, though.
    """
    found, exchange = _begin("gather", value, process_group)
    exchange.check(found.kinds(leaves.kind_to_gather))
    payload = to_bytes([leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in found.leaves])
    payloads = exchange.collective.gather_bytes(payload, exchange.device, what="metrics of gather()")
    columns = zip(*map(from_bytes, payloads), strict=True)
    return found.rebuild(
        [
            [other.to(leaf.device) if isinstance(leaf, torch.Tensor) else other for other in column]
            for leaf, column in zip(found.leaves, columns, strict=True)
        ]
    )
