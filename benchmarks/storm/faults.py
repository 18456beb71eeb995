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
LASTS = {"worker stopped": (0.2, 2.5), "link cut": (0.2, 2.5), "host left": (1.0, 8.0)}
# How many hosts leave at once, of eight.
LEAVING = (1, 1, 2, 4, 6)


@dataclass(frozen=True)
class Fault:
    """``cause`` befalls ``hosts`` at ``at_s`` after the first step; what can be undone is, ``lasts_s`` later."""

    at_s: float
    cause: str
    hosts: tuple[int, ...]
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
        count = chance.choice(LEAVING) if cause == "host left" else 1
        chosen = tuple(chance.sample(range(hosts), min(count, hosts)))
        found.append(Fault(at_s, cause, chosen, lease_s * chance.uniform(*LASTS.get(cause, (0.0, 0.0)))))
