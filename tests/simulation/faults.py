"""What each kind of fault does, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from simulation import inspection
from simulation.network import DOWN, UP, Cut, rank_of
from simulation.scenario import WAITS_S, Fault
from simulation.stranger import Stranger


class Faults:
    """Those of a scenario.

    Attributes:
        calm_s: since when nothing fails; None where something does, or will.
        cut_off: the rank of the member that is cut off from a server, since when, while this is all that fails; else
            None.
    """

    def __init__(self, world) -> None:
        self._world = world
        self._open = len(world.scenario.faults)
        self.calm_s: float | None = None if self._open else 0.0
        self._ended_s = self._anew_s = 0.0
        self._begun: list[tuple[Fault, float, bool]] = []  # since when; whether its worker was a member
        # Faults whose time has come, and that wait for a message.
        self._waiting: list[Fault] = []

    @property
    def cut_off(self) -> tuple[int, float] | None:
        if self._open != 1 or not self._begun:
            return None
        fault, since_s, is_member = self._begun[0]
        is_counted = fault.kind == "cut off" and is_member and since_s >= self._anew_s
        if self._world.scenario.rule == "average" and len(self._world.training.views.members) < 2:
            return None  # nobody else has the state, so that who comes waits for this worker
        return (fault.rank, max(since_s, self._ended_s)) if is_counted else None

    def begin_anew(self) -> None:
        """All processes are started anew: none of them was a member when what fails now began."""
        self._anew_s = self._world.clock.now_s

    def schedule(self) -> None:
        """At the beginning."""
        for fault in self._world.scenario.faults:
            self._world.clock.at(fault.at_s, self._due, fault)

    def _due(self, fault: Fault) -> None:
        if not fault.on:
            self._begin(fault)
            return
        self._waiting.append(fault)
        self._world.clock.after(WAITS_S, self._begin_if_waiting, fault)

    def _begin_if_waiting(self, fault: Fault) -> None:
        if fault in self._waiting:
            self._waiting.remove(fault)
            self._begin(fault)

    def coordinated(self, server) -> None:
        """A coordinator has taken a message."""
        if self._waiting and (state := inspection.coordinator_state(server)):
            self.noticed(state)

    def noticed(self, name: str) -> None:
        """A message of this type has arrived somewhere: it is taken before, or after, what waited for it happens."""
        for fault in [fault for fault in self._waiting if fault.on == name]:
            self._waiting.remove(fault)
            self._world.clock.after(0.0 if int(fault.detail * 1000) % 2 else 0.001, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        world = self._world
        # A shrunk job has fewer.
        fault = fault._replace(server=fault.server % len(world.network.servers), rank=fault.rank % len(world.slots))
        world.clock.note("fault", *fault)
        world.counts[fault.kind] += 1
        self._begun.append((fault, world.clock.now_s, world.slots[fault.rank].is_member))
        _BEGIN[fault.kind](world, fault)
        world.clock.after(fault.lasts_s, self._ended, self._begun[-1])

    def _ended(self, begun: tuple[Fault, float, bool]) -> None:
        self._open -= 1
        self._begun.remove(begun)
        self._ended_s = self._world.clock.now_s
        if not self._open:
            self.calm_s = self._world.clock.now_s


def _break(world, fault: Fault) -> None:
    found = world.network.between(fault.rank, fault.server)
    for one in found if fault.detail < 0.3 else found[int(fault.detail * len(found)) :][:1]:
        first = fault.detail > 0.6
        times = (0.0, fault.lasts_s) if first else (fault.lasts_s, 0.0)
        world.network.drop(one, worker_s=times[0], server_s=times[1])


def _cut(world, fault: Fault) -> None:
    choice = int(fault.detail * 100)
    directions = ((UP,), (DOWN,), (UP, DOWN), (UP, DOWN))[choice % 4]
    cut = Cut(None if fault.detail > 0.8 else fault.rank, None if fault.detail < 0.2 else fault.server, directions)
    if fault.kind == "cut off":
        cut = Cut(fault.rank, fault.server, (UP, DOWN))
    elif fault.kind == "cut all":
        cut = Cut(None, None, (UP, DOWN))
    world.network.begin(cut)
    world.clock.after(fault.lasts_s, lambda: world.network.end(cut, loses=choice % 3 == 0))


def _slow(world, fault: Fault) -> None:
    """What is sent in the first half of the time takes the other half."""
    found = world.network.between(fault.rank, fault.server)
    found = found if fault.detail < 0.3 else found[int(fault.detail * len(found)) :][:1]
    if fault.kind == "slow servers":
        hosts = [one.host for one in _pair(world, fault)]
        found = [one for host in hosts for one in world.network.between(rank_of(host), None)]
    for one in found:
        one.delay_s += fault.lasts_s / 3

    def mend() -> None:
        for one in found:
            one.delay_s -= fault.lasts_s / 3

    world.clock.after(fault.lasts_s / 2, mend)


def _evict(world, fault: Fault) -> None:
    slot = world.slots[fault.rank]
    slot.training.lead.evict(slot.training.name, slot.rank)


def _kill_worker(world, fault: Fault) -> None:
    for slot in world.slots[fault.rank].together:
        if slot.process is not None and not slot.process.is_dead:
            # With its machine, or alone: then its kernel says so at once.
            slot.process.kill(world.scenario.lease_s if fault.detail < 0.3 else 0.0)
            slot.rest_s = fault.lasts_s


def _stop_worker(world, fault: Fault) -> None:
    for slot in world.slots[fault.rank].together:
        if (process := slot.process) is not None and not process.is_dead:
            process.stop()
            world.clock.after(fault.lasts_s, process.resume)


def _zombie(world, fault: Fault) -> None:
    for slot in world.slots[fault.rank].together:
        process = slot.process
        if process is not None and not process.is_dead and not process.is_stopped:
            process.stop()
            slot.training.zombies.append(process)
            world.clock.after(fault.lasts_s, process.resume)
            slot.process, slot.rest_s = None, 0.2 * fault.detail


def _kill_server(world, fault: Fault) -> None:
    world.kill_server(fault.server, fault.lasts_s, loses_power=fault.detail < 0.5)


def _stop_server(world, fault: Fault) -> None:
    server = world.network.servers[fault.server]
    if server.is_up:
        server.pause()
        world.clock.after(fault.lasts_s, server.resume)


def _bad_disk(world, fault: Fault) -> None:
    disk = world.disks[fault.server].files.state
    disk.problem = fault.kind

    def mend() -> None:
        disk.problem = ""
        if fault.kind == "fsync fails" and fault.detail < 0.5:
            world.kill_server(fault.server, 0.3, loses_power=True)

    world.clock.after(fault.lasts_s, mend)


def _flip_bits(world, fault: Fault) -> None:
    may_lose, note = world.disks[fault.server].flip_bit(has_log=world.scenario.keeps_log)
    if may_lose:
        world.damaged(fault.server, note or {})


def _cut_workers(world, fault: Fault) -> None:
    count = len(world.training.slots)
    other = (fault.rank + 1 + int(fault.detail * 100) % max(1, count - 1)) % count
    there, back = (fault.rank, other), (other, fault.rank)
    links = [[there], [back], [there, back]][int(fault.detail * 1000) % 3]
    world.training.groups.cut(links)
    world.clock.after(fault.lasts_s, lambda: world.training.groups.mend(links, breaks=fault.detail < 0.3))


def _kill_workers(world, fault: Fault) -> None:
    for rank in range(len(world.training.slots)):
        _kill_worker(world, fault._replace(rank=rank))


def _fail_checkpoint(world, fault: Fault) -> None:
    disk = world.training.job.disk_of(fault.rank).state
    disk.problem = ("fsync fails", "disk full")[int(fault.detail * 1000) % 2]
    world.clock.after(fault.lasts_s, lambda: setattr(disk, "problem", ""))


def _flip_checkpoint(world, fault: Fault) -> None:
    """A bit of a checkpoint flips, among its values mostly, and all workers have to read theirs."""
    world.training.job.disk_of(fault.rank).flip_bit(last_bytes=128 if fault.detail < 0.8 else None)
    world.training.job.excused.update((0, fault.rank))
    _kill_workers(world, fault)


# ---- of servers that have followers ----------------------------------------------------------------------------------


def _pair(world, fault: Fault) -> tuple[Any, Any]:
    """The process that leads the fault's server, or did last, and the other one."""
    index = fault.server % world.scenario.servers
    hosts = [world.network.servers[host] for host in range(index, world.scenario.hosts, world.scenario.servers)]
    return tuple(sorted(hosts, key=lambda one: one.host != world.leaders[index].host))


def _kill_one(which: int) -> Callable[..., None]:
    return lambda world, fault: _kill_server(world, fault._replace(server=_pair(world, fault)[which].host))


def _stop_one(which: int) -> Callable[..., None]:
    return lambda world, fault: _stop_server(world, fault._replace(server=_pair(world, fault)[which].host))


def _kill_both(world, fault: Fault) -> None:
    """The other one a while later: it may lead by then."""
    other = _pair(world, fault)[1].host
    _kill_one(0)(world, fault)
    world.clock.after(3 * fault.detail, _kill_server, world, fault._replace(server=other))


def _cut_servers(world, fault: Fault) -> None:
    first, second = (one.host for one in _pair(world, fault))
    choice = int(fault.detail * 100)
    there, back = (((UP,), (DOWN,)), ((DOWN,), (UP,)), ((UP, DOWN), (UP, DOWN)))[choice % 3]
    for cut in Cut(rank_of(first), second, there), Cut(rank_of(second), first, back):
        world.network.begin(cut)
        world.clock.after(fault.lasts_s, partial(world.network.end, cut, loses=choice % 2 == 0))


def _bad_elector(world, fault: Fault) -> None:
    problems = world.electors[fault.server % world.scenario.servers].problems
    problem = fault._replace(server=_pair(world, fault)[fault.detail > 0.7].host)
    problems.append(problem)
    world.clock.after(fault.lasts_s, problems.remove, problem)


_BEGIN = {
    "kill leader": _kill_one(0),
    "kill follower": _kill_one(1),
    "kill both": _kill_both,
    "stop leader": _stop_one(0),
    "stop follower": _stop_one(1),
    "cut servers": _cut_servers,
    "cut elector": _bad_elector,
    "slow servers": _slow,
    "elector down": _bad_elector,
    "elector late": _bad_elector,
    "cut workers": _cut_workers,
    "kill workers": _kill_workers,
    "checkpoint fails": _fail_checkpoint,
    "bits of a checkpoint flip": _flip_checkpoint,
    "break": _break,
    "cut": _cut,
    "cut off": _cut,
    "cut all": _cut,
    "slow": _slow,
    "kill worker": _kill_worker,
    "stop worker": _stop_worker,
    "zombie": _zombie,
    "kill server": _kill_server,
    "kill lead": lambda world, fault: _kill_server(world, fault._replace(server=0)),
    "stop server": _stop_server,
    "evict": _evict,
    "stranger": lambda world, fault: Stranger(world, fault.lasts_s, str(fault.detail)),
    "fsync fails": _bad_disk,
    "disk full": _bad_disk,
    "bits flip": _flip_bits,
}
