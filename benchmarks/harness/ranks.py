"""The ranks that a benchmark starts: processes of one gloo group, with a deadline, by mpiexec where MPI is a peer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness.barrier import CACHE_LINE_BYTES, Barrier

BENCHMARKS = Path(__file__).resolve().parents[1]
GROUP_TIMEOUT_S = 120


@dataclass(frozen=True)
class Rank:
    """What a rank's function gets first."""

    rank: int
    world_size: int
    barrier: Barrier
    has_mpi: bool

    @property
    def has_a_core(self) -> bool:
        return self.world_size <= len(os.sched_getaffinity(0))

    def keep_to_core(self) -> None:
        """Give this thread, not gloo's, a core of its own where there are enough.

        Ranks that compute are on different cores already; ranks that slept a moment ago may wake on the same one, and
        then all who hand pieces to and fro take four times as long.
        """
        if self.has_a_core:
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[self.rank]})


def find_mpiexec() -> str | None:
    """The mpiexec of this environment, else of the machine; None where there is no MPI to compare with."""
    if importlib.util.find_spec("mpi4py") is None or importlib.util.find_spec("numpy") is None:
        return None
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline_s: float,
    mpiexec: str | None = None,
    environment: Mapping[str, str] = {},
) -> list[Any]:
    """Call ``function(Rank, *arguments)`` on every rank; return the results in rank order.

    Args:
        function: of a module under benchmarks/; what it returns goes through JSON.
        world_size: number of ranks.
        arguments: plain values; they go through JSON.
        deadline_s: how long the ranks may take.
        mpiexec: starts them, for a candidate that needs MPI.
        environment: for them, besides this process's.

    Raises:
        RuntimeError: a rank failed, or the deadline passed.
    """
    import torch.distributed as dist

    module = ".".join(Path(inspect.getfile(function)).resolve().relative_to(BENCHMARKS).with_suffix("").parts)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"OMP_NUM_THREADS": "1", **os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="psengine-benchmark-") as directory:
        folder = Path(directory)
        (folder / "barrier").write_bytes(bytes(world_size * CACHE_LINE_BYTES))
        plan = {"module": module, "function": function.__name__, "arguments": arguments, "deadline_s": deadline_s}
        plan |= {"world_size": world_size, "port": store.port, "has_mpi": mpiexec is not None}
        (folder / "plan").write_text(json.dumps(plan))
        try:
            for command in _commands(folder, world_size, mpiexec):
                processes.append(subprocess.Popen(command, env=settings, start_new_session=True))
            _wait_for(processes, f"{module}.{function.__name__} on {world_size} ranks", deadline_s)
            return [json.loads((folder / f"result{rank}").read_text()) for rank in range(world_size)]
        finally:
            _end(processes)


def _commands(folder: Path, world_size: int, mpiexec: str | None) -> list[list[str]]:
    """One command that starts all ranks where there is an mpiexec, else one for each."""
    ranks = [[sys.executable, "-m", "harness.ranks", str(folder), str(rank)] for rank in range(world_size)]
    if mpiexec is None:
        return ranks
    command = [mpiexec]
    for rank, own in enumerate(ranks):
        command += [*([":"] if rank else []), "-n", "1", *own]
    return [command]


def _wait_for(processes: list[subprocess.Popen[bytes]], what: str, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} has not finished within {deadline_s:g} s; --deadline gives it more")
        time.sleep(0.02)
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise RuntimeError(f"{what}: one ended with exit code {failed[0]}; its error is above")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them and, by their process groups, what they started: mpiexec ends its ranks when it is asked to."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, how)
        for process in processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                continue


# ---- on a rank -------------------------------------------------------------------------------------------------------


def _main(folder: Path, number: int) -> None:
    plan = json.loads((folder / "plan").read_text())
    signal.alarm(math.ceil(plan["deadline_s"]))  # ends this process even where nobody is left who would
    if plan["has_mpi"]:
        _check_mpi(number, plan["world_size"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = Rank(number, plan["world_size"], Barrier(folder / "barrier", number, plan["world_size"]), plan["has_mpi"])
    store = dist.TCPStore("127.0.0.1", plan["port"], is_master=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=number, world_size=rank.world_size, timeout=timeout)
    try:
        result = getattr(importlib.import_module(plan["module"]), plan["function"])(rank, *plan["arguments"])
        (folder / f"result{number}").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _check_mpi(number: int, world_size: int) -> None:
    import mpi4py

    mpi4py.rc.thread_level = "single"  # MPI's fastest
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (number, world_size):
        raise RuntimeError(
            f"mpiexec and mpi4py do not belong together (expected rank {number} of {world_size}, got {world.rank} of"
            f" {world.size}): install both into this environment, pip install mpich mpi4py"
        )


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
