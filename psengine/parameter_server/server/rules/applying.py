"""Rule "apply": an update is applied when it arrives, and its answer is the chunk's new weights.

    rank 0   push ─► apply ─► weights           rank 2, four times slower
    rank 1      push ─► apply ─► weights        push ─► apply ─► weights
    rank 0         push ─► apply ─ held: more than max_staleness steps ahead of rank 2 ─────► weights

Unbounded without ``max_staleness``, with it the stale-synchronous parallel model (Ho et al. 2013, "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.flat_optimizers.kernel_windows import places_of
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec, compensate, is_finite, staleness_factor
from psengine.parameter_server.server.rules.consistency import ChunkRule, Push, Reply, RuleContext
from psengine.parameter_server.server.rules.loans import Loans
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode, MessageType


class ApplyingRule(ChunkRule):
    """See the module's text.

    Args:
        max_staleness: hold an answer while its worker's clock (number of its pushes) is more than this many ahead of
            the slowest live worker's; None never holds.
        scales_by_staleness: multiply the learning rate by 1 / (staleness + 1).
        delay_compensation: strength of the correction of DC-ASGD; 0 keeps no backups.

    ``version`` counts applied updates; ``values`` are the weights.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        values: torch.Tensor,
        context: RuleContext,
        *,
        max_staleness: int | None = None,
        scales_by_staleness: bool = False,
        delay_compensation: float = 0.0,
    ) -> None:
        super().__init__(spec, values, context)
        self.values: torch.Tensor = values
        self._loans = Loans()
        self.optimizer: ChunkOptimizer | None = None
        self.optimizer_spec: OptimizerSpec | None = None
        self._max_staleness = max_staleness
        self._scales_by_staleness = scales_by_staleness
        self._delay_compensation = delay_compensation
        self._clocks: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        # What each worker was last sent, and its version.
        self._backups: dict[int, tuple[int, torch.Tensor]] = {}
        # Pushes computed from older versions were under way when their worker's lease ran out.
        self._oldest_base: dict[int, int] = {}
        # What a snapshot had: the version, and each worker's last exchange in it.
        self._restored_version = 0
        self._restored_sequence: dict[int, int] = {}

    def restored(self, rank: int) -> tuple[int, int]:
        """The version, and the last exchange of worker ``rank``, that this server started with; (0, 0) without."""
        return self._restored_version, self._restored_sequence.get(rank, 0)

    def configure(self, spec: OptimizerSpec) -> None:
        """Attach the optimizer; a repetition of the same is no change.

        Raises:
            ValueError: another one is attached.
        """
        if self.optimizer_spec is None:
            self.optimizer = ChunkOptimizer(self.values, spec, places_of(spec.runs, self.spec.segments))
            self.optimizer_spec = spec
        elif _shape_of(self.optimizer_spec) != _shape_of(spec):
            known = self.optimizer_spec
            raise ValueError(f"{known.name} of {len(known.groups)} groups over {len(known.runs)} runs")

    @override
    def push(self, push: Push) -> list[Reply]:
        rank = push.rank
        last = self.last_sequence.get(rank, 0)
        if push.sequence <= last:
            self.context.statistics.duplicates += 1
            return []
        if self.spec.kind is ChunkKind.PARAMETER and self.optimizer is None:
            text = f"{self.spec.describe()} has no optimizer yet; the worker has to send CONFIGURE first"
            return [
                self.reply(MessageType.ERROR, rank, push.sequence, body={"code": ErrorCode.NOT_READY, "text": text})
            ]
        reason = self._reason_to_refuse(push)
        if reason is None:
            self._apply(push)  # an error leaves everything as it was
            self._refused.pop(rank, None)
        else:
            self._refused[rank] = reason
            self.context.statistics.count_refused(reason)
        self.last_sequence[rank] = push.sequence
        self._clocks[rank] = self._clocks.get(rank, 0) + 1
        if self._max_staleness is None:
            return [self._answer(rank)]
        self._held[rank] = push.sequence
        return self._release()

    def _reason_to_refuse(self, push: Push) -> str | None:
        if push.values is None:
            return "abstained"
        if push.base_version < self._oldest_base.get(push.rank, 0):
            return "stale"
        # A buffer may hold infinities on purpose, such as an attention mask.
        is_fine = self.spec.kind is not ChunkKind.PARAMETER or is_finite(push.values)
        return None if is_fine else "non_finite"

    def _apply(self, push: Push) -> None:
        assert push.values is not None
        if self.spec.kind is not ChunkKind.PARAMETER:
            self.writable_values().copy_(push.values)
            self.version += 1
            return
        assert self.optimizer is not None
        self.writable_values()
        # After a restart workers may be ahead of the restored weights for one push.
        staleness = max(0, self.version - push.base_version)
        gradient = push.values
        backup_version, backup = self._backups.get(push.rank, (-1, None))
        if backup is not None and backup_version == push.base_version and staleness:
            gradient = compensate(gradient, self.values, backup, self._delay_compensation)
        self.optimizer.apply(
            gradient,
            groups=push.groups,
            learning_rate_scale=staleness_factor(staleness) if self._scales_by_staleness else 1.0,
            absent=push.absent,
        )
        self.version += 1
        self.context.statistics.applied += 1
        self.context.statistics.count_staleness(staleness, push.rank)

    def writable_values(self) -> torch.Tensor:
        """``values``, in other memory if the old is still being sent."""
        if self._loans.are_out():
            self._loans = Loans()
            self.values = self.values.clone()
            if self.optimizer is not None:
                self.optimizer.move_to(self.values)
        return self.values

    @override
    def probe(self, rank: int, sequence: int) -> list[Reply]:
        last = self.last_sequence.get(rank, 0)
        if sequence > last:
            return [self.reply(MessageType.MISSING, rank, sequence, self.version)]
        if sequence < last:
            return []  # answered long ago
        if self._held.get(rank) == sequence:
            return [self._pending(rank, sequence), *self._release()]
        if self._max_staleness is not None and self._lead(rank) > self._max_staleness:
            self._held[rank] = sequence  # restored from a snapshot, which keeps no held answers
            return [self._pending(rank, sequence)]
        return [self.reply(MessageType.SENT, rank, sequence, self.version)]

    @override
    def repeat(self, rank: int, sequence: int) -> list[Reply]:
        found = self.probe(rank, sequence)
        return [self._answer(rank, repeated=True)] if found and found[0].type is MessageType.SENT else found

    def _pending(self, rank: int, sequence: int) -> Reply:
        return self.reply(
            MessageType.PENDING, rank, sequence, self.version, None, {"waiting_for": self.waiting().get(rank, [])}
        )

    def _lead(self, rank: int) -> int:
        """How many steps this worker is ahead of the slowest live one, or of one that has yet to come."""
        if self.context.missing_ranks():
            return self._clocks.get(rank, 0)
        slowest = min((self._clocks.get(r, 0) for r in self.context.live_ranks()), default=0)
        return self._clocks.get(rank, 0) - slowest

    def _release(self) -> list[Reply]:
        """Answers that may leave now. The comparison is <=: a clock may jump over the one waited for."""
        assert self._max_staleness is not None
        free = [rank for rank in self._held if self._lead(rank) <= self._max_staleness]
        replies = []
        for rank in sorted(free):
            self.context.statistics.count_lead(max(0, self._lead(rank)))
            replies.append(self._answer(rank))
            del self._held[rank]
        return replies

    def _answer(self, rank: int, *, repeated: bool = False) -> Reply:
        version, values, loans = self.version, self.values, self._loans
        if self._delay_compensation and self.spec.kind is ChunkKind.PARAMETER:
            # A repeat must bring what the first answer brought: the worker may have received that one.
            if not repeated or rank not in self._backups:
                self.back_up(rank)
            (version, values), loans = self._backups[rank], Loans()
        body = {"refused": self._refused[rank]} if rank in self._refused else {}
        return self.reply(MessageType.UPDATED, rank, self.last_sequence[rank], version, values, body, loans)

    def back_up(self, rank: int) -> None:
        """Remember the weights as this worker is getting them now (an answer, or its first pull)."""
        if self._delay_compensation and self.spec.kind is ChunkKind.PARAMETER:
            self._backups[rank] = (self.version, self.values.clone())

    @override
    def worker_came(self, rank: int, *, is_new_process: bool) -> list[Reply]:
        """It starts level with the slowest, so that nobody waits for its past."""
        if is_new_process:
            self.last_sequence.pop(rank, None)
            self._restored_sequence.pop(rank, None)
            self._refused.pop(rank, None)
        elif self._max_staleness is not None:
            self._oldest_base[rank] = self.version
        others = [self._clocks.get(other, 0) for other in self.context.live_ranks() if other != rank]
        self._clocks[rank] = min(others, default=self._clocks.get(rank, 0))
        return self._release() if self._max_staleness is not None else []

    @override
    def worker_left(self, rank: int) -> list[Reply]:
        self._held.pop(rank, None)
        self._backups.pop(rank, None)
        return self._release() if self._max_staleness is not None else []

    @override
    def waiting(self) -> dict[int, list[int]]:
        if self._max_staleness is None or not self._held:
            return {}
        clocks = {rank: self._clocks.get(rank, 0) for rank in self.context.live_ranks()}
        clocks.update(dict.fromkeys(self.context.missing_ranks(), 0))
        return {
            rank: sorted(r for r in clocks if self._clocks.get(rank, 0) - clocks[r] > self._max_staleness)
            for rank in self._held
        }

    @override
    def clocks(self) -> dict[int, int]:
        """The number of a worker's pushes, counted from where it joined."""
        return dict(self._clocks)

    @override
    def extra_bytes(self) -> int:
        optimizer_bytes = self.optimizer.size_bytes if self.optimizer is not None else 0
        return optimizer_bytes + len(self._backups) * self.spec.size_bytes

    @override
    def to_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "version": self.version,
            "last_sequence": _string_keys(self.last_sequence),
            "clocks": _string_keys(self._clocks),
            "oldest_base": _string_keys(self._oldest_base),
            "refused": _string_keys(self._refused),
            "backup_versions": {str(rank): version for rank, (version, _) in self._backups.items()},
        }
        if self.optimizer is not None and self.optimizer_spec is not None:
            meta["optimizer"] = self.optimizer.spec.to_body()  # with the hyperparameters of now
            meta["steps"] = self.optimizer.steps()
        return meta

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"values": self.values}
        if self.optimizer is not None:
            tensors.update({f"slot/{name}": tensor for name, tensor in self.optimizer.slots().items()})
        tensors.update({f"backup/{rank}": backup for rank, (_, backup) in self._backups.items()})
        return tensors

    @override
    def restore(self, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.values.copy_(tensors["values"])
        self.version = meta["version"]
        self.last_sequence = _integer_keys(meta["last_sequence"])
        self._restored_version, self._restored_sequence = self.version, dict(self.last_sequence)
        self._clocks = _integer_keys(meta["clocks"])
        self._oldest_base = _integer_keys(meta["oldest_base"])
        self._refused = _integer_keys(meta["refused"])
        self._backups = {
            int(rank): (version, tensors[f"backup/{rank}"]) for rank, version in meta["backup_versions"].items()
        }
        if "optimizer" in meta:
            self.configure(OptimizerSpec.from_body(meta["optimizer"], self.spec.numel))
            assert self.optimizer is not None
            for name, tensor in tensors.items():
                if name.startswith("slot/"):
                    self.optimizer.load_slot(name.removeprefix("slot/"), tensor, meta["steps"])


def _shape_of(spec: OptimizerSpec) -> tuple[Any, ...]:
    """What every worker's description of the optimizer must share; hyperparameters may differ, and change."""
    return spec.name, len(spec.groups), spec.runs


def _string_keys(mapping: Mapping[int, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in mapping.items()}


def _integer_keys(mapping: Mapping[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in mapping.items()}
