"""The answers to pushes that left the servers: none is sent again unasked."""

from __future__ import annotations

from psengine.parameter_server.server.interfaces import Outgoing
from psengine.protocol.messages import Message, MessageType
from simulation.violation import require


class SentAnswers:
    """Those of all servers."""

    def __init__(self) -> None:
        self._sent: set[tuple[int, int, int, int, int]] = set()

    def check(self, epoch: int, message: Message | None, outgoing: list[Outgoing]) -> None:
        """A shard has answered ``message``: a probe brings no payload that was sent before."""
        is_probe = message is not None and message.type is MessageType.PROBE
        for one in outgoing:
            sent = one.message
            if sent.type is not MessageType.UPDATED:
                continue
            answer = epoch, sent.worker, sent.incarnation, sent.key, sent.sequence
            is_again = is_probe and answer in self._sent
            require(not is_again, "a probe of push {} of chunk {} repeated its answer", sent.sequence, sent.key)
            self._sent.add(answer)
