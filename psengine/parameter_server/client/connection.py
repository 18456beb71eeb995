"""Sockets to the shards and the thread that owns them: the ``Transport`` of a client in a process.

    workers' threads                        I/O thread
      do(function, argument) ── deque ──►   run the queued tasks ─► poll ─► receive all messages ─► tick every 100 ms
                       └─ wake-up byte, only if it may be asleep ──┘

The thread passes messages to a ``Receiver``, which knows what they mean.
"""

from __future__ import annotations

import logging
import os
import random
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from typing_extensions import override

from psengine.environment import local_sockets
from psengine.environment.variables import read_variable
from psengine.errors import EnvironmentVariableError, ProtocolError, PSEngineError, ServerError
from psengine.kernels.freed_memory import keep_freed_memory
from psengine.parameter_server.client.handshake_monitor import HandshakeMonitor
from psengine.parameter_server.client.operation import forked_error
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.reachability import watch_first_contact
from psengine.parameter_server.client.runtime import Receiver, Runtime, Transport
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.parameter_server.keepalive import KEEPALIVE
from psengine.parameter_server.zero_copy import ZeroCopySends
from psengine.protocol.frames import decode, encode
from psengine.protocol.groups import split
from psengine.protocol.keys import CurveClientKeys
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

TICK_S = 0.1
HANDSHAKE_MS = 2000
RECONNECT_MS = 50
RECONNECT_MOST_MS = 500
TRANSPORT_HEARTBEAT_MS = 5000
TRANSPORT_TIMEOUT_MS = 30000
# Not on connections with payloads: behind these, ZMTP's heartbeats would find a slow link dead.
HEARTBEATS = {zmq.HEARTBEAT_IVL: TRANSPORT_HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: TRANSPORT_TIMEOUT_MS}
LINGER_MS = 500
CLOSE_S = 5.0
# Below this a copy is cheaper than none: 50 µs a chunk of 64 KiB against 63, of 256 KiB 110 against 85 (measured).
ZERO_COPY_BYTES = 128 * 1024
# Then other sockets and the queued tasks get their turn.
RECEIVES_PER_TURN = 64
MAX_FRAMES = 3
# Pushes whose payload lies in shared memory and that are ready together travel as one frame: a shard answers the first
# before the last is sent where a step has more.
PUSHES_PER_GROUP = 8
_OF_SEGMENTS = frozenset({MessageType.WELCOME, MessageType.ERROR})


class Connection(Transport):
    """DEALER sockets and their thread.

    Args:
        receiver: gets the messages.
        keys: CURVE keys; None speaks in the clear.
        checksum: add xxh3 checksums to payloads.
        uses_local_socket: see ``SessionOptions``.
        segments: memory to share with servers of this host.

    ``close`` is idempotent, and does nothing in a child process.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        keys: CurveClientKeys | None = None,
        checksum: bool = False,
        uses_local_socket: bool = True,
        segments: WorkerSegments | None = None,
    ) -> None:
        self._receiver = receiver
        self._keys = keys
        self._checksum = checksum
        self._uses_local_socket = uses_local_socket
        self.segments = segments or WorkerSegments(is_wanted=False)
        self._process_id = os.getpid()
        self._context: Any = zmq.Context()
        self._sockets: list[Any] = []
        self._zero_copy: list[ZeroCopySends] = []
        # By socket, messages without a payload frame that leave before this thread waits.
        self._groups: list[list[bytes]] = []
        self._monitors: list[HandshakeMonitor] = []
        self._poller: Any = zmq.Poller()
        self._tasks: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake_reader, self._wake_writer = sockets.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._may_sleep = False
        self._is_stopping = False
        self._failure: PSEngineError | None = None
        self._indices: dict[Any, int] = {}
        self._addresses: list[str] = []
        keep_freed_memory()
        self._thread = threading.Thread(target=self._run, name="psengine-client", daemon=True)
        self._thread.start()

    # ---- any thread --------------------------------------------------------------------------------------------

    @override
    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        if os.getpid() != self._process_id:
            raise forked_error()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        self._tasks.append((function, arguments))
        if self._may_sleep:
            self._wake()
        self._run_leftovers()

    @override
    def open(self, address: str, *, carries_payloads: bool = True) -> None:
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS),
            *(KEEPALIVE if carries_payloads else HEARTBEATS).items(),
            # Credits bound what is in flight. Without a connection nothing is queued: the link sends again.
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.IPV6, int("[" in address)),
        ):
            socket.setsockopt(option, value)
        self._monitors.append(HandshakeMonitor(socket, address, self._keys))
        self._indices[socket] = len(self._sockets)
        self._sockets.append(socket)
        self._zero_copy.append(ZeroCopySends(socket))
        self._groups.append([])
        self._poller.register(socket, zmq.POLLIN)
        self._addresses.append(address)
        self._take_way(len(self._sockets) - 1)

    def _take_way(self, index: int) -> bool:
        """Connect to the address or to the Unix socket beside it, whichever is there; whether that is a change."""
        socket, monitor, address = self._sockets[index], self._monitors[index], self._addresses[index]
        way = local_sockets.way_to(address) if self._uses_local_socket else address
        if way == monitor.way:
            return False
        if (stranger := monitor.find_stranger(way)) is not None:
            self._receiver.rejected(index, stranger, time.monotonic())
            return False
        keys = monitor.keys_for(way)
        if keys is None:
            socket.curve_server = 0  # in the clear; an option counts for the connections made after it
        else:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.own.public.encode()
            socket.curve_secretkey = keys.own.secret.encode()
        if monitor.way:
            socket.disconnect(monitor.way)
        monitor.way = way
        socket.connect(way)
        return True

    @property
    @override
    def is_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    @override
    def close(self) -> None:
        self._is_stopping = True
        if os.getpid() != self._process_id or self.is_own_thread:
            return
        self._wake()
        self._thread.join(CLOSE_S)

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"w")
        except (BlockingIOError, OSError):  # full: it will wake up; closed: it has ended
            return

    # ---- I/O thread --------------------------------------------------------------------------------------------

    @override
    def send(self, index: int, message: Message) -> bool:
        socket = self._sockets[index]
        if message.type is MessageType.PUSH:
            self.segments.place(self._addresses[index], message)
        *frames, last = encode(message, checksum=self._checksum)
        group = self._groups[index]
        if message.in_segment:
            group.extend((*frames, last))
            return len(group) < 2 * PUSHES_PER_GROUP or self._send_group(index)
        if group:
            self._send_group(index)  # a connection keeps its order
        try:
            for frame in frames:
                socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
            if len(last) < ZERO_COPY_BYTES:
                socket.send(last, zmq.NOBLOCK)
            else:
                self._zero_copy[index].send(last)
        except zmq.Again:
            return False
        return True

    def _send_group(self, index: int) -> bool:
        """Send what is gathered; without a connection it is lost, and the link asks once there is one."""
        group = self._groups[index]
        frame = b"".join(group)
        group.clear()
        try:
            self._sockets[index].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _run(self) -> None:
        failure: PSEngineError = ServerError("the connection to the parameter servers is closed")
        try:
            self._poller.register(self._wake_reader.fileno(), zmq.POLLIN)
            self._loop()
        except BaseException as error:
            logger.exception("the client's I/O thread failed")
            failure = ServerError(f"the client's I/O thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        finally:
            self._failure = failure
            try:
                self._receiver.crashed(failure)
                self._run_leftovers()
            finally:
                self._close_sockets()

    def _run_leftovers(self) -> None:
        """Run the tasks that the thread has not seen before it ended: the receiver makes them fail."""
        while self._failure is not None and self._tasks:
            function, arguments = self._tasks.popleft()
            try:
                function(*arguments)
            except (PSEngineError, zmq.ZMQError):
                continue  # there are no sockets any more

    def _loop(self) -> None:
        tasks = self._tasks
        wake_descriptor = self._wake_reader.fileno()
        next_tick_s = time.monotonic() + TICK_S
        while not self._is_stopping:
            while tasks:
                function, arguments = tasks.popleft()
                function(*arguments)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._read_monitors(now_s)
                for zero_copy in self._zero_copy:
                    zero_copy.release()
                self._receiver.tick(now_s)
            for index, group in enumerate(self._groups):
                if group:
                    self._send_group(index)
            # Set before the deque is looked at: who appends after that look sees it set, and wakes this thread.
            self._may_sleep = True
            timeout_ms = 0 if tasks or self._is_stopping else max(0, int((next_tick_s - now_s) * 1000) + 1)
            ready = self._poller.poll(timeout_ms)
            self._may_sleep = False
            for source, _ in ready:
                if source == wake_descriptor:
                    self._drain_wake_ups()
                else:
                    self._receive(source)

    def _drain_wake_ups(self) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:
            return

    def _receive(self, socket: Any) -> None:
        index = self._indices[socket]
        for _ in range(RECEIVES_PER_TURN):
            try:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = [frame.buffer]
            while frame.more:
                frame = socket.recv(copy=False)
                frames[MAX_FRAMES:] = [frame.buffer]  # one too many is enough for ``decode`` to refuse them
            now_s = time.monotonic()
            for part in split(frames):
                try:
                    message = decode(part)
                except ProtocolError as error:
                    self._receiver.garbled(index, error, now_s)
                else:
                    if not (message.in_segment or message.type in _OF_SEGMENTS) or self._look_into(index, message):
                        self._receiver.received(index, message, now_s)

    def _look_into(self, index: int, message: Message) -> bool:
        """Take what a message says of shared memory; whether the receiver gets it."""
        address = self._addresses[index]
        if message.type is MessageType.WELCOME:
            self.segments.welcomed(address, message)
        elif message.type is MessageType.ERROR and message.body["code"] == ErrorCode.SEGMENT:
            self.segments.lost(address, message.body["text"])
            message.type, message.body = MessageType.MISSING, {}  # the bytes never came
        return not message.in_segment or self.segments.fetch(address, message)

    def _read_monitors(self, now_s: float) -> None:
        for index, monitor in enumerate(self._monitors):
            error = monitor.read(now_s)
            if monitor.is_new:
                monitor.is_new = False
                self._receiver.connected(index, now_s)
            # A client that is refused at a TCP address may have been too early for the socket beside it.
            if not monitor.has_succeeded and self._take_way(index):
                error = None
            if error is not None:
                self._receiver.rejected(index, error, now_s)

    def _close_sockets(self) -> None:
        for monitor in self._monitors:
            monitor.close()
        for socket in self._sockets:
            socket.close()
        self._context.term()  # waits for the linger of the sockets
        for zero_copy in self._zero_copy:
            zero_copy.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self.segments.close()


def _connect(receiver: Receiver, options: SessionOptions) -> Transport:
    # With CURVE keys of its own a client is somebody else than its user.
    is_this_user = options.keys is None or bool(options.keys.secret_file)
    variable = read_variable("PSENGINE_SEGMENTS") or "1"
    if variable not in ("0", "1"):
        raise EnvironmentVariableError(
            "PSENGINE_SEGMENTS says whether this worker shares memory with servers on its host (expected 0 or 1, got"
            f" {variable!r})."
        )
    is_wanted = options.uses_segments and options.uses_local_socket and variable == "1"
    return Connection(
        receiver,
        keys=options.keys,
        checksum=options.checksum,
        uses_local_socket=options.uses_local_socket,
        segments=WorkerSegments(is_wanted=is_wanted and is_this_user, codec=options.codec),
    )


# The runtime of a client in a process.
PROCESS = Runtime(
    now_s=time.monotonic,
    draw_nonce=lambda: random.SystemRandom().getrandbits(64),
    connect=_connect,
    watch=watch_first_contact,
    is_listening=local_sockets.is_listening,
)
