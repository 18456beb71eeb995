"""Ranks of a benchmark: those of ``psengine.verify.ranks``, with a barrier, by mpiexec where MPI is a peer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from psengine.verify import ranks

BENCHMARKS = Path(__file__).resolve().parents[1]
GROUP_TIMEOUT_S = 120
START_S = 60
CACHE_LINE_BYTES = 64
SLEEP_S = 50e-6


class Barrier:
    """Lets ranks go within a microsecond of each other; belongs to no candidate.

    Each rank counts its arrivals in a cache line of its own; nothing else is exchanged, so the order in which
    processors make stores visible does not matter. The file has a line for each rank, all zeros at first.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        with path.open("r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        stride = CACHE_LINE_BYTES // 8
        self._own = rank * stride
        self._others = [other * stride for other in range(world_size) if other != rank]
        self._shares_cores = world_size > len(os.sched_getaffinity(0))
        self._arrivals = 0

    def wait(self) -> None:
        """Meet asleep first: a rank that spun at once would keep a core from threads that finish another's work."""
        self._meet(lambda: time.sleep(SLEEP_S))
        self.spin()

    def spin(self) -> None:
        self._meet(os.sched_yield if self._shares_cores else lambda: None)

    def _meet(self, pause: Callable[[], object]) -> None:
        self._arrivals += 1
        self._counters[self._own] = self._arrivals
        for other in self._others:
            while self._counters[other] < self._arrivals:
                pause()


@dataclass(frozen=True)
class Rank:
    """What a rank's function gets first."""

    rank: int
    world_size: int
    barrier: Barrier
    has_mpi: bool

    def keep_to_core(self) -> None:
        """Give this thread, not gloo's, a core of its own where there are enough.

        Ranks that compute are on different cores already; ranks that slept a moment ago may wake on the same one, and
        then all who hand pieces to and fro take four times as long.
        """
        cores = sorted(os.sched_getaffinity(0))
        if self.world_size <= len(cores):
            os.sched_setaffinity(0, {cores[self.rank]})


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline_s: float,
    mpiexec: str | None = None,
    environment: Mapping[str, str] = {},
) -> list[Any]:
    """Call ``function(Rank, *arguments)`` on every rank, in a gloo group; return the results in rank order.

    Args:
        function: of a module under benchmarks/.
        world_size: number of ranks.
        arguments: plain values.
        deadline_s: how long the ranks may take.
        mpiexec: starts them, for a candidate that needs MPI.
        environment: for them, besides this process's.

    Raises:
        RuntimeError: a rank failed, or the deadline passed.
    """
    module = ".".join(Path(inspect.getfile(function)).resolve().relative_to(BENCHMARKS).with_suffix("").parts)
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"OMP_NUM_THREADS": "1", **os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="psengine-benchmark-") as directory:
        folder = Path(directory)
        (folder / "barrier").write_bytes(bytes(world_size * CACHE_LINE_BYTES))

        def start(count: int) -> list[tuple[ranks.Process, Connection]]:
            if mpiexec is None:
                return ranks.start_interpreters(count, settings)
            return _start_by(mpiexec, count, settings, str(folder / "socket"))

        try:
            return ranks.run_ranks(
                _work,
                *(module, function.__name__, folder / "barrier", mpiexec is not None, arguments),
                world_size=world_size,
                timeout_s=deadline_s,
                group_timeout_s=GROUP_TIMEOUT_S,
                threads=1,
                start=start,
            )
        except ranks.RankFailedError as error:
            raise RuntimeError(f"{module}.{function.__name__}: {error}\n{error.rank_traceback}") from None


def _work(place: ranks.Place, module: str, name: str, barrier: Path, has_mpi: bool, arguments: tuple[Any, ...]) -> Any:
    rank = Rank(place.rank, place.world_size, Barrier(barrier, place.rank, place.world_size), has_mpi)
    result = getattr(importlib.import_module(module), name)(rank, *arguments)
    if has_mpi:
        from mpi4py import MPI

        MPI.Finalize()  # mpiexec ends all ranks when one ends without this
    return result


def find_mpiexec() -> str | None:
    """The mpiexec of this environment, else of the machine; None where there is no MPI to compare with."""
    if importlib.util.find_spec("mpi4py") is None or importlib.util.find_spec("numpy") is None:
        return None
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def _start_by(
    mpiexec: str, world_size: int, settings: Mapping[str, str], address: str
) -> list[tuple[ranks.Process, Connection]]:
    """One command starts all ranks, which connect to ``address`` and say which they are."""
    found: dict[int, Connection] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(world_size)
        listener.settimeout(START_S)
        command = [mpiexec, "-n", str(world_size), sys.executable, "-m", "harness.ranks", address]
        process = subprocess.Popen(command, env=dict(settings), start_new_session=True)
        try:
            while len(found) < world_size:
                accepted, _ = listener.accept()
                connection = Connection(accepted.detach())
                rank, size = connection.recv()
                if size != world_size:
                    raise RuntimeError(
                        f"mpiexec and mpi4py do not belong together (expected {world_size} ranks, got {size}): install"
                        " both into this environment, pip install mpich mpi4py"
                    )
                found[rank] = connection
        except BaseException:
            process.kill()
            raise
    return [(process, found[rank]) for rank in range(world_size)]


def _serve_mpi(address: str) -> None:
    import mpi4py

    mpi4py.rc.thread_level = "single"  # MPI's fastest
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    own = socket.socket(socket.AF_UNIX)
    own.connect(address)
    connection = Connection(own.detach())
    connection.send((MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size))
    ranks.serve(connection, watches=True)


if __name__ == "__main__":
    _serve_mpi(sys.argv[1])
