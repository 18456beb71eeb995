"""A shard's socket against peers that do not read, do not end a message, or are gone: it closes, and drops nothing."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.waiting import eventually

from psengine.parameter_server.server.transport.endpoint import UNREAD_BYTES, Endpoint, Received
from psengine.parameter_server.server.transport.peers import GONE_KEPT, Doorkeeper

PART_BYTES = 10 << 20


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, context: zmq.Context[Any], tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(context, "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/shard")
    try:
        yield made
    finally:
        made.close(0)


@pytest.fixture
def peer(context: zmq.Context[Any], endpoint: Endpoint) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(endpoint.address)
        yield dealer


def heard(endpoint: Endpoint) -> Received:
    return eventually(endpoint.receive)


def test_a_peer_that_never_reads_is_closed_and_its_memory_is_free(endpoint, peer):
    peer.send(b"all values, please")
    route = heard(endpoint).route
    payload, sent_bytes = bytearray(1 << 20), 0
    while endpoint.peers.is_connected(route):
        assert sent_bytes < UNREAD_BYTES + (32 << 20)  # the kernel takes some of it
        endpoint.send(route, [b"header", memoryview(payload)], copies=sent_bytes % 2 == 0)
        assert endpoint.unread_bytes <= UNREAD_BYTES
        sent_bytes += len(payload)
    assert endpoint.closed == 1
    endpoint.send(route, [b"to nobody"])
    eventually(lambda: endpoint.receive() or endpoint.unread_bytes == 0)


def test_a_peer_that_reads_gets_everything(endpoint, peer):
    peer.send(b"")
    route = heard(endpoint).route
    for number in range(300):
        endpoint.send(route, [struct.pack("<I", number), bytes(PART_BYTES if number == 0 else 5000)])
    for number in range(300):
        assert peer.poll(5000)
        header, _ = peer.recv_multipart()
        assert header == struct.pack("<I", number)
    assert endpoint.closed == 0
    assert endpoint.peers.is_connected(route)


def test_a_connection_that_has_ended_is_known(endpoint, peer):
    peer.send(b"")
    route = heard(endpoint).route
    assert endpoint.peers.is_connected(route)
    assert not endpoint.peers.is_connected(b"another")
    peer.close()
    eventually(lambda: not endpoint.peers.is_connected(route))


def test_no_descriptor_is_kept(context, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):  # more than the context's threads have
        Endpoint(context, f"ipc://{tmp_path}/{number}").close(0)
    eventually(lambda: len(os.listdir("/proc/self/fd")) < before + 50)


def test_connections_that_are_gone_go_with_what_they_sent(endpoint, context):
    """Clients that come, send and go faster than anybody reads left descriptors behind until libzmq aborted."""
    said: list[str] = []
    doorkeeper = Doorkeeper(lambda kind, text: said.append(text))
    doorkeeper.watch(endpoint.peers)
    doorkeeper.start()
    try:
        for _ in range(2 * GONE_KEPT):
            with context.socket(zmq.DEALER) as flood:
                flood.setsockopt(zmq.LINGER, 60_000)
                flood.connect(endpoint.address)
                for _ in range(500):  # more than zmq takes from a connection that nobody reads, less than the kernel
                    flood.send(bytes(100))
        eventually(lambda: endpoint.peers.dropped > GONE_KEPT and said)
        eventually(lambda: endpoint.receive() is None and endpoint.peers.connections == 0)
    finally:
        doorkeeper.end()
    assert endpoint.dropped_messages
