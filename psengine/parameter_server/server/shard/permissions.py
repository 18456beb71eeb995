"""Who may send which message to a shard: one table, looked up before anything else. Pure."""

from __future__ import annotations

from enum import Enum

from psengine.protocol.messages import MessageType


class Role(str, Enum):
    """The sender of a message, as the shard sees it."""

    READER = "reader"  # anybody: evaluators, workers that are in no view yet or no longer
    REGISTRAR = "registrar"  # has the job's key, before a view names this life of the server
    MEMBER = "member"  # a worker of the view


def _types(names: str) -> frozenset[MessageType]:
    return frozenset(MessageType[name] for name in names.split())


# VIEW and RELEASE are the coordinator's, whoever forwards them: their digest is checked.
_READS = _types("RESUME VIEW RELEASE LIST PULL")
_WRITES = _READS | _types("REGISTER CONFIGURE STORE")
MAY_SEND: dict[Role, frozenset[MessageType]] = {
    Role.READER: _READS,
    Role.REGISTRAR: _WRITES,
    Role.MEMBER: _WRITES | _types("PUSH WAITS RESULT"),
}
