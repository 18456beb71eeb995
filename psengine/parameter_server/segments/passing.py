"""The small Unix socket beside a shard's own, over which workers pass segments: ZeroMQ carries no descriptors."""

from __future__ import annotations

import os
import socket
import struct

from psengine.environment.local_sockets import LONGEST_PATH_BYTES
from psengine.errors import ProtocolError
from psengine.parameter_server.segments.offer import (
    ANSWER_BYTES,
    Offer,
    answer_text_bytes,
)

SUFFIX = ".fd"
# A shard answers at once; one that is busy with a snapshot takes a second.
ANSWER_S = 2.0


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


def pass_segment(path: str, offer: Offer, descriptor: int) -> socket.socket:
    """Offer a segment to the shard that listens at ``path``; the shard has it for as long as the stream is open.

    Raises:
        OSError: nobody listens there, or there is no answer in time.
        ProtocolError: the shard refuses it, or is no shard of this user.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        stream.settimeout(ANSWER_S)
        stream.connect(path)
        uid = peer_uid(stream)
        if uid not in (0, os.geteuid()):
            raise ProtocolError(f"another user's process listens there (expected user {os.geteuid()} or 0, got {uid})")
        data = memoryview(offer.to_bytes())
        sent = socket.send_fds(stream, [data], [descriptor])
        stream.sendall(data[sent:])
        text_bytes = answer_text_bytes(_read(stream, ANSWER_BYTES))
        if text_bytes is not None:
            raise ProtocolError(_read(stream, text_bytes).decode(errors="replace"))
    except BaseException:
        stream.close()
        raise
    return stream


def _read(stream: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = stream.recv(size_bytes - len(data))
        if not piece:
            raise ProtocolError("the server closed the connection")
        data += piece
    return data
