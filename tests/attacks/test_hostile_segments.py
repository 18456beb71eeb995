"""What a process may share with a server as memory, and what it may do to memory that it shares."""

import fcntl
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.server_process import Peer, ServerProcess
from support.waiting import eventually

from psengine.parameter_server.segment import IS_AVAILABLE, Segment

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 1024
SIZE = 3 * 4096


@pytest.fixture
def peer(server: ServerProcess) -> Iterator[Peer]:
    """A worker with a job of its own: one chunk of zeros."""
    with Peer(server.addresses[0]) as made:
        made.job = f"job {random.getrandbits(40)}"
        made.make_job(torch.zeros(NUMEL))
        try:
            yield made
        finally:
            made.leave()


def offer(peer: Peer, descriptor: int) -> list[int] | None:
    """Where the server's memory is, if it takes the one behind this descriptor."""
    resumed = peer.request("RESUME", body={**peer.proof, "open": [], "memory": descriptor})
    assert resumed.type.name == "RESUMED"
    return resumed.body.get("memory")


@pytest.fixture
def memory(peer: Peer) -> Iterator[Segment]:
    """Memory that the server has taken from ``peer``."""
    made = Segment.make("psengine-worker", SIZE)
    assert offer(peer, made.descriptor) is not None
    yield made
    made.close()


def push(peer: Peer, sequence: int, numel: int = NUMEL, key: int = 0, place: int | None = 0) -> Any:
    message = peer.message("PUSH", key=key, payload=torch.zeros(numel), place=place)
    message.sequence = sequence
    peer.send(message)
    return peer.receive()


def descriptors(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def test_other_descriptors_are_not_taken_and_none_is_kept(server, peer, tmp_path):
    before = descriptors(server)
    unsealed, half_sealed = (os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(2))
    fcntl.fcntl(half_sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK)
    opened = [unsealed, half_sealed, *os.pipe(), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)]
    try:
        for descriptor in (*opened, 2**40, peer.socket.FD):
            assert offer(peer, descriptor) is None
        assert push(peer, 1).body["code"] == "bad_message"
        eventually(lambda: descriptors(server) <= before)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_what_is_taken_is_dropped_once_nobody_holds_it(server, peer):
    before = descriptors(server)
    for _ in range(20):
        made = Segment.make("psengine-worker", SIZE)
        assert offer(peer, made.descriptor) is not None
        made.close()
    eventually(lambda: descriptors(server) <= before + 2)  # of the memory that the job's answers are made in


def test_a_payload_lies_in_memory_that_is_shared(server, peer, memory):
    memory.tensor(0, NUMEL, torch.float32).fill_(1.0)
    for wrong in ({"numel": NUMEL // 2}, {"key": 9}):
        assert push(peer, 1, **wrong).type.name == "ERROR"
    for place in (2, SIZE - 4, SIZE, 2**64 - 4):
        assert push(peer, 1, place=place).body["code"] == "bad_message"
    answer = push(peer, 1)
    assert (answer.type.name, answer.numel) == ("UPDATED", NUMEL)
    assert answer.place is not None
    # Again: the answer travels, because the place may be read.
    assert (
        peer.request("RESUME", body={**peer.proof, "open": [[0, 1]], "memory": memory.descriptor}).type.name
        == "RESUMED"
    )
    again = peer.receive()
    assert (again.type.name, again.place) == ("UPDATED", None)
    assert torch.frombuffer(bytearray(again.payload), dtype=torch.float32).eq(-1.0).all()
    assert push(peer, 2, place=None).place is None  # it travelled, and so does the answer


def test_a_worker_that_writes_while_the_server_reads_harms_values_only(peer, memory):
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            memory.tensor(0, SIZE, torch.uint8).random_()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for sequence in range(1, 300):
            assert push(peer, sequence).type.name == "UPDATED"
    finally:
        stop.set()
        writer.join()
    assert peer.request("PULL", key=0).type.name == "VALUES"
