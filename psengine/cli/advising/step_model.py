"""How long a training step takes on hosts that links join: a model of compute, links and codecs. Pure.

Buckets fill during backward; each goes through the stages of its exchange, one after the other on the host's link::

    core   forward ── backward ─ b0 ─ encode ── backward ─ b1 ─ encode ─┬─ second stages, decode ── step
    link                         └── b0 ──────────────────┴── b1 ───────┴── b0 ── b1

A stage of n bytes takes ``n / (efficiency * rate) + n * host_s * sharing + messages * (round trip / 2 + message_s)``.
The constants were fitted by ``benchmarks/cluster/step_time.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psengine.cli.advising.traffic import Stage, Traffic

# Of a step without exchange: backward computes two gradients for each product of forward.
BACKWARD = 2 / 3
# Native DDP's buckets, and ours.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass(frozen=True, kw_only=True)
class Road:
    """How messages of one kind use a link.

    Attributes:
        efficiency: share of the link's rate at which payloads move; the rest of the time the link is idle.
        host_s: a core's seconds for each byte that a host sends (system calls, copies, additions).
    """

    efficiency: float
    host_s: float


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What was fitted.

    Attributes:
        ring: all-reduces of gloo.
        gathers: its all-to-alls and all-gathers.
        servers: psengine's parameter servers.
        operation_s: a core's time for each stage of a bucket, whatever its size.
        value_s: a core's time for a byte of values that is packed and unpacked.
        message_s: software's part of a message that another one waits for.
    """

    ring: Road
    gathers: Road
    servers: Road
    operation_s: float
    value_s: float
    message_s: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts that are alike, and the links that join them.

    Attributes:
        hosts: number of hosts.
        ranks_per_host: ranks on each.
        bytes_per_s: rate of a host's link, in each direction.
        round_trip_s: between two hosts.
        sharing: how many times longer a rank computes because ranks share cores, beyond what ``compute_s`` includes;
            1 where each has its own.
    """

    hosts: int
    ranks_per_host: int = 1
    bytes_per_s: float
    round_trip_s: float = 0.0
    sharing: float = 1.0

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.hosts * self.ranks_per_host


def buckets_of(value_bytes: float) -> list[float]:
    """Sizes of the buckets of so many bytes of gradients, were parameters of any size."""
    sizes: list[float] = []
    left = value_bytes
    while left > 0:
        sizes.append(min(left, BUCKET_BYTES if sizes else FIRST_BUCKET_BYTES))
        left -= sizes[-1]
    return sizes


def step_s(traffic: Traffic, value_bytes: float, compute_s: float, network: Network, constants: Constants) -> float:
    """Seconds of a step; averaged over ``traffic.every`` of them.

    Args:
        traffic: of the strategy.
        value_bytes: float32 gradients of a replica.
        compute_s: a step without exchange.
        network: the hosts.
        constants: fitted.
    """
    buckets = buckets_of(value_bytes)
    if not traffic.is_hidden:
        waits_s = _end_s(traffic, buckets, 0.0, network, constants)
        hidden_s = traffic.overlap * compute_s
        return compute_s + max(0.0, waits_s - hidden_s) / traffic.every
    return _end_s(traffic, buckets, compute_s, network, constants)


def _end_s(
    traffic: Traffic, buckets: Sequence[float], compute_s: float, network: Network, constants: Constants
) -> float:
    """When the last bucket's values are there, from the step's begin."""
    road: Road = getattr(constants, traffic.road)
    latency_s = network.round_trip_s / 2 + constants.message_s

    def on_link_s(stage: Stage, size: float) -> float:
        byte_s = 1 / (road.efficiency * network.bytes_per_s) + road.host_s * network.sharing
        return stage.sent * size * byte_s + stage.messages * latency_s + constants.operation_s * network.sharing

    first, *more = traffic.stages
    total = sum(buckets)
    core_s, link_s = (1 - BACKWARD) * compute_s, 0.0
    arrived: list[float] = []
    for size in buckets:
        packed_s = (constants.value_s / 2 + first.coding_s) * size * network.sharing
        core_s += BACKWARD * compute_s * size / total + packed_s
        link_s = max(link_s, core_s) + on_link_s(first, size)
        arrived.append(link_s)
    for stage in more:
        before, arrived = arrived, []
        for size, ready_s in zip(buckets, before, strict=True):
            core_s = max(core_s, ready_s) + stage.coding_s * size * network.sharing
            link_s = max(link_s, core_s) + on_link_s(stage, size)
            arrived.append(link_s)
    for size, ready_s in zip(buckets, arrived, strict=True):
        core_s = max(core_s, ready_s) + (constants.value_s / 2 + traffic.after_s) * size * network.sharing
    return core_s
