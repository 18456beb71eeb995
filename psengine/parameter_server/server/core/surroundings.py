"""What a shard is given, and what it gives back: settings, clocks, senders, messages to send. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psengine.parameter_server.server.rules.exchange import PayloadPins
from psengine.protocol.messages import Message


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Given by the daemon.

    Attributes:
        lease_s: silence after which a worker is evicted.
        heartbeat_s: how often workers should send HEARTBEAT.
        max_memory_bytes: what this shard may hold.
        credit_bytes: payload bytes a worker may have in flight to this shard.
        software: version of psengine, for WELCOME.
    """

    lease_s: float = 5.0
    heartbeat_s: float = 1.0
    max_memory_bytes: int = 8 << 30
    credit_bytes: int = 256 << 20
    software: str = ""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Neither decides about leases: these follow the ``now_s`` of ``Shard.handle``.

    Attributes:
        wall_s: seconds since 1970; dates events and reports, and lets incarnations grow from one server to the next.
        measure_s: seconds since any moment, never going back; measures what work costs.
    """

    wall_s: Callable[[], float]
    measure_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a message came from.

    Attributes:
        route: its connection's routing id.
        user_id: its public key; "" without CURVE.
        peer: the key, user or address that answers for it; "" where that is not known.
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
        pins: told when the payload is sent without a copy; None has it copied.
    """

    route: bytes
    message: Message
    pins: PayloadPins | None = None
