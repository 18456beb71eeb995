"""The one gate: what each kind of sender may send to a shard at all, looked up before anything else is done. Pure.

HELLO, which anybody may send, does not come here. Whether a chunk is known or values are there is checked behind it.
"""

from __future__ import annotations

from enum import Enum

from psengine.errors import ProtocolError
from psengine.protocol.messages import SENT_BY_SERVERS, ErrorCode, Message, MessageType


class Standing(str, Enum):
    """Who sends a message, as the shard sees it."""

    GREETED = "greeted"  # let in; the job has no values for it yet
    MEMBER = "member"  # takes part
    READER = "reader"  # looks, never pushes


_READ = frozenset(
    {
        MessageType.LIST,
        MessageType.STATUS,
        MessageType.BYE,
        MessageType.PULL,
        MessageType.HEARTBEAT,
        MessageType.ECHO,
    }
)
# Before and after the job has values: rank 0 configures before or after it seals; what was lost is asked for again.
_WORK = _READ | {
    MessageType.SEAL,
    MessageType.CONFIGURE,
    MessageType.STORE,
    MessageType.JOIN,
    MessageType.SNAPSHOT,  # the server writes to its disk: not for those who only look
    MessageType.PROGRESS,
}
MAY_SEND: dict[Standing, frozenset[MessageType]] = {
    Standing.GREETED: _WORK | {MessageType.REGISTER},
    Standing.MEMBER: _WORK
    | {
        MessageType.PUSH,
        MessageType.PROBE,
        MessageType.REPEAT,
        MessageType.ADMIT,
        MessageType.RESULT,
        MessageType.LEAVE,
    },
    Standing.READER: _READ,
}
# How a message is answered that is not in the sender's row.
_REFUSALS = {
    Standing.GREETED: (ErrorCode.NOT_READY, "wait for a WELCOME that says ready, or SEAL or JOIN first"),
    Standing.MEMBER: (ErrorCode.BAD_MESSAGE, "the job has begun"),
    Standing.READER: (ErrorCode.BAD_MESSAGE, "a reader cannot change anything; say HELLO as a worker"),
}


def check_legal(standing: Standing, message: Message) -> None:
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
