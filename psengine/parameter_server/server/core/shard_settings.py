"""What a shard needs to know, given by the daemon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What a shard needs to know.

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
