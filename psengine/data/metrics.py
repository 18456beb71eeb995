"""Mean, sum and gather of training metrics across ranks: the loss and the accuracy that people average by hand.

Every call is one header of 40 bytes from each rank, then one collective per kind of number, however many metrics the
value holds::

    value ── leaves, in key order ──┬── header: what I hold, hashed ── all-gather ── all equal? else name the difference
                                    └── one flat tensor per kind ───── all-reduce ── leaves ── the value's structure
                                        (float64; int64 halves; bytes)

A rank that cannot take part (a leaf is no number) still sends its header, so that the others raise at once instead of
waiting. No rank unpickles bytes of another.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from psengine.collectives.registry import collective_for, default_group
from psengine.errors import ArgumentTypeError, ConfigurationError, ReplicaMismatchError
from psengine.tensors.leaves import (
    CPU,
    Description,
    Leaf,
    Walk,
    as_float64,
    as_halves,
    from_float64,
    from_halves,
    from_payload,
    is_integral,
    is_real_scalar,
    kind_for_gather,
    kind_for_mean,
    kind_for_sum,
    rebuild,
    to_float,
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
        ConfigurationError: the weights are negative, not finite, or all zero.
        ReplicaMismatchError: the ranks' values differ in keys, nesting, dtype or shape.
    """
    exchange = _Exchange("mean", value, process_group)
    share = exchange.check_weight(weight)
    exchange.check(kind_for_mean)
    addends = [as_float64(leaf) for leaf in exchange.leaves]
    if weight is not None:
        addends = [torch.zeros_like(a) if share == 0 else a * share for a in addends]
    *totals, total_share = exchange.all_reduce([*addends, torch.tensor([share], dtype=torch.float64, device=CPU)])
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
    exchange = _Exchange("sum", value, process_group)
    exchange.check(kind_for_sum)
    leaves = exchange.leaves
    integral = [i for i, leaf in enumerate(leaves) if is_integral(leaf)]
    floating = [i for i, leaf in enumerate(leaves) if not is_integral(leaf)]
    totals: dict[int, Any] = {}
    for i, total in zip(floating, exchange.all_reduce([as_float64(leaves[i]) for i in floating]), strict=True):
        totals[i] = from_float64(leaves[i], total)
    for i, halves in zip(integral, exchange.all_reduce([as_halves(leaves[i]) for i in integral]), strict=True):
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
    exchange = _Exchange("gather", value, process_group)
    payload = to_payload(exchange.leaves, exchange.device)
    sizes_bytes = exchange.check(kind_for_gather, payload.numel())
    leaves_of_ranks = [from_payload(exchange.leaves, flat) for flat in exchange.gather(payload, sizes_bytes)]
    return exchange.rebuild([list(leaves) for leaves in zip(*leaves_of_ranks, strict=True)])


class _Exchange:
    """One call's value on this rank, and the ranks it is exchanged with."""

    def __init__(self, verb: str, value: Any, process_group: Any) -> None:
        self._verb = verb
        self._value = value
        process_group = process_group or default_group()
        self._collective = collective_for(process_group)
        self.world_size = self._collective.world_size
        self._walk = Walk()
        self._walk.visit(value, "value")
        self.leaves = self._walk.leaves
        self.paths = self._walk.paths
        self._header_device, self.device = CPU, CPU
        if self.world_size > 1:
            self._header_device, self.device = _transport_devices(process_group, self.leaves)

    def check_weight(self, weight: Any) -> float:
        """Return the weight as a number, 1 for None; ``check`` raises where the weight is refused."""
        if weight is None:
            return 1.0
        self._verb = "mean with a weight"
        if not isinstance(weight, numbers.Real) and not is_real_scalar(weight):
            got = type(weight).__name__
            message = f"mean(weight=) is one real number a rank, such as its sample count (expected a float, got {got})"
            self._walk.add_fault("weight", got, ArgumentTypeError(message))
            return 1.0
        share = to_float(weight)
        if not 0 <= share < math.inf:
            message = f"mean(weight=) says how much a rank counts (expected a finite number >= 0, got {share})"
            self._walk.add_fault("weight", f"{share}", ConfigurationError(message))
        return share

    def check(self, kind: Callable[[Leaf], str], size_bytes: int = 0) -> list[int]:
        """Make sure that the ranks' values are alike, as far as ``kind`` tells; return each rank's ``size_bytes``.

        Raises:
            ArgumentTypeError, ConfigurationError: this rank's own value cannot be exchanged.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        sizes_bytes = [size_bytes]
        if self.world_size > 1:
            description = {"the call": self._verb, "the transport's device": self.device.type}
            description |= self._walk.description
            description |= {path: kind(leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)}
            payload = json.dumps(description).encode()
            header = hashlib.sha256(payload).digest() + size_bytes.to_bytes(8, sys.byteorder)
            flat = torch.frombuffer(bytearray(header), dtype=torch.int64).to(self._header_device)
            headers = [t.tolist() for t in self._collective.gather(flat, what=f"header of {self._verb}()")]
            if any(h[:4] != headers[0][:4] for h in headers):
                payloads = self._collective.gather_bytes(payload, self._header_device, what="metrics description")
                descriptions: list[Description] = [json.loads(other) for other in payloads]
                if not self._walk.faults:
                    raise ReplicaMismatchError(_first_difference(descriptions, self._collective.rank))
            sizes_bytes = [h[4] for h in headers]
        for fault in self._walk.faults:
            raise fault
        return sizes_bytes

    def all_reduce(self, addends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum over ranks of each addend, all of one dtype, with its shape and on its device."""
        if self.world_size == 1 or not addends:
            return list(addends)
        flat = torch.cat([addend.reshape(-1).to(self.device) for addend in addends])
        self._collective.all_reduce(flat, what=f"metrics of {self._verb}()").wait()
        totals = flat.split([addend.numel() for addend in addends])
        return [total.to(addend.device).view(addend.shape) for total, addend in zip(totals, addends, strict=True)]

    def gather(self, payload: torch.Tensor, sizes_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's flat payload, of ``sizes_bytes[rank]`` bytes."""
        longest = max(sizes_bytes)
        if self.world_size == 1 or longest == 0:
            return [payload] * self.world_size
        padded = torch.cat([payload, payload.new_zeros(longest - payload.numel())])
        gathered = self._collective.gather(padded, what=f"metrics of {self._verb}()")
        return [flat[:size_bytes] for flat, size_bytes in zip(gathered, sizes_bytes, strict=True)]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value's structure, in new containers, around ``leaves``."""
        return rebuild(self._value, iter(leaves))


def _transport_devices(process_group: Any, leaves: Sequence[Leaf]) -> tuple[torch.device, torch.device]:
    """The devices of the header and of the leaves in transport: the host, or the accelerator that holds the leaves."""
    try:
        entries = dist.get_backend_config(process_group).split(",")
    except ValueError:  # a group torch.distributed did not make
        entries = ["cpu:unknown"]
    backends = dict(entry.split(":", 1) for entry in entries)
    host_backend = backends.get("cpu")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and backends.get(leaf.device.type, host_backend) != host_backend:
            return (leaf.device if host_backend is None else CPU), leaf.device
    if host_backend is not None:
        return CPU, CPU
    kind = next(iter(backends))
    device = getattr(process_group, "bound_device_id", None)
    device = device or torch.device(kind, torch.get_device_module(kind).current_device())
    return device, device


def _first_difference(descriptions: list[Description], this_rank: int) -> str:
    paths = dict.fromkeys(path for description in descriptions for path in description)
    for path in paths:
        kinds = [description.get(path, "nothing") for description in descriptions]
        others: dict[str, list[str]] = {}
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                others.setdefault(kind, []).append(str(rank))
        if others:
            got = ", ".join(f"{kind} on rank {' and '.join(ranks)}" for kind, ranks in others.items())
            return (
                f"metrics must have the same structure on every rank (expected {path} to be {kinds[0]} as on rank 0,"
                f" got {got}; seen on rank {this_rank}). Make the same call, with the same keys, types and shapes, on"
                " every rank."
            )
    return f"the ranks' metrics differ, though not in what can be shown (seen on rank {this_rank})"
