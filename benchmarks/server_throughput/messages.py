"""Python for one exchange of a chunk (PUSH and its answer), by stage: a session and a shard in one thread, no sockets.

python benchmarks/server_throughput/messages.py [--chunks 25] [--rounds 300] [--numel 16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psengine.errors import ServerError
from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.runtime import Receiver, Runtime
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession, wait_all
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.core.surroundings import Clocks, Sender, ShardSettings
from psengine.protocol.frames import decode, encode
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import Message

RULE = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}


class Wire:
    """The session's transport: the benchmark carries messages to the shard and back, stage by stage."""

    is_own_thread = False
    segments = None

    def __init__(self, receiver: Receiver, shard: Shard) -> None:
        self.receiver, self.shard = receiver, shard
        self.routes: list[bytes] = []
        self.tasks: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.sent: list[tuple[int, list[Any]]] = []
        self.carries_at_once = True

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        self.tasks.append((function, arguments))
        if self.carries_at_once:
            self.carry()

    def open(self, address: str, *, carries_payloads: bool = True) -> None:
        self.routes.append(b"%d" % len(self.routes))

    def send(self, index: int, message: Message) -> bool:
        self.sent.append((index, encode(message)))
        return True

    def close(self) -> None:
        self.receiver.crashed(ServerError("the benchmark is over"))

    def run_tasks(self) -> None:
        while self.tasks:
            function, arguments = self.tasks.popleft()
            function(*arguments)

    def take_sent(self) -> list[tuple[int, list[Any]]]:
        """What was sent, as a socket would give it out: in writable memory of its own."""
        sent, self.sent = self.sent, []
        return [(index, list(map(bytearray, frames))) for index, frames in sent]

    def carry(self) -> None:
        """To the shard and back, until nothing is under way."""
        self.run_tasks()
        for index, frames in self.take_sent():
            for one in self.shard.handle(Sender(self.routes[index]), decode(frames), time.monotonic()):
                answer = decode([bytearray(frame) for frame in encode(one.message)])
                self.receiver.received(self.routes.index(one.route), answer, time.monotonic())
        if self.tasks:
            self.carry()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--numel", type=int, default=16, help="elements of a chunk: few, so that Python is what counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shard = Shard(0, 1, ShardSettings(), Clocks(wall_s=time.time, measure_s=time.monotonic))
    shard.shard_addresses = ["inproc://shard"]
    wires: list[Wire] = []

    def connect(receiver: Receiver, _: SessionOptions) -> Wire:
        wires.append(Wire(receiver, shard))
        return wires[-1]

    runtime = Runtime(
        now_s=time.monotonic,
        draw_nonce=lambda: 1,
        connect=connect,
        watch=lambda *_: None,
        is_listening=lambda _: True,
    )
    session = WorkerSession(SessionOptions(addresses=shard.shard_addresses, rank=0, rule=RULE), runtime)
    session.start()
    numel = options.numel * options.chunks
    specs = cut(ChunkKind.PARAMETER, [("weight", (numel,), (1,), numel)], torch.float32, 0, options.numel * 4)
    sizes = [spec.numel for spec in specs]
    gradients, weights = torch.randn(numel).split(sizes), torch.zeros(numel).split(sizes)
    session.enter(specs, lambda spec: weights[spec.key])
    groups = wire_groups(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3))
    bodies = [{"optimizer": "SGD", "groups": groups, "runs": [[0, size, 0]]} for size in sizes]
    wait_all([session.configure(spec.key, body) for spec, body in zip(specs, bodies, strict=True)])
    wire, seconds = wires[0], defaultdict(list)
    wire.carries_at_once = False

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        seconds[name].append((time.perf_counter() - began_s) / len(specs))

    for _ in range(options.rounds):
        with stage("worker, training thread: push()"):
            session.begin_step([spec.key for spec in specs], is_whole=True)
            pushes = [
                session.push(spec.key, gradient, [part], groups=groups)
                for spec, gradient, part in zip(specs, gradients, weights, strict=True)
            ]
        with stage("worker, I/O thread: credit, encode"):
            wire.run_tasks()
        sent = [frames for _, frames in wire.take_sent()]
        with stage("server: decode"):
            messages = [decode(frames) for frames in sent]
        now_s, sender = time.monotonic(), Sender(wire.routes[0])
        with stage("server: handle (and torch's functions)"):
            outgoing = [one for message in messages for one in shard.handle(sender, message, now_s)]
        with stage("server: encode"):
            encoded = [encode(one.message) for one in outgoing]
        answered = [list(map(bytearray, frames)) for frames in encoded]
        with stage("worker, I/O thread: decode"):
            answers = [decode(frames) for frames in answered]
        with stage("worker, I/O thread: received"):
            for answer in answers:
                wire.receiver.received(0, answer, now_s)
        with stage("worker, training thread: wait"):
            wait_all(pushes)
    wire.carries_at_once = True
    session.close()
    for name, values in seconds.items():
        print(f"{name:42} {statistics.median(values) * 1e6:6.1f} µs   (best {min(values) * 1e6:.1f})")
    for end in ("worker", "server"):
        total_s = sum(statistics.median(values) for name, values in seconds.items() if name.startswith(end))
        print(f"{end}, together {total_s * 1e6:27.1f} µs")


if __name__ == "__main__":
    main()
