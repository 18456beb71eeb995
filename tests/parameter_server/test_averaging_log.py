"""An averaging job over a server with ``durability="log"``, killed in the middle of a step: the step goes on.

worker 0   push 0 1 2 3 ────────────── average 0 1 ──── SIGKILL ─┬─ sends 2 3 again ──── average 2 3
worker 1   push 0 1 2 3 ────────────── average 0 1 ──── of the   ├─ sends 2 3 again ──── average 2 3
worker 2   push 0 1 ── is held back ── average 0 1 ──── server ──┴─ is let go ── push 2 3 ── average 2 3
"""

from __future__ import annotations

import os

import pytest
import torch
from support.fault_workers import Reports, results_of, worker_processes
from support.server_process import running_server
from support.shard_world import spec
from support.waiting import eventually
from support.worker_sessions import entered
from typer.testing import CliRunner

from psengine.cli.server import _serve, build_app
from psengine.parameter_server.client.worker_session import wait_all

WORKERS = 3
CHUNKS = 4
NUMEL = 1000
STEPS = 8
# Worker 2 is held back in this step, before this chunk.
HELD_STEP, HELD_KEY = 5, 2


def gradient(rank: int, step: int, key: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + key))


def average(reports: Reports, address: str) -> list[list[torch.Tensor]]:
    """The averages of every step and chunk."""
    rank = int(os.environ["PSENGINE_WORKER"])
    chunks = [spec(key, NUMEL) for key in range(CHUNKS)]
    session = entered(address, rank, chunks, world_size=WORKERS, timeout_s=60.0)
    averages = []
    for step in range(STEPS):
        landings = [torch.zeros(NUMEL) for _ in range(CHUNKS)]
        pushes = []
        for key in range(CHUNKS):
            if (rank, step, key) == (2, HELD_STEP, HELD_KEY):
                wait_all(pushes)  # an average that nobody was told of need not be in the log
                reports.await_go()
            session.keep_result(key)
            pushes.append(session.push(key, gradient(rank, step, key), [landings[key]]))
        wait_all(pushes)
        averages.append(landings)
    session.close()
    return averages


def expected(step: int, key: int, ranks: tuple[int, ...]) -> torch.Tensor:
    """Added in the order of ranks."""
    total = gradient(ranks[0], step, key)
    for rank in ranks[1:]:
        total = total + gradient(rank, step, key)
    return total / len(ranks)


@pytest.mark.parametrize("snapshot_interval_s", [0.0, 0.1])
@pytest.mark.parametrize("dies", [False, True])
def test_a_restarted_server_goes_on_with_the_step_it_was_in(tmp_path, dies, snapshot_interval_s):
    """``dies``: worker 1, with the server."""
    options = {
        "bind": f"ipc://{tmp_path}/socket",
        "shards": 2,
        "lease_s": 1.0,
        "snapshot_dir": tmp_path / "s",
        "durability": "log",
        "snapshot_interval_s": snapshot_interval_s,
    }
    with running_server(**options) as server, worker_processes() as members:
        workers = [members.start(average, server.addresses[0], rank=rank) for rank in range(WORKERS)]

        def is_in_the_middle() -> bool:
            jobs = server.job("job")
            versions = sorted({0}.union(*({job["version_min"], job["version_max"]} for job in jobs)) - {0}) or [0]
            pushes = sum(worker["pushes"] for job in jobs for worker in job["workers"])
            everything = WORKERS * CHUNKS * HELD_STEP + (WORKERS - 1) * CHUNKS + HELD_KEY
            return (versions[0], versions[-1], pushes) == (HELD_STEP, HELD_STEP + 1, everything)

        eventually(is_in_the_middle)
        server.kill()
        if dies:
            workers.pop(1).kill()
        # Once more before any worker has said where it is.
        for _ in range(2):
            with running_server(**options) as server:
                server.kill()
            told = CliRunner().invoke(build_app(_serve), ["inspect", str(tmp_path / "s")], catch_exceptions=False)
            assert f"{WORKERS} workers, {CHUNKS} chunks, versions {HELD_STEP} to {HELD_STEP + 1}" in told.output
        with running_server(**options) as server:
            assert f"(job version {HELD_STEP + 1})" in server.lines[1]
            jobs = server.job("job")
            assert all(job["started"] and job["members"] == WORKERS for job in jobs), jobs
            workers[-1].go()
            results = results_of(workers)
    living = (0, 2) if dies else (0, 1, 2)
    for step in range(STEPS):
        for key in range(CHUNKS):
            is_before = step < HELD_STEP or (step == HELD_STEP and key < HELD_KEY)
            right = expected(step, key, (0, 1, 2) if is_before else living)
            for result in results:
                assert torch.equal(result[step][key], right), (step, key)
