"""Workers whose connections break again and again.

Worker r pushes a one in element r of every chunk, as in ``kill_loop``: what came of each push is read from the weights,
or from the averages. ``benchmarks/faults/run.py`` prints it.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from attacks.kill_loop import Counters
from attacks.throttled_relay import ThrottledRelay, throttled_relay
from support.server_process import SGD, ServerProcess, running_server

from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment

WORKERS = 2
CHUNKS = 8
STEPS = 25
# Trainings at once: they wait more than they compute.
AT_ONCE = 8
# Seconds between two cuts of all connections, at most.
MOST_S = 0.1


def layout(numel: int, chunks: int) -> list[ChunkSpec]:
    return [
        ChunkSpec(key, ChunkKind.PARAMETER, torch.float32, numel, (Segment(f"p{key}", (numel,), (1,), 0, numel),))
        for key in range(chunks)
    ]


class Trainer:
    """Worker ``rank``, in this process."""

    def __init__(self, address: str, rule: dict[str, Any], rank: int, numel: int, chunks: int) -> None:
        self.rank = rank
        self.numel = numel
        self.chunks = chunks
        self.averages: list[list[tuple[float, ...]]] = []
        self._applies = rule["name"] == "apply"
        options = SessionOptions(
            addresses=(address,), job="job", rule=rule, rank=rank, world_size=WORKERS, timeout_s=30.0
        )
        self.session = WorkerSession(options)
        self.session.start()
        self.session.enter(layout(numel, chunks), lambda one: torch.zeros(one.numel))
        if self._applies:
            body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, numel, 0]]}
            wait_all([self.session.configure(key, body) for key in range(chunks)])

    def train(self, steps: int) -> None:
        """Pushes of a one, so many times."""
        gradient = torch.zeros(self.numel)
        gradient[self.rank] = 1.0
        for _ in range(steps):
            landings = [torch.zeros(self.numel) for _ in range(self.chunks)]
            wait_all([self.session.push(key, gradient.clone(), [landing]) for key, landing in enumerate(landings)])
            self.averages.append([tuple(landing[:WORKERS].tolist()) for landing in landings])


def account(trainers: list[Trainer], rule: dict[str, Any], steps: int) -> Counters:
    """What is there of what was pushed."""
    counters = Counters(survived=1)
    chunks = trainers[0].chunks
    if rule["name"] == "apply":
        answers = [trainers[0].session.pull(key).wait().payload for key in range(chunks)]
        shares = [round(-values[rank].item()) - steps for values in answers if values is not None for rank in
                  range(WORKERS)]  # fmt: skip
        counters.lost = sum(max(0, -share) for share in shares)
        counters.doubled = sum(max(0, share) for share in shares)
        return counters
    for step in range(steps):
        for key in range(chunks):
            found = {trainer.averages[step][key] for trainer in trainers}
            counters.two_results += len(found) > 1
            counters.lost += sum(share < 1 / WORKERS for share in next(iter(found)))
            counters.doubled += sum(share > 1 / WORKERS for share in next(iter(found)))
    return counters


def run_broken(tries: int, seed: int, rule: dict[str, Any], steps: int = STEPS, chunks: int = CHUNKS) -> Counters:
    """``tries`` trainings, ``AT_ONCE`` together, through a relay that ends all connections at random moments."""

    def train(number: int) -> Counters:
        chooser, is_over = random.Random(seed + number), threading.Event()

        def cut_again_and_again(relay: ThrottledRelay) -> int:
            cut = 0
            while not is_over.wait(chooser.uniform(0.0, MOST_S)):
                cut += relay.cut()
            return cut

        with (
            running_server(lease_s=10.0, insecure=True) as server,
            throttled_relay(server.addresses[0], up_bytes_per_s=1e9) as relay,
            ThreadPoolExecutor(1) as pool,
        ):
            cutting = pool.submit(cut_again_and_again, relay)
            try:
                found = _train(server, [relay.address] * WORKERS, rule, 4, steps, chunks=chunks)
            finally:
                is_over.set()
            assert cutting.result() > 0
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(train, range(tries)), Counters())


def _train(
    server: ServerProcess,
    addresses: list[str],
    rule: dict[str, Any],
    numel: int,
    steps: int,
    chunks: int = CHUNKS,
) -> Counters:
    with ExitStack() as context:
        with ThreadPoolExecutor(WORKERS) as pool:
            # An averaging job begins when all are here.
            entries = [pool.submit(Trainer, one, rule, rank, numel, chunks) for rank, one in enumerate(addresses)]
            trainers = [entry.result() for entry in entries]
            for trainer in trainers:
                context.callback(trainer.session.close)
            trainings = [pool.submit(trainer.train, steps) for trainer in trainers]
            for training in trainings:
                training.result()
        counters = account(trainers, rule, steps)
        assert server.coordinated("job")["evicted"] == 0
    return Counters(tries=1) + counters
