"""Rule "merge": contributions of workers that go at their own pace are merged as the coordinator names them.

    rank 0   push ─ commit ── quorum of 2 ─┐                ┌─ RELEASE {0, 1, 2} ─► answer          push ...
    rank 1        push ─ commit ───────────┤ grace window   ├─ RELEASE {0, 1, 2} ─► answer     push ...
    rank 2                       push ─ commit ─────────────┴─ RELEASE {0, 1, 2} ─► answer
    rank 3, slow                                          push: part of the next merge

Decoupled DiLoCo (https://arxiv.org/abs/2604.21428): each worker numbers its own steps; a merge takes the same steps in
all chunks, weighted by the samples since each worker's last merge. It has no hyperparameters but the configured ones.
A worker that abstains is answered at once. Buffers are taken as they come, as under "apply".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.contribution_set import ContributionSet, check_weight
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.views import Release, View


class Merge(Apply):
    """See the module's text. The chunk's version counts merges.

    A contribution counts as taken once it was merged, so that one that a restart cut off is pushed again.
    """

    encodes_answers = False
    kept: ClassVar[dict[str, Any]] = Apply.kept | {
        "here": dict[int, Contribution],
        "due": dict[int, tuple[tuple[int, int], ...]],
        "merged": int,
    }

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> None:
        super().__init__(spec, values, context)
        self.here: dict[int, Contribution] = {}  # by rank, what is to be merged
        # By the number of its release, a merge that lacks contributions: (rank, step) of each.
        self.due: dict[int, tuple[tuple[int, int], ...]] = {}
        self.merged = 0  # the number of the last one

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        if not self._is_trained:
            return super().push(contribution)
        rank, step = contribution.rank, contribution.step
        check_weight(self.spec, contribution, self.here.values())
        reason = self._reason_to_refuse(contribution)
        self.here.pop(rank, None)  # of a process that is gone
        if reason is None:
            self.workers[rank].refused = None
            self.here[rank] = contribution
            return self._merge_due()
        # It does not wait for others, because others do not wait for it.
        self._take(contribution, reason)
        # First the merge, which may write over the values that the answer brings.
        merged = self._merge_due()
        return [self._answer(rank, step), *merged]

    @override
    def has(self, rank: int, step: int) -> bool:
        one, known = self.here.get(rank), self.workers.get(rank)
        is_here = one is not None and known is not None and (one.incarnation, one.step) == (known.incarnation, step)
        return is_here or super().has(rank, step)

    @override
    def begin_life(self, *, keeps_log: bool) -> None:
        """Without a log, who has the answer to a contribution that a snapshot brought back does not push it again."""
        super().begin_life(keeps_log=keeps_log)
        if not keeps_log:
            self.here.clear()

    @override
    def release(self, release: Release) -> list[Reply]:
        self._note_due(release)
        return self._merge_due()

    @override
    def adopt(self, view: View) -> list[Reply]:
        """Contributions of workers that left are dropped, unless a merge that was decided has them.

        An earlier decision names nobody whom this view admits. A coordinator that lost the decision in a restart may
        give the newcomer a step that the decision names.
        """
        former = {rank: known.incarnation for rank, known in self.workers.items()}
        super().adopt(view)
        first = {one.rank: one.first_step for one in view.members if former.get(one.rank) != one.incarnation}
        for number, pairs in self.due.items():
            self.due[number] = tuple((rank, step) for rank, step in pairs if rank not in first or step < first[rank])
        for release in view.releases:
            self._note_due(release)
        named = {pair for pairs in self.due.values() for pair in pairs}
        members = {(member.rank, member.incarnation) for member in view.members}
        for rank, one in list(self.here.items()):
            if (rank, one.incarnation) not in members and (rank, one.step) not in named:
                del self.here[rank]
        return self._merge_due()

    def _note_due(self, release: Release) -> None:
        if release.number > self.merged and release.contributors is not None and self._is_trained:
            self.due[release.number] = release.contributors

    def _merge_due(self) -> list[Reply]:
        """The merges of which nothing is missing, in the order of their releases."""
        replies, unsent = list[Reply](), set[Place]()
        for number in sorted(self.due):
            if self._missing_from(self.due[number]):
                break
            replies += self._merge(number, self.due.pop(number))
            self._place.hold(unsent)  # the next merge must not write over answers that nobody has sent yet
        return replies

    def _missing_from(self, pairs: tuple[tuple[int, int], ...]) -> list[int]:
        """The ranks whose contribution to this merge is still to come.

        A worker that left brings it no more. One that has a later step here did not push this chunk in the step named.
        """
        view = self.context.view
        members = set() if view is None else {member.rank for member in view.members}
        return [rank for rank, step in pairs if rank in members - self.here.keys() and not self.has(rank, step)]

    def _merge(self, number: int, pairs: tuple[tuple[int, int], ...]) -> list[Reply]:
        given = list[Contribution]()
        for rank, step in sorted(pairs):
            one = self.here.get(rank)
            if one is not None and one.step <= step:  # older where this chunk was not part of the step named
                given.append(self.here.pop(rank))
            elif one is None and rank in self.workers:
                known = self.workers[rank]
                known.step = max(known.step, step)  # of one who left: should it come back, it is late
        self.merged = number
        if not given:
            return []
        self.context.use(self, given)
        self.context.statistics.averaged += 1
        for one in given:
            self.workers[one.rank].step = one.step
        return [self._answer(one.rank, one.step) for one in given]

    @override
    def use(self, given: Sequence[Contribution]) -> None:
        merged = ContributionSet(self.spec)
        for one in given:
            merged.add(one, ())
        average = merged.combine(self.memory.new)
        assert average is not None
        self._step(average.values, given)

    @override
    def waits(self) -> dict[int, list[int]]:
        if self.due:
            missing = self._missing_from(self.due[min(self.due)])
        else:
            members = () if self.context.view is None else self.context.view.members
            missing = [member.rank for member in members if member.rank not in self.here]
        return dict.fromkeys(self.here, missing)

    @override
    def size_bytes(self) -> int:
        return super().size_bytes() + sum(one.values.nbytes for one in self.here.values() if one.values is not None)
