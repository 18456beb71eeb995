"""When what happens to whom, from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# By cause, how often it comes among mixed faults.
SHARES = {
    "worker killed": 45,
    "launcher killed": 10,
    "coordinator killed": 10,
    "worker stopped": 12,
    "link cut": 12,
    "host left": 11,
}
# How long a worker is stopped, a link is cut and a host is away, in leases: shorter and longer than one.
STOPPED, CUT, AWAY = (0.2, 2.5), (0.2, 2.5), (1.0, 8.0)


@dataclass(frozen=True)
class Fault:
    """``cause`` befalls ``host`` at ``at_s`` after the first step; what can be undone is, ``lasts_s`` later."""

    at_s: float
    cause: str
    host: int
    lasts_s: float


def plan(
    seed: int, *, per_hour: float, lease_s: float, hosts: int, most_s: float, causes: Sequence[str]
) -> list[Fault]:
    """Faults at the times of a Poisson process, until ``most_s``."""
    chance = random.Random(seed)
    found, at_s = [], 0.0
    while True:
        at_s += chance.expovariate(per_hour / 3600)
        if at_s > most_s:
            return found
        (cause,) = chance.choices(causes, [SHARES[one] for one in causes])
        range_of = {"worker stopped": STOPPED, "link cut": CUT, "host left": AWAY}.get(cause, (0.0, 0.0))
        found.append(Fault(at_s, cause, chance.randrange(hosts), lease_s * chance.uniform(*range_of)))
