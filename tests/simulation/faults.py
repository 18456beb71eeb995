"""What each kind of fault does, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.network import DOWN, UP, Cut, Noise
from simulation.scenario import Fault

if TYPE_CHECKING:
    from simulation.job import Simulation


def begin(world: Simulation, fault: Fault) -> None:
    """Let it happen; its end is scheduled."""
    if fault.server is not None:
        fault = fault._replace(server=fault.server % len(world.network.servers))  # a shrunk job has fewer
    world.clock.note("fault", *fault)
    world.counts[fault.kind] += 1
    _BEGIN[fault.kind](world, fault)


def _break(world: Simulation, fault: Fault) -> None:
    wires = world.network.wires_of(fault.rank, fault.server)
    if not wires:
        return
    for wire in wires if fault.detail < 0.3 else wires[: 1 + int(fault.detail * len(wires))][-1:]:
        world.network.break_wire(wire, delivers_late=fault.detail > 0.5, notices_after_s=fault.lasts_s)


def _cut(world: Simulation, fault: Fault, directions: tuple[int, ...] | None = None) -> None:
    rank = None if fault.detail > 0.8 else fault.rank
    cut = Cut(rank, fault.server, directions or ((UP,) if int(fault.detail * 10) % 2 else (DOWN,)))
    world.network.cuts.append(cut)
    world.clock.after(fault.lasts_s, lambda: world.network.release(cut, loses=int(fault.detail * 100) % 3 == 0))


def _clog(world: Simulation, fault: Fault) -> None:
    _cut(world, fault, (UP, DOWN))


def _noise(world: Simulation, fault: Fault) -> None:
    noise = Noise(0.2 * fault.detail, 0.1, 0.1 * (1 - fault.detail))
    world.network.noises.append(noise)
    world.clock.after(fault.lasts_s, lambda: world.network.noises.remove(noise))


def _kill_worker(world: Simulation, fault: Fault) -> None:
    assert fault.rank is not None
    process = world.slots[fault.rank].process
    if process is not None and not process.is_dead:
        process.kill()
        for wire in world.network.wires_of(fault.rank, None):
            if wire.socket.process is process:
                world.network.break_wire(wire, delivers_late=fault.detail > 0.3, notices_after_s=0.0)
        world.slots[fault.rank].rest_s = fault.lasts_s


def _stop_worker(world: Simulation, fault: Fault) -> None:
    assert fault.rank is not None
    process = world.slots[fault.rank].process
    if process is not None and not process.is_dead:
        process.stop()
        world.clock.after(fault.lasts_s, process.resume)


def _zombie(world: Simulation, fault: Fault) -> None:
    assert fault.rank is not None
    slot = world.slots[fault.rank]
    process = slot.process
    if process is not None and not process.is_dead and not process.is_stopped:
        process.stop()
        world.zombies.append(process)
        world.clock.after(fault.lasts_s, process.resume)
        slot.process, slot.rest_s = None, 0.2 * fault.detail


def _kill_server(world: Simulation, fault: Fault) -> None:
    assert fault.server is not None
    world.kill_server(fault.server, fault.lasts_s, loses_power=fault.detail < 0.5)


def _stop_server(world: Simulation, fault: Fault) -> None:
    assert fault.server is not None
    server = world.network.servers[fault.server]
    if server.is_up:
        server.pause()
        world.clock.after(fault.lasts_s, server.resume)


def _bad_disk(world: Simulation, fault: Fault) -> None:
    assert fault.server is not None
    disk = world.disks[fault.server].files.state
    disk.problem = fault.kind

    def mend() -> None:
        disk.problem = ""

    world.clock.after(fault.lasts_s, mend)


def _flip_bits(world: Simulation, fault: Fault) -> None:
    assert fault.server is not None
    may_lose, note = world.disks[fault.server].flip_bit(has_log=world.scenario.keeps_log)
    if may_lose:
        world.job.damaged(fault.server, note)


_BEGIN = {
    "break": _break,
    "cut": _cut,
    "clog": _clog,
    "noise": _noise,
    "kill worker": _kill_worker,
    "stop worker": _stop_worker,
    "zombie": _zombie,
    "kill server": _kill_server,
    "stop server": _stop_server,
    "fsync fails": _bad_disk,
    "disk full": _bad_disk,
    "bits flip": _flip_bits,
}
