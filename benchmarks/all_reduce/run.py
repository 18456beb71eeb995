"""What summing a tensor over the ranks of one machine costs: psengine's shared memory, gloo, MPI, in turn in one run.

python benchmarks/all_reduce/run.py [--ranks 2 4] [--sizes-kb 4 64 1024 25600 102400] [--rounds 100] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import mmap
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe_machine

from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for
from psengine.kernels import native

GROUP_TIMEOUT_S = 120
WARM_UP_ROUNDS = 5
# A round of a small size is short and a scheduler's whim shows more: they are repeated more often.
SMALL_KB, SMALL_TIMES = 1024, 10
CACHE_LINE_BYTES = 64
MEETING_SLEEP_S = 50e-6

COPY, IN_PLACE, STAGED, GLOO, MPI = "copy", "psengine in place", "psengine staged", "gloo", "MPI"
# MPICH's default sums in shared memory and spins without yielding while it waits, so ranks that share a core wait for
# their time slices to end: a second for 1 MB. Its other algorithm yields.
MPICH_WHERE_CORES_ARE_SHARED = {
    "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "mpir",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}


@dataclass(frozen=True)
class Plan:
    """What the ranks of one run measure; ``barrier_path`` names a file of a cache line for each rank."""

    world_size: int
    sizes_kb: tuple[int, ...]
    rounds: int
    port: int
    barrier_path: str
    deadline_s: float
    has_mpi: bool


@dataclass(frozen=True)
class Row:
    """Seconds of the slowest rank, for each candidate a list over the rounds; in a round all candidates had a turn."""

    size_kb: int
    seconds: dict[str, list[float]]
    mpi_name: str


# ---- the ranks -------------------------------------------------------------------------------------------------------


class Barrier:
    """Lets ranks go within a microsecond of each other, and belongs to no candidate.

    Each rank counts its arrivals in a cache line of its own; nothing else is exchanged, so the order in which
    processors make stores visible does not matter. Ranks meet asleep first: one that spun at once would keep a core
    from the threads with which gloo finishes on another rank.
    """

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        with open(path, "r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        stride = CACHE_LINE_BYTES // 8
        self._own = rank * stride
        self._others = [other * stride for other in range(world_size) if other != rank]
        self._shares_cores = world_size > len(os.sched_getaffinity(0))
        self._arrivals = 0

    def wait(self) -> None:
        self._meet(lambda: time.sleep(MEETING_SLEEP_S))
        self._meet(os.sched_yield if self._shares_cores else lambda: None)

    def _meet(self, pause: Callable[[], None]) -> None:
        self._arrivals += 1
        self._counters[self._own] = self._arrivals
        for other in self._others:
            while self._counters[other] < self._arrivals:
                pause()


def candidates_of(
    collective: Collective, numel: int, has_mpi: bool
) -> dict[str, tuple[torch.Tensor, Callable[[], object]]]:
    """For each candidate the tensor that it sums, and the call; ``COPY`` leaves its tensor as it is."""
    own = torch.empty(numel)
    in_place = collective.allocate(numel, torch.float32, torch.device("cpu"))
    target = torch.zeros(numel)
    copy = ctypes.memmove
    to, source, size_bytes = target.data_ptr(), own.data_ptr(), 4 * numel

    def copy_once(_keep: torch.Tensor = target) -> None:
        copy(to, source, size_bytes)

    candidates: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {
        COPY: (own, copy_once),
        IN_PLACE: (in_place, lambda: collective.all_reduce(in_place).wait()),
        STAGED: (own, lambda: collective.all_reduce(own).wait()),
        GLOO: (own, lambda: dist.all_reduce(own)),
    }
    if has_mpi:
        from mpi4py import MPI as mpi  # noqa: N811

        communicator, buffer = mpi.COMM_WORLD, [own.numpy(), mpi.FLOAT]
        candidates[MPI] = (own, lambda: communicator.Allreduce(mpi.IN_PLACE, buffer))
    return candidates


def addends_of(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def check(name: str, tensor: torch.Tensor, reduce: Callable[[], object], rank: int, world_size: int) -> None:
    """Compare one sum with float64's; float32 may be off by an ulp of the magnitudes an addition."""
    numel = tensor.numel()
    tensor.copy_(addends_of(rank, numel))
    reduce()
    expected = torch.zeros(numel, dtype=torch.float64)
    bound = torch.zeros(numel, dtype=torch.float64)
    for other in range(world_size):
        addends = addends_of(other, numel).double()
        expected += addends
        bound += addends.abs()
    bound *= (world_size - 1) * torch.finfo(torch.float32).eps
    excess = (tensor.double() - expected).abs() - bound
    worst = int(excess.argmax())
    if not excess[worst] <= 0:
        raise ArithmeticError(
            f"{name}: rank {rank}, {numel} elements: wrong sum at {worst} (expected {expected[worst]:.9g} within"
            f" {bound[worst]:.1e}, got {tensor[worst]:.9g})"
        )


def measure(plan: Plan, rank: int, collective: Collective, barrier: Barrier, size_kb: int) -> Row:
    """Time every candidate in every round; each sums a tensor that its rank has just written, as after a backward."""
    candidates = candidates_of(collective, size_kb * 256, plan.has_mpi)
    for name, (tensor, reduce) in candidates.items():
        if name != COPY:
            check(name, tensor, reduce, rank, plan.world_size)
    names = list(candidates)
    rounds = plan.rounds * (SMALL_TIMES if size_kb <= SMALL_KB else 1)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for turn in range(-WARM_UP_ROUNDS, rounds):
        # Who begins and who follows whom rotates: nobody always meets the caches as the same neighbour left them.
        order = [names[(turn + place) % len(names)] for place in range(len(names))]
        for name in order if turn // len(names) % 2 == 0 else reversed(order):
            tensor, reduce = candidates[name]
            tensor.fill_(1.0 + rank)
            barrier.wait()
            begin = time.perf_counter()
            reduce()
            duration = time.perf_counter() - begin
            if turn >= 0:
                seconds[name].append(duration)
    gc.enable()
    durations = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
    dist.all_reduce(durations, op=dist.ReduceOp.MAX)
    mpi_name = ""
    if plan.has_mpi:
        from mpi4py import MPI as mpi  # noqa: N811

        mpi_name = "{} {}".format(mpi.get_vendor()[0], ".".join(map(str, mpi.get_vendor()[1])))
    return Row(size_kb, dict(zip(names, durations.tolist(), strict=True)), mpi_name)


def keep_to_core(rank: int, world_size: int) -> None:
    """Give this thread, not gloo's, a core of its own where there are enough.

    Ranks that compute are on different cores already; ranks that slept a moment ago may wake on the same one, and then
    all who hand pieces to and fro take four times as long.
    """
    cores = sorted(os.sched_getaffinity(0))
    if world_size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def rank_main(plan: Plan, rank: int) -> None:
    """Measure as one rank; rank 0 leaves the rows in the store."""
    signal.alarm(math.ceil(plan.deadline_s))  # ends this process even where nobody is left who would
    torch.set_num_threads(1)
    if plan.has_mpi:
        import mpi4py

        mpi4py.rc.thread_level = "single"  # MPI's fastest
        from mpi4py import MPI as mpi  # noqa: N811

        if (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size) != (rank, plan.world_size):
            raise RuntimeError(
                f"mpiexec and mpi4py do not belong together (expected rank {rank} of {plan.world_size}, got"
                f" {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}): install both into this environment, pip install"
                " mpich mpi4py"
            )
    store = dist.TCPStore("127.0.0.1", plan.port, is_master=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size, timeout=timeout)
    collective = collective_for(dist.group.WORLD, "shared_memory")
    try:
        barrier = Barrier(plan.barrier_path, rank, plan.world_size)
        collective.connect()  # counts cores
        keep_to_core(rank, plan.world_size)
        for size_kb in plan.sizes_kb:
            row = measure(plan, rank, collective, barrier, size_kb)
            if rank == 0:
                store.set(f"row/{size_kb}", json.dumps(asdict(row)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


# ---- starting them ---------------------------------------------------------------------------------------------------


def find_mpiexec() -> str | None:
    """The mpiexec of this environment, else of the machine; None where there is no MPI to compare with."""
    if importlib.util.find_spec("mpi4py") is None or importlib.util.find_spec("numpy") is None:
        return None
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def commands_of(plan: Plan, mpiexec: str | None) -> list[list[str]]:
    """One command that starts all ranks where there is an mpiexec, else one for each."""
    rank_commands = [
        [sys.executable, str(Path(__file__).resolve()), "--as-rank", str(rank), "--plan", json.dumps(asdict(plan))]
        for rank in range(plan.world_size)
    ]
    if mpiexec is None:
        return rank_commands
    command = [mpiexec]
    for rank, rank_command in enumerate(rank_commands):
        command += [*([":"] if rank else []), "-n", "1", *rank_command]
    return [command]


def measure_on_ranks(
    world_size: int, sizes_kb: tuple[int, ...], rounds: int, mpiexec: str | None, deadline_s: float
) -> list[Row]:
    """Start the ranks, wait for them, and end them, whatever happens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(os.environ)
    if world_size > len(os.sched_getaffinity(0)):
        environment = {**MPICH_WHERE_CORES_ARE_SHARED, **environment}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.NamedTemporaryFile(prefix="psengine-barrier-") as barrier:
        barrier.truncate(world_size * CACHE_LINE_BYTES)
        plan = Plan(world_size, sizes_kb, rounds, store.port, barrier.name, deadline_s, mpiexec is not None)
        try:
            for command in commands_of(plan, mpiexec):
                processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            wait_for(processes, f"{world_size} ranks", deadline_s)
            rows = [json.loads(store.get(f"row/{size_kb}")) for size_kb in sizes_kb]
        finally:
            end(processes)
    return [Row(**row) for row in rows]


def wait_for(processes: list[subprocess.Popen[bytes]], what: str, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} have not finished within {deadline_s:g} s; --deadline gives them more")
        time.sleep(0.1)
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise SystemExit(f"{what}: one ended with exit code {failed[0]}; its error is above")


def end(processes: list[subprocess.Popen[bytes]]) -> None:
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


def busy_s() -> float:
    """CPU seconds that all processes of the machine took so far (man 5 proc: user, nice, system)."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)
    return sum(int(fields[place]) for place in (1, 2, 3)) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# ---- the table -------------------------------------------------------------------------------------------------------


def table_of(rows: list[Row], world_size: int) -> str:
    """Format as Markdown: microseconds, then how much longer the others took, then how near memory's speed this is."""
    mpi_name = rows[0].mpi_name
    lines = [
        f"**{world_size} ranks**",
        "",
        f"| size | in place, µs | staged, µs | gloo, µs | {mpi_name or 'MPI'}, µs | gloo ÷ in place | gloo ÷ staged"
        " | MPI ÷ in place | MPI ÷ staged | copy, µs | in place, GB/s a rank | of copy's speed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [size_text(row.size_kb)]
        cells += [time_text(row.seconds.get(name)) for name in (IN_PLACE, STAGED, GLOO, MPI)]
        cells += [
            ratio_text(row.seconds.get(other), row.seconds[own]) for other in (GLOO, MPI) for own in (IN_PLACE, STAGED)
        ]
        moved_bytes = 2 * 1024 * row.size_kb  # read once, written once
        cells += [
            time_text(row.seconds[COPY]),
            f"{moved_bytes / statistics.median(row.seconds[IN_PLACE]) / 1e9:.1f}",
            f"{ratio_of(row.seconds[COPY], row.seconds[IN_PLACE]):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def size_text(size_kb: int) -> str:
    return f"{size_kb / 1024:g} MB" if size_kb >= 1024 else f"{size_kb} KB"


def time_text(seconds: list[float] | None) -> str:
    if seconds is None:
        return "-"
    median, minimum = 1e6 * statistics.median(seconds), 1e6 * min(seconds)
    digits = 1 if median < 100 else 0
    return f"{median:.{digits}f} ({minimum:.{digits}f})"


def ratio_of(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def ratio_text(numerators: list[float] | None, denominators: list[float]) -> str:
    return "-" if numerators is None else f"{ratio_of(numerators, denominators):.2g}"


# ---- arguments -------------------------------------------------------------------------------------------------------


def at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {smallest}, got {text}")
        return value

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument(
        "--sizes-kb",
        type=at_least(1),
        nargs="+",
        default=[4, 64, 1024, 25600, 102400],
        help="of the float32 tensor, in 1024 bytes (default: 4 64 1024 25600 102400)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=100,
        help=f"turns of each candidate, {SMALL_TIMES} times as many up to {SMALL_KB} KB (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds and nothing over 25 MB: seconds, and noisy")
    parser.add_argument("--deadline", type=at_least(1), default=600, metavar="S", help="seconds the ranks may take")
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        rank_main(Plan(**json.loads(options.plan)), options.as_rank)
        return
    if not native.has_shared_memory():
        sys.exit("psengine's native extension is not built here: pip install -e . (Linux only)")
    if max(options.ranks) > 64:
        parser.error(f"argument --ranks: expected at most 64, got {max(options.ranks)}")
    rounds = min(5, options.rounds) if options.quick else options.rounds
    sizes_kb = [size for size in dict.fromkeys(options.sizes_kb) if size <= 25600 or not options.quick]

    mpiexec = find_mpiexec()
    print(f"{describe_machine('gloo over loopback', 'one thread per rank')}\n")
    if mpiexec is None:
        print("No MPI to compare with: its column stays empty. To get one: pip install mpich mpi4py\n")
    for world_size in dict.fromkeys(options.ranks):
        begin, busy_begin_s, own_begin_s = time.monotonic(), busy_s(), children_s()
        rows = measure_on_ranks(world_size, tuple(sizes_kb), rounds, mpiexec, options.deadline)
        elapsed_s, own_s = time.monotonic() - begin, children_s() - own_begin_s
        others = max(0.0, busy_s() - busy_begin_s - own_s) / elapsed_s / os.cpu_count()
        print(table_of(rows, world_size))
        print(f"{elapsed_s:.0f} s; meanwhile others took {others:.0%} of the machine's CPU time\n", flush=True)


if __name__ == "__main__":
    main()
