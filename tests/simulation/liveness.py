"""Nobody waits for long once nothing fails, and nobody waits for the dead longer than a lease and a grace window."""

from __future__ import annotations

from simulation import inspection
from simulation.violation import Violation, require

# Beside the lease, what was restarted and what others compute.
SLACK_S = 2.0
CHECK_S = 0.5


class Liveness:
    """Watches all workers.

    Attributes:
        unrest_s: when something last changed that a worker may have to wait for: a process started, ended, was put out,
            or a fault began or ended.
    """

    def __init__(self, world) -> None:
        self._world = world
        self.unrest_s = 0.0
        self._unheard: set[int] = set()  # processes that could not say LEAVE
        scenario = world.scenario
        latency_s = 40 * scenario.latency_s[1]
        self._longest_s = scenario.lease_s * (1 + scenario.grace) + SLACK_S + 3 * scenario.think_s + latency_s
        self._longest_s += scenario.virtual_workers * scenario.think_s  # one may play all
        world.clock.after(CHECK_S, self._check)

    def _check(self) -> None:
        world = self._world
        world.clock.after(CHECK_S, self._check)
        if {fault.kind for fault in world.cluster.scenario.faults} == {"cut all"}:
            ended = [process for process in world.all_processes if process.is_dead]
            states = [inspection.worker_state(world.lead, world.name, one.rank, one.incarnation) for one in ended]
            self._unheard |= {one.number for one, state in zip(ended, states, strict=True) if state == "member"}
            evicted = inspection.evicted_count(world.lead, world.name) - len(self._unheard)
            require(evicted <= 0, "a cut of everybody ended {} leases: {}", evicted, world.where())
        calm_s, longest_s, spared = world.faults.calm_s, self._longest_s, -1
        if world.faults.cut_off is not None:
            spared, calm_s = world.faults.cut_off
            if inspection.awaits(world.lead, world.name, spared):
                return  # the job, begun anew, has not had it yet
            longest_s += 2 * world.scenario.lease_s + 1.0
        if calm_s is None:
            return
        since_s = max(calm_s, self.unrest_s)
        for process in (*world.processes, *world.readers):
            began_s = max(process.waits_since_s, since_s)
            passed_s = world.clock.now_s - began_s
            waits = not (process.is_dead or process.is_stopped or process.rank == spared)
            if waits and passed_s > longest_s + process.patience_s:
                raise Violation(f"worker {process.rank} has waited for {passed_s:.1f} s: {world.where()}")
