"""How fast a model goes to a parameter server and back, against echoes of the same chunks in the same run.

python benchmarks/server_throughput/run.py [--sizes-mb 25,100] [--workers 1,2] [--rounds 15] [--optimizer SGD]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import zmq

from psengine.parameter_server.client.partition import CHUNK_BYTES, cut
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from echo import Echo, WorkingEcho, echo_servers
from machine import describe_machine

DEADLINE_S = 120.0
WARM_UP_ROUNDS = 2
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}
APPLY = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}
AVERAGE = {"name": "average", "quorum": None}


class Psengine:
    """A worker of a job: gradients go out, weights (or averages) land in their tensors."""

    def __init__(
        self,
        address: str,
        job: str,
        rule: dict[str, Any],
        rank: int,
        world_size: int,
        size: int,
        optimizer: str,
        *,
        uses_local_socket: bool,
    ) -> None:
        from psengine.protocol.hyperparameters import optimizer_name, wire_groups

        self._specs = cut(ChunkKind.PARAMETER, [("weight", (size,), (1,), size)], torch.float32, 0)
        self.weights = torch.zeros(size)
        self._parts = list(self.weights.split(self.chunk_numels))
        self._packed = torch.zeros(size).split(self.chunk_numels)
        self._session = WorkerSession(
            SessionOptions(
                addresses=[address],
                job=job,
                rule=rule,
                rank=rank,
                world_size=world_size,
                timeout_s=DEADLINE_S,
                uses_local_socket=uses_local_socket,
            )
        )
        self._session.start()
        self._session.enter(self._specs, lambda spec: self._parts[spec.key])
        self._groups = None
        if rule["name"] == "apply":
            made = OPTIMIZERS[optimizer]([torch.nn.Parameter(torch.zeros(1))])
            self._groups = wire_groups(made)
            wait_all(
                [
                    self._session.configure(
                        spec.key,
                        {"optimizer": optimizer_name(made), "groups": self._groups, "runs": [[0, spec.numel, 0]]},
                    )
                    for spec in self._specs
                ]
            )

    def push_pull(self, chunks: list[torch.Tensor]) -> None:
        pending = []
        for spec, packed, chunk, part in zip(self._specs, self._packed, chunks, self._parts, strict=True):
            packed.copy_(chunk)
            pending.append(self._session.push(spec.key, packed, [part], groups=self._groups))
        wait_all(pending)

    @property
    def chunk_numels(self) -> list[int]:
        return [spec.numel for spec in self._specs]

    def close(self) -> None:
        self._session.close()


def worker(
    rank: int,
    workers: int,
    size: int,
    options: argparse.Namespace,
    addresses: dict[str, str],
    barrier: Barrier,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    candidates: dict[str, Any] = {}
    for name, rule, moves in (
        ("async", APPLY, True),
        ("sync-server", AVERAGE, True),
        ("async, TCP only", APPLY, False),
    ):
        candidates[name] = Psengine(
            addresses["psengine"],
            f"{name} {workers} {size}",
            rule,
            rank,
            workers,
            size,
            options.optimizer,
            uses_local_socket=moves,
        )
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    chunk_numels = candidates["async"].chunk_numels
    chunks = list(gradient.split(chunk_numels))
    candidates["echo"] = Echo(addresses["echo"])
    for name in ("working echo", "working echo, ipc"):
        candidates[name] = WorkingEcho(addresses[name], chunk_numels)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for round_index in range(WARM_UP_ROUNDS + options.rounds):
        for name in order[round_index % len(order) :] + order[: round_index % len(order)]:
            barrier.wait(DEADLINE_S)
            started_s = time.perf_counter()
            candidates[name].push_pull(chunks)
            barrier.wait(DEADLINE_S)
            if round_index >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - started_s)
    for candidate in candidates.values():
        candidate.close()
    results.put((rank, seconds))


def measure(workers: int, size: int, options: argparse.Namespace, addresses: dict[str, str]) -> dict[str, list[float]]:
    """Seconds per round of each candidate, from the first worker's start to the last one's end."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, workers, size, options, addresses, barrier, results), daemon=True)
        for rank in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        gathered = [results.get(timeout=DEADLINE_S * 3) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return dict(min(gathered)[1])


def start_psengine_server() -> tuple[subprocess.Popen[str], str]:
    server = subprocess.Popen(
        # The candidate over TCP alone goes in the clear.
        [sys.executable, "-m", "psengine.cli.server", "--bind", "tcp://127.0.0.1:0", "--insecure"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("psengine-server ready"):
            return server, line.split()[2]
    raise RuntimeError("psengine-server did not start")


def table(measured: dict[tuple[int, int], dict[str, list[float]]]) -> str:
    lines = [
        "| workers | size | candidate | median ms | one way, all workers | of the echo's throughput | of the working |",
        "|---|---|---|---|---|---|---|",
    ]
    for (workers, megabytes), seconds in measured.items():
        for name, values in seconds.items():
            median = statistics.median(values)
            rate = workers * megabytes / median / 1000
            ratios = [
                statistics.median(e / v for e, v in zip(seconds[peer], values, strict=True))
                for peer in ("echo", "working echo")
            ]
            lines.append(
                f"| {workers} | {megabytes} MB | {name} | {median * 1000:.1f} | {rate:.2f} GB/s |"
                f" {ratios[0]:.2f} | {ratios[1]:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mb", default="25,100")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="SGD")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    description = describe_machine(
        f"pyzmq {zmq.__version__}",
        f"chunks of {CHUNK_BYTES // 1024} KiB",
        f"{options.optimizer} applied",
        f"{options.rounds} rounds",
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    server, address = start_psengine_server()
    try:
        with echo_servers() as addresses:
            addresses["psengine"] = address
            measured = {
                (workers, megabytes): measure(workers, megabytes * 1_000_000 // 4, options, addresses)
                for megabytes in map(int, options.sizes_mb.split(","))
                for workers in map(int, options.workers.split(","))
            }
    finally:
        server.terminate()
        server.wait(15)
    print(f"{description}\n")
    print(table(measured))
    if options.json:
        options.json.write_text(json.dumps({f"{w} workers, {m} MB": s for (w, m), s in measured.items()}, indent=1))


if __name__ == "__main__":
    main()
