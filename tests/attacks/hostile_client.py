"""A client that means harm, and what it costs the server: attacks that leave counters behind.

    python tests/attacks/hostile_client.py                 # all attacks at length: rows for benchmarks/faults/README.md
    python tests/attacks/hostile_client.py --scale 0.1 idle_connections hello_flood

Each attack is a function of (server, count) that returns what it sent and what came back. ``AttackFixture`` looks at
the server and at an honest worker before and after. The tests run short forms.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.server_process import AVERAGE_RULE as AVERAGE
from support.server_process import Peer as PeerOverAnything
from support.server_process import ServerProcess, running_server

NOBODY = 2**32 - 1
# As from another machine.
Peer = partial(PeerOverAnything, over_tcp=True)


@dataclass
class Counters:
    """What an attack did.

    Attributes:
        sent: messages, connections or pieces, whatever the attack is made of.
        answered: messages that came back.
        let_in: WELCOMEs to a worker.
        cut: connections that the server ended.
    """

    sent: int = 0
    answered: int = 0
    let_in: int = 0
    cut: int = 0


@dataclass
class Outcome:
    """What an attack came to: the counters, and how the server was during and after it."""

    attack: str
    counters: Counters
    seconds: float
    disk_bytes: int
    memory_bytes: int
    descriptors: int
    health: str
    newcomer_s: float
    survived: bool
    changed: int
    notes: list[str] = field(default_factory=list)

    HEADER = (
        "| attack | sent | answered | let in | cut | disk MB | memory MB | descriptors | healthy | newcomer s"
        " | survived | changed |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )

    def row(self) -> str:
        """Of the table in benchmarks/faults/README.md."""
        c = self.counters
        cells = [
            self.attack.replace("_", " "), c.sent, c.answered, c.let_in, c.cut, f"{self.disk_bytes / 1e6:.1f}",
            f"{self.memory_bytes / 1e6:.0f}", self.descriptors, self.health, f"{self.newcomer_s:.2f}",
            "yes" if self.survived else "no", self.changed,
        ]  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


# ---- attacks -------------------------------------------------------------------------------------------------------


def snapshot_storm(server: ServerProcess, count: int) -> Counters:
    """Orders to write a snapshot without a HELLO, as reader and as a worker that is none."""
    with Peer(server.addresses[0]) as peer:
        for number in range(count):
            peer.send(peer.message("ADMIN", worker=NOBODY if number % 2 else 7, body={"action": "snapshot"}))
        return Counters(count, answers(peer))


def member_snapshot_storm(server: ServerProcess, count: int) -> Counters:
    """The same of a worker that was let in."""
    with Peer(server.addresses[0]) as peer:
        peer.job = "storm"
        peer.make_job(torch.zeros(10))
        for _ in range(count):
            peer.send(peer.message("ADMIN", body={"action": "snapshot"}))
        return Counters(count, answers(peer), let_in=1)


def strangers(server: ServerProcess, count: int) -> Counters:
    """Every message that a client may send, from a reader, from ranks that are none, and with wrong numbers."""
    from psengine.protocol.frames import encode

    rng = random.Random(count)
    kinds = list(samples().values())
    with Peer(server.addresses[0]) as peer:
        peer.job = "honest"
        for number in range(count):
            sample = kinds[number % len(kinds)]
            lies = {"worker": rng.choice([NOBODY, 0, 1, 5]), "incarnation": rng.choice([0, 1, 2**63]), "epoch": 0}
            peer.socket.send_multipart(encode(replace(sample, job=peer.message("STATUS").job, **lies)))
        return Counters(count, answers(peer))


def samples() -> dict[str, Any]:
    """A good message of each type that a client may send, but for HELLO: those of the protocol's vectors."""
    from fuzz.fuzz_frames import SEEDS

    from psengine.protocol.frames import decode
    from psengine.protocol.messages import SENT_BY_SERVERS

    found = {}
    for frames in SEEDS:
        message = decode(frames)
        if message.type not in SENT_BY_SERVERS and message.type.name != "HELLO":
            found.setdefault(message.type.name, message)
    return found


def mutated_frames(server: ServerProcess, count: int) -> Counters:
    """The fuzzer's mutations of good messages, over a socket."""
    from fuzz.fuzz_frames import SEEDS, mutate

    rng = random.Random(7)
    with Peer(server.addresses[0]) as peer:
        for _ in range(count):
            peer.socket.send_multipart(mutate(rng, rng.choice(SEEDS)) or [b""])
        return Counters(count, answers(peer))


def hello_flood(server: ServerProcess, count: int) -> Counters:
    """A HELLO for a new job each time."""
    counters = Counters(count)
    with Peer(server.addresses[0]) as peer:
        for number in range(count):
            peer.job = f"flood-{number}"
            answer = peer.hello(rule=AVERAGE if number % 2 else None)
            counters.answered += answer is not None
            counters.let_in += answer is not None and answer.type.name == "WELCOME"
    return counters


def idle_connections(server: ServerProcess, count: int) -> Counters:
    """Connections that shake hands, answer zmq's own heartbeats and say nothing."""
    with idle_dealers(server.addresses[0], count):
        eventually_settled(server.pid)
        look_around(server)
        return Counters(count)


@contextmanager
def idle_dealers(address: str, count: int) -> Iterator[None]:
    """So many sockets of zmq, which do not come back when they are cut."""
    import zmq

    context: Any = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    dealers = []
    try:
        for _ in range(count):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.connect(address)
            dealers.append(dealer)
        yield
    finally:
        for dealer in dealers:
            dealer.close(linger=0)
        context.destroy(linger=0)


def eventually_settled(pid: int, deadline_s: float = 10.0) -> None:
    """Wait until the process's number of descriptors stays as it is for a second."""
    last_s = time.monotonic() + deadline_s
    counts = [-1] * 10
    while len(set(counts)) > 1 and time.monotonic() < last_s:
        time.sleep(0.1)
        counts = [*counts[1:], len(os.listdir(f"/proc/{pid}/fd"))]


def slow_readers(server: ServerProcess, count: int) -> Counters:
    """Peers that ask for the model again and again and never read."""
    counters = Counters()
    with ExitStack() as held:
        peers = [held.enter_context(Peer(server.addresses[0], deaf=True)) for _ in range(count)]
        for peer in peers:
            peer.job = "honest"
            for _ in range(200):
                with contextlib.suppress(Exception):
                    peer.socket.send_multipart(encoded(peer.message("PULL", worker=NOBODY, key=0)), flags=1)
                    counters.sent += 1
        look_around(server)
    return counters


def greedy_readers(server: ServerProcess, count: int) -> Counters:
    """One peer that asks as fast as it can and reads."""
    counters = Counters()
    with Peer(server.addresses[0]) as peer:
        peer.job = "honest"
        asked = [("STATUS", {}), ("LIST", {"body": {"after": -1}}), ("PULL", {"key": 0})]
        for kind, fields in [*asked, ("ECHO", {"payload": torch.ones(4)})]:
            for _ in range(count // 4):
                peer.send(peer.message(kind, worker=NOBODY, **fields))
            counters.sent += count // 4
            counters.answered += answers(peer)
    return counters


def endless_messages(server: ServerProcess, count: int) -> Counters:
    """A message with more and more frames, ``count`` of 8 MiB."""
    more = struct.pack(">BQ", 3, 8 << 20) + bytes(8 << 20)
    counters = Counters()
    with connect_by_hand(server.addresses[0]) as connection:
        try:
            for _ in range(count):
                connection.sendall(more)
                counters.sent += 1
        except (ConnectionResetError, BrokenPipeError):
            counters.cut = 1
    return counters


# attack -> how much of it at length
ATTACKS: dict[Callable[[ServerProcess, int], Counters], int] = {
    snapshot_storm: 30_000,
    member_snapshot_storm: 30_000,
    strangers: 30_000,
    mutated_frames: 100_000,
    hello_flood: 5_000,
    idle_connections: 1_500,
    slow_readers: 16,
    greedy_readers: 20_000,
    endless_messages: 20,
}


# ---- around them ---------------------------------------------------------------------------------------------------


class AttackFixture:
    """One server under attack, with an honest worker in it.

    Args:
        server: running, with snapshots.
        values: how many the honest worker's model has.
    """

    def __init__(self, server: ServerProcess, values: int = 100_000) -> None:
        self.server = server
        self.worker = Peer(server.addresses[0])
        self.worker.job = "honest"
        self.worker.make_job(torch.zeros(values))
        self._values = values
        self._pushes = 0
        self.push()

    def push(self) -> bool:
        """The honest worker's next exchange, and a heartbeat; whether it was answered."""
        self._pushes += 1
        self.worker.send(self.worker.message("HEARTBEAT"))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            push = {"key": 0, "sequence": self._pushes, "payload": torch.ones(self._values)}
            self.worker.send(self.worker.message("PUSH", **push))
            answer = self.worker.receive(1.0)
            while answer is not None and answer.type.name != "UPDATED":
                if answer.type.name == "ERROR":
                    self.worker.enter()
                answer = self.worker.receive(0.2)
            if answer is not None:
                return True
        return False

    def run(self, attack: Callable[[ServerProcess, int], Counters], count: int) -> Outcome:
        """Attack the server, and see what became of it."""
        pid = self.server.pid
        disk, memory, began_s = disk_bytes(pid), resident_bytes(pid), time.monotonic()
        counters = attack(self.server, count)
        seconds = time.monotonic() - began_s
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        health, newcomer_s = look_around(self.server)
        survived = self.push()
        return Outcome(
            attack.__name__,
            counters,
            seconds,
            disk_bytes(pid) - disk,
            resident_bytes(pid) - memory,
            descriptors,
            health,
            newcomer_s,
            survived,
            self.foreign_updates(),
        )

    def foreign_updates(self) -> int:
        """How many updates of its model the honest worker did not make."""
        version: int = self.server.job("honest")[0]["version_max"]
        return version - self._pushes

    def close(self) -> None:
        """The honest worker goes."""
        self.worker.__exit__()


@contextmanager
def attack_fixture(*, values: int = 100_000, **options: Any) -> Iterator[AttackFixture]:
    """A server that keeps snapshots, and an honest worker."""
    options = {"insecure": True, "snapshot_interval_s": 0.0, "lease_s": 60.0, **options}
    with (
        tempfile.TemporaryDirectory(prefix="psengine-hostile-") as folder,
        running_server(snapshot_dir=Path(folder) / "s", **options) as server,
        contextlib.closing(AttackFixture(server, values)) as made,
    ):
        yield made


def look_around(server: ServerProcess, deadline_s: float = 10.0) -> tuple[str, float]:
    """(health checks answered of ten, seconds until a newcomer is answered; inf where it is not)."""
    answered = 0
    for _ in range(10):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.status_url}/healthz", timeout=2) as reply:
            answered += reply.status == 200
    began_s = time.monotonic()
    with Peer(server.addresses[0]) as newcomer:
        is_served = newcomer.request("STATUS", worker=NOBODY, timeout_s=deadline_s) is not None
    return f"{answered}/10", time.monotonic() - began_s if is_served else float("inf")


def connect_by_hand(address: str, timeout_s: float = 20.0) -> socket.socket:
    """A ZMTP 3.0 connection as a DEALER: libzmq itself would not send a message before its last frame."""
    host, port = address.removeprefix("tcp://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(struct.pack("BB", 4, len(ready)) + ready)
    received = b""
    while b"READY" not in received:
        more = connection.recv(1000)
        if not more:
            raise ConnectionResetError("the server ended the connection")
        received += more
    return connection


def encoded(message: Any) -> list[Any]:
    """Its frames."""
    from psengine.protocol.frames import encode

    return encode(message)


def answers(peer: PeerOverAnything, patience_ms: int = 500) -> int:
    """How many messages came, until none comes for ``patience_ms``."""
    count = 0
    while peer.socket.poll(patience_ms):
        peer.socket.recv_multipart()
        count += 1
    return count


def resident_bytes(pid: int) -> int:
    """Of memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def disk_bytes(pid: int) -> int:
    """Written since the process began."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise AssertionError("no wchar in /proc/PID/io")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", help=f"of {', '.join(attack.__name__ for attack in ATTACKS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of each attack")
    arguments = parser.parse_args()
    print(Outcome.HEADER)
    is_bad = False
    for attack, count in ATTACKS.items():
        if arguments.attacks and attack.__name__ not in arguments.attacks:
            continue
        with attack_fixture() as made:
            outcome = made.run(attack, max(1, int(count * arguments.scale)))
        print(outcome.row(), flush=True)
        is_bad |= not outcome.survived or outcome.health != "10/10" or outcome.changed != 0
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
