"""A job whose weights this server holds: a joiner reads them, and a snapshot keeps them. Pure.

A server that comes back from a snapshot counts the updates that are lost by the versions that workers know:

    chunk   snapshot: version 8; worker 0 knows version 12, worker 1 knows version 11          4 lost

A push that was under way may be part of a version that another worker has seen. It is sent again, so the count may be
too high by the pushes that were under way.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import MAX_COUNTED, ErrorCode, Message, MessageType


class JobWithWeights(Job):
    """See the module's text."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # By chunk, the lost updates that are counted.
        self._lost: dict[int, int] = {}

    @override
    def _place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        return "ready", self.let_in(member)

    @override
    def note_taken(self, rule: ChunkRule, message: Message, version: int) -> None:
        self.journal.message(self, message)

    @override
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        lost = {key: version - self.chunks.find(key).restored_version for key, version, _ in message.body["chunks"]}
        lost = {key: updates for key, updates in lost.items() if updates > 0}
        # What a worker says it knows is not checked: a sum must still fit a message.
        total = min(sum(lost.values()), MAX_COUNTED)
        self._check_kept(member, message, total)
        more = {key: n - self._lost.get(key, 0) for key, n in lost.items() if n > self._lost.get(key, 0)}
        if more:
            self._lost |= {key: lost[key] for key in more}
            self.statistics.lost_updates = min(self.statistics.lost_updates + sum(more.values()), MAX_COUNTED)
            self.record.lost(sum(more.values()), len(more))
        return [Reply(MessageType.OK, member.rank, message.sequence, body={"lost": [total, len(lost)]})]

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
