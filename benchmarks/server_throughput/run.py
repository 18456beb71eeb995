"""How fast a model goes to a parameter server and back, against echoes of the same chunks in the same run.

python benchmarks/server_throughput/run.py [--sizes-mb 25,100] [--workers 1,2] [--rounds 15]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.command_line import numbers, parser_of, some_of
from harness.figures import slowest
from harness.ranks import Rank, run_ranks
from harness.record import Record
from harness.turns import Turn, take_turns
from server_throughput import ps_lite
from server_throughput.echo import ECHO, Echo, echo_server
from support.server_process import running_server
from support.waiting import eventually

from psengine.parameter_server.client.partition import CHUNK_BYTES, cut
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession, wait_all
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.protocol.frames import buffer_of
from psengine.protocol.hyperparameters import optimizer_name, wire_groups
from psengine.protocol.layout import ChunkKind, ChunkSpec

QUESTION = "How fast does a model go to a parameter server and back?"
DEADLINE_S = 120.0
WARM_UP_ROUNDS = 2
APPLY = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}
AVERAGE = {"name": "average"}
# name -> the rule of its job, and the ways to the server that it may use
PSENGINE: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "async": (APPLY, {}),
    "async packed": (APPLY, {}),
    "sync-server": (AVERAGE, {}),
    "async Unix socket": (APPLY, {"uses_segments": False}),
    "async TCP": (APPLY, {"uses_local_socket": False}),
    "async snapshot": (APPLY, {}),
    "async log": (APPLY, {}),
    "async replica": (APPLY, {}),
}
# Their servers have another durability than "memory". An answer of "log" says that the update is on the disk, one of
# "replica" that a follower on this host has it.
TIERS = {"async snapshot": "snapshot", "async log": "log", "async replica": "replica"}
# The log's bytes appended to one file, with one fdatasync: no log can be faster.
DISK = "disk"
# Its gradients were packed where the server reads them as they came: packing is not timed.
PACKED = "async packed"
CANDIDATES = (*PSENGINE, DISK, ECHO, ps_lite.NAME)


# ---- on a worker -----------------------------------------------------------------------------------------------------


def chunks_of(size: int) -> list[ChunkSpec]:
    return cut(ChunkKind.PARAMETER, [("weight", (size,), (1,), size)], torch.float32, 0)


class Psengine:
    """A worker of a job: gradients go out, weights (or averages) land in their tensors."""

    def __init__(self, address: str, name: str, job: str, rank: Rank, size: int) -> None:
        rule, ways = PSENGINE[name]
        self._specs = chunks_of(size)
        numels = [spec.numel for spec in self._specs]
        self._parts = list(torch.zeros(size).split(numels))
        self._session = WorkerSession(
            SessionOptions(
                addresses=[address],
                job=job,
                rule=rule,
                rank=rank.rank,
                world_size=rank.world_size,
                timeout_s=DEADLINE_S,
                **ways,
            )
        )
        self._session.segments.reserve(4 * size)
        self._packed = self._session.segments.allocate(size, torch.float32).split(numels)
        self._session.start()
        self._session.enter(self._specs, lambda spec: self._parts[spec.key])
        self._groups = None
        if rule["name"] == "apply":
            made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
            self._groups = wire_groups(made)
            body = {"optimizer": optimizer_name(made), "groups": self._groups}
            wait_all(
                [self._session.configure(spec.key, {**body, "runs": [[0, spec.numel, 0]]}) for spec in self._specs]
            )

    def pack(self, chunks: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self._packed, chunks)

    def push_pull(self, chunks: Sequence[torch.Tensor] | None) -> None:
        """Of these gradients, or of what is packed already."""
        pending = []
        for index, (spec, packed, part) in enumerate(zip(self._specs, self._packed, self._parts, strict=True)):
            if chunks is not None:
                packed.copy_(chunks[index])
            pending.append(self._session.push(spec.key, packed, [part], groups=self._groups))
        wait_all(pending)

    def close(self) -> None:
        self._session.close()


class Disk:
    """Rank 0 writes what all workers send."""

    def __init__(self, folder: str, rank: Rank) -> None:
        self._times = rank.world_size
        self._file = DirectoryDisk(Path(tempfile.mkdtemp(dir=folder))).create("log") if rank.rank == 0 else None

    def push_pull(self, chunks: Sequence[torch.Tensor]) -> None:
        if self._file is not None:
            self._file.append([buffer_of(chunk) for chunk in chunks] * self._times)
            self._file.sync()

    def close(self) -> None:
        pass


def worker(rank: Rank, size: int, rounds: int, names: list[str], addresses: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of each candidate's round trips."""
    numels = [spec.numel for spec in chunks_of(size)]
    candidates: dict[str, Any] = {}
    for name in names:
        if name in PSENGINE:
            job = f"{name} {rank.world_size} {size}"
            candidates[name] = Psengine(addresses[TIERS.get(name, "memory")], name, job, rank, size)
        elif name == DISK:
            candidates[name] = Disk(addresses[DISK], rank)
        elif name == ECHO:
            candidates[name] = Echo(addresses[name])
        else:
            candidates[name] = ps_lite.Worker(addresses[name], rank, numels)
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(rank.rank))
    chunks = gradient.split(numels)
    try:
        turns = {
            name: Turn(lambda candidate=candidate: candidate.push_pull(chunks))
            for name, candidate in candidates.items()
        }
        if PACKED in candidates:
            packed = candidates[PACKED]
            turns[PACKED] = Turn(lambda: packed.push_pull(None), before=lambda: packed.pack(chunks))
        return take_turns(turns, rounds, warm_up=WARM_UP_ROUNDS, barrier=rank.barrier.wait)
    finally:
        for candidate in candidates.values():
            candidate.close()


# ---- here ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__, rounds=15, quick="3 rounds of 25 MB")
    parser.add_argument("--sizes-mb", type=numbers(1), default=(25, 100))
    parser.add_argument("--workers", type=numbers(1), default=(1, 2))
    parser.add_argument("--candidates", type=some_of(CANDIDATES), default=CANDIDATES, help="comma-separated")
    parser.add_argument("--directory", type=Path, help="where logs are written (default: a temporary directory)")
    parser.add_argument("--ps-lite", type=Path, metavar="PATH", help="a checkout of ps-lite, to compare with")
    options = parser.parse_args()
    sizes_mb, rounds = ((25,), min(3, options.rounds)) if options.quick else (options.sizes_mb, options.rounds)
    record = Record.begin("server_throughput", QUESTION, options, peers=(ECHO, ps_lite.NAME, DISK))
    record.caveat(f"pyzmq {zmq.__version__}, chunks of {CHUNK_BYTES // 1024} KiB, SGD applied")
    program = ps_lite.build(options.ps_lite, record.caveat) if ps_lite.NAME in options.candidates else None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
        servers = {DISK: folder, "memory": stack.enter_context(running_server(insecure=True)).addresses[0]}
        for tier in (tier for name, tier in TIERS.items() if name in options.candidates):
            kept = {"insecure": True, "durability": tier, "snapshot_dir": Path(folder) / tier, "snapshot_interval_s": 0}
            kept |= {"election": f"launcher={folder}/leadership"} if tier == "replica" else {}
            servers[tier] = stack.enter_context(running_server(**kept)).addresses[0]
            if tier == "replica":
                kept |= {"follow": servers[tier], "snapshot_dir": Path(folder) / "follower"}
                follower = stack.enter_context(running_server(**kept))
                eventually(lambda one=follower: one.status()["replica"]["is_in_sync"], "a follower in sync")
        servers[ECHO] = stack.enter_context(echo_server())
        for megabytes in sizes_mb:
            for workers in options.workers:
                with ps_lite.job(program, workers) as job:
                    addresses = {**servers, ps_lite.NAME: job}
                    names = [name for name in options.candidates if name != ps_lite.NAME or job]
                    arguments = (megabytes * 1_000_000 // 4, rounds, names, addresses)
                    seconds = slowest(run_ranks(worker, workers, *arguments, deadline_s=options.deadline))
                record.add({"workers": workers, "size": f"{megabytes} MB"}, seconds)
    record.finish()


if __name__ == "__main__":
    main()
