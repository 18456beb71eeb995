"""A chunk's optimizer on the server: the arithmetic of a ``torch.optim`` class over flat memory. Pure.

chunk     |_________________________________________________|
runs      |  group 0  |  group 0  |  -1  |  group 1         |      one for each parameter; -1: not trained
stretches |      one tensor       |      |  one tensor      |      neighbours that have stepped alike step as one
"""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from psengine.errors import ProtocolError
from psengine.flat_optimizers.stretches import STEPS, Stretch, step_in_copy, step_sgd
from psengine.protocol.hyperparameters import SLOTS, check_groups, slot_names
from psengine.protocol.messages import ErrorCode

_MAX_STEPS = 2**53


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The optimizer of one chunk, as CONFIGURE describes it."""

    name: str  # of a ``torch.optim`` class, one of ``hyperparameters.OPTIMIZERS``
    groups: tuple[dict[str, Any], ...]  # the hyperparameters of each parameter group, checked; not to be mutated
    # (start, end, group): elements start <= i < end follow that group, -1 where they are not trained. They tile the
    # chunk, one for each parameter, because a parameter may lack a gradient by itself.
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_body(cls, body: Mapping[str, Any], numel: int) -> OptimizerSpec:
        """Check a body that a peer sent for a chunk of ``numel`` elements.

        Raises:
            ProtocolError: an optimizer, hyperparameter or run that is not allowed.
        """
        groups, runs = check_groups(body["optimizer"], body["groups"]), body["runs"]
        position = 0
        for index, (start, end, group) in enumerate(runs):
            if start != position or not start < end <= numel:
                raise _refusal(
                    f"runs tile the chunk (expected run {index} to begin at {position} and end by {numel},"
                    f" got [{start}, {end}))"
                )
            if not -1 <= group < len(groups):
                raise _refusal(f"run {index} names a group (expected -1 <= group < {len(groups)}, got {group})")
            position = end
        if position != numel:
            raise _refusal(f"runs tile the chunk (expected the last to end at {numel}, got {position})")
        return cls(str(body["optimizer"]), tuple(groups), tuple((start, end, group) for start, end, group in runs))

    def to_body(self) -> dict[str, Any]:
        """Inverse of ``from_body``; JSON-able."""
        return {"optimizer": self.name, "groups": list(self.groups), "runs": [list(run) for run in self.runs]}


class ChunkOptimizer:
    """Steps one chunk's values like its ``torch.optim`` class steps the parameters the chunk is made of, bit for bit.

    Groups that are "fused" step by torch's fused kernels, which round differently. All kernels may round the last
    elements of a tensor, which fill no vector, differently too; so a parameter is cut at whole cache lines.

    Args:
        values: 1-D, contiguous, on the CPU, of a floating or complex dtype; mutated by ``apply``. Views of it are kept:
            overwrite values in place only.
        spec: made for as many elements.

    Raises:
        ProtocolError: a fused kernel cannot step the chunk's dtype.
    """

    def __init__(self, values: Tensor, spec: OptimizerSpec) -> None:
        assert values.shape == (spec.runs[-1][1] if spec.runs else 0,)
        assert values.is_contiguous()
        assert values.is_floating_point() or values.is_complex()
        self._values = values
        self._spec = spec
        self._groups = list(spec.groups)
        self._check_kernels(self._groups)
        self._slots: dict[str, Tensor] = {}
        self._steps = [0.0] * len(spec.runs)
        self._stretches: list[Stretch] = []
        self._absent: tuple[tuple[int, int], ...] | None = None  # what the stretches were made for
        self._make_slots()

    @property
    def spec(self) -> OptimizerSpec:
        """The chunk's optimizer, with the hyperparameters of the last ``apply``."""
        return replace(self._spec, groups=tuple(self._groups))

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots; grows where an ``apply`` switches on what needs another (momentum, amsgrad, centered)."""
        return sum(slot.nbytes for slot in self._slots.values())

    def apply(
        self,
        gradient: Tensor,
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        learning_rate_scale: float = 1.0,
        absent: Sequence[tuple[int, int]] = (),
        into: Tensor | None = None,
    ) -> None:
        """Take one step: mutate the values and the state. On an error neither has changed.

        Args:
            gradient: of the shape and dtype of the values; read only.
            groups: hyperparameters from now on, one map for each group; None keeps those of the last step.
            learning_rate_scale: factor on every learning rate, this time only.
            absent: [start, end) of whole runs that have no gradient this time; their values and state stay.
            into: other memory like the values: the new values are written there, and are the values from then on. The
                old ones stay as they are.

        Raises:
            ProtocolError: hyperparameters out of bounds, or an absent range that cuts a run.
        """
        numel = self._values.numel()
        assert gradient.dim() == 1
        assert gradient.numel() == numel
        assert gradient.dtype is self._values.dtype
        changed = self._check_change(groups) if groups is not None and groups != self._groups else None
        ranges = tuple(absent)
        if ranges != self._absent:
            self._plan(ranges)
        if changed is not None:
            is_planned_anew = list(map(self._is_fused, changed)) != list(map(self._is_fused, self._groups))
            self._groups = changed
            if self._make_slots() or is_planned_anew:
                self._plan(ranges)
        step = STEPS[self._spec.name]
        if into is not None and into is not self._values:
            if self._step_into(into, gradient, learning_rate_scale):
                return
            self.move_to(into.copy_(self._values))
        for stretch in self._stretches:
            options = dict(self._groups[stretch.group])
            options["lr"] *= learning_rate_scale
            options.pop("fused", None)
            is_whole = stretch.end - stretch.start == numel
            part = gradient if is_whole else gradient[stretch.start : stretch.end]
            if stretch.needs_copy:
                step_in_copy(step, stretch, part, options)
            else:
                step(stretch, part, options)

    def check(self, groups: Sequence[Mapping[str, Any]] | None, absent: Sequence[tuple[int, int]]) -> None:
        """Raise ProtocolError where ``apply`` would for these; nothing changes."""
        if groups is not None:
            self._check_change(groups)
        self._present_runs(tuple((start, end) for start, end in absent))

    def slots(self) -> dict[str, Tensor]:
        """The state by torch's names, each like ``values``: not copies."""
        return dict(self._slots)

    def steps(self) -> list[float]:
        """For each run how many steps it has taken (torch's ``step``); of SGD 1 where there is a momentum buffer."""
        self._settle()
        return list(self._steps)

    def load_slot(self, name: str, tensor: Tensor, steps: Sequence[float]) -> None:
        """Overwrite one slot by a copy of ``tensor``, which is like ``values``, and the steps of all.

        Raises:
            ProtocolError: not a slot of this optimizer, or steps that count nothing.
        """
        self.check_slot(name)
        if len(steps) != len(self._steps):
            raise _refusal(f"steps are those of each run (expected {len(self._steps)} numbers, got {len(steps)})")
        for count in steps:
            if not isinstance(count, (int, float)) or not 0 <= count < _MAX_STEPS:
                raise _refusal(f"steps count (expected 0 <= steps < 2**53, got {reprlib.repr(count)})")
        if name not in self._slots:
            self._make_slot(name)
        self._slots[name].copy_(tensor)
        self._steps = [float(count) for count in steps]
        self._stretches, self._absent = [], None

    def check_slot(self, name: str) -> None:
        """Raise ProtocolError unless the optimizer may have such a slot."""
        if name not in SLOTS[self._spec.name]:
            known = ", ".join(SLOTS[self._spec.name])
            raise _refusal(f"{self._spec.name} has no such slot (expected one of {known}, got {name[:80]!r})")

    def _step_into(self, into: Tensor, gradient: Tensor, learning_rate_scale: float) -> bool:
        """Step from the values to ``into`` in one pass, where there is one; whether that was so."""
        only = self._stretches[0] if len(self._stretches) == 1 else None
        if only is None or only.end - only.start != self._values.numel() or self._spec.name != "SGD":
            return False
        group = self._groups[only.group]
        if not step_sgd(only, gradient, {**group, "lr": group["lr"] * learning_rate_scale}, into):
            return False
        self.move_to(into)
        return True

    def move_to(self, values: Tensor) -> None:
        """Go on with ``values``, a copy of the old ones in other memory."""
        assert values.shape == self._values.shape
        self._values = values
        for stretch in self._stretches:
            stretch.values = values[stretch.start : stretch.end]

    def _check_change(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        checked = check_groups(self._spec.name, groups)
        if len(checked) != len(self._groups):
            raise _refusal(
                f"an optimizer keeps its parameter groups (expected {len(self._groups)}, got {len(checked)})"
            )
        self._check_kernels(checked)
        return checked

    def _check_kernels(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if self._values.is_complex() and any(map(self._is_fused, groups)):
            raise _refusal(f"fused kernels step real numbers (expected fused=False, got True for {self._values.dtype})")

    def _is_fused(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get("fused")) and (self._spec.name, self._values.dtype) not in _WRONG_KERNELS

    def _make_slots(self) -> bool:
        """Allocate the slots that the groups need; whether any was missing."""
        missing = [name for name in slot_names(self._spec.name, self._groups) if name not in self._slots]
        for name in missing:
            self._make_slot(name)
        return bool(missing)

    def _make_slot(self, name: str) -> None:
        slot = self._slots[name] = torch.zeros_like(self._values)
        if self._spec.name == "Adagrad":
            for start, end, group in self._spec.runs:
                if group >= 0:
                    initial = self._groups[group]["initial_accumulator_value"]
                    slot[start:end].fill_(complex(initial, initial) if slot.is_complex() else initial)

    def _plan(self, absent: tuple[tuple[int, int], ...]) -> None:
        """Join the runs that step alike, without those in ``absent``."""
        present = self._present_runs(absent)
        self._settle()
        may_join = self._values.dtype not in (torch.float16, torch.bfloat16)
        self._stretches = []
        spans: list[list[int]] = []
        for index in present:
            joins = may_join and not self._is_fused(self._groups[self._spec.runs[index][2]])
            if joins and spans and self._step_alike(spans[-1][-1], index):
                spans[-1].append(index)
            else:
                spans.append([index])
        for runs in spans:
            start, end, group = self._spec.runs[runs[0]][0], self._spec.runs[runs[-1]][1], self._spec.runs[runs[0]][2]
            slots = {name: slot[start:end] for name, slot in self._slots.items()}
            steps = torch.tensor(self._steps[runs[0]], device="cpu")
            is_fused = self._is_fused(self._groups[group])
            self._stretches.append(Stretch(start, end, group, runs, steps, self._values[start:end], slots, is_fused))
        self._absent = absent

    def _step_alike(self, left: int, right: int) -> bool:
        """Whether two runs are neighbours of one group that have taken equally many steps."""
        (_, end, group), (start, _, other_group) = self._spec.runs[left], self._spec.runs[right]
        return end == start and group == other_group and self._steps[left] == self._steps[right]

    def _present_runs(self, absent: tuple[tuple[int, int], ...]) -> list[int]:
        edges = _union(absent)
        present = []
        for index, (start, end, group) in enumerate(self._spec.runs):
            if group < 0:
                continue
            # An even number of edges lies before what is outside every range.
            before = bisect_left(edges, start + 1)
            if bisect_left(edges, end) != before:
                raise _refusal(
                    f"parameters lack a gradient as a whole (expected absent ranges of whole runs, got one that cuts"
                    f" [{start}, {end})). Configure a run for each parameter."
                )
            if before % 2 == 0:
                present.append(index)
        return present

    def _settle(self) -> None:
        """Write the stretches' steps back to their runs."""
        for stretch in self._stretches:
            steps = stretch.steps.item()
            for run in stretch.runs:
                self._steps[run] = steps


def _union(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The edges of the union of [start, end) ranges: start, end, start, end, ... ascending."""
    edges: list[int] = []
    for start, end in sorted(ranges):
        if edges and start <= edges[-1]:
            edges[-1] = max(edges[-1], end)
        elif start < end:
            edges += [start, end]
    return edges


# Before torch 2.14 fused SGD is wrong for 16-bit tensors on the CPU (with lr=0.1 elements are off by 0.5 after five
# steps), and reads past its tensor: the plain kernels step them.
_WRONG_KERNELS = {("SGD", torch.float16), ("SGD", torch.bfloat16)}


def _refusal(text: str) -> ProtocolError:
    return ProtocolError(text, ErrorCode.BAD_VALUE)
