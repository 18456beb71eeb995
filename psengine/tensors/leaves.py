"""The leaves of a metric: numbers and tensors, found in a value by torch's pytree, as addends and back. Pure.

::

    value ── Leaves ── as_float64, as_halves ── added over the ranks ── from_float64, from_halves ── rebuild ── a value

Each ``from_*`` takes a sum, and the leaf that gives the result its type, dtype and device.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from psengine.errors import ArgumentTypeError, ConfigurationError, PSEngineError

INTEGER_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32}
)
LOW_HALF = 2**32 - 1

Leaf = torch.Tensor | bool | int | float


class Leaves:
    """A value taken apart; the order of its leaves, that of their paths, is the same on all ranks.

    Attributes:
        paths: where each leaf stands, such as "value['loss']".
        leaves: Python's bool, int and float, and detached dense tensors.
        faults: by path, the kind of a leaf that is none of these, and the error to raise once the other ranks know.
    """

    def __init__(self, value: Any) -> None:
        found, self._spec = tree_flatten_with_path(value)
        paths = [f"value{keystr(path)}" for path, _ in found]
        # Keys may have been added in another order on another rank.
        self._order = sorted(range(len(found)), key=paths.__getitem__)
        self.paths = [paths[i] for i in self._order]
        self.faults: dict[str, tuple[str, PSEngineError]] = {}
        self.leaves = [self._leaf(paths[i], found[i][1]) for i in self._order]

    def _leaf(self, path: str, value: Any) -> Leaf:
        if isinstance(value, torch.Tensor):
            if _is_dense(value):
                return value.detach()
            kind = f"a tensor of {value.dtype} and layout {value.layout} on {value.device.type}"
        elif isinstance(value, bool):
            return value
        elif isinstance(value, numbers.Integral):
            if -(2**63) <= int(value) < 2**63:
                return int(value)
            rule = f"{path} does not fit int64 (expected -2**63 <= value < 2**63, got {value})"
            self.faults[path] = "an int beyond int64", ConfigurationError(f"{rule}. Pass a float instead.")
            return 0
        elif isinstance(value, numbers.Real):
            return to_float(value)
        else:
            kind = type(value).__name__
        error = ArgumentTypeError(
            f"{path} is no metric (expected a number, a dense tensor of numbers, or a dict, list or tuple of them, got"
            f" {kind}). Leave it out, or turn it into a float or a tensor."
        )
        self.faults[path] = kind, error
        return 0

    def kinds(self, kind: Callable[[Leaf], str]) -> dict[str, str]:
        """By path, what must be the same on all ranks."""
        return {path: kind(leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)}

    def rebuild(self, results: Sequence[Any]) -> Any:
        """The value's structure, in new containers, around one result for each leaf."""
        placed = dict(zip(self._order, results, strict=True))
        return tree_unflatten([placed[i] for i in range(len(placed))], self._spec)


def kind_to_add(leaf: Leaf) -> str:
    """What must be alike to add leaves: a number's type, or a tensor's dtype and shape."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype} with shape {list(leaf.shape)}"
    return f"a Python {type(leaf).__name__}"


def kind_to_average(leaf: Leaf) -> str:
    """As ``kind_to_add``, but all Python numbers are alike: a rank without data says 0 where others say 0.5."""
    return kind_to_add(leaf) if isinstance(leaf, torch.Tensor) else "a Python number"


def kind_to_gather(leaf: Leaf) -> str:
    """As ``kind_to_add``, but a tensor's sizes may differ."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype} with {leaf.dim()} dimensions"
    return kind_to_add(leaf)


def _is_dense(tensor: torch.Tensor) -> bool:
    is_number = tensor.dtype in INTEGER_DTYPES or tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.layout is torch.strided and not tensor.is_meta


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


def as_float64(leaf: Leaf) -> torch.Tensor:
    """The leaf as real float64 numbers; a complex one has a last dimension of 2 more."""
    if not isinstance(leaf, torch.Tensor):
        return torch.tensor(float(leaf), dtype=torch.float64, device="cpu")
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
    whole = leaf if isinstance(leaf, torch.Tensor) else torch.tensor(int(leaf), dtype=torch.int64, device="cpu")
    whole = whole.to(torch.int64)
    return torch.stack([whole >> 32, whole & LOW_HALF])


def from_halves(leaf: Leaf, halves: torch.Tensor, path: str) -> Any:
    """Undo ``as_halves`` on sums of them; a bool tensor's comes back as int64.

    Raises:
        ConfigurationError: the sum does not fit the tensor's dtype.
    """
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


def first_difference(descriptions: list[dict[str, str]], this_rank: int) -> str:
    """Say in which path's kind the ranks' descriptions, which are not all equal, differ; for an error."""
    paths = dict.fromkeys(path for description in descriptions for path in description)
    path = next(path for path in paths if len({description.get(path) for description in descriptions}) > 1)
    kinds = [description.get(path, "nothing") for description in descriptions]
    others: dict[str, list[str]] = {}
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            others.setdefault(kind, []).append(str(rank))
    got = ", ".join(f"{kind} on rank {' and '.join(ranks)}" for kind, ranks in others.items())
    return (
        f"every rank makes the same call, with values of the same keys, types and shapes (expected {path} to be"
        f" {kinds[0]} as on rank 0, got {got}; seen on rank {this_rank})"
    )
