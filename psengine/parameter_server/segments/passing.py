"""The small Unix socket beside a shard's own, over which workers pass segments: ZeroMQ carries no descriptors."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import weakref
from typing import NamedTuple

import torch

from psengine.environment.local_sockets import LONGEST_PATH_BYTES
from psengine.errors import ProtocolError
from psengine.parameter_server.segments.memory import SegmentMapping, check_segment
from psengine.parameter_server.segments.offer import (
    ANSWER_BYTES,
    LENT_BYTES,
    LentTable,
    Offer,
    answer_text_bytes,
    lent_rows_bytes,
    read_lent_table,
)

SUFFIX = ".fd"
# A shard answers at once; one that is busy with a snapshot takes a second.
ANSWER_S = 2.0
# A worker's last byte: its payloads travel from now on. It may go on to read what it was told to read.
END = b"e"
NO_DESCRIPTOR = "the {} has no file descriptor left to take one (expected room below its limit, see `ulimit -n`)"


def passing_path(address: str) -> str | None:
    """Where the shard that listens at an ipc:// address takes segments; None where that can be nowhere."""
    path = address.removeprefix("ipc://")
    if path == address or path.startswith("@") or len(os.fsencode(path + SUFFIX)) > LONGEST_PATH_BYTES:
        return None
    return os.path.abspath(path) + SUFFIX


def peer_uid(stream: socket.socket) -> int:
    """The user of the process at the other end, by the kernel."""
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


class Lent(NamedTuple):
    """Memory of the server that this process may read.

    Places that it was told to read do not change before the stream ends. So the stream's end waits until nothing refers
    to the memory any more: ``keeper`` closes the last descriptor of it then, or when it is called.
    """

    memory: torch.Tensor  # of bytes
    table: LentTable
    keeper: weakref.finalize[..., mmap.mmap]

    def place(self, key: int, part: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The chunk's place in this part, to be read only; None where there is none. All share one storage."""
        offset = self.table.offsets.get(key)
        if offset is None or part >= self.table.parts:
            return None
        begin = part * self.table.part_bytes + offset
        return self.memory[begin : begin + numel * dtype.itemsize].view(dtype)


def pass_segment(path: str, offer: Offer, descriptor: int) -> tuple[socket.socket, Lent | None]:
    """Offer a segment to the shard that listens at ``path``; the shard has it until ``END`` or the stream's end.

    Returns:
        The stream, which does not block, and the memory that the shard lends in turn, if it does.

    Raises:
        OSError: nobody listens there, or there is no answer in time.
        ProtocolError: the shard refuses it, or is no shard of this user, or lends what is no memory.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        stream.settimeout(ANSWER_S)
        stream.connect(path)
        uid = peer_uid(stream)
        if uid not in (0, os.geteuid()):
            raise ProtocolError(f"another user's process listens there (expected user {os.geteuid()} or 0, got {uid})")
        data = memoryview(offer.to_bytes())
        with contextlib.suppress(BrokenPipeError):  # a shard that refuses at once has said why before it closed
            sent = socket.send_fds(stream, [data], [descriptor])
            stream.sendall(data[sent:])
        lent = _read_answer(stream, offer)
        stream.setblocking(False)
    except BaseException:
        stream.close()
        raise
    return stream, lent


def _read_answer(stream: socket.socket, offer: Offer) -> Lent | None:
    # Descriptors come with the first bytes.
    answer, descriptors, flags, _ = socket.recv_fds(stream, 1, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not answer:
            raise ProtocolError("the server closed the connection")
        text_bytes = answer_text_bytes(answer + _read(stream, ANSWER_BYTES - 1))
        if text_bytes is not None:
            raise ProtocolError(_read(stream, text_bytes).decode(errors="replace"))
        header = _read(stream, LENT_BYTES)
        table = read_lent_table(header + _read(stream, lent_rows_bytes(header)), offer)
        if not table.offsets:
            return None
        if flags & socket.MSG_CTRUNC and not descriptors:
            raise ProtocolError(NO_DESCRIPTOR.format("worker"))
        if len(descriptors) != 1:
            raise ProtocolError(f"a server lends memory by one descriptor (got {len(descriptors)})")
        check_segment(descriptors[0], table.size_bytes, sys.maxsize)
        mapping = SegmentMapping(descriptors[0], table.size_bytes, is_written=False)
        keeper = weakref.finalize(mapping.memory, os.close, os.dup(stream.fileno()))
        return Lent(mapping.tensor(0, table.size_bytes, torch.uint8), table, keeper)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(stream: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = stream.recv(size_bytes - len(data))
        if not piece:
            raise ProtocolError("the server closed the connection")
        data += piece
    return data
