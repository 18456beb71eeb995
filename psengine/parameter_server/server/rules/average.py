"""Rule "average": a step is closed when every member of the view has contributed, and all get the same average.

    rank 0   push 7 ─────────┐                    ┌─► answer 7
    rank 1        push 7 ──┐ │                    ├─► answer 7
    rank 2              push 7: everybody is here ┴─► answer 7

The weights are in the workers, and ``values`` are what a worker last deposited for others. A step has one result, kept
until every member has it. A step in which all abstain has no average, and changes nothing.

A view with members takes back all steps from its ``from_step`` on: nobody has used them, and workers push them again.
Of an earlier step nothing is taken back. A server that restarted has no results; the view's donor returns that of the
last step. A snapshot has neither steps nor values: after a restart workers push again, and deposit anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from psengine.codecs.base import CodecState
from psengine.errors import ProtocolError
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule, KnownWorker
from psengine.parameter_server.server.rules.contribution_set import ContributionSet, check_weight
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.protocol.bounds import INT64_MAX
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode
from psengine.protocol.views import Release, View

# A worker has at most this many contributions to open steps of a chunk: it pushes the next when it has the answer.
MAX_OPEN = 2


class _Result(NamedTuple):
    """An average, which is made once and never changed while somebody may ask for it."""

    place: Place | None  # of the payload; None: nobody contributed, and there is no average
    contributors: int  # the number of gradients


class Average(ChunkRule):
    """See the module's text. The chunk's version is the number of the last step that was closed."""

    holds_weights = False

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> None:
        super().__init__(spec, values, context)
        self.values_version = 0
        self._open: dict[int, ContributionSet] = {}
        # Averages that some member may still ask for, as they travel.
        self._results: dict[int, _Result] = {}
        # What payloads of averages left out, for the next one; made with the first.
        self._state: CodecState | None = None
        # The last step that changed it, and what it was before. The tensors are shared: codecs write into others.
        self._former: tuple[int, CodecState] | None = None

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        rank, step = contribution.rank, contribution.step
        if step in self._results:
            return self._answers([contribution])
        view = self.context.view
        if view is not None and step < view.from_step - 1:
            raise ProtocolError(
                f"{self.spec.describe()}: the average of step {step} is gone, the others are at step {view.from_step}",
                ErrorCode.FENCED,
            )
        if sum(rank in one.by_rank for one in self._open.values()) >= MAX_OPEN:
            raise ProtocolError(
                f"{self.spec.describe()}: worker {rank} has contributions to {MAX_OPEN} open steps already"
                f" (expected no more, got step {step})",
                ErrorCode.BAD_VALUE,
            )
        gathered = self._open.get(step) or ContributionSet(self.spec)
        check_weight(self.spec, contribution, gathered.by_rank.values())
        if contribution.values is None:
            self.context.statistics.abstained += 1
        gathered.add(contribution, () if view is None else _members_at(view, step))
        self._open[step] = gathered
        self.workers[rank].step = step
        return self._close(step)

    @override
    def answer_again(self, rank: int, step: int) -> Reply | None:
        return self._answer(rank, step) if step in self._results else None

    @override
    def release(self, release: Release) -> list[Reply]:
        return []  # nothing is decided

    @override
    def adopt(self, view: View) -> list[Reply]:
        # A view without members does not know what those have who may come back: their next view says it.
        first = view.from_step if view.members else INT64_MAX
        former, self.workers = self.workers, {}
        for member in view.members:
            known = former.get(member.rank)
            if known is None or known.incarnation != member.incarnation:
                known = KnownWorker(member.incarnation, member.first_step - 1)
            elif known.step >= first:
                known.step = first - 1
            self.workers[member.rank] = known
        for step, gathered in list(self._open.items()):
            for one in list(gathered.by_rank.values()):
                if one.rank not in self.workers or self.workers[one.rank].incarnation != one.incarnation:
                    gathered.remove(one.rank)
            if step >= first or not gathered.by_rank:
                del self._open[step]
        self._results = {step: result for step, result in self._results.items() if step < first}
        if self._former is not None and self._former[0] >= first:
            self._state = self._former[1]
            self._former = None
        self.version = min(self.version, first - 1)
        return []

    @override
    def supply_result(self, step: int, payload: torch.Tensor | None, contributors: int | None) -> list[Reply]:
        if step in self._results:
            return []  # this server did not restart, or others were asked too
        gathered = self._open.pop(step, None)
        waiting = {} if gathered is None else gathered.by_rank
        count = len(waiting) if contributors is None else contributors
        self._results[step] = _Result(None if payload is None else Place(payload.clone()), count)
        self.version = max(self.version, step)
        return self._answers(one for _, one in sorted(waiting.items()))

    @override
    def waits(self) -> dict[int, list[int]]:
        found, view = dict[int, list[int]](), self.context.view
        for step, gathered in sorted(self._open.items()):
            assert view is not None
            donor = [] if view.donor is None else [view.donor]
            awaited = _members_at(view, step) if step >= view.from_step else donor
            missing = [other for other in awaited if other not in gathered.by_rank]
            found |= dict.fromkeys(gathered.by_rank, missing)
        return found

    # ---- the end of a step -------------------------------------------------------------------------------------

    def _close(self, step: int) -> list[Reply]:
        """Close the step, if everybody is here."""
        gathered, view = self._open.get(step), self.context.view
        if gathered is None or view is None or step < view.from_step:
            return []
        if any(rank not in gathered.by_rank for rank in _members_at(view, step)):
            return []
        del self._open[step]
        self._conclude(step, gathered)
        return self._answers(one for _, one in sorted(gathered.by_rank.items()))

    def _conclude(self, step: int, gathered: ContributionSet) -> None:
        given, kept = gathered.given, [result.place for result in self._results.values() if result.place is not None]
        place = gathered.combine(lambda: self.memory.free(kept))
        if place is not None:
            place = self._encoded(step, place, given)
        self._results[step] = _Result(place, len(given))
        self.version = max(self.version, step)

    def _encoded(self, step: int, place: Place, given: Sequence[Contribution]) -> Place:
        """The payload of an average; encoded once, so that all workers get the same bits."""
        statistics = self.context.statistics
        state = self._state = self._state or self.payloads.make_state()
        if state is not None:
            self._former = step, copy.copy(state)
        # A value that is not finite stays so in every sum, and is passed on, as native DDP does.
        is_spoiled = not is_finite(place.values)
        if is_spoiled:
            statistics.non_finite += sum(one.values is not None and not is_finite(one.values) for one in given)
        payload = self.payloads.encode(place.values, state)
        if is_spoiled and state is not None:
            state.give_back()  # workers skip a step with this average, and their residuals are as before too
        statistics.averaged += 1
        statistics.applied += len(given)
        return place if payload is place.values else Place(payload)

    def _answers(self, given: Iterable[Contribution]) -> list[Reply]:
        """The averages of steps that are closed; who has just joined may ask for one that is without it."""
        replies = []
        for one in given:
            known = self.workers[one.rank]
            known.step = max(known.step, one.step)
            replies.append(self._answer(one.rank, one.step))
        # A worker that pushes a step has the answers of all before it.
        needed = min((known.step for known in self.workers.values()), default=self.version)
        for old in [step for step in self._results if step < needed]:
            del self._results[old]
        return replies

    def _answer(self, rank: int, step: int) -> Reply:
        result = self._results[step]
        return self._updated(rank, step, step, result.place, contributors=result.contributors)

    # ---- values and memory -------------------------------------------------------------------------------------

    @override
    def read(self) -> tuple[int, torch.Tensor]:
        if self.values is None:
            raise ProtocolError(f"nobody has deposited values of {self.spec.describe()}", ErrorCode.NOT_READY)
        return self.values_version, self.values

    @override
    def store(self, values: torch.Tensor, version: int) -> None:
        self.values, self.values_version = values.clone(), version

    @override
    def take_back(self) -> None:
        super().take_back()
        for step, result in self._results.items():
            if result.place is not None and result.place.segment is not None:
                self._results[step] = result._replace(place=Place(result.place.values.clone()))

    @override
    def lent_places(self) -> int:
        if self.spec.kind is ChunkKind.CONSTANT or self.payloads.encodes_answers:
            return 0
        return 2  # who contributes to a step has read all averages but the last

    @override
    def size_bytes(self) -> int:
        values_bytes = 0 if self.values is None else self.spec.size_bytes
        state_bytes = 0 if self._state is None else self._state.size_bytes
        results_bytes = max(self.memory.extra_bytes, len(self._results) * self.payloads.answer_bytes)
        return values_bytes + state_bytes + results_bytes + sum(one.size_bytes for one in self._open.values())


def _members_at(view: View, step: int) -> list[int]:
    """The ranks of those who take part in a step, ascending."""
    return [member.rank for member in view.members if member.first_step <= step]
