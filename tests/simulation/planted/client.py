"""Bugs of clients."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.membership import Membership as ClientMembership
from psengine.parameter_server.client.pushes import Pushes
from psengine.protocol.messages import MessageType
from simulation.planted.registry import plant


def _any_result(send: Any) -> Any:
    def one(self: ClientMembership, link: Link, message: Any, now_s: float) -> None:
        last = link.pushes.last_answered(message.key)
        if last is not None:
            link.send_result(
                type(message)(
                    MessageType.RESULT, key=message.key, sequence=message.sequence, payload=last.result() * 2.0
                )
            )

    return one


plant("a worker returns another average than it had", ClientMembership, "_send_result", _any_result)


def _any_answer(find: Any) -> Any:
    return lambda self, message: self.sent.get(message.key)


def _gives_up(receive: Any) -> Any:
    def one(self: Pushes, message: Any, now_s: float) -> None:
        if message.type is not MessageType.MISSING:
            receive(self, message, now_s)

    return one


plant("an answer to any push of the chunk is taken", Pushes, "find", _any_answer)
plant("a client does not send again what is missing", Pushes, "receive_probed", _gives_up)
plant("a client never asks about a push", Pushes, "tick", lambda tick: lambda self, now_s: None)
plant(
    "a fenced client goes on with its own state",
    ClientMembership,
    "resume",
    lambda resume: lambda self, fenced=None: resume(self, None),
)
plant(
    "a client does not look after its requests",
    Link,
    "_send_marker",
    lambda send: lambda self, now_s: None,
)
