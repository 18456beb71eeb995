"""What the log of every acknowledged update costs, against the disk itself; and what to log, in bytes and recovery.

python benchmarks/durability/run.py [--what step,recovery] [--sizes-mb 25] [--workers 1,2] [--directory DIRECTORY]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import numbers, parser_of, some_of
from harness.figures import slowest
from harness.ranks import Rank, run_ranks
from harness.record import Record
from harness.tables import Table
from harness.turns import Turn, take_turns
from server_throughput.run import Psengine, chunks_of

from psengine.codecs.registry import resolve_codec
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import LogStart, SegmentWriter, ShardLog, segment_name
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import Record as LogRecord
from psengine.parameter_server.server.log.records import RecordKind
from psengine.protocol.frames import buffer_of
from psengine.protocol.hyperparameters import optimizer_name, wire_groups

QUESTION = "What does it cost that every acknowledged update is on the disk?"
WARM_UP_ROUNDS = 3
TIERS = {"memory": [], "snapshot": ["--durability", "snapshot"], "log": ["--durability", "log"]}
DISK = "disk"
BOUND = "larger of memory and disk"
NUMEL = 1 << 18  # a chunk of 1 MiB
PUSHES = 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}
CODECS = ("none", "int8", "topk:ratio=0.01")
KINDS = ("gradient", "values", "difference")


# ---- a step under each tier ------------------------------------------------------------------------------------------


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, str]]:
    """A server for each tier; their addresses."""
    with ExitStack() as stack:
        found = {}
        for tier, arguments in TIERS.items():
            command = [sys.executable, "-m", "psengine.cli.server", "--bind", "tcp://127.0.0.1:0", *arguments]
            if arguments:
                command += ["--snapshot-dir", str(directory / tier), "--snapshot-interval-s", "0"]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.kill)  # a snapshot at the end is of no use
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith("psengine-server ready")), None)
            if ready is None:
                raise RuntimeError("psengine-server did not start; its error is above")
            found[tier] = ready.split()[2]
        yield found


def worker(rank: Rank, size: int, rounds: int, directory: str, addresses: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of a push and pull of all chunks under each tier, and of the disk with the log's bytes."""
    job = f"{rank.world_size} workers {size}"
    candidates = {tier: Psengine(address, "async", job, rank, size, "SGD") for tier, address in addresses.items()}
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(rank.rank))
    chunks = gradient.split([spec.numel for spec in chunks_of(size)])
    file = DirectoryDisk(Path(directory)).create(f"{DISK} {job}") if rank.rank == 0 else None

    def write() -> None:
        if file is not None:
            file.append([buffer_of(gradient)] * rank.world_size)
            file.sync()

    try:
        turns = {tier: Turn(lambda one=one: one.push_pull(chunks)) for tier, one in candidates.items()}
        return take_turns(turns | {DISK: Turn(write)}, rounds, warm_up=WARM_UP_ROUNDS, barrier=rank.barrier.wait)
    finally:
        for one in candidates.values():
            one.close()


def measure_steps(record: Record, directory: Path, options: Any) -> None:
    """The step of each tier, and the bound: no log can be faster than both its disk and the step without it."""
    with servers(directory) as addresses:
        for megabytes in options.sizes_mb:
            for workers in options.workers:
                arguments = (megabytes * 1_000_000 // 4, options.rounds, str(directory), addresses)
                seconds = slowest(run_ranks(worker, workers, *arguments, deadline_s=options.deadline))
                seconds[BOUND] = list(map(max, seconds["memory"], seconds[DISK]))
                record.add({"workers": workers, "size": f"{megabytes} MB"}, seconds)


# ---- what to log -----------------------------------------------------------------------------------------------------


def make_optimizer(name: str, values: torch.Tensor) -> ChunkOptimizer:
    made = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))])
    body = {"optimizer": optimizer_name(made), "groups": wire_groups(made), "runs": [[0, values.numel(), 0]]}
    return ChunkOptimizer(values, OptimizerSpec.from_body(body, values.numel()), [(0, values.numel())])


class Trial:
    """One chunk, its updates in a log, and the way back from that log."""

    def __init__(self, kind: str, optimizer: str, codec: str) -> None:
        self.kind = kind
        self._codec = resolve_codec(None if codec == "none" else codec)
        self._form = self._codec.payload_spec(NUMEL, torch.float32)
        self._generator = torch.Generator().manual_seed(1)
        self._optimizer = optimizer

    def _start(self) -> tuple[torch.Tensor, ChunkOptimizer]:
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
        return values, make_optimizer(self._optimizer, values)

    def _state(self, values: torch.Tensor, optimizer: ChunkOptimizer) -> list[torch.Tensor]:
        return [values, *optimizer.slots().values()]

    def _decoded(self, payload: torch.Tensor) -> torch.Tensor:
        values = torch.empty(NUMEL)
        self._codec.decode(payload, values)
        return values

    def write(self, disk: DirectoryDisk, shard: int) -> tuple[int, list[torch.Tensor]]:
        """Log ``PUSHES`` updates; their bytes, and the state that they lead to."""
        values, optimizer = self._start()
        log, writer = ShardLog(LogStart(shard, 1, 0, 1)), SegmentWriter(disk, shard)
        logged_bytes = 0
        for _ in range(PUSHES):
            payload = torch.empty(self._form.numel, dtype=self._form.dtype)
            self._codec.encode(torch.randn(NUMEL, generator=self._generator), payload, None)
            before = [one.clone() for one in self._state(values, optimizer)]
            optimizer.apply(self._decoded(payload))
            after = self._state(values, optimizer)
            before += [torch.zeros(NUMEL) for _ in after[len(before) :]]
            parts = {
                "gradient": [payload],
                "values": [one.clone() for one in after],
                "difference": [new - old for new, old in zip(after, before, strict=True)],
            }[self.kind]
            logged_bytes += sum(part.nbytes for part in parts)
            log.append(LogRecord(RecordKind.MESSAGE, frames=[buffer_of(part) for part in parts]))
            while (batch := log.pending()) is not None:
                writer.write(batch)
        writer.close()
        return logged_bytes, self._state(values, optimizer)

    def recover(self, disk: DirectoryDisk, shard: int) -> list[torch.Tensor]:
        values, optimizer = self._start()
        if self.kind == "gradient":
            for frames in self._frames(disk, shard):
                payload = torch.frombuffer(bytearray(frames[0]), dtype=self._form.dtype)
                optimizer.apply(self._decoded(payload))
            return self._state(values, optimizer)
        state = [values]
        for frames in self._frames(disk, shard):
            parts = [torch.frombuffer(bytearray(frame), dtype=torch.float32) for frame in frames]
            state += [torch.zeros(NUMEL) for _ in parts[len(state) :]]
            for one, part in zip(state, parts, strict=True):
                one.copy_(part) if self.kind == "values" else one.add_(part)
        return state

    def _frames(self, disk: DirectoryDisk, shard: int) -> Iterator[Sequence[Any]]:
        for placed in LogReader(disk, shard):
            if placed.record.kind is RecordKind.MESSAGE:
                yield placed.record.frames


def measure_recovery(record: Record, directory: Path) -> None:
    """Bytes, seconds and bits of each kind of record."""
    disk, rows, shard = DirectoryDisk(directory), [], 0
    for optimizer in OPTIMIZERS:
        for codec in CODECS:
            for kind in KINDS:
                trial = Trial(kind, optimizer, codec)
                logged_bytes, expected = trial.write(disk, shard)
                seconds = []
                for _ in range(3):
                    began_s = time.perf_counter()
                    found = trial.recover(disk, shard)
                    seconds.append(time.perf_counter() - began_s)
                same = sum(int((a == b).sum()) for a, b in zip(found, expected, strict=True))
                share = same / sum(one.numel() for one in expected)
                rows.append(
                    [
                        optimizer,
                        codec,
                        kind,
                        f"{logged_bytes / PUSHES / 2**20:.3g}",
                        f"{1e3 * min(seconds) / PUSHES:.2f}",
                        "all" if share == 1 else f"{100 * share:.3f} %",
                    ]
                )
                disk.delete(segment_name(shard, 1))
                shard += 1
    columns = [
        "optimizer",
        "codec",
        "logged",
        "MiB per push of 1 MiB",
        "recovery, ms per push",
        "elements with their bits",
    ]
    record.tables.append(Table(title="What to log", columns=columns, rows=rows))


def main() -> None:
    parser = parser_of(__doc__, rounds=15, quick="3 rounds")
    parser.add_argument("--what", type=some_of(("step", "recovery")), default=("step", "recovery"))
    parser.add_argument("--sizes-mb", type=numbers(1), default=(25,))
    parser.add_argument("--workers", type=numbers(1), default=(1, 2))
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    options = parser.parse_args()
    options.rounds = min(3, options.rounds) if options.quick else options.rounds
    record = Record.begin("durability", QUESTION, options, peers=(BOUND,))
    record.caveat("disk: the log's bytes appended to one file with one fdatasync, in the same rounds, on the same disk")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if "step" in options.what:
            measure_steps(record, Path(directory), options)
        if "recovery" in options.what:
            measure_recovery(record, Path(directory))
    record.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
