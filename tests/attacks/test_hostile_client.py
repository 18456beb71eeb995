"""Clients that mean harm: the server serves on, an honest worker loses nothing, and nothing grows."""

import os
import random
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from fuzz.fuzz_frames import SEEDS, mutate
from support.server_process import Peer, ServerProcess, running_server
from support.shard_world import AVERAGE
from support.waiting import eventually

from psengine.parameter_server.server import daemon
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, NOBODY

VALUES = 100_000


def stranger(server: ServerProcess, **options: Any) -> Peer:
    """As from another machine."""
    return Peer(server.addresses[0], over_tcp=True, **options)


def read_all(peer: Peer) -> None:
    while peer.socket.poll(500):
        peer.socket.recv_multipart()


def snapshot_storm(server: ServerProcess) -> None:
    """Orders to write a snapshot from a reader, from a worker that is none, and from one that was let in."""
    with stranger(server) as peer:
        peer.job = "storm"
        peer.make_job(torch.zeros(10))
        for number in range(1000):
            worker = (NOBODY, 7, peer.rank)[number % 3]
            peer.send(peer.message("ADMIN", worker=worker, body={"action": "snapshot"}))
        read_all(peer)


def mutated_frames(server: ServerProcess) -> None:
    """The fuzzer's mutations of good messages, over a socket."""
    rng = random.Random(7)
    with stranger(server) as peer:
        for _ in range(1000):
            peer.socket.send_multipart(mutate(rng, rng.choice(SEEDS)) or [b""])
        read_all(peer)


def hello_flood(server: ServerProcess) -> None:
    """A HELLO for a new job each time."""
    with stranger(server) as peer:
        for number in range(1000):
            peer.job = f"flood-{number}"
            assert peer.hello(rule=AVERAGE if number % 2 else None) is not None


def idle_connections(server: ServerProcess) -> None:
    """Connections that shake hands, answer zmq's own heartbeats and say nothing."""
    files = Path(f"/proc/{server.pid}/fd")
    before = len(os.listdir(files))
    with zmq.Context() as context, ExitStack() as held:
        for _ in range(100):
            dealer = held.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.connect(server.addresses[0])
        eventually(lambda: len(os.listdir(files)) >= before + 100, "it has taken the connections")
        assert_serves(server)


def large_frame(server: ServerProcess) -> None:
    with stranger(server) as peer:
        peer.socket.send(bytes(MAX_PAYLOAD_BYTES + 65 * 1024))
        assert peer.receive(0.5) is None


def endless_message(server: ServerProcess, frames: int = 20) -> bool:
    """A message with more and more frames of 8 MiB: libzmq itself would not send it before its last frame.

    Returns whether the server closed the connection.
    """
    more = struct.pack(">BQ", 3, 8 << 20) + bytes(8 << 20)
    host, port = server.addresses[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        # ZMTP 3.0, as a DEALER.
        connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        connection.sendall(struct.pack("BB", 4, len(ready)) + ready)
        received = b""
        while b"READY" not in received:
            received += connection.recv(1000)
        try:
            for _ in range(frames):
                connection.sendall(more)
        except ConnectionError:
            return True
    return False


ATTACKS = [snapshot_storm, mutated_frames, hello_flood, idle_connections, large_frame, endless_message]


class Honest:
    """A worker that trains all the while."""

    def __init__(self, server: ServerProcess) -> None:
        self.pushes, self.server, self.peer = 0, server, Peer(server.addresses[0])
        self.peer.job = "honest"
        self.peer.make_job(torch.zeros(VALUES))

    def push(self) -> None:
        """The next update: it is applied, and nobody else's was."""
        self.pushes += 1
        self.peer.send(self.peer.message("HEARTBEAT"))
        self.peer.send(self.peer.message("PUSH", key=0, sequence=self.pushes, payload=torch.ones(VALUES)))
        while (answer := self.peer.receive()).type.name != "UPDATED":
            assert answer.type.name != "ERROR", answer.body
        assert self.server.job("honest")[0]["version_max"] == self.pushes


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Honest]:
    options: dict[str, Any] = {"insecure": True, "snapshot_interval_s": 0.0, "lease_s": 60.0}
    with running_server(snapshot_dir=tmp_path_factory.mktemp("hostile") / "s", **options) as server:
        made = Honest(server)
        with made.peer:
            yield made


def assert_serves(server: ServerProcess) -> None:
    for _ in range(10):
        with urllib.request.urlopen(f"{server.status_url}/healthz", timeout=10) as reply:
            assert reply.status == 200
    with Peer(server.addresses[0]) as newcomer:
        assert newcomer.request("STATUS", worker=NOBODY, timeout_s=10) is not None


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def written_bytes(pid: int) -> int:
    """Since the process began."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["wchar"])


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_costs_little_and_changes_nothing(honest: Honest, attack: Callable[[ServerProcess], None]) -> None:
    server = honest.server
    honest.push()
    memory, written = resident_bytes(server.pid), written_bytes(server.pid)
    attack(server)
    assert_serves(server)
    honest.push()
    assert written_bytes(server.pid) - written < 10e6  # a generation has 0.4 MB
    assert resident_bytes(server.pid) - memory < 512e6
    assert server.log().count("\n") < 100


def let_little_be_unexplained() -> None:
    daemon.UNACCOUNTED_BYTES, daemon.LOOK_S = 0, 0.05


def test_a_connection_is_closed_whose_message_fills_the_memory() -> None:
    with running_server(insecure=True, sabotage=let_little_be_unexplained) as server:
        assert endless_message(server, frames=100)
        assert_serves(server)
        assert "messages that do not end filled the memory: 1 connections were closed" in server.log()
