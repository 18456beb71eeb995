"""What a shard is given, and what it gives back: settings, senders, messages to send. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.protocol.messages import DURABILITY_TIERS, ErrorCode, Message


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Given by the daemon."""

    lease_s: float = 5.0  # silence after which a worker is evicted
    heartbeat_s: float = 1.0  # how often workers should send HEARTBEAT
    max_memory_bytes: int = 8 << 30  # what this shard may hold
    durability: str = "memory"  # the server's: one of ``DURABILITY_TIERS``
    # Settings by name, as FOLLOW says them: a follower has the same, so that it can go on as its leader.
    likeness: Mapping[str, Any] = field(default_factory=dict)
    keeps_snapshots: bool = False  # beside what ``durability`` says
    keeps_updates: bool = False  # this life of the server began with every acknowledged update
    warns_of_loss: bool = False  # say of a job with its weights here that the process's end loses them

    def check_tier(self, job: str, rule: Mapping[str, Any]) -> None:
        """Raise ProtocolError where a job asks for more durability than the server has."""
        wanted, offered = rule.get("durability", "memory"), self.durability
        if wanted not in DURABILITY_TIERS[offered] and not (wanted == "snapshot" and self.keeps_snapshots):
            raise ProtocolError(
                f"job {job!r} asks for durability={wanted} (expected a server that offers at least that, got"
                f" {offered}). Fix: start its servers with --durability {wanted} --snapshot-dir DIRECTORY (psengine"
                f" run: --server-option durability={wanted}), or ask for less in the strategy.",
                ErrorCode.RULE_MISMATCH,
            )


class Sender(NamedTuple):
    """Where a message came from."""

    route: bytes  # its connection's routing id
    user_id: str = ""  # its public key; "" without CURVE
    process: int = 0  # its number, of a HELLO or RESUME over a Unix socket


class Outgoing(NamedTuple):
    """A message to send."""

    route: bytes  # the connection it goes to
    message: Message  # its payload may change with the next message that is taken, unless it has a ``place``
    place: Place | None = None  # the payload's memory, which does not change while it is read; None: copy it


def too_many_jobs(most: int, name: str) -> ProtocolError:
    """There is no place for one more job."""
    return ProtocolError(
        f"this server has its most jobs already (expected at most {most}, got one more, {name!r}). Fix: end one that is"
        " no longer needed, by psengine admin forget --job NAME; or use another server.",
        ErrorCode.MEMORY,
    )
