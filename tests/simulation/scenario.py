"""What a seed stands for: a job, its servers, its network, and a list of faults. Shrinking takes faults away."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Fault(NamedTuple):
    """One fault; what ``detail`` means depends on the kind, see ``faults.py``."""

    kind: str
    at_s: float
    lasts_s: float = 0.0
    rank: int | None = None
    server: int | None = None
    detail: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """See the module's text.

    Attributes:
        seed: of every draw that is made while it runs.
        rule: "average", "apply" or "merge".
        codec: of gradients and of the answers to them; "" has none.
        quorum: of "average", where None waits for all, and of "merge".
        grace: of "merge".
        weighs: under "average", whether gradients weigh differently.
        max_staleness: of "apply"; None is unbounded.
        steps: of each worker ("apply"), or of the job ("average").
        shards: of each server.
        room: how many times the model fits a shard's limit of memory; None has room for everything.
        shares: how many workers, from rank 0 on, share memory with the servers.
        snapshot_s: from one snapshot to the next; None keeps none.
        keeps_log: an update is acknowledged once it is on the disk.
        think_s: the longest time between two steps of a worker.
    """

    seed: int
    rule: str = "apply"
    codec: str = ""
    quorum: int | None = None
    grace: float = 0.0
    weighs: bool = False
    max_staleness: int | None = None
    workers: int = 2
    servers: int = 1
    shards: int = 1
    chunks: int = 2
    steps: int = 6
    room: float | None = None
    shares: int = 0
    think_s: float = 0.4
    latency_s: tuple[float, float] = (0.001, 0.02)
    lease_s: float = 2.0
    heartbeat_s: float = 0.5
    tick_s: float = 0.1
    snapshot_s: float | None = None
    keeps_log: bool = False
    faults: tuple[Fault, ...] = field(default=())

    @property
    def durability(self) -> str:
        """The tier of its servers."""
        return "memory" if self.snapshot_s is None else "log" if self.keeps_log else "snapshot"

    @property
    def healed_s(self) -> float:
        """From here on nothing fails."""
        return max((fault.at_s + fault.lasts_s for fault in self.faults), default=0.0)


# kind -> how often it is drawn, and the bounds of how long it lasts
KINDS = {
    "break": (5, 0.0, 1.5),  # one connection
    "cut": (3, 0.2, 4.0),  # nothing arrives one way
    "clog": (2, 0.2, 4.0),  # nothing arrives either way
    "noise": (3, 0.5, 4.0),  # frames are lost, doubled, reordered
    "kill worker": (3, 0.1, 5.0),
    "stop worker": (3, 0.1, 6.0),
    "zombie": (2, 0.5, 6.0),  # stopped, and another process gets its rank
    "kill server": (2, 0.1, 3.0),
    "stop server": (2, 0.1, 5.0),
    "fsync fails": (1, 0.1, 4.0),
    "disk full": (1, 0.1, 4.0),
    "bits flip": (1, 0.0, 0.0),  # of the newest snapshot
}
FAULTY_S = 4.0
# "topk" keeps a part of the differences to several updates, and all that is in an average.
CODECS = {
    "apply": ("bf16", "fp16", "fp32", "int8", "fp4", "onebit", "topk:ratio=0.01"),
    "merge": ("bf16", "fp16", "fp32", "int8", "fp4", "topk:ratio=0.01"),
    "average": ("bf16", "fp16", "fp32", "int8", "fp4", "topk:ratio=0.02"),
}


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    rule = rng.choice(("apply", "average"))
    lease_s = rng.choice((1.0, 2.0, 2.0, 4.0))
    servers = rng.choice((1, 1, 1, 2))
    scenario = Scenario(
        seed=seed,
        rule=rule,
        quorum=rng.choice((None, None, 1, 2)) if rule == "average" else None,
        max_staleness=rng.choice((None, 0, 1, 3)) if rule == "apply" else None,
        workers=workers,
        servers=servers,
        shards=rng.choice((1, 1, 2)),
        chunks=rng.choice((1, 2, 3)),
        steps=rng.randint(3, 8),
        think_s=rng.choice((0.05, 0.4, 1.0)),
        latency_s=rng.choice(((0.0005, 0.002), (0.001, 0.05), (0.01, lease_s / 12))),
        lease_s=lease_s,
        heartbeat_s=lease_s / 4,
        tick_s=rng.choice((0.1, 0.1, 0.2)),
        snapshot_s=rng.choice((None, 0.3, 1.0)),
    )
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    keeps_log = scenario.snapshot_s is not None and rng.random() < 0.6
    faults = sorted((_draw_fault(rng, scenario) for _ in range(count)), key=lambda fault: fault.at_s)
    scenario = replace(scenario, keeps_log=keeps_log, faults=tuple(faults))
    if rule == "apply" and rng.random() < 0.3:
        quorum, grace = rng.choice((1, 2, 2, 3)), rng.choice((0.0, 0.25, 0.25, 1.0, 4.0))
        scenario = replace(scenario, rule="merge", max_staleness=None, quorum=quorum, grace=grace)
    codec = rng.choice(CODECS[scenario.rule]) if rng.random() < 0.4 else ""
    weighs = rule == "average" and not codec and rng.random() < 0.4
    shares = rng.choice((workers, workers, 1)) if not codec and rng.random() < 0.5 else 0
    room = rng.choice((0.5, 1.0, *[2.0, 3.0, 4.0, 8.0] * 2)) if rng.random() < 0.1 else None
    scenario = replace(scenario, codec=codec, weighs=weighs, shares=shares, room=room)
    if shares and rng.random() < 0.5:
        # Noise spares these workers; who reads a place may die, stop or be replaced.
        kind = rng.choice(("kill worker", "stop worker", "stop worker", "zombie"))
        more = _draw_fault(rng, scenario, kind)
        scenario = replace(scenario, faults=tuple(sorted((*faults, more), key=lambda fault: fault.at_s)))
    return scenario


def _draw_fault(rng: random.Random, scenario: Scenario, kind: str = "") -> Fault:
    kind = kind or rng.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])[0]
    _, shortest_s, longest_s = KINDS[kind]
    return Fault(
        kind,
        round(rng.random() * FAULTY_S, 3),
        round(shortest_s + (longest_s - shortest_s) * rng.random() ** 2, 3),
        rng.randrange(scenario.workers),
        rng.randrange(scenario.servers),
        round(rng.random(), 3),
    )
