"""Where a shard's messages come from and go to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from psengine.parameter_server.server.rules.exchange import PayloadPins
from psengine.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a message came from: its connection's routing id, and its public key ("" without CURVE).

    ``peer`` is whom to hold to account: a key, a user or an address; "" where that is not known.
    """

    route: bytes
    user_id: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send.

    Attributes:
        route: the connection it goes to.
        message: its payload may change once ``handle`` or ``tick`` is called again, unless there are ``pins``.
        pins: to be told when the payload is sent without a copy; None has it copied.
    """

    route: bytes
    message: Message
    pins: PayloadPins | None = None
