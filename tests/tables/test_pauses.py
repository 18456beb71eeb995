"""Workers that stop for longer than a lease: under "average" they cannot go on, and the others do."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_workers import expect_workers
from support.processes import run_ranks_to_any_end
from support.server_process import ServerProcess, running_server
from support.server_training import use
from support.table_training import at_servers, batch
from support.waiting import eventually

import psengine
from psengine.errors import FencedError

LEASE_S, STEPS, PAUSED_IN = 4.0, 6, 3
SAID = {
    "backward": r"went on without worker \d: silent for .* raise the servers' --lease-s",
    "step": r"took steps 4 to \d+ without it .* raise the servers' --lease-s",
}


def pause(said: Path) -> None:
    said.with_suffix(".pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def resume(server: ServerProcess, said: Path) -> None:
    """Once every job has gone on without the worker that has stopped."""

    def have_gone_on() -> bool:
        jobs = server.status()["jobs"].values()
        return all(job["departed"] and job["workers"][0]["step"] > PAUSED_IN for job in jobs) and bool(jobs)

    eventually(have_gone_on)
    os.kill(int(said.with_suffix(".pid").read_text()), signal.SIGCONT)


def paused(rank: int, world_size: int, address: str, strategy: str, where: str, said: Path) -> Any:
    use(address)
    expect_workers(world_size)
    model = at_servers()
    wrapped = psengine.DistributedDataParallel(model, strategy=strategy)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), wrapped)
    for step in range(STEPS):
        loss = wrapped(*batch(rank, step))
        is_cut_off = (rank, step) == (1, PAUSED_IN)
        with pytest.raises(FencedError, match=SAID[where]) if is_cut_off else nullcontext():
            if is_cut_off and where == "backward":
                pause(said)
            loss.backward()
            if is_cut_off and where == "step":
                pause(said)
            optimizer.step()
        if is_cut_off:
            said.touch()
            os._exit(0)  # as a script does that the error ends
        optimizer.zero_grad()
    eventually(said.exists)  # or the job has ended, and the other worker hears that
    wrapped.leave()


@pytest.mark.parametrize(("strategy", "where"), [("sync-server", "backward"), ("sync", "step")])
def test_a_worker_that_missed_steps_says_so_instead_of_waiting(strategy, where, tmp_path):
    """It would wait for the others in the tables, and they for it in the dense part."""
    with running_server(lease_s=LEASE_S) as server, ThreadPoolExecutor(1) as pool:
        resumed = pool.submit(resume, server, tmp_path / "said")
        first, second = run_ranks_to_any_end(
            paused, 2, server.addresses[0], strategy, where, tmp_path / "said", init_group=strategy == "sync"
        )
    resumed.result()
    assert second.exit_code == 0, second.error
    if strategy == "sync-server":
        assert first.exit_code == 0, first.error
    else:
        assert "PeerLostError" in str(first.error)
