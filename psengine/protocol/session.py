"""What may be said when: the life of one connection between a client and a shard, as a table. Pure, as in h11.

                    WELCOME initialise | wait | join            SEAL | JOIN
    STRANGER ────────────────────────────────────► GREETED ──────────────────► MEMBER ──BYE──► GONE
       │  ▲                                                      WELCOME ready    ▲  │            │
       │  └── ERROR fenced | not_member, from anywhere ───────────────────────────┼──┘            │
       └──────────────────────────────────────────────────────────────────────────┴──── HELLO ◄───┘
    A WELCOME to nobody in particular (a reader) leads to READER.

Both ends feed what they send and receive through the same table and so agree about the phase. The table says what a
peer in this phase can mean at all; whether a rank is alive, a chunk known or values are there is the shard's to check.
"""

from __future__ import annotations

from enum import Enum

from psengine.errors import MisuseError, ProtocolError
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType


class Phase(str, Enum):
    """Where a client stands with one shard."""

    STRANGER = "stranger"  # not introduced, or no longer known
    GREETED = "greeted"  # let in; the job has no values for it yet
    MEMBER = "member"  # takes part
    READER = "reader"  # looks, never pushes
    GONE = "gone"  # said BYE


_HELLO, _LIST, _STATUS, _BYE = MessageType.HELLO, MessageType.LIST, MessageType.STATUS, MessageType.BYE
_LOOK = {_HELLO, _LIST, _STATUS}
_READ = _LOOK | {MessageType.PULL, MessageType.HEARTBEAT, MessageType.ECHO}
# May follow in both phases: rank 0 configures before or after it seals; an answer that was lost is asked for again.
_WORK = _READ | {
    MessageType.SEAL,
    MessageType.CONFIGURE,
    MessageType.STORE,
    MessageType.JOIN,
    MessageType.SNAPSHOT,  # the server writes to its disk: not for those who only look
    MessageType.PROGRESS,
}
_PUSH = {
    MessageType.PUSH,
    MessageType.PROBE,
    MessageType.REPEAT,
    MessageType.ADMIT,
    MessageType.RESULT,
    MessageType.LEAVE,
}


def _stay(phase: Phase, types: set[MessageType]) -> dict[MessageType, Phase]:
    return dict.fromkeys(types, phase)


# Phase -> what a client may send -> the phase after it. HELLO itself changes nothing: its answer does.
CLIENT_SENDS: dict[Phase, dict[MessageType, Phase]] = {
    Phase.STRANGER: {**_stay(Phase.STRANGER, _LOOK), _BYE: Phase.GONE},
    Phase.GREETED: {
        **_stay(Phase.GREETED, _WORK | {MessageType.REGISTER}),
        MessageType.SEAL: Phase.MEMBER,
        MessageType.JOIN: Phase.MEMBER,
        _BYE: Phase.GONE,
    },
    Phase.MEMBER: {**_stay(Phase.MEMBER, _WORK | _PUSH), _BYE: Phase.GONE},
    Phase.READER: {**_stay(Phase.READER, _READ), _BYE: Phase.GONE},
    Phase.GONE: _stay(Phase.GONE, {_HELLO, _STATUS, _BYE}),
}

# What a server may send, in every phase: an answer may arrive late.
SERVER_SENDS = frozenset(
    {
        MessageType.WELCOME,
        MessageType.CHUNKS,
        MessageType.UPDATED,
        MessageType.PENDING,
        MessageType.MISSING,
        MessageType.SENT,
        MessageType.VALUES,
        MessageType.HEARTBEAT_ACK,
        MessageType.STATE_WANTED,
        MessageType.RESULT_WANTED,
        MessageType.PROGRESS_WANTED,
        MessageType.STATUS_REPORT,
        MessageType.OK,
        MessageType.ERROR,
        MessageType.ECHOED,
    }
)

# WELCOME's state -> the phase of a worker that reads it.
_WELCOMED = {"initialise": Phase.GREETED, "wait": Phase.GREETED, "join": Phase.GREETED, "ready": Phase.MEMBER}

# What a refused client is told. A stranger that works on was a member of a server that restarted: it must HELLO again.
_REFUSALS = {
    Phase.STRANGER: (ErrorCode.NOT_MEMBER, "say HELLO first"),
    Phase.GREETED: (ErrorCode.NOT_READY, "wait for a WELCOME that says ready, or SEAL or JOIN first"),
    Phase.MEMBER: (ErrorCode.BAD_MESSAGE, "the job has begun"),
    Phase.READER: (ErrorCode.BAD_MESSAGE, "a reader cannot change anything; say HELLO as a worker"),
    Phase.GONE: (ErrorCode.NOT_MEMBER, "you said BYE; say HELLO again"),
}


def from_client(phase: Phase, message: Message) -> Phase:
    """The server received ``message`` from a client in ``phase``: the phase after it.

    Raises:
        ProtocolError: the message is not legal now; ``code`` says how to answer. The phase stays.
    """
    after = CLIENT_SENDS[phase].get(message.type)
    if after is not None:
        return after
    if message.type in SERVER_SENDS:
        raise ProtocolError(f"{message.type.name} is for servers to send (expected a client's message)")
    code, fix = _REFUSALS[phase]
    raise ProtocolError(_illegal(phase, message) + f"; {fix}", code)


def to_server(phase: Phase, message: Message) -> Phase:
    """The client in ``phase`` is about to send ``message``: the phase after it.

    Raises:
        MisuseError: it is not legal now.
    """
    after = CLIENT_SENDS[phase].get(message.type)
    if after is None:
        raise MisuseError(_illegal(phase, message))
    return after


def from_server(phase: Phase, message: Message) -> Phase:
    """The client in ``phase`` received ``message``: the phase after it.

    Raises:
        ProtocolError: no server sends such a message.
    """
    if message.type not in SERVER_SENDS:
        raise ProtocolError(f"{message.type.name} is for clients to send (expected a server's message)")
    return _answered(phase, message)


def to_client(phase: Phase, message: Message) -> Phase:
    """The server is about to send ``message`` to a client in ``phase``: the phase after it.

    Raises:
        MisuseError: no server sends such a message.
    """
    if message.type not in SERVER_SENDS:
        raise MisuseError(f"{message.type.name} is for clients to send (expected a server's message)")
    return _answered(phase, message)


def _answered(phase: Phase, message: Message) -> Phase:
    if message.type is MessageType.WELCOME:
        return Phase.READER if message.worker == NOBODY else _WELCOMED[message.body["state"]]
    if message.type is MessageType.ERROR and message.body["code"] in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER):
        return Phase.STRANGER
    return phase


def _illegal(phase: Phase, message: Message) -> str:
    legal = ", ".join(sorted(kind.name for kind in CLIENT_SENDS[phase]))
    return f"{message.type.name} is not legal from a {phase.value} (expected one of {legal})"
