"""The leaves of a metric: numbers and tensors, found in a value and turned into flat buffers and back.

Pure: nothing here knows of other ranks::

    value ── Walk ──┬── description: what there is at every path
                    └── leaves ──┬── to_numbers ──┐          ┌── from_numbers ──┐
                                 ├── as_float64 ──┤          ├── from_float64 ──┤
                                 ├── as_halves ───┼─ travels ┼── from_halves ───┼── rebuild ── the value's structure
                                 └── to_payload ──┘          └── from_payload ──┘

A few numbers travel as Python's: torch's calls cost more than they do.

Each ``from_*`` takes the values that arrived, and the leaf that gives the result its type, dtype and device.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from psengine.errors import ArgumentTypeError, ConfigurationError, PSEngineError

INTEGER_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32}
)
FLOATING_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
COMPLEX_DTYPES = frozenset({torch.complex32, torch.complex64, torch.complex128})
CPU = torch.device("cpu")
LOW_HALF = 2**32 - 1

Leaf = torch.Tensor | bool | int | float
# Path of every container and leaf ("value['loss']") to its kind ("a Python float").
Description = dict[str, str]


@dataclass
class Walk:
    """A value taken apart: its leaves, and the kind at every path, in an order that all ranks share."""

    leaves: list[Leaf] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    description: Description = field(default_factory=dict)
    faults: list[PSEngineError] = field(default_factory=list)

    def visit(self, value: Any, path: str) -> None:
        """Take ``value`` apart; a leaf that cannot be exchanged becomes a fault, raised once the others know of it."""
        if type(value) is float:  # most are
            self._add(path, value)
        elif isinstance(value, dict):
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
            self._add(path, to_float(value))
        else:
            self.add_fault(path, type(value).__name__, _leaf_error(path, type(value).__name__))

    def add_fault(self, path: str, kind: str, error: PSEngineError) -> None:
        """Note that this rank is to raise ``error``; the other ranks are told ``kind``."""
        self.description[path] = kind
        self.faults.append(error)

    def _add(self, path: str, leaf: Leaf) -> None:
        self.description[path] = ""  # ``check`` fills in the kind, which depends on the verb
        self.leaves.append(leaf)
        self.paths.append(path)


def _leaf_error(path: str, kind: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{path} is no metric (expected a number, a dense tensor of numbers, or a dict, list or tuple of them, got"
        f" {kind}). Leave it out, or turn it into a float or a tensor."
    )


def _keys(value: dict[Any, Any]) -> list[Any]:
    """The keys in an order that does not depend on when each was added, which may differ from rank to rank."""
    return sorted(value, key=lambda key: (type(key).__name__, repr(key)))


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """Undo ``Walk.visit``: ``value``'s structure, in new containers, around ``leaves``."""
    if isinstance(value, dict):
        items = {key: rebuild(value[key], leaves) for key in _keys(value)}
        # A subclass may hold more than its items, such as a default factory; assigning keeps the order of its keys.
        result = copy.copy(value) if type(value) is not dict else dict.fromkeys(value)
        for key, item in items.items():
            result[key] = item
        return result
    if isinstance(value, tuple):
        parts = [rebuild(item, leaves) for item in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(value, list):
        return [rebuild(item, leaves) for item in value]
    return next(leaves)


def _is_dense(tensor: torch.Tensor) -> bool:
    known = tensor.dtype in INTEGER_DTYPES | FLOATING_DTYPES | COMPLEX_DTYPES
    return known and tensor.layout is torch.strided and not tensor.is_meta


def is_real_scalar(value: Any) -> bool:
    """Whether ``value`` is a tensor that holds one real number."""
    return isinstance(value, torch.Tensor) and _is_dense(value) and value.numel() == 1 and not value.is_complex()


def is_integral(leaf: Leaf) -> bool:
    """Whether the leaf holds integers or bools, which are added exactly."""
    return leaf.dtype in INTEGER_DTYPES if isinstance(leaf, torch.Tensor) else isinstance(leaf, int)


def to_float(number: Any) -> float:
    """The number, or a tensor of one, as a float, infinite where it is too large for one."""
    try:
        return float(number.detach() if isinstance(number, torch.Tensor) else number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def kind_for_sum(leaf: Leaf) -> str:
    """The leaf's kind, which must be the same on all ranks to add it: its type, or its dtype and shape."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype} with shape {list(leaf.shape)}"
    return f"a Python {type(leaf).__name__}"


def kind_for_mean(leaf: Leaf) -> str:
    """As ``kind_for_sum``, but all Python numbers are of one kind: a rank without data says 0 where others say 0.5."""
    return kind_for_sum(leaf) if isinstance(leaf, torch.Tensor) else "a Python number"


def kind_for_gather(leaf: Leaf) -> str:
    """As ``kind_for_sum``, but a tensor's sizes may differ from rank to rank."""
    dimensions = isinstance(leaf, torch.Tensor) and f"a tensor of {leaf.dtype} with {leaf.dim()} dimensions"
    return dimensions or kind_for_sum(leaf)


def numbers_in(leaf: Leaf) -> int:
    """How many real numbers the leaf holds."""
    return 1 if not isinstance(leaf, torch.Tensor) else leaf.numel() * (1 + leaf.is_complex())


def to_numbers(leaf: Leaf) -> list[Any]:
    """The leaf's elements as Python's numbers; each complex one as two."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf]
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.to(torch.complex128).resolve_conj())
    if leaf.dim() == 0:
        return [leaf.item()]
    return leaf.tolist() if leaf.dim() == 1 else leaf.reshape(-1).tolist()


def from_floats(leaf: Leaf, results: Sequence[float]) -> Any:
    """Undo ``to_numbers`` on floats, as ``from_float64``."""
    if not isinstance(leaf, torch.Tensor):
        return results[0]
    if leaf.dtype is torch.float32 or leaf.dtype is torch.float64:  # rounded once here too
        return _shaped(results, leaf.dtype, leaf)
    if leaf.is_complex():
        pairs = torch.tensor(results, dtype=torch.float64, device=leaf.device)
        return from_float64(leaf, pairs.view(*leaf.shape, 2))
    return from_float64(leaf, _shaped(results, torch.float64, leaf))


def from_ints(leaf: Leaf, totals: Sequence[int], path: str) -> Any:
    """Undo ``to_numbers`` on sums of integers, as ``from_halves``."""
    if not isinstance(leaf, torch.Tensor):
        return totals[0]
    dtype = _dtype_of_sum(leaf)
    limits = torch.iinfo(dtype)
    if not all(limits.min <= total <= limits.max for total in totals):
        raise _overflow(dtype, path)
    return _shaped(totals, dtype, leaf)


def _shaped(numbers: Sequence[float], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    if like.dim() == 0:
        return torch.tensor(numbers[0], dtype=dtype, device=like.device)
    return torch.tensor(numbers, dtype=dtype, device=like.device).view(like.shape)


def as_float64(leaf: Leaf) -> torch.Tensor:
    """The leaf as real float64 numbers; a complex one has a last dimension of 2 more."""
    if not isinstance(leaf, torch.Tensor):
        return torch.tensor(float(leaf), dtype=torch.float64, device=CPU)
    if leaf.is_complex():
        return torch.view_as_real(leaf.to(torch.complex128).resolve_conj())
    return leaf.to(torch.float64)


def from_float64(leaf: Leaf, result: torch.Tensor) -> Any:
    """Undo ``as_float64``: a copy in the leaf's type and dtype; an integer tensor's in the default dtype."""
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    if leaf.is_complex():
        return torch.view_as_complex(result.clone()).to(leaf.dtype)
    dtype = torch.get_default_dtype() if is_integral(leaf) else leaf.dtype
    return result.to(dtype, copy=True)


def as_halves(leaf: Leaf) -> torch.Tensor:
    """The leaf's integers as int64 high and low halves: 32 bits each, so 2**31 ranks add up without overflow."""
    whole = leaf if isinstance(leaf, torch.Tensor) else torch.tensor(int(leaf), dtype=torch.int64, device=CPU)
    whole = whole.to(torch.int64)
    return torch.stack([whole >> 32, whole & LOW_HALF])


def from_halves(leaf: Leaf, halves: torch.Tensor, path: str) -> Any:
    """Undo ``as_halves`` on sums of them."""
    high, low = halves
    if not isinstance(leaf, torch.Tensor):
        return (int(high) << 32) + int(low)
    dtype = _dtype_of_sum(leaf)
    high = high + (low >> 32)
    total = (high << 32) | (low & LOW_HALF)
    limits = torch.iinfo(dtype)
    if bool(((high < -(2**31)) | (high >= 2**31) | (total < limits.min) | (total > limits.max)).any()):
        raise _overflow(dtype, path)
    return total.to(dtype, copy=True)


def _dtype_of_sum(leaf: torch.Tensor) -> torch.dtype:
    return torch.int64 if leaf.dtype is torch.bool else leaf.dtype


def _overflow(dtype: torch.dtype, path: str) -> ConfigurationError:
    limits = torch.iinfo(dtype)
    return ConfigurationError(
        f"the sum of {path} does not fit its dtype (expected {limits.min} <= sum <= {limits.max} for {dtype}, got"
        " more). Convert it to a larger integer dtype or to torch.float64 before the call."
    )


def _as_tensor(leaf: Leaf) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    dtype = torch.int64 if isinstance(leaf, int) else torch.float64
    return torch.tensor(leaf, dtype=dtype, device=CPU)


def to_payload(leaves: Sequence[Leaf], device: torch.device) -> torch.Tensor:
    """The sizes of all tensors' dimensions as int64, then all leaves' elements: flat uint8 on ``device``."""
    sizes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
    parts = [torch.tensor(sizes, dtype=torch.int64, device=CPU), *map(_as_tensor, leaves)]
    return torch.cat([_bytes_of(part).to(device) for part in parts])


def from_payload(leaves: Sequence[Leaf], payload: torch.Tensor) -> list[Any]:
    """Undo ``to_payload`` of a rank's leaves that are like these but for their sizes; copies."""
    dimensions = [leaf.dim() if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
    start = 8 * sum(dimensions)
    sizes = iter(payload[:start].clone().view(torch.int64).tolist())
    found: list[Any] = []
    for leaf, count in zip(leaves, dimensions, strict=True):
        like, shape = _as_tensor(leaf), list(islice(sizes, count))
        end = start + math.prod(shape) * like.element_size()
        # Cloned, because a view of wider elements needs memory that is aligned for them.
        part = payload[start:end].to(like.device).clone()
        if like.is_complex():
            found.append(torch.view_as_complex(part.view(like.dtype.to_real()).view([*shape, 2])))
        else:
            result = part.view(like.dtype).view(shape)
            found.append(result if isinstance(leaf, torch.Tensor) else type(leaf)(result.item()))
        start = end
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format)  # contiguous() leaves one element its odd stride
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
