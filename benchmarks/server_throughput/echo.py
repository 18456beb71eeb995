"""The peer over ZeroMQ alone: an echo that copies nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import zmq

from psengine.kernels.freed_memory import keep_freed_memory
from psengine.protocol.frames import buffer_of

ECHO = "echo"
DEADLINE_S = 120.0


def _serve(address: Any) -> None:
    """Send every message back unchanged."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        address.send(socket.last_endpoint.decode())
        address.close()
        while True:
            socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


@contextmanager
def echo_server() -> Iterator[str]:
    """Start one; yield its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError(f"the echo has not started within {DEADLINE_S:g} s")
        yield ours.recv()
    finally:
        process.kill()
        process.join(10)


class Echo:
    """A DEALER that sends every chunk and takes every chunk back; nothing is copied in Python."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(DEADLINE_S * 1000)
        self._socket.connect(address)

    def push_pull(self, chunks: Sequence[torch.Tensor]) -> None:
        for chunk in chunks:
            self._socket.send_multipart([b"header", buffer_of(chunk)], copy=False)
        for _ in chunks:
            self._socket.recv_multipart(copy=False)

    def close(self) -> None:
        self._context.destroy(linger=0)
