"""A job whose weights this server holds: whoever comes reads them, and a snapshot keeps them. Pure."""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import override

from psengine.parameter_server.server.core.losses import Losses
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.core.team import Team
from psengine.parameter_server.server.core.weights import Weights
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import Message, MessageType


class WeightsHere(Weights):
    """See the module's text."""

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self._losses = Losses()

    @override
    def told(self, members: Collection[int], now_s: float) -> None:
        if self._team.phase.is_restored:
            self._losses.expect(members)

    @override
    def place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        return "ready", self._team.admit(member)

    @override
    def sealed(self, member: Member) -> None:
        """The weights are the ones it brought."""

    @override
    def restored(self) -> None:
        self._losses.expect(self._team.membership.live_ranks)

    @override
    def join(self, member: Member, request: int) -> list[Reply]:
        raise self._refuse("JOIN")

    @override
    def admit(self, message: Message, donor: Member) -> list[Reply]:
        raise self._refuse("ADMIT")

    @override
    def leave(self, message: Message, member: Member) -> list[Reply]:
        raise self._refuse("LEAVE")

    @override
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        lost, rank = [0, 0, 0], member.rank
        for key, version, sequence, under_way, *unused in message.body["chunks"]:
            restored = self._team.chunks.find(key).restored(rank)
            updates, own = self._losses.report(rank, key, restored, (version, sequence), under_way, unused)
            lost = [lost[0] + updates, lost[1] + own, lost[2] + (updates > 0)]
        if not message.body["more"]:
            self._losses.spoke(rank, now_s)
            self.tick(now_s)
        return [Reply(MessageType.OK, rank, message.sequence, body={"lost": lost})]

    @override
    def pushed(self, rank: int) -> list[Reply]:
        return []

    @override
    def check_readable(self) -> None:
        """They are here."""

    @override
    def is_missed(self, now_s: float) -> bool:
        return self._team.is_sealed or self._team.membership.is_remembered(now_s)

    @override
    def tick(self, now_s: float) -> None:
        """Where it is time, say what was lost when this server went back to a snapshot."""
        membership = self._team.membership
        updates, chunks = self._losses.count(membership.members, membership.lease_s, now_s)
        if updates:
            self._team.statistics.lost_updates += updates
            self._team.record.lost(updates, chunks)

    @override
    def stood_still(self, pause_s: float) -> None:
        self._losses.stood_still(pause_s)
