"""Gathering "merge": contributions of workers that go at their own pace are merged once a quorum of them is here.

    rank 0   push ──── quorum of 2 ─┐                ┌─► answer          push ...
    rank 1        push ─────────────┤ grace window   ├─► answer     push ...
    rank 2                       push ───────────────┴─► answer
    rank 3, slow                                          push: part of the next merge

Decoupled DiLoCo (https://arxiv.org/abs/2604.21428): each worker numbers its own exchanges; a merge takes what is here,
weighted by the samples since each worker's last merge. A worker that abstains is answered at once, and no merge waits
for it until it has brought something again. Buffers are taken as they come, as under "apply".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext, Update
from psengine.parameter_server.server.rules.grace import GraceWindow
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode


class Merge(Apply):
    """See the module's text. The chunk's version counts merges.

    Chunks are merged one by one, so merges may have different workers. Where all are stuck, each in a merge that lacks
    others, one of these merges goes on without its quorum. A worker that waited a moment ago may be on its way with the
    next contribution, so those whose contributions are here have to be stuck too.

    A contribution counts as taken (``last_sequence``) once it was merged: one that a snapshot, or a worker that left,
    cut off is sent again.
    """

    def __init__(self, outcome: Outcome, context: RuleContext, options: Mapping[str, Any]) -> None:
        super().__init__(outcome, context, options)
        self._quorum: int = options["quorum"]
        self._window = GraceWindow(options["grace"])
        self._gathered = ContributionSet(self.spec, self.outcome.result_memory)
        self._has_quorum = False
        # Workers that abstained last.
        self._idle: set[int] = set()

    @override
    def _gather(self, contribution: Contribution) -> list[Reply]:
        if self.spec.kind is not ChunkKind.PARAMETER:
            return super()._gather(contribution)
        rank, sequence = contribution.rank, contribution.sequence
        known = self._gathered.by_rank.get(rank)
        if sequence <= self.progress.last_sequence.get(rank, 0) or (known and known.sequence == sequence):
            self.context.statistics.duplicates += 1
            return []
        if known is not None:
            raise ProtocolError(
                f"{self.spec.describe()}: worker {rank} has a contribution that is not merged yet (expected exchange"
                f" {known.sequence} to end first, got {sequence})",
                ErrorCode.CREDIT,
            )
        self._gathered.check_weight(contribution)
        self.outcome.check(contribution)
        reason = self._reason_to_refuse(contribution)
        if reason is not None:
            # It does not wait for others, because others do not wait for it.
            self._note_refused(contribution, reason)
            self._take(contribution)
            if reason == "abstained":
                self._idle.add(rank)
            # First the merge, which may write over the values that the answer brings.
            merged = self._merge_if_complete()
            return [self._answer(rank, sequence), *merged]
        self._refused.pop(rank, None)
        self._idle.discard(rank)
        self._gathered.add(contribution, self.context.live_ranks())
        self._window.arrived(rank, self.context.now_s())
        return self._merge_if_complete()

    def _take(self, contribution: Contribution) -> None:
        self.progress.last_sequence[contribution.rank] = contribution.sequence
        self._clocks[contribution.rank] = self._clocks.get(contribution.rank, 0) + 1

    def _absent(self) -> list[int]:
        """Workers whose contribution may come."""
        known = (*self.context.live_ranks(), *self.context.missing_ranks())
        gone = self._gathered.by_rank.keys() | self._idle
        return [rank for rank in known if rank not in gone]

    def _merge_if_complete(self) -> list[Reply]:
        return self._merge_unless_waiting_for(self._absent())

    def _merge_unless_waiting_for(self, absent: list[int]) -> list[Reply]:
        here, now_s = self._gathered.by_rank, self.context.now_s()
        # Where fewer are left than the quorum, these are all that it can have.
        if not here or len(here) < min(self._quorum, len(here) + len(absent)):
            self._has_quorum = False
            return []
        if not self._has_quorum:
            self._has_quorum = True
            self._window.open(here, absent, now_s)
        if not self._window.is_over(absent, now_s):
            return []
        return self._merge()

    def _merge(self) -> list[Reply]:
        merged, self._gathered = self._gathered, ContributionSet(self.spec, self.outcome.result_memory)
        self._has_quorum = False
        given = merged.given
        staleness = max(0, self.version - min(one.base_version for one in given))
        self.outcome.conclude(given[-1].sequence, Update(merged.combine(), given, staleness))
        statistics = self.context.statistics
        for one in given:
            statistics.count_staleness(max(0, self.version - one.base_version), one.rank)
            self._take(one)
        self.progress.version += 1
        statistics.averaged += 1
        statistics.applied += len(given)
        self.context.exchange_ended()
        return [self._answer(one.rank, one.sequence) for one in given]

    @override
    def tick(self) -> list[Reply]:
        here, absent = self._gathered.by_rank, self._absent()
        are_stuck = bool(here) and self.context.are_stuck((*here, *absent))
        return self._merge_unless_waiting_for([] if are_stuck else absent)

    @override
    def probe(self, rank: int, sequence: int) -> list[Reply]:
        known = self._gathered.by_rank.get(rank)
        if known is not None and known.sequence == sequence:
            return [self._pending(rank, sequence), *self._merge_if_complete()]
        return super().probe(rank, sequence)

    @override
    def worker_came(self, rank: int, *, is_new_process: bool) -> list[Reply]:
        self._window.forget(rank)
        self._idle.discard(rank)
        return [*super().worker_came(rank, is_new_process=is_new_process), *self._merge_if_complete()]

    @override
    def worker_left(self, rank: int) -> list[Reply]:
        """Its contribution that is not merged yet is dropped; it has to send it again.

        Workers whose leases run out together are all gone when the chunk is told of the first: the last of them are not
        merged for want of the others.
        """
        replies = super().worker_left(rank)
        self._window.forget(rank)
        self._idle.discard(rank)
        for gone in self._gathered.by_rank.keys() - set(self.context.live_ranks()):
            self._gathered.remove(gone)
        return [*replies, *self._merge_if_complete()]

    @override
    def open_exchange(self, rank: int) -> int:
        known = self._gathered.by_rank.get(rank)
        return 0 if known is None else known.sequence

    @override
    def waiting(self) -> dict[int, list[int]]:
        absent = self._absent()
        return dict.fromkeys(self._gathered.by_rank, absent)

    @override
    def reset(self) -> None:
        super().reset()
        self._idle.clear()
        self._gathered = ContributionSet(self.spec, self.outcome.result_memory)
        self._has_quorum = False

    @override
    def size_bytes(self) -> int:
        return super().size_bytes() + self._gathered.size_bytes

    @override
    def under_way(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        meta, tensors = super().under_way()
        here = self._gathered.by_rank
        merge = {
            "contributions": [one._replace(values=None) for one in here.values()],
            "has_quorum": self._has_quorum,
            "idle": sorted(self._idle),
            "window": self._window.to_meta(),
        }
        given = {f"contribution/{rank}": one.values for rank, one in here.items() if one.values is not None}
        return {**meta, "merge": merge}, tensors | given

    @override
    def go_on(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().go_on(meta, tensors)
        merge = meta["merge"]
        for fields in merge["contributions"]:
            one = Contribution(*fields)
            absent = tuple((start, end) for start, end in one.absent)
            values = tensors.get(f"contribution/{one.rank}")
            self._gathered.add(one._replace(values=values, absent=absent, is_borrowed=False), ())
        self._has_quorum = merge["has_quorum"]
        self._idle = set(merge["idle"])
        self._window.restore(merge["window"])

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().restore(meta, tensors)
        self._gathered = ContributionSet(self.spec, self.outcome.result_memory)
