"""Mean, sum and gather of training metrics across ranks: the loss and the accuracy that people average by hand.

Every call is one header of 64 bytes from each rank, then one collective per kind of number, however many metrics the
value holds::

    value ── leaves, in key order ──┬── header: what I hold, hashed ── all-gather ── all equal? else name the difference
                                    └── one flat tensor per kind ───── all-reduce ── leaves ── the value's structure
                                        (float64; int64 halves; bytes)

A rank that cannot take part (a leaf that is no number) still sends its header, so that the others learn it at once
instead of waiting. No rank ever unpickles what another sent.
"""

from __future__ import annotations

import builtins
import copy
import hashlib
import json
import math
import numbers
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.errors import ArgumentTypeError, ConfigurationError, PSEngineError, ReplicaMismatchError

INTEGER_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32}
)
FLOATING_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
COMPLEX_DTYPES = frozenset({torch.complex32, torch.complex64, torch.complex128})
CPU = torch.device("cpu")
LOW_HALF = 2**32 - 1

Leaf = torch.Tensor | bool | int | float
Value = TypeVar("Value")
# Path of every container and leaf ("value['loss']") to what is there ("float").
Description = dict[str, str]


@overload
def mean(
    value: torch.Tensor, process_group: dist.ProcessGroup | None = None, *, weight: float | torch.Tensor | None = None
) -> torch.Tensor: ...
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
        process_group: the ranks to average over; None means the default group, or this process alone without one.
        weight: this rank's say, such as its number of samples: the result is sum(weight * value) / sum(weight). A rank
            of weight 0 has no say at all, whatever its value (the mean of an empty batch is nan).

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
    exchange.check(_kind_for_mean)
    addends = [_as_float64(leaf) for leaf in exchange.leaves]
    if weight is not None:
        addends = [torch.zeros_like(a) if share == 0 else a * share for a in addends]
    *totals, total_share = exchange.all_reduce([*addends, torch.tensor([share], dtype=torch.float64, device=CPU)])
    divisor = total_share.item()
    if divisor == 0:
        raise ConfigurationError(
            "mean(weight=) needs a rank with something to average (expected a weight above 0 on at least one rank, got"
            f" 0 on all {exchange.world_size}). Skip the call where no rank has samples, or leave weight= out."
        )
    return exchange.rebuild([_from_float64(leaf, t / divisor) for leaf, t in zip(exchange.leaves, totals, strict=True)])


@torch.no_grad()
def sum(value: Value, process_group: dist.ProcessGroup | None = None) -> Value:
    """Return the sum of ``value`` over the ranks; every rank of the group calls it and gets the same.

    Integers are added exactly: a Python int comes back as the exact Python int, and a tensor's sum that does not fit
    its dtype is an error, never a wrapped number. Floats are added in float64 and rounded once.

    Args:
        value: a tensor, a number, or dicts, lists and tuples of them, nested at will; not mutated.
        process_group: the ranks to add up; None means the default group, or this process alone without one.

    Returns:
        ``value``'s structure with tensors detached, of the same shape, device and dtype; a bool counts as 0 or 1 and
        comes back as int, a bool tensor as int64.

    Raises:
        ArgumentTypeError: a leaf of this rank is no number or dense tensor of numbers.
        ConfigurationError: an int lies outside int64, or the sum of an integer tensor outside its dtype.
        ReplicaMismatchError: the ranks' values differ in keys, nesting, types, dtype or shape.
    """
    exchange = _Exchange("sum", value, process_group)
    exchange.check(_kind)
    leaves = exchange.leaves
    integral = [i for i, leaf in enumerate(leaves) if _is_integral(leaf)]
    floating = [i for i, leaf in enumerate(leaves) if not _is_integral(leaf)]
    totals: dict[int, Any] = {}
    for i, total in zip(floating, exchange.all_reduce([_as_float64(leaves[i]) for i in floating]), strict=True):
        totals[i] = _from_float64(leaves[i], total)
    for i, halves in zip(integral, exchange.all_reduce([_as_halves(leaves[i]) for i in integral]), strict=True):
        totals[i] = _from_halves(leaves[i], halves, exchange.paths[i])
    return exchange.rebuild([totals[i] for i in range(len(leaves))])  # type: ignore[no-any-return]


@torch.no_grad()
def gather(value: Any, process_group: dist.ProcessGroup | None = None) -> Any:
    """Return ``value``'s structure with each leaf replaced by the list of all ranks' leaves, in rank order.

    Tensors of a leaf must agree in dtype and number of dimensions; their sizes may differ from rank to rank, as batches
    do (``torch.cat(gathered)`` joins batches). All leaves travel as one flat tensor of bytes, padded to the largest
    rank's; sizes travel first, and only where they differ.

    Args:
        value: a tensor, a number, or dicts, lists and tuples of them, nested at will; not mutated.
        process_group: the ranks to hear; None means the default group, or this process alone without one.

    Returns:
        lists of world_size Python numbers, or of world_size detached tensors on this rank's leaf's device; no tensor
        shares memory with another or with ``value``.

    Raises:
        ArgumentTypeError: a leaf of this rank is no number or dense tensor of numbers.
        ConfigurationError: an int lies outside int64.
        ReplicaMismatchError: the ranks' values differ in keys, nesting, types, dtype or number of dimensions.
    """
    exchange = _Exchange("gather", value, process_group)
    sizes = [size for leaf in exchange.leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
    sizes_differ = exchange.check(_kind_for_gather, sizes)
    sizes_of_ranks = exchange.gather_sizes(sizes) if sizes_differ else [sizes] * exchange.world_size
    shapes_of_ranks = [_shapes(exchange.leaves, sizes) for sizes in sizes_of_ranks]
    counts_of_ranks = [
        [math.prod(s) * _as_tensor(leaf).element_size() for leaf, s in zip(exchange.leaves, shapes, strict=True)]
        for shapes in shapes_of_ranks
    ]
    parts_of_ranks = exchange.all_gather([_as_bytes(leaf) for leaf in exchange.leaves], counts_of_ranks)
    ranks = range(exchange.world_size)
    return exchange.rebuild(
        [
            [_from_bytes(leaf, parts_of_ranks[rank][i], shapes_of_ranks[rank][i]) for rank in ranks]
            for i, leaf in enumerate(exchange.leaves)
        ]
    )


_collectives: weakref.WeakKeyDictionary[Any, C10dCollective] = weakref.WeakKeyDictionary()


def collective_for(process_group: Any = None) -> Collective | None:
    """Return the collective of ``process_group`` (None: the default group), made once; None where nobody else is in it.

    Raises:
        ArgumentTypeError: not a process group, such as the marker ``new_group`` returns to ranks outside the group.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            "process_group is not a process group this rank belongs to (expected torch.distributed.ProcessGroup or"
            f" None, got {process_group!r}). Call it only on the ranks given to new_group()."
        )
    if process_group.size() == 1:
        return None
    collective = _collectives.get(process_group)
    if collective is None:
        collective = C10dCollective(process_group)
        # The cache must not keep a destroyed group alive: its store would go on holding the rendezvous port, and the
        # next init_process_group() on that port would fail.
        collective.process_group = weakref.proxy(process_group)
        _collectives[process_group] = collective
    return collective


@dataclass
class _Walk:
    """A value taken apart: its leaves, and what there is at every path, in an order that all ranks share."""

    leaves: list[Leaf] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    description: Description = field(default_factory=dict)
    faults: list[PSEngineError] = field(default_factory=list)

    def visit(self, value: Any, path: str) -> None:
        """Take ``value`` apart; what cannot be exchanged becomes a fault, to be raised when the others know."""
        if isinstance(value, dict):
            self.description[path] = "a dict"
            for key in _keys(value):
                self.visit(value[key], f"{path}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            self.description[path] = "a list" if isinstance(value, list) else "a tuple"
            for index, item in enumerate(value):
                self.visit(item, f"{path}[{index}]")
        elif isinstance(value, torch.Tensor):
            if _is_dense(value):
                self._add(path, value.detach())
            else:
                kind = f"a tensor of {value.dtype} and layout {value.layout} on {value.device.type}"
                self.add_fault(path, kind, _leaf_error(path, kind))
        elif isinstance(value, bool):
            self._add(path, value)
        elif isinstance(value, numbers.Integral):
            if -(2**63) <= int(value) < 2**63:
                self._add(path, int(value))
            else:
                rule = f"{path} does not fit int64 (expected -2**63 <= value < 2**63, got {value})"
                self.add_fault(path, "an int beyond int64", ConfigurationError(f"{rule}. Pass a float instead."))
        elif isinstance(value, numbers.Real):
            self._add(path, _to_float(value))
        else:
            self.add_fault(path, type(value).__name__, _leaf_error(path, type(value).__name__))

    def add_fault(self, path: str, kind: str, error: PSEngineError) -> None:
        """Note that ``error`` is to be raised here, and what the other ranks are to be told instead."""
        self.description[path] = kind
        self.faults.append(error)

    def _add(self, path: str, leaf: Leaf) -> None:
        self.description[path] = ""  # the verb decides what has to agree
        self.leaves.append(leaf)
        self.paths.append(path)


class _Exchange:
    """One call's value on this rank, and the ranks it is exchanged with."""

    def __init__(self, verb: str, value: Any, process_group: Any) -> None:
        self._verb = verb
        self._value = value
        self._collective = collective_for(process_group)
        self.world_size = 1 if self._collective is None else self._collective.world_size
        self._walk = _Walk()
        self._walk.visit(value, "value")
        self.leaves = self._walk.leaves
        self.paths = self._walk.paths
        self._header_device, self._device = CPU, CPU
        if self._collective is not None:
            self._header_device, self._device = _transport_devices(process_group or dist.group.WORLD, self.leaves)

    def check_weight(self, weight: Any) -> float:
        """Return the weight as a number, 1 for None; what is wrong with it is raised by ``check``."""
        if weight is None:
            return 1.0
        self._verb = "mean with a weight"
        if not isinstance(weight, numbers.Real) and not _is_real_scalar(weight):
            got = type(weight).__name__
            message = f"mean(weight=) is one real number a rank, such as its sample count (expected a float, got {got})"
            self._walk.add_fault("weight", got, ArgumentTypeError(message))
            return 1.0
        share = _to_float(weight)
        if not 0 <= share < math.inf:
            message = f"mean(weight=) says how much a rank counts (expected a finite number >= 0, got {share})"
            self._walk.add_fault("weight", f"{share}", ConfigurationError(message))
        return share

    def check(self, kind: Callable[[Leaf], str], sizes: Sequence[int] = ()) -> bool:
        """Make sure that the ranks' values are alike, as far as ``kind`` tells; return whether ``sizes`` are not.

        Raises:
            ArgumentTypeError, ConfigurationError: this rank's own value cannot be exchanged.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        sizes_differ = False
        if self._collective is not None:
            description = {"the call": self._verb, "the transport's device": self._device.type}
            description |= self._walk.description
            description |= {path: kind(leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)}
            payload = json.dumps(description).encode()
            header = hashlib.sha256(payload).digest() + hashlib.sha256(json.dumps(list(sizes)).encode()).digest()
            flat = torch.frombuffer(bytearray(header), dtype=torch.int64).to(self._header_device)
            headers = [t.tolist() for t in self._collective.all_gather(flat, what=f"header of {self._verb}()")]
            if any(h[:4] != headers[0][:4] for h in headers):
                descriptions = self._gather_descriptions(self._collective, payload)
                if not self._walk.faults:
                    raise ReplicaMismatchError(_first_difference(descriptions, self._collective.rank))
            sizes_differ = any(h[4:] != headers[0][4:] for h in headers)
        for fault in self._walk.faults:
            raise fault
        return sizes_differ

    def all_reduce(self, addends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum over ranks of each addend, all of one dtype, with its shape and on its device."""
        if self._collective is None or not addends:
            return list(addends)
        flat = self._pack(addends)
        self._collective.all_reduce(flat, what=f"metrics of {self._verb}()").wait()
        totals = _unpack(flat, [a.device for a in addends], [a.numel() for a in addends])
        return [total.view(addend.shape) for total, addend in zip(totals, addends, strict=True)]

    def all_gather(self, parts: Sequence[torch.Tensor], counts_of_ranks: list[list[int]]) -> list[list[torch.Tensor]]:
        """Return every rank's flat ``parts``, of ``counts_of_ranks[rank]`` elements, on the devices of this rank's."""
        longest = max(builtins.sum(counts) for counts in counts_of_ranks)
        if self._collective is None or longest == 0:
            return [list(parts)] * self.world_size
        flat = self._pack(parts)
        padded = torch.cat([flat, flat.new_zeros(longest - flat.numel())])
        gathered = self._collective.all_gather(padded, what=f"metrics of {self._verb}()")
        devices = [part.device for part in parts]
        return [
            _unpack(flat[: builtins.sum(counts)], devices, counts)
            for flat, counts in zip(gathered, counts_of_ranks, strict=True)
        ]

    def gather_sizes(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return every rank's ``sizes``; their number is the same everywhere."""
        assert self._collective is not None
        flat = torch.tensor(sizes, dtype=torch.int64, device=self._header_device)
        return [t.tolist() for t in self._collective.all_gather(flat, what=f"sizes of {self._verb}()")]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value's structure, in new containers, around ``leaves``."""
        return _rebuild(self._value, iter(leaves))

    def _pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat copy on the transport's device; neighbours on one device move there together.

        In the order of the leaves, not by device: which leaf lies where may differ from rank to rank.
        """
        runs = [list(run) for _, run in groupby(tensors, key=lambda t: t.device)]
        return torch.cat([torch.cat([t.reshape(-1) for t in run]).to(self._device) for run in runs])

    def _gather_descriptions(self, collective: Collective, payload: bytes) -> list[Description]:
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self._header_device)
        lengths = [int(t.item()) for t in collective.all_gather(length, what="metrics description length")]
        padded = bytearray(payload.ljust(max(lengths), b" "))
        flat = torch.frombuffer(padded, dtype=torch.uint8).to(self._header_device)
        return [json.loads(bytes(t.tolist())) for t in collective.all_gather(flat, what="metrics description")]


def _unpack(flat: torch.Tensor, devices: Sequence[torch.device], counts: Sequence[int]) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    for device, run in groupby(zip(devices, counts, strict=True), key=lambda pair: pair[0]):
        run_counts = [count for _, count in run]
        run_flat, flat = flat.tensor_split([builtins.sum(run_counts)])
        parts += torch.split(run_flat.to(device), run_counts)
    return parts


def _transport_devices(process_group: Any, leaves: Sequence[Leaf]) -> tuple[torch.device, torch.device]:
    """Where the header and the leaves travel: through host memory, or on the accelerator if the leaves lie there."""
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


def _leaf_error(path: str, kind: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{path} is no metric (expected a number, a dense tensor of numbers, or a dict, list or tuple of them, got"
        f" {kind}). Leave it out, or turn it into a float or a tensor."
    )


def _keys(value: dict[Any, Any]) -> list[Any]:
    """The keys in an order that does not depend on when each was added, which may differ from rank to rank."""
    return sorted(value, key=lambda key: (type(key).__name__, repr(key)))


def _rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(value, dict):
        items = {key: _rebuild(value[key], leaves) for key in _keys(value)}
        # A subclass may have more to it than its items (a default factory, say); assigning keeps the order of its keys.
        result = copy.copy(value) if type(value) is not dict else dict.fromkeys(value)
        for key, item in items.items():
            result[key] = item
        return result
    if isinstance(value, tuple):
        parts = [_rebuild(item, leaves) for item in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(value, list):
        return [_rebuild(item, leaves) for item in value]
    return next(leaves)


def _is_dense(tensor: torch.Tensor) -> bool:
    known = tensor.dtype in INTEGER_DTYPES | FLOATING_DTYPES | COMPLEX_DTYPES
    return known and tensor.layout is torch.strided and not tensor.is_meta


def _is_real_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _is_dense(value) and value.numel() == 1 and not value.is_complex()


def _is_integral(leaf: Leaf) -> bool:
    return leaf.dtype in INTEGER_DTYPES if isinstance(leaf, torch.Tensor) else isinstance(leaf, int)


def _to_float(number: Any) -> float:
    try:
        return float(number.detach() if isinstance(number, torch.Tensor) else number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _kind(leaf: Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype} with shape {list(leaf.shape)}"
    return f"a Python {type(leaf).__name__}"


def _kind_for_mean(leaf: Leaf) -> str:
    # A rank without data says 0 where the others say 0.5; their mean is a float either way.
    return _kind(leaf) if isinstance(leaf, torch.Tensor) else "a Python number"


def _kind_for_gather(leaf: Leaf) -> str:
    return f"a tensor of {leaf.dtype} with {leaf.dim()} dimensions" if isinstance(leaf, torch.Tensor) else _kind(leaf)


def _as_float64(leaf: Leaf) -> torch.Tensor:
    """The leaf as real float64 numbers; a complex one has a last dimension of 2 more."""
    if not isinstance(leaf, torch.Tensor):
        return torch.tensor(float(leaf), dtype=torch.float64, device=CPU)
    if leaf.is_complex():
        return torch.view_as_real(leaf.to(torch.complex128).resolve_conj())
    return leaf.to(torch.float64)


def _from_float64(leaf: Leaf, result: torch.Tensor) -> Any:
    """Undo ``_as_float64``: ``result`` as what ``leaf`` is, an integer tensor's in the default dtype; a copy."""
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    if leaf.is_complex():
        return torch.view_as_complex(result.clone()).to(leaf.dtype)
    dtype = torch.get_default_dtype() if _is_integral(leaf) else leaf.dtype
    return result.to(dtype, copy=True)


def _as_halves(leaf: Leaf) -> torch.Tensor:
    """The leaf's integers as int64 high and low halves: 32 bits each, so 2**31 ranks add up without overflow."""
    whole = leaf if isinstance(leaf, torch.Tensor) else torch.tensor(int(leaf), dtype=torch.int64, device=CPU)
    whole = whole.to(torch.int64)
    return torch.stack([whole >> 32, whole & LOW_HALF])


def _from_halves(leaf: Leaf, halves: torch.Tensor, path: str) -> Any:
    """Undo ``_as_halves`` on sums of them."""
    high, low = halves
    if not isinstance(leaf, torch.Tensor):
        return (int(high) << 32) + int(low)
    dtype = torch.int64 if leaf.dtype is torch.bool else leaf.dtype
    high = high + (low >> 32)
    total = (high << 32) | (low & LOW_HALF)
    limits = torch.iinfo(dtype)
    if bool(((high < -(2**31)) | (high >= 2**31) | (total < limits.min) | (total > limits.max)).any()):
        raise ConfigurationError(
            f"the sum of {path} does not fit its dtype (expected {limits.min} <= sum <= {limits.max} for {dtype}, got"
            " more). Convert it to a larger integer dtype or to torch.float64 before the call."
        )
    return total.to(dtype, copy=True)


def _shapes(leaves: Sequence[Leaf], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Give each leaf its dimensions' share of ``sizes``; numbers have none."""
    remaining = iter(sizes)
    dimensions = [leaf.dim() if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
    return [tuple(next(remaining) for _ in range(count)) for count in dimensions]


def _as_tensor(leaf: Leaf) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    dtype = torch.int64 if isinstance(leaf, int) else torch.float64
    return torch.tensor(leaf, dtype=dtype, device=CPU)


def _as_bytes(leaf: Leaf) -> torch.Tensor:
    flat = _as_tensor(leaf).resolve_conj().resolve_neg().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format)  # contiguous() leaves one element its odd stride
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _from_bytes(leaf: Leaf, part: torch.Tensor, shape: Sequence[int]) -> Any:
    """Undo ``_as_bytes``; a copy, because a view of wider elements needs memory that is aligned for them."""
    like = _as_tensor(leaf)
    if like.is_complex():
        return torch.view_as_complex(part.clone().view(like.dtype.to_real()).view([*shape, 2]))
    result = part.clone().view(like.dtype).view(list(shape))
    return result if isinstance(leaf, torch.Tensor) else type(leaf)(result.item())
