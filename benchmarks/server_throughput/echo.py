"""The peers over ZeroMQ alone: an echo that copies nothing, and one that does a parameter server's work.

The working echo does for every chunk what training needs and no more: the worker packs the gradient, the server applies
SGD, the worker copies the weights out. It checks nothing, knows no sequence numbers and survives nothing. Its server
sends the weights from where they live: with two workers a chunk may be sent half updated by the other's gradient.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import zmq

from psengine.kernels.freed_memory import keep_freed_memory
from psengine.protocol.frames import buffer_of

ECHO, WORKING_ECHO = ECHOES = ("echo", "working echo")
DEADLINE_S = 120.0
LEARNING_RATE = 1e-3


def _serve_echo(socket: zmq.Socket[bytes]) -> None:
    """Sends every message back unchanged."""
    while True:
        socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


def _serve_working_echo(socket: zmq.Socket[bytes]) -> None:
    """Applies SGD to the chunk that a message names, and answers with its weights."""
    chunks: dict[bytes, tuple[torch.Tensor, Any]] = {}
    while True:
        identity, name, payload = socket.recv_multipart(copy=False)
        gradient = torch.frombuffer(payload.buffer, dtype=torch.float32)
        chunk = chunks.get(name.bytes)
        if chunk is None:
            weights = torch.zeros_like(gradient)
            chunk = chunks[name.bytes] = weights, buffer_of(weights)
        chunk[0].add_(gradient, alpha=-LEARNING_RATE)
        socket.send_multipart([identity, chunk[1]], copy=False)


def _serve(works: bool, address: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        address.send(socket.last_endpoint.decode())
        address.close()
        (_serve_working_echo if works else _serve_echo)(socket)


@contextmanager
def echo_servers(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start the servers of those echoes that are among the names; yield their addresses."""
    context = multiprocessing.get_context("spawn")
    processes, addresses = [], {}
    try:
        for name in (name for name in ECHOES if name in names):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(name == WORKING_ECHO, theirs), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
            if not ours.poll(DEADLINE_S):
                raise TimeoutError(f"the server of {name!r} has not started within {DEADLINE_S:g} s")
            addresses[name] = ours.recv()
        yield addresses
    finally:
        for process in processes:
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


class WorkingEcho(Echo):
    """Packs and sends every chunk; its weights land where they belong. One server answers in the order of requests."""

    def __init__(self, address: str, chunk_numels: Sequence[int]) -> None:
        super().__init__(address)
        total = sum(chunk_numels)
        self.weights = torch.zeros(total)
        self._packed = torch.zeros(total).split(chunk_numels)
        self._names = [f"{index} of {total}".encode() for index in range(len(chunk_numels))]
        self._payloads = [buffer_of(chunk) for chunk in self._packed]
        self._targets = [buffer_of(chunk) for chunk in self.weights.split(chunk_numels)]

    def push_pull(self, chunks: Sequence[torch.Tensor]) -> None:
        for name, payload, packed, chunk in zip(self._names, self._payloads, self._packed, chunks, strict=True):
            packed.copy_(chunk)
            self._socket.send_multipart([name, payload], copy=False)
        for target in self._targets:
            self._socket.recv_into(target)
