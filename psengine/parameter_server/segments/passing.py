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
from psengine.parameter_server.segments.offer import PREFIX_BYTES, LentTable, Offer, body_bytes, read_answer, to_bytes

SUFFIX = ".fd"
# A shard answers at once; one that is busy with a snapshot takes a second.
ANSWER_S = 2.0
# A worker's last byte: its payloads travel from now on. It may go on to read what it was told to read.
END = b"e"


def passing_path(address: str) -> str | None:
    """Where the shard that listens at an ipc:// address takes segments; None where that can be nowhere."""
    path = address.removeprefix("ipc://")
    if path == address or path.startswith("@") or len(os.fsencode(path + SUFFIX)) > LONGEST_PATH_BYTES:
        return None
    return os.path.abspath(path) + SUFFIX


def check_user(stream: socket.socket) -> None:
    """Raise ProtocolError unless the process at the other end is this user's, or root's, by the kernel's word."""
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = int(struct.unpack("3i", credentials)[1])
    if uid not in (0, os.geteuid()):
        raise ProtocolError(
            f"memory is shared with this user's processes (expected user {os.geteuid()} or 0, got {uid})"
        )


def receive(stream: socket.socket, who: str) -> tuple[bytes, int | None]:
    """A message about a segment, and the descriptor that came with it, which the caller closes.

    Args:
        stream: blocks.
        who: reads it, for errors.

    Raises:
        OSError: the stream has ended, or there is nothing in time.
        ProtocolError: it is no such message, or came with several descriptors, or there is no room for one.
    """
    data, descriptors, expected_bytes = b"", list[int](), PREFIX_BYTES
    try:
        while len(data) < expected_bytes:
            piece, more, flags, _ = socket.recv_fds(stream, expected_bytes - len(data), 1, socket.MSG_CMSG_CLOEXEC)
            descriptors += more
            if flags & socket.MSG_CTRUNC and not descriptors:
                raise ProtocolError(
                    f"the {who} has no file descriptor left to take one (expected room below its limit: `ulimit -n`)"
                )
            if len(descriptors) > 1 or flags & socket.MSG_CTRUNC:
                raise ProtocolError("a segment comes with one descriptor (got more)")
            if not piece:
                raise ConnectionResetError("the other side closed the connection")
            data += piece
            if len(data) == PREFIX_BYTES:
                expected_bytes += body_bytes(data)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return data, descriptors[0] if descriptors else None


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
        check_user(stream)
        data = to_bytes(offer)
        with contextlib.suppress(BrokenPipeError):  # a shard that refuses at once has said why before it closed
            sent = socket.send_fds(stream, [data], [descriptor])
            stream.sendall(data[sent:])
        answer, lent = receive(stream, "worker")
        try:
            memory = _map_lent(stream, read_answer(answer, offer), lent)
        finally:
            if lent is not None:
                os.close(lent)
        stream.setblocking(False)
    except BaseException:
        stream.close()
        raise
    return stream, memory


def _map_lent(stream: socket.socket, table: LentTable, descriptor: int | None) -> Lent | None:
    if not table.offsets:
        return None
    if descriptor is None:
        raise ProtocolError("a server lends memory by a descriptor (got none)")
    check_segment(descriptor, table.size_bytes, sys.maxsize)
    mapping = SegmentMapping(descriptor, table.size_bytes, is_written=False)
    keeper = weakref.finalize(mapping.memory, os.close, os.dup(stream.fileno()))
    return Lent(mapping.tensor(0, table.size_bytes, torch.uint8), table, keeper)
