"""A job whose weights this server holds: whoever comes reads them, and a snapshot keeps them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from typing_extensions import override

from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.losses import Losses
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import Message, MessageType


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
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        lost, rank = [0, 0, 0], member.rank
        for key, version, sequence, under_way, *unused in message.body["chunks"]:
            restored = self.chunks.find(key).restored(rank)
            updates, own = self._losses.report(rank, key, restored, (version, sequence), under_way, unused)
            lost = [lost[0] + updates, lost[1] + own, lost[2] + (updates > 0)]
        if not message.body["more"]:
            self._losses.spoke(rank, now_s)
            self._count_losses(now_s)
        return [Reply(MessageType.OK, rank, message.sequence, body={"lost": lost})]

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
