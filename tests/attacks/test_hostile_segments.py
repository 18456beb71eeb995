"""What a process may pass to a server as shared memory, and what it may do to memory that it shares."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.other_user import as_other_user, needs_root
from support.server_process import Peer, ServerProcess, running_server
from support.waiting import eventually

from psengine.environment.local_sockets import socket_beside
from psengine.errors import ProtocolError
from psengine.parameter_server.segments.memory import IS_AVAILABLE, SegmentMapping, make_segment
from psengine.parameter_server.segments.offer import Member, Offer, Place, read_answer, to_bytes
from psengine.parameter_server.segments.passing import passing_path
from psengine.protocol.frames import HEADER_BYTES, encode
from psengine.protocol.layout import job_number

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 1024
SIZE = 3 * 4096
PLACE = Place(0, 4096, 4 * NUMEL)
NOTHING = Offer(Member(0, 0, 0), "", 0, {})


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server() as running:
        yield running


@pytest.fixture
def peer(server: ServerProcess) -> Iterator[Peer]:
    with Peer(server.addresses[0]) as made:
        made.job = f"job {random.getrandbits(40)}"
        made.make_job(torch.zeros(NUMEL))
        try:
            yield made
        finally:
            made.leave()


def path_of(server: ServerProcess) -> str:
    path = passing_path(socket_beside(server.addresses[0]))
    assert path is not None
    return path


def offer_of(peer: Any, **changes: Any) -> Offer:
    member = Member(job_number(peer.job), peer.rank, peer.incarnation)
    return Offer(**{"member": member, "token": peer.token, "size_bytes": SIZE, "places": {0: PLACE}, **changes})


def say(path: str, data: bytes, *files: int) -> tuple[bytes, socket.socket]:
    """The server's answer to these bytes and descriptors, and the stream."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(10.0)
    stream.connect(path)
    with contextlib.suppress(BrokenPipeError):
        socket.send_fds(stream, [data], files)
    return stream.recv(4096), stream


def refusal(server: ServerProcess, data: bytes, *files: int) -> str:
    answer, stream = say(path_of(server), data, *files)
    with stream, contextlib.suppress(ConnectionResetError):
        assert stream.recv(1) == b""
    return words_of(answer)


def words_of(answer: bytes) -> str:
    """Why an offer was refused."""
    with pytest.raises(ProtocolError) as caught:
        read_answer(answer, NOTHING)
    return str(caught.value)


@contextlib.contextmanager
def shared(server: ServerProcess, peer: Peer) -> Iterator[SegmentMapping]:
    """Memory that the server took from ``peer``."""
    descriptor = make_segment(SIZE)
    answer, stream = say(path_of(server), to_bytes(offer_of(peer)), descriptor)
    read_answer(answer, offer_of(peer))
    with stream:
        yield SegmentMapping(descriptor, SIZE)
    os.close(descriptor)


def push(peer: Peer, sequence: int, numel: int = NUMEL, key: int = 0) -> Any:
    message = peer.message("PUSH", key=key, payload=torch.zeros(numel), in_segment=True)
    message.sequence = sequence
    peer.send(message)
    return peer.receive()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token": "0" * 32}, "the token is not the one"),
        ({"places": {1: PLACE}}, "this shard no such chunk"),
        ({"places": {0: Place(0, 4096, 4096 - 8)}}, "the offer has 4088 bytes, this shard 4096 bytes"),
        ({"places": {0: Place(2**62, 0, 4096)}}, "outside the segment"),
        ({"size_bytes": 2**62}, "of another size"),
    ],
)
def test_other_offers_are_refused(server, peer, changes, words):
    descriptor = make_segment(SIZE)
    try:
        assert words in refusal(server, to_bytes(offer_of(peer, **changes)), descriptor)
    finally:
        os.close(descriptor)


def test_descriptors_are_one_and_none_is_kept(server, peer):
    before = len(os.listdir(f"/proc/{server.pid}/fd"))
    files = [make_segment(SIZE) for _ in range(200)]
    try:
        for _ in range(20):
            refusal(server, to_bytes(offer_of(peer)), *files)
        assert "got none" in refusal(server, to_bytes(offer_of(peer)))
        eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= before + 1)
    finally:
        for descriptor in files:
            os.close(descriptor)


def test_streams_that_say_nothing_end(server, peer):
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(80)]
        for stream in streams:
            stream.settimeout(10.0)
            stream.connect(path_of(server))
        with shared(server, peer):
            assert push(peer, 1).type.name == "UPDATED"
        assert all("no offer came within 2 s" in words_of(stream.recv(4096)) for stream in streams)


def offer_as_other_user(path: str, data: bytes) -> bytes:
    descriptor = make_segment(SIZE)
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(10.0)
    stream.connect(path)
    with contextlib.suppress(BrokenPipeError):  # it may have refused already
        socket.send_fds(stream, [data], [descriptor])
    return stream.recv(4096)


@needs_root
def test_another_user_is_refused(server, peer):
    data = to_bytes(offer_of(peer))
    path = Path(path_of(server))
    assert as_other_user(offer_as_other_user, str(path), data)[0] == "PermissionError"
    # Even where the modes let it in, the kernel says who it is. The link leaves the directory of all servers as it is.
    with tempfile.TemporaryDirectory() as directory:
        link = Path(directory, "socket")
        link.hardlink_to(path)
        Path(directory).chmod(0o755)
        link.chmod(0o777)
        answer = as_other_user(offer_as_other_user, str(link), data)
    assert "this user's processes (expected user 0 or 0, got 65534)" in words_of(answer)


def test_a_frame_says_nothing_that_the_table_does_not(server, peer):
    assert push(peer, 1).body["code"] == "segment"  # nothing is shared yet
    with shared(server, peer) as memory:
        memory.tensor(0, NUMEL, torch.float32).fill_(1.0)
        for wrong in ({"numel": NUMEL + 1}, {"numel": NUMEL // 2}):
            assert push(peer, 1, **wrong).body["code"] == "segment"
        assert push(peer, 1, key=9).body["code"] == "segment"
        answer = push(peer, 1)
        assert (answer.type.name, answer.in_segment, answer.numel) == ("UPDATED", True, NUMEL)
        assert answer.body == {"place": 0}
        # Again: the answer travels, because the place may be read.
        assert peer.request("RESUME", body={"open": [[0, 1]]}).type.name == "RESUMED"
        again = peer.receive()
        assert (again.type.name, again.in_segment) == ("UPDATED", False)
        assert torch.frombuffer(bytearray(again.payload), dtype=torch.float32).eq(-1.0).all()
    sequences = itertools.count(2)  # what is taken before the stream's end is seen gets no second answer
    eventually(lambda: push(peer, next(sequences)).body.get("code") == "segment")


def test_a_group_with_a_bad_message_is_answered_message_by_message(server, peer):
    with shared(server, peer) as memory:
        memory.tensor(0, NUMEL, torch.float32).fill_(1.0)
        assert push(peer, 1).type.name == "UPDATED"
        header = bytearray(HEADER_BYTES)
        header[:4] = b"PSEN"
        good = [encode(peer.message("WAITS", key=0, sequence=number)) for number in (1, 2)]
        peer.socket.send(b"".join(good[0]) + bytes(header) + b"".join(good[1]))
        answers = [peer.receive() for _ in range(3)]
        assert [one.type.name for one in answers] == ["PENDING", "ERROR", "PENDING"]
        peer.socket.send(b"".join(good[0])[:-1])  # cut off
        assert peer.receive().body["code"] == "bad_message"
        assert push(peer, 2).type.name == "UPDATED"


def test_a_worker_that_writes_while_the_server_reads_harms_values_only(server, peer):
    stop = threading.Event()
    with shared(server, peer) as memory:
        gradient, answer = memory.tensor(0, NUMEL, torch.float32), memory.tensor(4096, NUMEL, torch.float32)

        def write() -> None:
            while not stop.is_set():
                gradient.copy_(torch.randn(NUMEL))
                answer.fill_(float("nan"))
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
