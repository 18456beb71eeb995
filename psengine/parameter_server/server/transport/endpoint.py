"""A shard's socket: frames in, frames out. It never waits for a peer that does not read, and drops no message.

    peer ══ ROUTER ── receive() ─► route, key, frames
                  ◄── send()       a peer that does not read: its connection is closed

Nothing is lost inside a connection: a client whose connection was closed makes another one, and says RESUME.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from psengine.environment.local_sockets import is_listening
from psengine.errors import ServerError
from psengine.parameter_server.server.transport.authentication import Authenticator, local_peer
from psengine.parameter_server.server.transport.peers import Peers
from psengine.parameter_server.sockets import HANDSHAKE_MS, keep_alive
from psengine.parameter_server.zero_copy import ZeroCopySends
from psengine.protocol.messages import MAX_PAYLOAD_BYTES

MAX_FRAME_BYTES = MAX_PAYLOAD_BYTES + 64 * 1024
# Messages, per peer and direction: zmq counts no bytes.
SENT_MESSAGES = 8192
RECEIVED_MESSAGES = 64
# Smaller frames are not counted: as many as may wait for a peer take 32 MiB.
COUNTED_BYTES = 4096
# Of answers that a peer has not read: more than a worker's credit and its requests lead to. Where a rule decides steps,
# a worker's answers of a step come all at once: ``owed_bytes`` more.
UNREAD_BYTES = 128 * 1024 * 1024
# A socket that has not been read empty for so long, and so many messages, is under pressure: what came over connections
# that are gone is dropped.
PRESSED_S, PRESSED_MESSAGES = 1.0, 1000
# Dropped messages in a row, after which other work has its turn.
DROPPED_AT_ONCE = 256
# How long answers may still leave after the end.
LINGER_MS = 1000
_MORE = zmq.NOBLOCK | zmq.SNDMORE


_OPTIONS: dict[int, int] = {
    zmq.LINGER: LINGER_MS,
    zmq.ROUTER_MANDATORY: 1,  # without it, answers to a slow peer vanish
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.SNDHWM: SENT_MESSAGES,
    zmq.RCVHWM: RECEIVED_MESSAGES,
}


class BindError(ServerError):
    """An address could not be bound."""


class Received(NamedTuple):
    """One message."""

    route: bytes  # the connection's routing id
    user_id: str  # the client's key; "" where keys name nobody
    frames: list[Any]  # bytes, or memoryviews of bytes
    part: zmq.Frame  # its last; zmq knows who sent it

    @property
    def peer(self) -> tuple[int | None, int]:
        """The user and the process that sent it, by the kernel's word, over a Unix socket; else None and 0."""
        return local_peer(str(self.part.get("Peer-Address")).encode())


class Endpoint:
    """One ROUTER socket, bound; used by one thread at a time.

    Args:
        context: of the process.
        address: to bind, as ``ServerSettings.bind_addresses`` has it.
        guard: decides who may connect; None: anybody may.
        lease_s: a connection whose other end's host is gone is found within it.
        backlog: connections that may wait to be accepted.

    Attributes:
        address: as bound, with the real port.
        peers: the connections behind the socket.
        owed_bytes: returns what a peer may be sent at once beside UNREAD_BYTES.
        closed: connections that were closed because their peer did not read.

    Raises:
        BindError: the address is taken, or is none of this machine's.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        guard: Authenticator | None = None,
        *,
        lease_s: float = 5.0,
        backlog: int = 1024,
    ) -> None:
        self._guard = guard
        self.owed_bytes: Callable[[], int] = int
        self.closed = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.received_messages = self.dropped_messages = 0
        self._read_since_empty, self._empty_s = 0, time.monotonic()
        # Of Unix sockets, which zmq leaves behind: by the end another process may have a file's name.
        self._files: dict[str, os.stat_result] = {}
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._zero_copy = ZeroCopySends(self._socket)
        self.peers = Peers(self._socket)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        # ZMTP's heartbeats wait behind payloads, so that a slow link would look dead. The kernel's keep-alives do not.
        options = _OPTIONS | keep_alive(lease_s) | {zmq.IPV6: int("[" in address), zmq.BACKLOG: backlog}
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            self._bind(address)
        except BaseException:
            self.peers.end()
            self._socket.close(linger=0)
            raise
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.address = bound.rstrip(b"\0").decode()

    def _bind(self, address: str) -> None:
        is_path = address.startswith("ipc://")
        if is_path:
            _refuse_occupied_path(address)
        if self._guard is not None:
            self._guard.secure(self._socket, address)
        # The socket's mode keeps other users out, whatever the directory's mode.
        mask = os.umask(0o077) if is_path else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise BindError(
                f"The address {address} could not be bound (expected a free one of this machine, got:"
                f" {error.strerror}). Fix: choose another with --bind, or port 0; a host must be an IP address or the"
                " name of a network interface."
            ) from error
        finally:
            if mask is not None:
                os.umask(mask)
        if is_path and not address.startswith("ipc://@"):
            path = os.path.abspath(address.removeprefix("ipc://"))
            self._files[path] = os.lstat(path)
            self.peers.paths.append(path)

    def open_local(self, address: str) -> None:
        """Listen at the Unix socket ``address`` too.

        Bytes go through it for about two thirds of what loopback TCP costs the kernel.

        Raises:
            BindError: it cannot be bound.
        """
        self._bind(address)

    def poll(self, timeout_s: float, descriptor: int) -> bool:
        """Whether a message is there, or this descriptor can be read, after at most ``timeout_s``."""
        if descriptor not in self._poller:
            self._poller.register(descriptor, zmq.POLLIN)
        return bool(self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))))

    def receive(self) -> Received | None:
        """The next message; None where there is none yet. Its frames live as long as they are referenced."""
        self._zero_copy.release()
        receive = self._socket.recv
        for _ in range(DROPPED_AT_ONCE):
            try:
                part = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._read_since_empty, self._empty_s = 0, time.monotonic()
                return None
            route, frames = part.bytes, []
            while part.more:  # zmq has all parts of a message, or none
                part = receive(copy=False)
                frames.append(part.buffer)
            size_bytes = sum(map(len, frames))
            self.received_messages += 1
            self.received_bytes += size_bytes
            self._read_since_empty += 1
            is_pressed = self._read_since_empty > PRESSED_MESSAGES and time.monotonic() - self._empty_s > PRESSED_S
            if self.peers.heard(route, part, size_bytes, is_pressed=is_pressed):
                user_id = str(part.get("User-Id")) if self._guard is not None and self._guard.names_peers else ""
                return Received(route, user_id, frames, part)
            self.dropped_messages += 1
        return None

    def operator(self, received: Received) -> str:
        """Who sent this, in words, if it may give orders; "" if it may not.

        That is the server's own user, or root, over a Unix socket, by the kernel's word; or a key of an operator.
        """
        user, _ = received.peer
        if user in (os.geteuid(), 0):
            return f"user {user}"
        # Without an authenticator a User-Id is the client's own word.
        if self._guard is None or not self._guard.is_operator(key := str(received.part.get("User-Id"))):
            return ""
        return f"the key {key}"

    def may_follow(self, received: Received) -> bool:
        """Whether the sender may have a copy of all that is here: it is the server's user, or has the server's keys."""
        if self._guard is None:
            return True
        return received.peer[0] in (os.geteuid(), 0) or self._guard.is_own(str(received.part.get("User-Id")))

    def send(self, route: bytes, frames: Sequence[Any], *, copies: bool = True) -> None:
        """Send, or close the connection of a peer that does not read; never waits. A peer that is gone gets nothing.

        Frames are bytes, or memoryviews of bytes. Without ``copies`` the last one must not change as long as it is
        referenced.
        """
        last = frames[-1]
        is_counted = len(last) >= COUNTED_BYTES
        more_bytes = self._zero_copy.unread_bytes(route) + len(last) - UNREAD_BYTES if is_counted else 0
        if more_bytes > 0 and more_bytes > self.owed_bytes():
            self._close(route)
            return
        send = self._socket.send
        try:
            send(route, _MORE)  # zmq refuses a message here, or takes all of it
            for frame in frames[:-1]:
                send(frame, _MORE)
            if is_counted:
                self._zero_copy.send(memoryview(bytearray(last)) if copies else last, route)
            else:
                send(last, zmq.NOBLOCK)
        except zmq.Again:
            self._close(route)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
        else:
            self.sent_bytes += sum(map(len, frames))

    def _close(self, route: bytes) -> None:
        self.closed += self.peers.close(route)

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that peers have not read."""
        return self._zero_copy.unread_bytes()

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close; answers already sent get ``linger_ms`` to leave."""
        self._zero_copy.close()
        self.peers.end()
        self._socket.close(linger=linger_ms)
        for path, status in self._files.items():
            with suppress(OSError):
                if os.path.samestat(status, os.lstat(path)):
                    os.unlink(path)


def _refuse_occupied_path(address: str) -> None:
    """Raise where a file is at an ipc path, or a process listens there: zmq would remove it silently."""
    path = Path(address.removeprefix("ipc://"))
    found, fix = "a file", "move it away"
    if path.is_socket() and not path.is_symlink():
        found, fix = "a socket at which another process listens", "stop that process"
    if os.path.lexists(path) and (fix == "move it away" or is_listening(address)):
        raise BindError(
            f"The address {address} could not be bound (expected nothing at that path, or a socket that a server left"
            f" behind, got {found}). Fix: choose another with --bind, or {fix}."
        )
