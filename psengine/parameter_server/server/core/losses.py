"""What a server that came back from a snapshot has lost, counted from what workers say that it had acknowledged. Pure.

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
from typing import NamedTuple


class _Report(NamedTuple):
    """What one worker knew of one chunk.

    Attributes:
        version: the newest that it knew.
        own: how many of its own updates are lost.
        asked_version: the version that it knew when it sent what was under way; None: nothing was.
    """

    version: int
    own: int
    asked_version: int | None


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
