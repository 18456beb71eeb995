"""What summing a tensor over the ranks of one machine costs: psengine's shared memory, gloo, MPI, in turn in one run.

python benchmarks/all_reduce/run.py [--ranks 2,4] [--sizes-kb 4,64,1024,25600,102400] [--rounds 100] [--quick]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import numbers, parser_of
from harness.figures import slowest
from harness.ranks import Rank, find_mpiexec, run_ranks
from harness.record import Record
from harness.turns import Turn, copy_of, take_turns

from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for
from psengine.kernels import native

QUESTION = "How fast is a tensor summed over the ranks of one machine?"
WARM_UP_ROUNDS = 5
# A round of a small size is short and a scheduler's whim shows more: they are repeated more often.
SMALL_KB, SMALL_TIMES = 1024, 10

COPY, IN_PLACE, STAGED, GLOO, MPI = "copy", "psengine in place", "psengine staged", "gloo", "MPICH"
NO_MPI = "No MPI to compare with: its row is missing. To get one: pip install mpich mpi4py"
# MPICH's default sums in shared memory and spins without yielding while it waits, so ranks that share a core wait for
# their time slices to end: a second for 1 MB. Its other algorithm yields.
MPICH_WHERE_CORES_ARE_SHARED = {
    "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "mpir",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}


# ---- on a rank -------------------------------------------------------------------------------------------------------


def candidates_of(
    collective: Collective, numel: int, has_mpi: bool
) -> dict[str, tuple[torch.Tensor, Callable[[], object]]]:
    """For each candidate the tensor that it sums, and the call; ``COPY`` leaves its tensor as it is."""
    own = torch.empty(numel)
    in_place = collective.allocate(numel, torch.float32, torch.device("cpu"))
    candidates: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {
        COPY: (own, copy_of(8 * numel)),
        IN_PLACE: (in_place, lambda: collective.sum(in_place)),
        STAGED: (own, lambda: collective.sum(own)),
        GLOO: (own, lambda: dist.all_reduce(own)),
    }
    if has_mpi:
        from mpi4py import MPI as mpi  # noqa: N811

        communicator, buffer = mpi.COMM_WORLD, [own.numpy(), mpi.FLOAT]
        candidates[MPI] = (own, lambda: communicator.Allreduce(mpi.IN_PLACE, buffer))
    return candidates


def check(name: str, tensor: torch.Tensor, reduce: Callable[[], object], rank: Rank) -> None:
    """Sum 1, 2, 3, ..., one number a rank: exact in float32, in any order."""
    tensor.fill_(1.0 + rank.rank)
    reduce()
    expected = rank.world_size * (rank.world_size + 1) / 2
    if not bool((tensor == expected).all()):
        raise ArithmeticError(f"{name}: rank {rank.rank} has a wrong sum (expected {expected}, got {tensor})")


def measure(rank: Rank, sizes_kb: list[int], rounds: int) -> list[dict[str, list[float]]]:
    """For each size, the seconds of every candidate; each sums a tensor that its rank has just written, as after a
    backward.
    """
    collective = collective_for(dist.group.WORLD, "shared_memory")
    collective.connect()  # counts cores
    rank.keep_to_core()
    found = []
    for size_kb in sizes_kb:
        candidates = candidates_of(collective, size_kb * 256, rank.has_mpi)
        for name, (tensor, reduce) in candidates.items():
            if name != COPY:
                check(name, tensor, reduce, rank)
        turns = {
            name: Turn(reduce, before=lambda tensor=tensor: tensor.fill_(1.0 + rank.rank))
            for name, (tensor, reduce) in candidates.items()
        }
        times = SMALL_TIMES if size_kb <= SMALL_KB else 1
        found.append(take_turns(turns, rounds * times, warm_up=WARM_UP_ROUNDS, barrier=rank.barrier.wait))
    return found


# ---- here ------------------------------------------------------------------------------------------------------------


def size_text(size_kb: int) -> str:
    return f"{size_kb / 1024:g} MB" if size_kb >= 1024 else f"{size_kb} KB"


def main() -> None:
    parser = parser_of(__doc__, rounds=100, quick="5 rounds and nothing over 25 MB")
    parser.add_argument("--ranks", type=numbers(2), default=(2, 4))
    parser.add_argument("--sizes-kb", type=numbers(1), default=(4, 64, 1024, 25600, 102400), help="of the tensor")
    options = parser.parse_args()
    if not native.has_shared_memory():
        sys.exit("psengine's native extension is not built here: pip install -e . (Linux only)")
    if max(options.ranks) > 64:
        parser.error(f"argument --ranks: expected at most 64, got {max(options.ranks)}")
    rounds = min(5, options.rounds) if options.quick else options.rounds
    sizes_kb = [size for size in options.sizes_kb if size <= 25600 or not options.quick]
    record = Record.begin("all_reduce", QUESTION, options, peers=(GLOO, MPI, COPY))
    mpiexec = find_mpiexec()
    if mpiexec is None:
        record.caveat(NO_MPI)
    for world_size in options.ranks:
        environment = MPICH_WHERE_CORES_ARE_SHARED if world_size > len(os.sched_getaffinity(0)) else {}
        how: dict[str, Any] = {"deadline_s": options.deadline, "mpiexec": mpiexec, "environment": environment}
        found = run_ranks(measure, world_size, sizes_kb, rounds, **how)
        for size_kb, per_rank in zip(sizes_kb, zip(*found, strict=True), strict=True):
            record.add({"ranks": world_size, "size": size_text(size_kb)}, slowest(per_rank))
    record.finish()


if __name__ == "__main__":
    main()
