"""Rule "average": the answer to a push is the average over workers of one exchange, added up in rank order.

    rank 0   push 7 ─────────┐                    ┌─► average 7
    rank 1        push 7 ──┐ │                    ├─► average 7
    rank 2              push 7: everybody is here ┴─► average 7

Contributions are kept until everybody who is live has contributed (or ``quorum`` gradients are here), and only then
added, in the order of ranks and in float32 at least: the same bits whatever order they arrived in. A worker that dies
in between is left out of the sum and of the denominator.

Where workers weigh their gradients (by the sizes of their batches), an average is sum(u g) / sum(u): in the same order
and type, u being weights scaled by a power of two; for equal weights it is the very bits of no weights.

An exchange has one result. It is kept until every live worker has it, so nobody is told two different ones. A server
that restarted has none, and does not know how far workers are (no ``last_sequence``): where one turns out to be further
on, it has the result, and is asked for it (RESULT_WANTED).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import is_finite
from psengine.kernels import ops
from psengine.parameter_server.server.rules.consistency import ChunkRule, Push, Reply, RuleContext
from psengine.parameter_server.server.rules.loans import Loans
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode, MessageType

# With a quorum: how many exchanges the fastest may be ahead of the slowest, whose averages have to be kept for it.
HISTORY = 8
# A worker has at most this many contributions to unfinished exchanges of a chunk: it numbers them one after the other,
# and sends the next when it has the answer.
MAX_OPEN = 2
MAX_SHOWN_RANKS = 256


class Contribution(NamedTuple):
    """What one worker brings to an exchange: see ``Push``."""

    values: torch.Tensor | None
    weight: float | None = None


Contributions = dict[int, Contribution]


class AveragingRule(ChunkRule):
    """See the module's text.

    Args:
        quorum: end an exchange with this many gradients (backup workers, Chen et al. 2016,
            https://arxiv.org/abs/1604.00981); None waits for everybody.

    ``version`` is the number of the last exchange that ended; ``values`` are whatever a worker deposited last.
    """

    def __init__(
        self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext, *, quorum: int | None = None
    ) -> None:
        super().__init__(spec, values, context)
        self.values_version = 0
        self._quorum = quorum
        self._open: dict[int, Contributions] = {}
        # Averages that some live worker may still ask for: exchange -> (average, number of gradients in it).
        self._results: dict[int, tuple[torch.Tensor, int]] = {}
        # The last exchange whose average a worker has: as it said itself, and as it got with another's state.
        self._said: dict[int, int] = {}
        self._given: dict[int, int] = {}

    @override
    def push(self, push: Push) -> list[Reply]:
        rank, sequence = push.rank, push.sequence
        last = self.last_sequence.get(rank, 0)
        if sequence < last:
            self.context.statistics.duplicates += 1
            return []  # answered long ago
        if sequence == last or rank in self._open.get(sequence, {}):
            self.context.statistics.duplicates += 1
            return []
        if sequence in self._results:
            return self._answer_late(push)
        if sum(rank in contributions for contributions in self._open.values()) >= MAX_OPEN:
            raise ProtocolError(
                f"{self.spec.describe()}: worker {rank} has contributions to {MAX_OPEN} unfinished exchanges already"
                f" (expected no more, got exchange {sequence})",
                ErrorCode.CREDIT,
            )
        self._check_weight(push)
        if push.values is None:
            self.context.statistics.abstained += 1
        elif not is_finite(push.values):
            self.context.statistics.non_finite += 1
        self._open.setdefault(sequence, {})[rank] = Contribution(push.values, push.weight)
        self.last_sequence[rank] = sequence
        return self.complete_all()

    def _check_weight(self, push: Push) -> None:
        """Raise ProtocolError for a weight that makes no sense here, or where one is missing."""
        weight = push.weight
        if weight is not None and self.spec.kind is not ChunkKind.PARAMETER:
            raise ProtocolError(
                f"{self.spec.describe()} is a {self.spec.kind.value}, of which there is no weighted average (expected"
                f" no weight, got {weight:g})",
                ErrorCode.BAD_VALUE,
            )
        if weight is not None and (weight == 0) != (push.values is None):
            raise ProtocolError(
                f"{self.spec.describe()}: weight 0 goes with no gradient, and every other with one (got weight"
                f" {weight:g} and {'no' if push.values is None else 'a'} gradient)",
                ErrorCode.BAD_VALUE,
            )
        if weight is None and push.values is None:
            return  # abstains from either kind
        for other, given in self._open.get(push.sequence, {}).items():
            if given.values is None and given.weight is None:
                continue
            if (given.weight is None) != (weight is None):
                weighs, not_ = (push.rank, other) if given.weight is None else (other, push.rank)
                raise ProtocolError(
                    f"{self.spec.describe()}: in exchange {push.sequence} worker {weighs} weighs its gradient and"
                    f" worker {not_} does not (expected a weight of every worker, or of none). Set model.batch_weight"
                    " on all workers in every step, or on none.",
                    ErrorCode.BAD_VALUE,
                )
            return  # the others are like this one

    @override
    def probe(self, rank: int, sequence: int) -> list[Reply]:
        if sequence in self._results:
            return [self.reply(MessageType.SENT, rank, sequence, self.version)]
        if rank in self._open.get(sequence, {}):
            waited_for = self._missing_from(sequence)
            pending = self.reply(MessageType.PENDING, rank, sequence, self.version, None, {"waiting_for": waited_for})
            return [pending, *self._complete(sequence)]
        return [self.reply(MessageType.MISSING, rank, sequence, self.version)]

    @override
    def repeat(self, rank: int, sequence: int) -> list[Reply]:
        """An exchange that ended without this worker has a result for it too."""
        if sequence not in self._results:
            return self.probe(rank, sequence)
        self.last_sequence[rank] = max(sequence, self.last_sequence.get(rank, 0))
        return [self._answer(rank, sequence), *self.complete_all()]

    def supply_result(self, rank: int, sequence: int, average: torch.Tensor, contributors: int | None) -> list[Reply]:
        """Worker ``rank`` returns the average of an exchange that ended before this server started.

        Raises:
            ProtocolError: nobody who is waited for has it.
        """
        waiting = self._open.get(sequence)
        if not waiting:
            return []  # others were asked too
        if not self._has_average(rank, sequence) or rank in waiting:
            raise ProtocolError(f"{self.spec.describe()}: the result of exchange {sequence} was not asked for")
        del self._open[sequence]
        self._results[sequence] = (average.clone(), len(waiting) if contributors is None else contributors)
        self.version = max(self.version, sequence)
        replies = [self._answer(other, sequence) for other in sorted(waiting)]
        return [*replies, *self.complete_all()]

    @override
    def worker_came(self, rank: int, *, is_new_process: bool) -> list[Reply]:
        """A new process that comes without state begins where the chunk stands."""
        if is_new_process:
            self.last_sequence[rank] = self._given[rank] = self.version
            self._said.pop(rank, None)
        return self.complete_all()

    def note_progress(self, rank: int, sequence: int) -> list[Reply]:
        """Worker ``rank`` says that it has the average of exchange ``sequence``; others may wait to hear that."""
        self._said[rank] = max(sequence, self._said.get(rank, 0))
        return self.complete_all()

    def reached(self, rank: int) -> int:
        """The last exchange whose average worker ``rank`` is known to have."""
        pushed = self.last_sequence.get(rank, 0)
        return max(self._said.get(rank, 0), self._given.get(rank, 0), pushed - 1)

    def _has_average(self, rank: int, sequence: int) -> bool:
        """Whether it has that average, or had it: it says so, or has pushed since."""
        return self.last_sequence.get(rank, 0) > sequence or self._said.get(rank, 0) >= sequence

    def can_catch_up(self, rank: int) -> bool:
        """Whether every average that worker ``rank`` may lack is still here."""
        pushed = self.last_sequence.get(rank, 0)
        if self.version - pushed > len(self._results):
            return False
        return all(sequence in self._results for sequence in range(pushed + 1, self.version + 1))

    def continue_from(self, rank: int, donor: int, *, was_live: bool) -> None:
        """A joiner has the state of ``donor`` after its last exchange; it takes part in the next.

        ``was_live``: it never left at this shard, or was admitted twice, and may be further on already.
        """
        reached, own = self.last_sequence.get(donor), self.last_sequence.get(rank)
        if reached is not None:
            self.last_sequence[rank] = min(reached, own) if was_live and own is not None else reached
            self._given[rank] = self.last_sequence[rank]
        elif not was_live:
            self.last_sequence.pop(rank, None)

    @override
    def worker_left(self, rank: int) -> list[Reply]:
        """What it contributed to unfinished exchanges it has to send again."""
        for sequence in sorted(self._open):
            contributions = self._open[sequence]
            if rank in contributions:
                del contributions[rank]
                self.last_sequence[rank] = min(self.last_sequence[rank], sequence - 1)
            if not contributions:
                del self._open[sequence]
        return self.complete_all()

    def complete_all(self) -> list[Reply]:
        """End what can end now."""
        if len(self._open) == 1:
            return self._complete(next(iter(self._open)))
        return [reply for sequence in sorted(self._open) for reply in self._complete(sequence)]

    def reset(self) -> None:
        """Forget exchanges, and values of long ago: the job goes on from the only worker there is."""
        self.values = None
        self._open.clear()
        self._results.clear()
        self.last_sequence.clear()
        self._said.clear()
        self._given.clear()
        self.version = 0

    @override
    def waiting(self) -> dict[int, list[int]]:
        waiting: dict[int, list[int]] = {}
        for sequence, contributions in self._open.items():
            waiting.update(dict.fromkeys(contributions, self._missing_from(sequence)))
        return waiting

    @override
    def clocks(self) -> dict[int, int]:
        """The number of a worker's last exchange."""
        return dict(self.last_sequence)

    def _missing_from(self, sequence: int) -> list[int]:
        contributions = self._open.get(sequence, {})
        absent = [rank for rank in self.context.live_ranks() if rank not in contributions]
        # Who is further on has the average already.
        behind = [rank for rank in absent if not self._has_average(rank, sequence)]
        return sorted({*behind, *self.context.missing_ranks()})[:MAX_SHOWN_RANKS]

    def _complete(self, sequence: int) -> list[Reply]:
        contributions = self._open.get(sequence)
        if not contributions or self.context.missing_ranks():
            return []
        live = self.context.live_ranks()
        missing = [rank for rank in live if rank not in contributions]
        if len(missing) == len(live):
            return []  # who contributed is on its way out
        # Who brings no gradient takes part, but an average is not made of nothing while gradients are on their way.
        contributors = sum(given.values is not None for given in contributions.values())
        if missing:
            if any(self._has_average(rank, sequence) for rank in missing):
                return self._ask_for_result(sequence)
            if self._quorum is None or contributors < min(self._quorum, len(live)):
                return []
            if any(rank not in self.last_sequence for rank in missing):
                return []  # since a restart of this server it was not heard from, and may have the result
            if sequence - min(self.last_sequence[rank] for rank in missing) > HISTORY:
                return []
        del self._open[sequence]
        self._results[sequence] = (self._combine(contributions), contributors)
        self.version = max(self.version, sequence)
        self.context.statistics.averaged += 1
        self.context.statistics.applied += self._results[sequence][1]
        self._forget_results(live)
        return [self._answer(rank, sequence) for rank in sorted(contributions)]

    def _forget_results(self, live: tuple[int, ...]) -> None:
        """A worker that pushes exchange n + 1 has the average of exchange n."""
        needed = min((self.last_sequence.get(rank, 0) for rank in live), default=self.version)
        for sequence in [s for s in self._results if s < needed]:
            del self._results[sequence]

    def _combine(self, contributions: Contributions) -> torch.Tensor:
        ordered = [contributions[rank] for rank in sorted(contributions)]
        given = [one.values for one in ordered if one.values is not None]
        if not given:
            return torch.zeros(self.spec.numel, dtype=self.spec.dtype)
        if self.spec.kind is ChunkKind.BUFFER:
            return given[0].clone()
        weights = [one.weight for one in ordered if one.values is not None and one.weight is not None]
        if len(set(weights)) > 1:
            return self._combine_weighted(given, weights)
        total = given[0].to(_accumulation_dtype(self.spec.dtype), copy=True)
        for values in given[1:]:
            if total.is_floating_point():
                ops.accumulate_(total, values)  # 16-bit values are widened in the same pass
            else:
                total += values
        if self.spec.kind is not ChunkKind.USAGE and len(given) > 1:
            total /= len(given)
        return total.to(self.spec.dtype)

    def _combine_weighted(self, given: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        # Weights of up to 1e12 would overflow what gradients are added in. By a power of two they are scaled exactly.
        _, exponent = math.frexp(max(weights))
        shares = [math.ldexp(weight, -exponent) for weight in weights]
        total = torch.zeros(self.spec.numel, dtype=_accumulation_dtype(self.spec.dtype))
        for values, share in zip(given, shares, strict=True):
            if total.is_floating_point():
                ops.accumulate_(total, values, share)
            else:
                total.add_(values, alpha=share)
        total /= sum(shares)
        return total.to(self.spec.dtype)

    def _answer(self, rank: int, sequence: int) -> Reply:
        average, contributors = self._results[sequence]
        body = {"contributors": contributors}
        # An average is made once and never changed.
        return self.reply(MessageType.UPDATED, rank, sequence, sequence, average, body, Loans())

    def _answer_late(self, push: Push) -> list[Reply]:
        self.last_sequence[push.rank] = push.sequence
        self.context.statistics.late += 1
        # The slowest has moved on, and others may be waiting for that.
        return [self._answer(push.rank, push.sequence), *self.complete_all()]

    def _ask_for_result(self, sequence: int) -> list[Reply]:
        """The exchange ended before this server started. Who is one further on has its average still."""
        live = self.context.live_ranks()
        contributions = self._open[sequence]
        one_ahead = [
            rank
            for rank in live
            if self.last_sequence.get(rank, 0) == sequence + 1
            or (self._said.get(rank, 0) == sequence and rank not in contributions)
        ]
        if one_ahead:
            return [self.reply(MessageType.RESULT_WANTED, one_ahead[0], sequence)]
        # Nobody has it: who waits for it has to start from somebody else's state.
        behind = sorted(self._open.pop(sequence))
        text = f"{self.spec.describe()}: the average of exchange {sequence} is gone, the others are further on"
        return [
            self.reply(MessageType.ERROR, rank, sequence, body={"code": ErrorCode.FENCED, "text": text})
            for rank in behind
        ]

    @override
    def extra_bytes(self) -> int:
        held = [given for contributions in self._open.values() for given in contributions.values()]
        held_count = sum(given.values is not None for given in held)
        return (held_count + len(self._results)) * self.spec.size_bytes

    @override
    def to_meta(self) -> dict[str, Any]:
        """Exchanges under way are not kept, because workers send them again."""
        return {"version": self.version, "values_version": self.values_version}

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.values is None else {"values": self.values}

    @override
    def restore(self, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Exchanges go on at whatever number workers say."""
        self.version = 0
        self.values_version = meta["values_version"]
        self.values = tensors.get("values")


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
