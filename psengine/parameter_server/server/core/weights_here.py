"""A job whose weights this server holds: a joiner reads them, and a snapshot keeps them. Pure.

A server that comes back from a snapshot counts the updates that are lost, from what workers say was acknowledged:

    chunk   snapshot: version 8, worker 0's pushes up to 5, worker 1's up to 3
            worker 0 knows version 12, its pushes up to 7 were answered     2 lost
            worker 1 knows version 11, its pushes up to 5 were answered     2 lost       together 4, each counted once

A worker that has died since can say nothing, but others have seen the versions that its updates made. A push that was
under way is no loss, because it is sent again; it may be part of a version that another worker has seen. So where
workers are gone the count may be too low by as many as were under way. It is never too high.

A job is counted once all its workers have spoken, or a lease after the first one has; later reports are added.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import ErrorCode, Message, MessageType


class _Report(NamedTuple):
    """One worker's knowledge of one chunk."""

    version: int  # the newest that it knew
    own: int  # how many of its own updates are lost
    asked_version: int | None  # the version that it knew when it sent what was under way; None: nothing was


@dataclass
class Losses:
    """Of one job at one shard."""

    _expected: set[int] = field(default_factory=set)
    _spoken: set[int] = field(default_factory=set)
    _since_s: float | None = None
    _is_due: bool = False
    _restored: dict[int, int] = field(default_factory=dict)
    _reports: dict[int, dict[int, _Report]] = field(default_factory=dict)
    _counted: dict[int, int] = field(default_factory=dict)

    def expect(self, ranks: Collection[int]) -> None:
        """These workers were there before; they will speak."""
        self._expected.update(ranks)

    def report(
        self,
        rank: int,
        key: int,
        restored: tuple[int, int],
        known: tuple[int, int],
        under_way: int,
        unused: Sequence[int],
    ) -> tuple[int, int]:
        """Worker ``rank`` says how far it was with a chunk.

        Args:
            rank: the worker.
            key: of the chunk.
            restored: the snapshot's version, and the last of this worker's exchanges in it.
            known: the version that the worker knows, and the last of its exchanges that was answered.
            under_way: 0 where nothing was; else 1 + the version that it knew when it sent that.
            unused: first and last of runs of exchanges that were not applied.

        Returns:
            How many updates that it knew of are lost, and how many of its own.
        """
        (version, sequence), (known_version, answered) = restored, known
        own = max(0, answered - sequence)
        for first, last in zip(unused[::2], unused[1::2], strict=True):
            own -= max(0, min(last, answered) - max(first, sequence + 1) + 1)
        own = max(0, own)
        self._restored[key] = version
        report = _Report(known_version, own, under_way - 1 if under_way else None)
        self._reports.setdefault(key, {})[rank] = report
        return max(own, known_version - version), own

    def spoke(self, rank: int, now_s: float) -> None:
        """That was all that worker ``rank`` knows."""
        self._spoken.add(rank)
        self._since_s = now_s if self._since_s is None else self._since_s
        self._is_due = True

    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` nobody could speak."""
        if self._since_s is not None:
            self._since_s += pause_s

    def count(self, members: Collection[int], lease_s: float, now_s: float) -> tuple[int, int]:
        """How many updates more are lost than was counted before, and over how many chunks; (0, 0) until it is time.

        ``members``: who is here.
        """
        if not self._is_due or self._since_s is None:
            return 0, 0
        if not self._spoken.issuperset({*self._expected, *members}) and now_s - self._since_s <= lease_s:
            return 0, 0
        self._is_due = False
        more = chunks = 0
        for key, reports in self._reports.items():
            lost, before = _lost(self._restored[key], list(reports.values())), self._counted.get(key, 0)
            if lost > before:
                self._counted[key] = lost
                more, chunks = more + lost - before, chunks + 1
        return more, chunks


def _lost(restored_version: int, reports: Sequence[_Report]) -> int:
    newest = max(report.version for report in reports)
    sent_again = sum(report.asked_version is not None and report.asked_version < newest for report in reports)
    return max(sum(report.own for report in reports), newest - restored_version - sent_again)


class JobWithWeights(Job):
    """See the module's text."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._losses = Losses()

    @override
    def told(self, members: Collection[int], now_s: float) -> None:
        if self.phase.is_restored:
            self._losses.expect(members)

    @override
    def _place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        return "ready", self.let_in(member)

    @override
    def restore_meta(self, meta: dict[str, Any], now_s: float) -> None:
        super().restore_meta(meta, now_s)
        self._losses.expect(self.membership.live_ranks)

    @override
    def note_taken(self, rule: ChunkRule, message: Message, version: int) -> None:
        self.journal.message(self, message)

    @override
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        lost, rank = [0, 0, 0], member.rank
        for key, version, sequence, under_way, *unused in message.body["chunks"]:
            restored = self.chunks.find(key).restored(rank)
            updates, own = self._losses.report(rank, key, restored, (version, sequence), under_way, unused)
            lost = [lost[0] + updates, lost[1] + own, lost[2] + (updates > 0)]
        self._check_kept(member, message, lost[0])
        if not message.body["more"]:
            self._losses.spoke(rank, now_s)
            self._count_losses(now_s)
        return [Reply(MessageType.OK, rank, message.sequence, body={"lost": lost})]

    def _check_kept(self, member: Member, message: Message, lost: int) -> None:
        """Raise ProtocolError, now and for everybody, where this server started from less than the last one promised.

        It is another directory's state, or an older copy: workers would go on from weights that were left behind.
        """
        told, tier = message.body.get("durable_version", 0), message.body.get("durability", "memory")
        if not (lost and tier == "log") and told <= self.restored_version:
            return
        self.outdated = (
            f"this server started from an older state of job {self.name!r} than the last one had on its disk, by what"
            f" worker {member.rank} was told (expected version {told} or later and none of its updates lost, under"
            f" durability {tier}; got version {self.restored_version}, {lost} updates lost). Fix: start it with the"
            " --snapshot-dir of before; or, to go on from the older state, start server and workers again."
        )
        self.record.note("lost", member, f": {self.outdated}")
        raise ProtocolError(self.outdated, ErrorCode.STATE_LOST)

    @override
    def is_missed(self, now_s: float) -> bool:
        return self.is_sealed or self.membership.is_remembered(now_s)

    @override
    def tick(self, now_s: float) -> list[int]:
        self._count_losses(now_s)
        return super().tick(now_s)

    def _count_losses(self, now_s: float) -> None:
        """Once it is time, tell what was lost when this server went back to a snapshot."""
        updates, chunks = self._losses.count(self.membership.members, self.membership.lease_s, now_s)
        if updates:
            self.statistics.lost_updates += updates
            self.record.lost(updates, chunks)

    @override
    def stood_still(self, pause_s: float) -> None:
        super().stood_still(pause_s)
        self._losses.stood_still(pause_s)
