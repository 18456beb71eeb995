"""The one gate: which messages each kind of sender may send to a shard, looked up before anything else. Pure.

HELLO, which anybody may send, does not come here. Whether a chunk is known or values are there is checked behind it.
"""

from __future__ import annotations

from enum import Enum

from psengine.errors import ProtocolError
from psengine.protocol.messages import SENT_BY_SERVERS, ErrorCode, Message, MessageType


class PeerState(str, Enum):
    """The sender of a message, as the shard sees it."""

    GREETED = "greeted"  # let in; the job has no values for it yet
    MEMBER = "member"  # takes part
    READER = "reader"  # looks, never pushes


def _types(names: str) -> frozenset[MessageType]:
    return frozenset(MessageType[name] for name in names.split())


_READ = _types("LIST STATUS BYE PULL HEARTBEAT ECHO")
# Before and after the job has values: rank 0 configures before or after it seals; lost messages are sent again; where a
# process of rank 0 died after it had sealed some shards, the next one begins anew at all of them.
# SNAPSHOT has the server write to its disk, so it is not for readers.
_WORK = _READ | _types("REGISTER SEAL CONFIGURE STORE JOIN SNAPSHOT PROGRESS")
MAY_SEND: dict[PeerState, frozenset[MessageType]] = {
    PeerState.GREETED: _WORK,
    PeerState.MEMBER: _WORK | _types("PUSH PROBE REPEAT ADMIT RESULT LEAVE"),
    PeerState.READER: _READ,
}
# The answer to a message that is not in the sender's row.
_REFUSALS = {
    PeerState.GREETED: (ErrorCode.NOT_READY, "wait for a WELCOME that says ready, or SEAL or JOIN first"),
    PeerState.MEMBER: (ErrorCode.BAD_MESSAGE, "the job has begun"),
    PeerState.READER: (ErrorCode.BAD_MESSAGE, "a reader cannot change anything; say HELLO as a worker"),
}


def check_legal(standing: PeerState, message: Message) -> None:
    """Raise ProtocolError for a message that its sender may not send; ``code`` says how to answer."""
    legal = MAY_SEND[standing]
    if message.type in legal:
        return
    if message.type in SENT_BY_SERVERS:
        raise ProtocolError(f"{message.type.name} is for servers to send (expected a client's message)")
    code, fix = _REFUSALS[standing]
    expected = ", ".join(sorted(kind.name for kind in legal))
    raise ProtocolError(
        f"{message.type.name} is not legal from a {standing.value} (expected one of {expected}); {fix}", code
    )
