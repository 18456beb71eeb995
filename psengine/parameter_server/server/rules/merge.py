"""Rule "merge": contributions of workers that go at their own pace are merged as the coordinator names them.

    rank 0   push ─ commit ── quorum of 2 ─┐                ┌─ RELEASE {0, 1, 2} ─► answer          push ...
    rank 1        push ─ commit ───────────┤ grace window   ├─ RELEASE {0, 1, 2} ─► answer     push ...
    rank 2                       push ─ commit ─────────────┴─ RELEASE {0, 1, 2} ─► answer
    rank 3, slow                                          push: part of the next merge

Decoupled DiLoCo (https://arxiv.org/abs/2604.21428): each worker numbers its own steps; a merge takes the same steps in
all chunks, weighted by the samples since each worker's last merge. A worker that abstains is answered at once. Buffers
are taken as they come, as under "apply".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.exchange import Contribution, Reply
from psengine.protocol.layout import ChunkKind
from psengine.protocol.views import Release, View


class Merge(Apply):
    """See the module's text. The chunk's version counts merges.

    A contribution counts as taken once it was merged, so that one that a restart cut off is pushed again.
    """

    encodes_answers = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._gathered = ContributionSet(self.spec)
        # By the number of its release, a merge that lacks contributions: (rank, step) of each.
        self._due: dict[int, tuple[tuple[int, int], ...]] = {}
        self._merged = 0  # the number of the last one

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        if self.spec.kind is not ChunkKind.PARAMETER:
            return super().push(contribution)
        rank, step = contribution.rank, contribution.step
        self._check_ready()
        self._gathered.check_weight(contribution)
        assert self.optimizer is not None
        self.optimizer.check(contribution.groups, contribution.absent)
        reason = self._reason_to_refuse(contribution)
        self._note_reason(contribution, reason)
        if rank in self._gathered.by_rank:
            self._gathered.remove(rank)  # of a process that is gone, or answered before this server went back
        if reason is None:
            self._gathered.add(contribution, ())
            return self._merge_due()
        # It does not wait for others, because others do not wait for it.
        self._taken[rank] = contribution.incarnation, step
        # First the merge, which may write over the values that the answer brings.
        merged = self._merge_due()
        return [self._answer(rank, step), *merged]

    @override
    def has(self, rank: int, step: int) -> bool:
        known, view = self._gathered.by_rank.get(rank), self.context.view()
        member = None if view is None else view.member(rank)
        is_here = known is not None and member is not None and known.incarnation == member.incarnation
        return (is_here and known is not None and known.step == step) or super().has(rank, step)

    @override
    def release(self, release: Release) -> list[Reply]:
        self._note_due(release)
        return self._merge_due()

    @override
    def adopt(self, view: View) -> list[Reply]:
        """Contributions of workers that left are dropped, unless a merge that was decided has them."""
        super().adopt(view)
        for member in view.members:  # one that leaves is known, also where a restart lost all that it brought
            self._taken.setdefault(member.rank, (member.incarnation, 0))
        for release in view.releases:
            self._note_due(release)
        named = {pair for pairs in self._due.values() for pair in pairs}
        members = {(member.rank, member.incarnation) for member in view.members}
        for one in list(self._gathered.by_rank.values()):
            if (one.rank, one.incarnation) not in members and (one.rank, one.step) not in named:
                self._gathered.remove(one.rank)
        return self._merge_due()

    def _note_due(self, release: Release) -> None:
        is_new = release.number > self._merged and self.spec.kind is ChunkKind.PARAMETER
        if is_new and release.contributors is not None:
            self._due[release.number] = release.contributors

    def _merge_due(self) -> list[Reply]:
        """The merges of which nothing is missing, in the order of their releases."""
        replies, unsent = list[Reply](), list[Place]()
        for number in sorted(self._due):
            if self._missing_from(self._due[number]):
                break
            replies += self._merge(number, self._due.pop(number))
            self._place.readers += 1  # the next merge must not write over answers that nobody has sent yet
            unsent.append(self._place)
        for place in unsent:
            place.readers -= 1
        return replies

    def _missing_from(self, pairs: tuple[tuple[int, int], ...]) -> list[int]:
        """The ranks whose contribution to this merge is still to come.

        A worker that left brings it no more. One that has a later step here did not push this chunk in the step named.
        """
        view = self.context.view()
        missing = []
        for rank, step in pairs:
            is_member = view is not None and view.member(rank) is not None
            if is_member and rank not in self._gathered.by_rank and not super().has(rank, step):
                missing.append(rank)
        return missing

    def _merge(self, number: int, pairs: tuple[tuple[int, int], ...]) -> list[Reply]:
        merged = ContributionSet(self.spec)
        for rank, step in pairs:
            one = self._gathered.by_rank.get(rank)
            if one is not None and one.step <= step:  # older where this chunk was not part of the step named
                merged.add(self._gathered.remove(rank), ())
            elif one is None and rank in self._taken:
                incarnation, last = self._taken[rank]
                self._taken[rank] = incarnation, max(last, step)  # of one who left: should it come back, it is late
        self._merged = number
        given, average = merged.given, merged.combine(self.memory.new)
        if average is None:
            return []
        self._step(average.values, given)
        self.context.statistics.averaged += 1
        for one in given:
            self._taken[one.rank] = one.incarnation, one.step
        return [self._answer(one.rank, one.step) for one in given]

    @override
    def waiting_for(self, rank: int, step: int) -> list[int]:
        known, view = self._gathered.by_rank.get(rank), self.context.view()
        if known is None or known.step != step or view is None:
            return []
        if self._due:
            return self._missing_from(self._due[min(self._due)])
        return [member.rank for member in view.members if member.rank not in self._gathered.by_rank]

    @override
    def open_steps(self) -> dict[int, int]:
        return super().open_steps() | {rank: one.step for rank, one in self._gathered.by_rank.items()}

    @override
    def size_bytes(self) -> int:
        return super().size_bytes() + self._gathered.size_bytes

    @override
    def to_meta(self) -> dict[str, Any]:
        contributions = [one._replace(values=None) for one in self._gathered.by_rank.values()]
        due = {str(number): pairs for number, pairs in self._due.items()}
        return super().to_meta() | {"contributions": contributions, "due": due, "merged": self._merged}

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        here = self._gathered.by_rank.items()
        return super().tensors() | {f"contribution/{rank}": one.values for rank, one in here if one.values is not None}

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().restore(meta, tensors)
        self._gathered = ContributionSet(self.spec)
        for fields in meta["contributions"]:
            one = Contribution(*fields)
            absent = tuple((start, end) for start, end in one.absent)
            values = tensors[f"contribution/{one.rank}"]
            self._gathered.add(one._replace(values=values, absent=absent, is_borrowed=False), ())
        self._due = {int(number): tuple((rank, step) for rank, step in pairs) for number, pairs in meta["due"].items()}
        self._merged = meta["merged"]
