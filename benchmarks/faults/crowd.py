"""Many clients at once: some that say nothing, some that push; for as long as asked."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from attacks.hostile_client import idle_dealers, look_around, resident_bytes
from harness.tables import Table
from support.server_process import APPLY, SGD, running_server

from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment

SAMPLES = 12
PAUSE_S = 1.0  # of a client after each push


def _layout(numel: int) -> list[ChunkSpec]:
    return [ChunkSpec(0, ChunkKind.PARAMETER, torch.float32, numel, (Segment("p", (numel,), (1,), 0, numel),))]


def _enter(session: WorkerSession, numel: int) -> None:
    session.start()
    session.enter(_layout(numel), lambda one: torch.zeros(one.numel))


def _push_until(session: WorkerSession, rank: int, numel: int, end_s: float) -> int:
    """Pushes of a one in element ``rank``; how many were acknowledged."""
    gradient = torch.zeros(numel)
    gradient[rank] = 1.0
    pushes = 0
    while time.monotonic() < end_s:
        session.push(0, gradient.clone(), []).wait()
        pushes += 1
        time.sleep(PAUSE_S)
    return pushes


def stand_in_crowd(idle: int, active: int, minutes: float) -> Table:
    """Element r of the weights counts worker r's pushes."""
    options = {"insecure": True, "lease_s": 30.0}
    with running_server(**options) as server, idle_dealers(server.addresses[0], idle):
        sessions = [
            WorkerSession(
                SessionOptions(
                    addresses=(server.addresses[0],),
                    job="crowd",
                    rule=APPLY,
                    rank=rank,
                    world_size=active,
                    timeout_s=60.0,
                )
            )
            for rank in range(active)
        ]
        try:
            with ThreadPoolExecutor(active) as pool:
                for entered in [pool.submit(_enter, session, active) for session in sessions]:
                    entered.result()
                body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, active, 0]]}
                wait_all([session.configure(0, body) for session in sessions])
                began_s = time.monotonic()
                end_s = began_s + 60 * minutes
                pushing = [
                    pool.submit(_push_until, session, rank, active, end_s) for rank, session in enumerate(sessions)
                ]
                memory, health, newcomer_s = [], [], []
                for sample in range(SAMPLES):
                    time.sleep(max(0.0, began_s + 60 * minutes * (sample + 1) / SAMPLES - time.monotonic()))
                    found, seconds = look_around(server)
                    memory.append(resident_bytes(server.pid) / 1e6)
                    health.append(found)
                    newcomer_s.append(seconds)
                acknowledged = [pushed.result() for pushed in pushing]
            values = sessions[0].pull(0).wait().values
            assert values is not None
            there = [round(-value) for value in values.tolist()]
            evicted = server.job("crowd")[0]["evicted"]
        finally:
            for session in sessions:
                session.close()
    lost = sum(max(0, pushes - found) for pushes, found in zip(acknowledged, there, strict=True))
    doubled = sum(max(0, found - pushes) for pushes, found in zip(acknowledged, there, strict=True))
    columns = ["idle", "active", "minutes", "pushes", "lost", "doubled", "evicted", "memory MB, first to last",
               "healthy", "newcomer s, longest"]  # fmt: skip
    well = sum(found == "10/10" for found in health)
    row = [idle, active, minutes, sum(acknowledged), lost, doubled, evicted, f"{memory[0]:.0f} to {memory[-1]:.0f}",
           f"{well} of {SAMPLES}", f"{max(newcomer_s):.2f}"]  # fmt: skip
    return Table("", columns, [row])
