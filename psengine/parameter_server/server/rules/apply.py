"""Aggregation "apply": a contribution is complete when it arrives; its answer may be held.

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

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext, Update
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode, MessageType


class Apply(ChunkRule):
    """See the module's text. The chunk's version counts the contributions that changed it."""

    is_single = True
    minds_who_is_stuck = True

    def __init__(self, outcome: Outcome, context: RuleContext, options: Mapping[str, Any]) -> None:
        super().__init__(outcome, context, options)
        # An answer is held while its worker's clock (number of its pushes) is more than this many ahead of the slowest
        # live worker's; None never holds.
        self._max_staleness: int | None = options.get("max_staleness")
        self._clocks: dict[int, int] = {}
        self._held: dict[int, int] = {}
        # Pushes computed from older versions were under way when their worker's lease ran out.
        self._oldest_base: dict[int, int] = {}

    @override
    def _gather(self, contribution: Contribution) -> list[Reply]:
        rank, sequence = contribution.rank, contribution.sequence
        if contribution.weight is not None:
            raise ProtocolError(
                f"{self.spec.describe()}: an asynchronous job averages nothing, so that no gradient has a weight"
                f" (expected none, got {contribution.weight:g})",
                ErrorCode.BAD_VALUE,
            )
        if sequence <= self.progress.last_sequence.get(rank, 0):
            self.context.statistics.duplicates += 1
            return []
        self.outcome.note_held(contribution)
        reason = self._reason_to_refuse(contribution)
        if reason is None:
            self._conclude(contribution)
            self._refused.pop(rank, None)
        else:
            self._note_refused(contribution, reason)
        self.progress.last_sequence[rank] = sequence
        self._clocks[rank] = self._clocks.get(rank, 0) + 1
        if self._max_staleness is None:
            return [self._answer(rank, sequence)]
        self._held[rank] = sequence
        return self._release()

    def _reason_to_refuse(self, contribution: Contribution) -> str | None:
        if contribution.values is None:
            return "abstained"
        if contribution.base_version < self._oldest_base.get(contribution.rank, 0):
            return "stale"
        return None if self.outcome.accepts(contribution.values) else "non_finite"

    def _conclude(self, contribution: Contribution) -> None:
        # After a restart workers may be ahead of the restored weights for one push.
        staleness = max(0, self.version - contribution.base_version)
        self.outcome.conclude(contribution.sequence, Update(contribution.values, (contribution,), staleness))
        self.progress.version += 1
        if self.spec.kind is ChunkKind.PARAMETER:
            self.context.exchange_ended()
            self.context.statistics.applied += 1
            self.context.statistics.count_staleness(staleness, contribution.rank)

    @override
    def probe(self, rank: int, sequence: int) -> list[Reply]:
        last = self.progress.last_sequence.get(rank, 0)
        if sequence > last:
            return [self._reply(MessageType.MISSING, rank, sequence)]
        if sequence < last:
            return []  # answered long ago
        if self._held.get(rank) == sequence:
            return [self._pending(rank, sequence), *self._release()]
        if self._slower(rank):
            self._held[rank] = sequence  # restored from a snapshot, which keeps no held answers
            return [self._pending(rank, sequence)]
        return [self._reply(MessageType.SENT, rank, sequence)]

    @override
    def repeat(self, rank: int, sequence: int) -> list[Reply]:
        found = self.probe(rank, sequence)
        if found and found[0].type is MessageType.SENT:
            return [self._answer(rank, sequence, repeated=True)]
        return found

    def _pending(self, rank: int, sequence: int) -> Reply:
        return self._reply(MessageType.PENDING, rank, sequence, {"waiting_for": self.waiting().get(rank, [])})

    def _lead(self, rank: int) -> int:
        """How many steps this worker is ahead of the slowest live one, or of one that has yet to come."""
        clock = self._clocks.get(rank, 0)
        if self.context.missing_ranks():
            return clock
        return clock - min((self._clocks.get(r, 0) for r in self.context.live_ranks()), default=0)

    def _slower(self, rank: int) -> list[int]:
        """The workers that worker ``rank`` is too far ahead of; those that have yet to come are at 0."""
        if self._max_staleness is None:
            return []
        allowed = self._clocks.get(rank, 0) - self._max_staleness
        slower = {other for other in self.context.live_ranks() if self._clocks.get(other, 0) < allowed}
        return sorted(slower.union(self.context.missing_ranks() if allowed > 0 else ()))

    def _release(self) -> list[Reply]:
        """Answers that may leave now."""
        free = [rank for rank in sorted(self._held) if not self._slower(rank)]
        return [self._let_go(rank) for rank in free]

    def _release_stuck(self) -> list[Reply]:
        """The answer that may leave where everybody is stuck.

        Chunks may disagree about who is ahead: workers come to shards one after the other, and a restart goes back to
        different steps of different workers. So a worker that is slower here may be stuck in another chunk until this
        answer has left. It counts as level then, and is not waited for again. Where one worker is not stuck, it may
        have brought another shard what a slower one waited for, and that one goes on.
        """
        everybody = (*self.context.live_ranks(), *self.context.missing_ranks())
        if not self._held or not self.context.are_stuck(everybody):
            return []
        rank = min(self._held)
        self._clocks.update(dict.fromkeys(self._slower(rank), self._clocks[rank]))
        return [self._let_go(rank)]

    def _let_go(self, rank: int) -> Reply:
        self.context.statistics.count_lead(max(0, self._lead(rank)))
        return self._answer(rank, self._held.pop(rank))

    @override
    def tick(self) -> list[Reply]:
        return [*self._release(), *self._release_stuck()]

    @override
    def open_exchange(self, rank: int) -> int:
        return self._held.get(rank, 0)

    @override
    def worker_came(self, rank: int, *, is_new_process: bool) -> list[Reply]:
        """A new process starts level with the slowest, so that nobody waits for its past.

        One that returns keeps its clock, or gets one that others wait for during one step at most. Another shard may
        have had it all the time: were it level here, where the others are ahead of it, each could wait for the other.
        """
        if is_new_process:
            self.progress.last_sequence.pop(rank, None)
            self._refused.pop(rank, None)
        elif self._max_staleness is not None:
            self._oldest_base[rank] = self.version
        others = [self._clocks.get(other, 0) for other in self.context.live_ranks() if other != rank]
        own = self._clocks.get(rank, 0)
        slowest = min(others, default=own)
        if not is_new_process and self._max_staleness is not None:
            slowest = max(own, slowest - self._max_staleness - 1)
        self._clocks[rank] = slowest
        return self._release()

    @override
    def worker_left(self, rank: int) -> list[Reply]:
        self._held.pop(rank, None)
        self.outcome.worker_left(rank)
        return self._release()

    @override
    def waiting(self) -> dict[int, list[int]]:
        return {rank: self._slower(rank) for rank in self._held}

    @override
    def clocks(self) -> dict[int, int]:
        """The number of a worker's pushes, counted from where it joined."""
        return dict(self._clocks)

    @override
    def store(self, values: torch.Tensor, version: int) -> None:
        super().store(values, version)
        self.progress.version += 1

    @override
    def to_meta(self) -> dict[str, Any]:
        by_rank: dict[str, dict[int, Any]] = {
            "last_sequence": self.progress.last_sequence,
            "clocks": self._clocks,
            "oldest_base": self._oldest_base,
            "refused": self._refused,
        }
        found = {name: {str(rank): value for rank, value in table.items()} for name, table in by_rank.items()}
        return super().to_meta() | found

    @override
    def under_way(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        meta, tensors = super().under_way()
        return {**meta, "held": {str(rank): sequence for rank, sequence in self._held.items()}}, tensors

    @override
    def go_on(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().go_on(meta, tensors)
        self._held = {int(rank): sequence for rank, sequence in meta["held"].items()}

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().restore(meta, tensors)
        names = ("last_sequence", "clocks", "oldest_base", "refused")
        by_rank = [{int(rank): value for rank, value in meta[name].items()} for name in names]
        self.progress.last_sequence, self._clocks, self._oldest_base, self._refused = by_rank
