"""Outcome "step": the chunk's optimizer steps with the gradient, and the answer is the chunk's new weights.

The weights are here, so a worker that lost an answer, or joins, gets the current ones. ``values`` are the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.flat_optimizers.finite import is_finite
from psengine.flat_optimizers.kernel_windows import places_of
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.parameter_server.server.rules.exchange import Contribution, PayloadPins, Reply, Update, ValueMemory
from psengine.parameter_server.server.rules.held_weights import HeldWeights
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode


class StepOutcome(Outcome):
    """See the module's text."""

    holds_weights = True
    pushed_kinds = frozenset({ChunkKind.PARAMETER, ChunkKind.BUFFER})
    values: torch.Tensor

    def __init__(
        self,
        spec: ChunkSpec,
        values: torch.Tensor | None,
        payloads: ChunkPayloads,
        statistics: JobStatistics,
        options: Mapping[str, Any],
    ) -> None:
        if values is None:
            raise ProtocolError(f"{spec.describe()}: expected initial values as payload, got none")
        super().__init__(spec, values, payloads, statistics, options)
        self._pins = PayloadPins()
        self._scales_by_staleness = options.get("staleness_scaling") == "inverse"
        is_parameter = spec.kind is ChunkKind.PARAMETER
        strength: float = options.get("delay_compensation", 0.0) if is_parameter else 0.0
        # None keeps no backups.
        self._compensation = DelayCompensation(strength, options.get("compensation_decay")) if strength else None
        self._held = HeldWeights(payloads) if is_parameter and payloads.answers_differences else None
        # The weights that each worker was last sent, and their version.
        self._backups: dict[int, tuple[int, torch.Tensor]] = {}

    @property
    @override
    def is_ready(self) -> bool:
        return self.optimizer is not None or self.spec.kind is not ChunkKind.PARAMETER

    @override
    def configure(self, spec: OptimizerSpec) -> None:
        if self.spec.kind is not ChunkKind.PARAMETER:
            super().configure(spec)
        if self.optimizer is None:
            self.optimizer = ChunkOptimizer(self.values, spec, places_of(spec.runs, self.spec.segments))
            return
        known = self.optimizer.spec
        # Hyperparameters may differ, and change.
        if (known.name, len(known.groups), known.runs) != (spec.name, len(spec.groups), spec.runs):
            raise ProtocolError(
                f"{self.spec.describe()} has another optimizer already (expected {known.name} of {len(known.groups)}"
                f" groups over {len(known.runs)} runs, got {spec.name} over {len(spec.runs)} runs). Every worker of a"
                " job needs the same optimizer and parameter groups.",
                ErrorCode.RULE_MISMATCH,
            )

    @override
    def accepts(self, values: torch.Tensor) -> bool:
        # A buffer may hold infinities on purpose, such as an attention mask.
        return self.spec.kind is not ChunkKind.PARAMETER or is_finite(values)

    @override
    def conclude(self, sequence: int, update: Update) -> None:
        if update.values is None:
            return
        if self.optimizer is None:
            self._overwrite(update.values)
            return
        memory = self._next_memory()
        self.optimizer.apply(
            self._compensated(update.values, update),
            groups=groups_of(update.contributions),
            # Zhang et al. 2016, "Staleness-aware Async-SGD" (https://arxiv.org/abs/1511.05950)
            learning_rate_scale=1.0 / (update.staleness + 1) if self._scales_by_staleness else 1.0,
            absent=absent_in_all(update.contributions),
            into=memory.values,
        )
        self.values, self._pins = memory

    def _compensated(self, gradient: torch.Tensor, update: Update) -> torch.Tensor:
        """With delay compensation: the gradient of one worker, corrected for what changed since its weights left."""
        if self._compensation is None:
            return gradient
        self._compensation.observe(gradient)
        if not update.staleness or len(update.contributions) > 1:
            return gradient
        one = update.contributions[0]
        version, backup = self._backups.get(one.rank, (-1, gradient))
        if version != one.base_version:
            return gradient
        return self._compensation.correct(gradient, self.values, backup)

    def _next_memory(self) -> ValueMemory:
        """Where the next values are written: over the present ones, unless these are still being read."""
        is_held, memories = self._pins.are_held(), self._memories
        if is_held or (memories and all(one.pins is not self._pins for one in memories)):
            for one in memories:
                if not one.pins.are_held():
                    return one
        if is_held:
            return ValueMemory(torch.empty_like(self.values), PayloadPins())
        return ValueMemory(self.values, self._pins)

    def _overwrite(self, values: torch.Tensor) -> None:
        memory = self._next_memory()
        memory.values.copy_(values)
        if self.optimizer is not None:
            self.optimizer.move_to(memory.values)
        self.values, self._pins = memory

    @property
    @override
    def lends(self) -> bool:
        return self.spec.kind in self.pushed_kinds and self._compensation is None and not self.payloads.encodes_answers

    @override
    def places(self, workers: int) -> int:
        return workers  # each may read another version, and who pushes reads none

    @override
    def can_answer(self, first: int, last: int) -> bool:
        return last <= self.progress.version

    @override
    def answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        version, values, pins = self.progress.version, self.values, self._pins
        if self._held is not None:
            version, payload = self._held.answer(rank, sequence, version, values, repeated=repeated)
            if self._compensation is not None:
                self._backups[rank] = (version, self._held.values(rank))
            return self._updated(rank, sequence, version, payload, PayloadPins())
        if self._compensation is not None:
            # A repeat must bring what the first answer brought: the worker may have received that one.
            if not repeated or rank not in self._backups:
                self._back_up(rank)
            (version, values), pins = self._backups[rank], PayloadPins()
        if self.payloads.encodes_answers:
            pins = PayloadPins()
        return self._updated(rank, sequence, version, self.payloads.encode(values), pins)

    def _back_up(self, rank: int) -> None:
        if self._compensation is not None:
            self._backups[rank] = (self.progress.version, self.values.clone())

    @override
    def forget_before(self, sequence: int) -> None:
        """The current weights answer every exchange."""

    @override
    def note_held(self, contribution: Contribution) -> None:
        if self._held is not None:
            self._held.note(contribution.rank, contribution.held)

    @override
    def worker_left(self, rank: int) -> None:
        self._backups.pop(rank, None)
        if self._held is not None:
            self._held.forget(rank)

    @override
    def read(self) -> tuple[int, torch.Tensor]:
        return self.progress.version, self.values

    @override
    def store(self, values: torch.Tensor, version: int) -> None:
        self._overwrite(values)
        if self._held is not None:
            self._held.forget()

    @override
    def note_base(self, rank: int) -> int:
        self._back_up(rank)
        return self.progress.version

    @override
    def extra_bytes(self) -> int:
        optimizer_bytes = self.optimizer.size_bytes if self.optimizer is not None else 0
        held_bytes = 0 if self._held is None else self._held.size_bytes
        mean_bytes = 0 if self._compensation is None else self._compensation.size_bytes
        return (
            optimizer_bytes
            + held_bytes
            + mean_bytes
            + (len(self._backups) + max(0, len(self._memories) - 1)) * self.spec.size_bytes
        )

    @override
    def to_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "version": self.progress.version,
            "backup_versions": {str(rank): version for rank, (version, _) in self._backups.items()},
        }
        if self.optimizer is not None:
            meta["optimizer"] = self.optimizer.spec.to_body()  # with the current hyperparameters
            meta["steps"] = self.optimizer.steps()
        return meta

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"values": self.values}
        if self.optimizer is not None:
            tensors.update({f"slot/{name}": tensor for name, tensor in self.optimizer.slots().items()})
        tensors.update({f"backup/{rank}": backup for rank, (_, backup) in self._backups.items()})
        if self._compensation is not None and self._compensation.mean_squares is not None:
            tensors["mean_squares"] = self._compensation.mean_squares
        return tensors

    @override
    def under_way(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return ({}, {}) if self._held is None else self._held.under_way()

    @override
    def go_on(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        if self._held is not None:
            self._held.go_on(meta, tensors)

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.values.copy_(tensors["values"])
        self.progress.version = meta["version"]
        self._backups = {
            int(rank): (version, tensors[f"backup/{rank}"]) for rank, version in meta["backup_versions"].items()
        }
        if self._compensation is not None:
            self._compensation.mean_squares = tensors.get("mean_squares")
        if "optimizer" in meta:
            self.configure(OptimizerSpec.from_body(meta["optimizer"], self.spec.numel))
            assert self.optimizer is not None
            for name, tensor in tensors.items():
                if name.startswith("slot/"):
                    self.optimizer.load_slot(name.removeprefix("slot/"), tensor, meta["steps"])


def groups_of(contributions: Sequence[Contribution]) -> Sequence[Mapping[str, Any]] | None:
    """The hyperparameters that the first contribution brings which brings any."""
    for one in contributions:
        if one.groups is not None:
            return one.groups
    return None


def absent_in_all(contributions: Sequence[Contribution]) -> Sequence[tuple[int, int]]:
    """[start, end) ranges of elements for which no contribution has a gradient."""
    common = contributions[0].absent
    for one in contributions[1:]:
        common = [
            (max(start, other_start), min(end, other_end))
            for start, end in common
            for other_start, other_end in one.absent
            if max(start, other_start) < min(end, other_end)
        ]
    return common
