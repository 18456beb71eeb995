"""Aggregation "average": an exchange ends when everybody who is live has contributed, or a quorum has.

    rank 0   push 7 ─────────┐                    ┌─► answer 7
    rank 1        push 7 ──┐ │                    ├─► answer 7
    rank 2              push 7: everybody is here ┴─► answer 7

A worker that dies in between is left out of the sum and of the denominator. A server that restarted does not know how
far workers are (no ``last_sequence``): a worker that is further on has the answer that others wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext, Update
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.protocol.messages import ErrorCode, MessageType

# With a quorum: how many exchanges the fastest may be ahead of the slowest, whose averages have to be kept for it.
HISTORY = 8
# A worker has at most this many contributions to unfinished exchanges of a chunk: it numbers them one after the other,
# and sends the next when it has the answer.
MAX_OPEN = 2
MAX_SHOWN_RANKS = 256


class Average(ChunkRule):
    """See the module's text. The chunk's version is the number of the last exchange that ended."""

    is_single = False

    def __init__(self, outcome: Outcome, context: RuleContext, options: Mapping[str, Any]) -> None:
        super().__init__(outcome, context, options)
        # An exchange ends with this many gradients (backup workers, Chen et al. 2016,
        # https://arxiv.org/abs/1604.00981); None waits for everybody.
        self._quorum: int | None = options.get("quorum")
        self._open: dict[int, ContributionSet] = {}
        # The ranks that took part in exchanges that ended here and may be answered again.
        self._ended: dict[int, frozenset[int]] = {}

    @override
    def _gather(self, contribution: Contribution) -> list[Reply]:
        rank, sequence = contribution.rank, contribution.sequence
        last = self.progress.last_sequence.get(rank, 0)
        if sequence <= last or rank in self._contributors(sequence):
            self.context.statistics.duplicates += 1
            return []
        self._refused.pop(rank, None)
        if self.outcome.can_answer(sequence, sequence):
            return self._answer_late(contribution)
        if sum(rank in one.by_rank for one in self._open.values()) >= MAX_OPEN:
            raise ProtocolError(
                f"{self.spec.describe()}: worker {rank} has contributions to {MAX_OPEN} unfinished exchanges already"
                f" (expected no more, got exchange {sequence})",
                ErrorCode.CREDIT,
            )
        gathered = self._open.get(sequence) or ContributionSet(self.spec, self.outcome.result_memory)
        gathered.check_weight(contribution)
        self.outcome.check(contribution)
        if contribution.values is None:
            self.context.statistics.abstained += 1
        elif not self.outcome.accepts(contribution.values):
            self._note_refused(contribution, "non_finite")
            contribution = contribution._replace(values=None)
        gathered.add(contribution, self.context.live_ranks())
        self._open[sequence] = gathered
        self.progress.last_sequence[rank] = sequence
        return self._complete_all()

    def _contributors(self, sequence: int) -> Collection[int]:
        gathered = self._open.get(sequence)
        return gathered.by_rank if gathered is not None else ()

    @override
    def probe(self, rank: int, sequence: int) -> list[Reply]:
        if self.outcome.can_answer(sequence, sequence):
            return [self._reply(MessageType.SENT, rank, sequence)]
        if rank in self._contributors(sequence):
            pending = self._reply(MessageType.PENDING, rank, sequence, {"waiting_for": self._missing_from(sequence)})
            return [pending, *self._complete(sequence)]
        return [self._reply(MessageType.MISSING, rank, sequence)]

    @override
    def repeat(self, rank: int, sequence: int) -> list[Reply]:
        """An exchange that ended without this worker has an answer for it too."""
        if not self.outcome.can_answer(sequence, sequence):
            return self.probe(rank, sequence)
        last_sequence = self.progress.last_sequence
        last_sequence[rank] = max(sequence, last_sequence.get(rank, 0))
        return [self._answer(rank, sequence, repeated=True), *self._complete_all()]

    @override
    def supply_result(self, rank: int, sequence: int, payload: torch.Tensor, contributors: int | None) -> list[Reply]:
        waiting = self._contributors(sequence)
        if not waiting:
            return []  # others were asked too
        is_asked = rank not in waiting and self.progress.is_past(rank, sequence)
        count = len(waiting) if contributors is None else contributors
        if not is_asked or not self.outcome.take_result(sequence, payload, count):
            return super().supply_result(rank, sequence, payload, contributors)
        del self._open[sequence]
        self.progress.version = max(self.version, sequence)
        replies = [self._answer(other, sequence) for other in sorted(waiting)]
        return [*replies, *self._complete_all()]

    @override
    def worker_came(self, rank: int, *, is_new_process: bool) -> list[Reply]:
        if is_new_process:
            self.progress.begin(rank)
        return self._complete_all()

    @override
    def note_answered(self, rank: int, sequence: int) -> list[Reply]:
        super().note_answered(rank, sequence)
        return self._complete_all()

    @override
    def worker_left(self, rank: int) -> list[Reply]:
        """Its contributions to unfinished exchanges are dropped; it has to send them again."""
        self.outcome.worker_left(rank)
        last_sequence = self.progress.last_sequence
        for sequence in sorted(self._open):
            gathered = self._open[sequence]
            if rank in gathered.by_rank:
                gathered.remove(rank)
                last_sequence[rank] = min(last_sequence[rank], sequence - 1)
            if not gathered.by_rank:
                del self._open[sequence]
        return self._complete_all()

    @override
    def reset(self) -> None:
        super().reset()
        self._open.clear()
        self._ended.clear()

    @override
    def waiting(self) -> dict[int, list[int]]:
        waiting: dict[int, list[int]] = {}
        for sequence, gathered in self._open.items():
            waiting.update(dict.fromkeys(gathered.by_rank, self._missing_from(sequence)))
        return waiting

    @override
    def clocks(self) -> dict[int, int]:
        """The number of a worker's last exchange."""
        return dict(self.progress.last_sequence)

    @override
    def size_bytes(self) -> int:
        return super().size_bytes() + sum(gathered.size_bytes for gathered in self._open.values())

    # ---- the end of an exchange --------------------------------------------------------------------------------

    def _missing_from(self, sequence: int) -> list[int]:
        contributors = self._contributors(sequence)
        absent = [rank for rank in self.context.live_ranks() if rank not in contributors]
        behind = [rank for rank in absent if not self.progress.is_past(rank, sequence)]
        return sorted({*behind, *self.context.missing_ranks()})[:MAX_SHOWN_RANKS]

    def _complete_all(self) -> list[Reply]:
        """End what can end now."""
        if len(self._open) == 1:
            return self._complete(next(iter(self._open)))
        return [reply for sequence in sorted(self._open) for reply in self._complete(sequence)]

    def _complete(self, sequence: int) -> list[Reply]:
        gathered = self._open.get(sequence)
        if gathered is None or self.context.missing_ranks():
            return []
        live = self.context.live_ranks()
        missing = [rank for rank in live if rank not in gathered.by_rank]
        if len(missing) == len(live):
            return []  # who contributed is on its way out
        if any(self.progress.is_past(rank, sequence) for rank in missing):
            return self._ask_for_result(sequence)
        if missing and not self._is_quorum(gathered, sequence, missing, live):
            return []
        return self._end(gathered, sequence, live)

    def _is_quorum(
        self, gathered: ContributionSet, sequence: int, missing: Collection[int], live: Collection[int]
    ) -> bool:
        # A worker without a gradient takes part, but does not fill the quorum: others' gradients are on their way.
        if self._quorum is None or len(gathered.given) < min(self._quorum, len(live)):
            return False
        last_sequence = self.progress.last_sequence
        if any(rank not in last_sequence for rank in missing):
            return False  # since a restart of this server it was not heard from, and may have the result
        return sequence - min(last_sequence[rank] for rank in missing) <= HISTORY

    def _end(self, gathered: ContributionSet, sequence: int, live: Collection[int]) -> list[Reply]:
        del self._open[sequence]
        given = gathered.given
        self.outcome.conclude(sequence, Update(gathered.combine(), given))
        self.progress.version = max(self.version, sequence)
        self.context.exchange_ended()
        self.context.statistics.averaged += 1
        self.context.statistics.applied += len(given)
        self._ended[sequence] = frozenset(gathered.by_rank)
        answers = [self._answer(rank, sequence) for rank in sorted(gathered.by_rank)]
        # A worker that pushes exchange n + 1 has the answer of exchange n.
        last_sequence = self.progress.last_sequence
        needed = min((last_sequence.get(rank, 0) for rank in live), default=self.version)
        self.outcome.forget_before(needed)
        for old in [known for known in self._ended if known < needed]:
            del self._ended[old]
        return answers

    @override
    def _answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        answer = super()._answer(rank, sequence, repeated=repeated)
        if rank not in self._ended.get(sequence, (rank,)):
            answer.body["late"] = True
        return answer

    def _answer_late(self, contribution: Contribution) -> list[Reply]:
        rank, sequence = contribution.rank, contribution.sequence
        self.progress.last_sequence[rank] = sequence
        if contribution.values is not None and sequence in self._ended:
            self._ended[sequence] -= {rank}  # a former process of the rank may have taken part; this one has not
        self.context.statistics.late += 1
        self.context.discarded(contribution, self.spec, "late")
        # The slowest has moved on, and others may be waiting for that.
        return [self._answer(rank, sequence), *self._complete_all()]

    def _ask_for_result(self, sequence: int) -> list[Reply]:
        """The exchange ended before this server started; a worker that is one exchange further has its average."""
        waiting, progress = self._contributors(sequence), self.progress
        # With a quorum nobody knows which of those who wait took part in it.
        sources = self.context.live_ranks() if self._quorum is None else ()
        one_ahead = [rank for rank in sources if rank not in waiting and progress.answered(rank) == sequence]
        if one_ahead:
            return [self._reply(MessageType.RESULT_WANTED, one_ahead[0], sequence)]
        # Nobody has it: who waits for it has to start from somebody else's state. It pushes this exchange again where
        # the others have left meanwhile, and the job goes on from its own.
        del self._open[sequence]
        for rank in waiting:
            progress.last_sequence[rank] = min(progress.last_sequence[rank], sequence - 1)
        text = f"{self.spec.describe()}: the average of exchange {sequence} is gone, the others are further on"
        return [self._error(rank, sequence, ErrorCode.FENCED, text) for rank in sorted(waiting)]
