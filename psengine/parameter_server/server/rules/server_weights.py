"""A chunk whose weights are here: its optimizer steps with gradients, and the answer is the new weights.

A worker that lost an answer, or joins, gets the current ones. Which gradients, and when, is for ``apply.py`` and
``merge.py`` to say.
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
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.parameter_server.server.rules.exchange import Contribution, Reply
from psengine.parameter_server.server.rules.held_weights import HeldWeights
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode


class ServerWeights(ChunkRule):
    """See the module's text."""

    holds_weights = True
    pushed_kinds = frozenset({ChunkKind.PARAMETER, ChunkKind.BUFFER})

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, *arguments: Any) -> None:
        if values is None:
            raise ProtocolError(f"{spec.describe()}: expected initial values as payload, got none")
        super().__init__(spec, values, *arguments)
        self._place = Place(values)
        self._is_parameter = spec.kind is ChunkKind.PARAMETER
        self._scales_by_staleness = self.options.get("staleness_scaling") == "inverse"
        strength: float = self.options.get("delay_compensation", 0.0) if self._is_parameter else 0.0
        # None keeps no backups.
        self._compensation = DelayCompensation(strength, self.options.get("compensation_decay")) if strength else None
        self._held = HeldWeights(self.payloads) if self._is_parameter and self.payloads.answers_differences else None
        # The weights that each worker was last sent, and their version.
        self._backups: dict[int, tuple[int, torch.Tensor]] = {}
        # By rank, why its last contribution does not count.
        self._refused: dict[int, str] = {}

    @property
    @override
    def values(self) -> torch.Tensor:
        return self._place.values

    @property
    @override
    def remembers_answers(self) -> bool:
        return self._compensation is not None or self._held is not None

    @override
    def configure(self, spec: OptimizerSpec) -> None:
        if not self._is_parameter:
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

    # ---- steps -------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._is_parameter and self.optimizer is None:
            text = f"{self.spec.describe()} has no optimizer yet; the worker has to send CONFIGURE first"
            raise ProtocolError(text, ErrorCode.NOT_READY)

    def _reason_to_refuse(self, contribution: Contribution) -> str | None:
        if contribution.values is None:
            return "abstained"
        # A buffer may hold infinities on purpose, such as an attention mask.
        return "non_finite" if self._is_parameter and not is_finite(contribution.values) else None

    def _note_reason(self, contribution: Contribution, reason: str | None) -> None:
        """Remember why a contribution does not count, if it does not: its answer says so."""
        self._refused.pop(contribution.rank, None)
        if reason is None:
            return
        self._refused[contribution.rank] = reason
        self.context.statistics.refused[reason] += 1
        if reason != "abstained":  # a worker that only asks for weights
            self.context.discarded(contribution, self.spec, reason)

    def _step(self, values: torch.Tensor, given: Sequence[Contribution]) -> None:
        """Step with the combined ``values`` of these contributions: one version. An error leaves all as it was.

        After a restart workers may be ahead of the restored weights for one push.
        """
        if self.optimizer is None:
            self._overwrite(values)
        else:
            staleness = max(0, self.version - min(one.base_version for one in given))
            place = self.memory.next_of(self._place)
            self.optimizer.apply(
                self._compensated(values, given, staleness),
                groups=groups_of(given),
                # Zhang et al. 2016, "Staleness-aware Async-SGD" (https://arxiv.org/abs/1511.05950)
                learning_rate_scale=1.0 / (staleness + 1) if self._scales_by_staleness else 1.0,
                absent=absent_in_all(given),
                into=place.values,
            )
            self._place = place
        if self._is_parameter:
            statistics = self.context.statistics
            statistics.applied += len(given)
            for one in given:
                statistics.count_staleness(max(0, self.version - one.base_version), one.rank)
        self.version += 1

    def _compensated(self, gradient: torch.Tensor, given: Sequence[Contribution], staleness: int) -> torch.Tensor:
        """With delay compensation: the gradient of one worker, corrected for what changed since its weights left."""
        if self._compensation is None:
            return gradient
        if self.optimizer is not None:
            self.optimizer.check(groups_of(given), absent_in_all(given))  # before anything changes
        self._compensation.observe(gradient)
        if not staleness or len(given) > 1:
            return gradient
        version, backup = self._backups.get(given[0].rank, (-1, gradient))
        if version != given[0].base_version:
            return gradient
        return self._compensation.correct(gradient, self.values, backup)

    def _overwrite(self, values: torch.Tensor) -> None:
        place = self.memory.next_of(self._place)
        place.values.copy_(values)
        if self.optimizer is not None:
            self.optimizer.move_to(place.values)
        self._place = place

    # ---- answers -----------------------------------------------------------------------------------------------

    def _answer(self, rank: int, step: int, *, repeated: bool = False) -> Reply:
        """UPDATED; ``repeated``: the worker may have received the first one, so that this must bring the same."""
        version, place = self.version, self._place
        if self._held is not None:
            version, payload = self._held.answer(rank, step, version, self.values, repeated=repeated)
            place = Place(payload)
            if self._compensation is not None:
                self._backups[rank] = version, self._held.values(rank)
        elif self._compensation is not None:
            if not repeated or rank not in self._backups:
                self._back_up(rank)
            version, backup = self._backups[rank]
            place = Place(self.payloads.encode(backup))
        elif self.payloads.encodes_answers:
            place = Place(self.payloads.encode(self.values))
        answer = self._updated(rank, step, version, place)
        if rank in self._refused:
            answer.body["refused"] = self._refused[rank]
        return answer

    def _back_up(self, rank: int) -> None:
        if self._compensation is not None:
            self._backups[rank] = self.version, self.values.clone()

    def _note_held(self, contribution: Contribution) -> None:
        if self._held is not None:
            self._held.note(contribution.rank, contribution.held)

    def _forget_answers(self, rank: int) -> None:
        """The worker is gone."""
        self._backups.pop(rank, None)
        if self._held is not None:
            self._held.forget(rank)

    # ---- values and memory -------------------------------------------------------------------------------------

    @override
    def read(self) -> tuple[int, torch.Tensor]:
        return self.version, self.values

    @override
    def store(self, values: torch.Tensor, version: int) -> None:
        self._overwrite(values)
        if self._held is not None:
            self._held.forget()
        self.version += 1

    @override
    def note_base(self, rank: int) -> int:
        self._back_up(rank)
        return self.version

    @override
    def lent_places(self, workers: int) -> int:
        is_lent = self.spec.kind in self.pushed_kinds and self._compensation is None
        # Each may read another version, and who pushes reads none.
        return workers if is_lent and not self.payloads.encodes_answers else 0

    @override
    def size_bytes(self) -> int:
        size_bytes = (1 + len(self._backups)) * self.spec.size_bytes + self.memory.extra_bytes
        parts = (self.optimizer, self._held, self._compensation)
        return size_bytes + sum(part.size_bytes for part in parts if part is not None)

    @override
    def to_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "version": self.version,
            "backup_versions": {str(rank): version for rank, (version, _) in self._backups.items()},
            "refused": {str(rank): reason for rank, reason in self._refused.items()},
        }
        if self._held is not None:
            meta["held_weights"] = self._held.to_meta()
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
        return tensors | (self._held.tensors() if self._held is not None else {})

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = meta["version"]
        self._refused = {int(rank): reason for rank, reason in meta["refused"].items()}
        self._backups = {
            int(rank): (version, tensors[f"backup/{rank}"]) for rank, version in meta["backup_versions"].items()
        }
        if self._compensation is not None:
            self._compensation.mean_squares = tensors.get("mean_squares")
        if self._held is not None:
            self._held.restore(meta["held_weights"], tensors)
        if "optimizer" in meta:
            self.configure(OptimizerSpec.from_body(meta["optimizer"], self.spec.numel))
            assert self.optimizer is not None
            for name, tensor in tensors.items():
                if name.startswith("slot/"):
                    self.optimizer.load_slot(name.removeprefix("slot/"), tensor, meta["steps"])


def groups_of(contributions: Sequence[Contribution]) -> Sequence[Mapping[str, Any]] | None:
    """The hyperparameters that the first contribution brings which brings any."""
    return next((one.groups for one in contributions if one.groups is not None), None)


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
