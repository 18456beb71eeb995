"""The part of an optimizer that one rank runs: a chunk optimizer, the servers' own, for each of its blocks.

Between two steps ``optimizer.state`` is empty, or a copy for ``state_dict``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ConfigurationError, ReductionError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.protocol.hyperparameters import SLOTS, optimizer_name, slot_names, wire_groups
from psengine.strategies.sharding.flat_parameters import FlatParameters, Section, in_memory_order
from psengine.strategies.sharding.plan import Piece
from psengine.strategies.step_hooks import ReplacedOptimizer


class ShareOptimizer(ReplacedOptimizer):
    """Steps this rank's blocks of ``flat`` as ``optimizer`` would.

    Args:
        optimizer: the distributed one. State that it has is taken over.
        flat: the parameters, placed.

    Attributes:
        blocks: those that this rank steps.

    Raises:
        ConfigurationError: an optimizer or hyperparameters that psengine's own arithmetic does not cover.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        super().__init__(optimizer, set(flat.parameters), "sync:shard_optimizer=true")
        self.flat = flat
        self._name = _name_of(optimizer)
        groups = _groups_of(optimizer)
        places = {parameter: index for index, parameter in enumerate(flat.parameters)}
        self._group_of = {
            places[parameter]: group
            for group, parameters in enumerate(self.groups)
            for parameter in parameters
            if parameter in places
        }
        # By index of the parameter: torch's "step"; of SGD 1 where there is a momentum buffer.
        self._steps = [0.0] * len(flat.parameters)
        self._slots: list[str] = []
        # By group, also those that are switched off (a momentum of 0): torch keeps them, and saves them.
        self._slots_of_group = [set(slot_names(self._name, [group])) for group in groups]
        self._make_slots(slot_names(self._name, groups))
        self.blocks = [
            _Block(self, section, block, pieces, groups)
            for section in flat.sections
            for block, pieces in enumerate(section.plan.pieces_by_block())
            if section.plan.owner_of(block) == flat.collective.rank
        ]
        if optimizer.state:
            self.take_state()

    @staticmethod
    def agreed_options(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> dict[str, str]:
        """What all ranks have to choose alike, by name; ``parameters``: those that are exchanged.

        Raises:
            ConfigurationError: an optimizer that cannot be sharded.
        """
        places = {parameter: index for index, parameter in enumerate(parameters)}
        options = {"optimizer": _name_of(optimizer), "has_state": str(bool(optimizer.state)).lower()}
        for number, (group, hyperparameters) in enumerate(
            zip(optimizer.param_groups, _groups_of(optimizer), strict=True)
        ):
            indices = [places[parameter] for parameter in group["params"] if parameter in places]
            options |= {f"group {number} {name}": str(value) for name, value in hyperparameters.items()}
            options[f"group {number} parameters"] = _ranges(indices)
        return options

    @property
    def size_bytes(self) -> int:
        """Bytes of the state that this rank keeps."""
        return sum(block.optimizer.size_bytes for block in self.blocks)

    def _make_slots(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._slots:
                self.flat.make_slot(name)
                self._slots.append(name)

    def make_block_optimizer(
        self, section: Section, block: int, pieces: Sequence[Piece], groups: Sequence[dict[str, Any]]
    ) -> ChunkOptimizer:
        """The optimizer of one block, whose runs are its pieces and the unused elements between them."""
        runs: list[tuple[int, int, int]] = []
        places: list[tuple[int, int]] = []
        first = block * section.plan.block_numel

        def fill_up_to(start: int) -> None:
            end = runs[-1][1] if runs else 0
            if start > end:
                runs.append((end, start, -1))
                places.append((0, start - end))

        for piece in pieces:
            index, start = section.indices[piece.parameter], piece.flat_start - first
            fill_up_to(start)
            runs.append((start, start + piece.numel, self._group_of.get(index, -1)))
            places.append((piece.start, self.flat.parameters[index].numel()))
        fill_up_to(section.plan.block_numel)
        return ChunkOptimizer(
            section.block_of(section.values, block),
            OptimizerSpec(self._name, tuple(groups), tuple(runs)),
            places,
            lambda slot: self.flat.slot_of(slot, section, block),
        )

    # ---- a step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step this rank's blocks, and return when all ranks' are stepped; all ranks call it.

        Raises:
            ConfigurationError, ReductionError: the optimizer or the parameters are not those that it was made for.
        """
        gradients = self._gradients()
        groups = _groups_of(self.optimizer)
        self._make_slots(slot_names(self._name, groups))
        for group, slots in zip(groups, self._slots_of_group, strict=True):
            slots.update(slot_names(self._name, [group]))
        self._drop_copies()  # those that state_dict() left there
        self.flat.begin_step()
        for block in self.blocks:
            block.step(gradients, groups)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._count_step(index, groups)
        self.flat.end_step()
        torch.autograd.graph.increment_version(self.flat.parameters)  # graphs from before are out of date

    def _count_step(self, index: int, groups: Sequence[dict[str, Any]]) -> None:
        if self._name != "SGD":
            self._steps[index] += 1
        elif groups[self._group_of[index]]["momentum"]:
            self._steps[index] = 1

    def _gradients(self) -> list[torch.Tensor | None]:
        """By index of the parameter its gradient in memory order; None where it has none, or is not trained."""
        self.check()
        flats: list[torch.Tensor | None] = []
        for index, parameter in enumerate(self.flat.parameters):
            gradient = parameter.grad if index in self._group_of else None
            flats.append(None if gradient is None else self._in_memory_order(index, gradient))
        if self.flat.has_whole_gradients and all(flat is None for flat in flats):
            warnings.warn(
                f"rank {self.flat.collective.rank}: no parameter of the sharded optimizer has a gradient, so this step"
                " changes nothing. Either backward was not called since zero_grad(), or the module has other parameters"
                " since it was wrapped (load_state_dict(..., assign=True)). Fix: load before wrapping, or without"
                " assign.",
                stacklevel=2,
            )
        return flats

    def _in_memory_order(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            raise ReductionError(
                f"parameter {self.flat.names[index]!r} has a sparse gradient, which a sharded optimizer does not step"
                f" (expected torch.strided, got {gradient.layout}). Fix: sparse=False, or strategy='sync'."
            )
        return in_memory_order(gradient.detach(), self.flat.parameters[index])

    @override
    def check(self) -> None:
        """As ``ReplacedOptimizer.check``; also for a parameter that was given other memory."""
        super().check()
        self.flat.check()

    # ---- state -------------------------------------------------------------------------------------------------

    def give_state(self) -> None:
        """Overwrite ``optimizer.state`` by copies of all ranks' state; over messages all ranks call it."""
        steps = self.flat.most_of(self._steps)
        state = self.optimizer.state
        self._drop_copies()
        wholes = {
            (slot, id(section)): self.flat.whole_slot(
                slot, section, [block.slot(slot) for block in self.blocks if block.section is section]
            )
            for slot in self._slots
            for section in self.flat.sections
        }
        for index, section, place in self._in_group_order():
            if not steps[index] and self._name != "Adagrad":
                continue
            parameter, entry = self.flat.parameters[index], {}
            if self._name != "SGD":
                entry["step"] = torch.tensor(steps[index], dtype=torch.float32)
            start = section.plan.offsets[place]
            for slot in SLOTS[self._name]:
                if slot not in self._slots_of_group[self._group_of[index]]:
                    continue
                copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                in_memory_order(copy, parameter).copy_(wholes[slot, id(section)][start : start + parameter.numel()])
                entry[slot] = copy
            if entry:
                state[parameter] = entry

    def take_state(self) -> None:
        """Take this rank's share of ``optimizer.state``, which is whole, and empty it; all ranks call it."""
        self.flat.begin_step()  # another rank may be reading for its state_dict()
        state = self.optimizer.state
        found = {slot for entry in state.values() for slot in entry if entry[slot] is not None}
        self._make_slots([slot for slot in SLOTS[self._name] if slot in found])
        for index, parameter in enumerate(self.flat.parameters):
            entry = state.get(parameter, {})
            is_counted = self._name != "SGD" or entry.get("momentum_buffer") is not None
            self._steps[index] = float(entry.get("step", 1.0)) if entry and is_counted else 0.0
            if index in self._group_of:
                self._slots_of_group[self._group_of[index]].update(found.intersection(entry))
        for block in self.blocks:
            block.take_state(self._slots)
        self._drop_copies()
        self.flat.settle_state()

    def _drop_copies(self) -> None:
        """Empty ``optimizer.state``, except for parameters that no rank steps: Adagrad has state of frozen ones."""
        if self.optimizer.state:
            for parameter in self.flat.parameters:
                self.optimizer.state.pop(parameter, None)

    def state_of(self, index: int, slot: str) -> torch.Tensor | None:
        """In memory order, a slot of ``optimizer.state``; None where the parameter has none."""
        parameter = self.flat.parameters[index]
        found = self.optimizer.state.get(parameter, {}).get(slot)
        return None if found is None else in_memory_order(found.to(parameter.dtype), parameter)

    def steps_of(self, index: int) -> float:
        """What torch calls "step", of a parameter."""
        return self._steps[index]

    def _in_group_order(self) -> Iterator[tuple[int, Section, int]]:
        """(index, section, place in it) of the optimizer's parameters, in its order."""
        places = {i: (section, place) for section in self.flat.sections for place, i in enumerate(section.indices)}
        indices = {parameter: index for index, parameter in enumerate(self.flat.parameters)}
        for parameters in self.groups:
            for parameter in parameters:
                if parameter in indices:
                    index = indices[parameter]
                    yield (index, *places[index])


class _Block:
    """One block of this rank."""

    def __init__(
        self, owner: ShareOptimizer, section: Section, block: int, pieces: Sequence[Piece], groups: Any
    ) -> None:
        self.section = section
        self.optimizer = owner.make_block_optimizer(section, block, pieces, groups)
        self._owner = owner
        first = block * section.plan.block_numel
        # (index of the parameter, first and last element in it, first element in the block)
        self._pieces = [
            (section.indices[p.parameter], p.start, p.start + p.numel, p.flat_start - first) for p in pieces
        ]
        is_one = len(pieces) == 1 and pieces[0].numel == section.plan.block_numel
        # Elements that are no parameter's stay zero.
        self._scratch = None if is_one else torch.zeros(section.plan.block_numel, dtype=section.dtype)

    def step(self, gradients: Sequence[torch.Tensor | None], groups: list[dict[str, Any]]) -> None:
        """Step with the gradients of all parameters, by index, and these hyperparameters."""
        absent, parts, places = [], [], []
        for index, start, end, at in self._pieces:
            gradient = gradients[index]
            if gradient is None:
                absent.append((at, at + end - start))
            else:
                parts.append(gradient[start:end])
                places.append(at)
        if not parts:
            return
        packed = self._scratch
        if packed is None:
            packed = parts[0]
        else:
            targets = [packed[at : at + part.numel()] for at, part in zip(places, parts, strict=True)]
            torch._foreach_copy_(targets, parts)
        self.optimizer.apply(packed, groups=groups, absent=absent)

    def slot(self, name: str) -> torch.Tensor:
        """The block's part of a slot; zeros where it has none yet."""
        found = self.optimizer.slots().get(name)
        return torch.zeros(self.section.plan.block_numel, dtype=self.section.dtype) if found is None else found

    def take_state(self, slots: Sequence[str]) -> None:
        """Take the block's part of the optimizer's whole state."""
        steps = self._steps()
        for slot in slots:
            whole = torch.zeros(self.section.plan.block_numel, dtype=self.section.dtype)
            for index, start, end, at in self._pieces:
                found = self._owner.state_of(index, slot)
                if found is not None:
                    whole[at : at + end - start] = found[start:end]
            self.optimizer.load_slot(slot, whole, steps)

    def _steps(self) -> list[float]:
        """By run."""
        starts = {at: index for index, _, _, at in self._pieces}
        return [
            self._owner.steps_of(starts[start]) if start in starts else 0.0 for start, _, _ in self.optimizer.spec.runs
        ]


def _ranges(indices: Sequence[int]) -> str:
    """Such as "0-3 7": errors stay readable where there are many."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    try:
        return optimizer_name(optimizer)
    except ConfigurationError as error:
        raise _refusal(error) from None


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    try:
        return wire_groups(optimizer)
    except ConfigurationError as error:
        raise _refusal(error) from None


def _refusal(error: ConfigurationError) -> ConfigurationError:
    return ConfigurationError(
        "shard_optimizer=true steps each rank's share with the arithmetic of psengine's servers, which does not cover"
        f" this optimizer. Fix: use one that it covers, or strategy='sync' without shard_optimizer. ({error})"
    )
