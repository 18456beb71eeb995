"""Bugs of clients."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from psengine.parameter_server.client.pushes import Pushes

from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.membership import Membership as ClientMembership
from psengine.parameter_server.server.core import exchanges
from psengine.protocol.messages import MessageType
from simulation.planted.registry import PLANTED, plant


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


def _goes_on(stack: ExitStack) -> None:
    """Two bugs: either side alone keeps the job from this."""
    resume = ClientMembership.resume
    stack.enter_context(mock.patch.object(ClientMembership, "resume", lambda self, fenced=None: resume(self, None)))
    stack.enter_context(mock.patch.object(exchanges, "_check_live"))


PLANTED["who has to join goes on with its own state, and its server lets it"] = _goes_on


def _keeps_its_epoch(receive: Any) -> Any:
    def one(self: ClientMembership, link: Link, message: Any, now_s: float) -> None:
        known = link.epoch
        receive(self, link, message, now_s)
        link.epoch = known or link.epoch

    return one


plant("a client keeps the number of its server's first life", ClientMembership, "_receive", _keeps_its_epoch)
plant(
    "a client does not look after its requests",
    Link,
    "_send_marker",
    lambda send: lambda self, now_s: None,
)
