"""Workers that want to leave an averaging job: each may go once everybody else has the averages that it has.

    leaver   PROGRESS ─ LEAVE ─────────────────────────────────► OK ─ BYE
    shard                   └ PROGRESS_WANTED ─► other       ┌───┘
    other                                          PROGRESS ─┘

Until then the leaver can give an average once more to a server that dies and comes back without it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import MessageType


class Leaving:
    """Of one job at one shard: who wants to leave, by the id of its request."""

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}

    def ask(self, rank: int, request: int) -> None:
        """LEAVE came, perhaps again."""
        self._requests[rank] = request

    def forget(self, rank: int) -> None:
        """The worker is gone."""
        self._requests.pop(rank, None)

    def who_is_behind(self, rank: int, rules: Iterable[ChunkRule], live: Sequence[int]) -> list[int]:
        """Live workers that lack an average which worker ``rank`` has, as far as is known here."""
        behind: set[int] = set()
        for rule in rules:
            reached = rule.progress.reached(rank)
            behind.update(other for other in live if other != rank and rule.progress.reached(other) < reached)
        return sorted(behind)

    def release(self, rules: Collection[ChunkRule], live: Sequence[int]) -> list[Reply]:
        """Answers to those that may leave now."""
        free = [rank for rank in self._requests if not self.who_is_behind(rank, rules, live)]
        return [Reply(MessageType.OK, rank, self._requests.pop(rank)) for rank in free]

    def questions(self, rank: int, rules: Collection[ChunkRule], members: dict[int, Member]) -> list[Reply]:
        """Ask those that seem to be behind worker ``rank`` how far they are."""
        live = [other for other, member in members.items() if member.phase.is_live]
        behind = self.who_is_behind(rank, rules, live)
        return [Reply(MessageType.PROGRESS_WANTED, other, 0) for other in behind]

    def __bool__(self) -> bool:
        return bool(self._requests)
