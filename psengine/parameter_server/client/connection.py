"""Sockets to the servers and the thread that owns them: the ``Transport`` of a client in a process.

    workers' threads                        I/O thread
      do(function, argument) ── deque ──►   run the queued tasks ─► poll ─► receive all messages ─► tick every 100 ms
                       └─ wake-up byte, only if it may be asleep ──┘

A socket has one connection in its life; the next connection of a channel is another socket.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from typing_extensions import override
from zmq.utils.monitor import recv_monitor_message

from psengine.environment import local_sockets
from psengine.environment.launchers import read_integer
from psengine.environment.variables import inherited_variables
from psengine.errors import ProtocolError, PSEngineError, ServerError, ServerLostError
from psengine.kernels.freed_memory import keep_freed_memory
from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.job_client import JobClient
from psengine.parameter_server.client.operation import forked_error
from psengine.parameter_server.client.reachability import Handshakes, refuse, watch_first_contact
from psengine.parameter_server.client.runtime import Runtime, Transport
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.parameter_server.sockets import Waker, make_dealer
from psengine.parameter_server.zero_copy import ZeroCopySends
from psengine.protocol.frames import decode, encode, split
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, Message, MessageType

logger = logging.getLogger(__name__)

TICK_S = 0.1
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
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitor_numbers = itertools.count()


class _Line:
    """One connection of a channel: its socket, and the events of it.

    Attributes:
        group: messages without a payload frame that leave before the thread waits.
        is_open: until ``close``.
    """

    def __init__(self, context: Any, channel: Channel, way: str, handshakes: Handshakes) -> None:
        self.channel, self.way, self.handshakes = channel, way, handshakes
        keys, given = handshakes.keys_for(way), {"linger_ms": LINGER_MS, "most_bytes": MAX_PAYLOAD_BYTES}
        pair = None if keys is None else (keys.server_public, keys.own)
        self.socket: Any = make_dealer(context, channel.address, channel.job.lease_s, pair, **given)
        # pyzmq would name it by the descriptor, whose number may be in use again.
        name = f"inproc://psengine-monitor-{next(_monitor_numbers)}"
        self.socket.monitor(name, _HANDSHAKES | _ENDS)
        self.events = context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.LINGER, 0)
        self.events.connect(name)
        self.zero_copy = ZeroCopySends(self.socket)
        self.group: list[bytes] = []
        self.is_open = True
        self.socket.connect(way)

    def send_group(self) -> None:
        """Send what is gathered."""
        frame = b"".join(self.group)
        self.group.clear()
        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)

    def close(self, linger_ms: int) -> None:
        """End the connection."""
        self.is_open = False
        try:
            self.socket.disable_monitor()
        finally:
            self.events.close()
            self.socket.close(linger_ms)
            self.zero_copy.close()


class Connection(Transport):
    """Sockets and their thread.

    Args:
        job: whose channels get the messages.

    Attributes:
        segments: memory to share with servers of this host.

    ``close`` is idempotent, and does nothing in a child process.
    """

    def __init__(self, job: JobClient) -> None:
        self._job = job
        self._options = options = job.options
        # With CURVE keys of its own a client is somebody else than its user.
        is_this_user = options.keys is None or bool(options.keys.secret_file)
        is_allowed = read_integer(inherited_variables(), "PSENGINE_SEGMENTS", 0, 1) != 0
        is_wanted = options.uses_segments and options.uses_local_socket and is_allowed
        self.segments = WorkerSegments(is_wanted=is_wanted and is_this_user)
        # To the Unix socket beside an address, where there is one.
        self._way_to = local_sockets.way_to if options.uses_local_socket else str
        self._process_id = os.getpid()
        self._context: Any = zmq.Context()
        self._lines: dict[Channel, _Line] = {}
        # What is done where a socket, or a descriptor, is ready.
        self._ready: dict[Any, Callable[[], object]] = {}
        self._handshakes: dict[str, Handshakes] = {}
        self._poller: Any = zmq.Poller()
        self._tasks: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._waker = Waker()
        self._may_sleep = False
        self._is_stopping = False
        self._failure: PSEngineError | None = None
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
        if self.is_own_thread:
            function(*arguments)
            return
        self._tasks.append((function, arguments))
        if self._may_sleep:
            self._waker.wake()
        self._run_leftovers()

    @property
    @override
    def is_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    @override
    def close(self) -> None:
        self._is_stopping = True
        if os.getpid() != self._process_id or self.is_own_thread:
            return
        self._waker.wake()
        self._thread.join(CLOSE_S)

    # ---- I/O thread --------------------------------------------------------------------------------------------

    @override
    def open(self, channel: Channel) -> None:
        if (former := self._lines.get(channel)) is not None:
            self._drop(former)
        address = channel.address
        for other in set(channel.addresses) - {address}:
            self.segments.forget(other)
        if address not in self._handshakes:
            self._handshakes[address] = Handshakes(address, self._options.keys)
            watch_first_contact(channel)
        handshakes = self._handshakes[address]
        # A server that restarts listens at the Unix socket a moment after it does at the address beside.
        line = _Line(self._context, channel, handshakes.way or self._way_to(address), handshakes)
        self._lines[channel] = line
        self._ready |= {
            line.socket: partial(self._receive, line, RECEIVES_PER_TURN),
            line.events: partial(self._read_events, line),
        }
        for source in (line.socket, line.events):
            self._poller.register(source, zmq.POLLIN)
        if (stranger := handshakes.find_stranger(line.way)) is not None:
            self._drop(line)
            channel.not_let_in(stranger)

    def _drop(self, line: _Line) -> None:
        del self._lines[line.channel]
        for source in (line.socket, line.events):
            self._poller.unregister(source)
            del self._ready[source]
        line.close(0)

    @override
    def send(self, channel: Channel, message: Message) -> None:
        line = self._lines.get(channel)
        if line is None:
            return
        if message.type is MessageType.PUSH:
            self.segments.place(channel.address, message)
        elif message.type is MessageType.RESUME and "open" in message.body:
            self.segments.offer(channel.address, line.way, message)
        *frames, last = encode(message)
        group = line.group
        if message.place is not None:
            group.extend((*frames, last))
            if len(group) >= 2 * PUSHES_PER_GROUP:
                line.send_group()
            return
        if group:
            line.send_group()  # a connection keeps its order
        with contextlib.suppress(zmq.Again):
            for frame in frames:
                line.socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
            if len(last) < ZERO_COPY_BYTES:
                line.socket.send(last, zmq.NOBLOCK)
            else:
                line.zero_copy.send(last)

    def _run(self) -> None:
        failure: PSEngineError = ServerError("the connection to the parameter servers is closed")
        try:
            self._poller.register(self._waker.descriptor, zmq.POLLIN)
            self._ready[self._waker.descriptor] = self._waker.clear
            self._loop()
        except BaseException as error:
            logger.exception("the client's I/O thread failed")
            failure = ServerError(f"the client's I/O thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        finally:
            self._failure = failure
            try:
                self._job.crashed(failure)
                self._run_leftovers()
            finally:
                self._close_sockets()

    def _run_leftovers(self) -> None:
        """Run the tasks that the thread has not seen before it ended: the receiver makes them fail."""
        while self._failure is not None and self._tasks:
            function, arguments = self._tasks.popleft()
            with contextlib.suppress(PSEngineError, zmq.ZMQError):  # there are no sockets any more
                function(*arguments)

    def _loop(self) -> None:
        tasks = self._tasks
        next_tick_s = time.monotonic() + TICK_S
        while not self._is_stopping:
            while tasks:
                function, arguments = tasks.popleft()
                function(*arguments)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._look_at_sent(now_s)
                self._job.tick(now_s)
            for line in self._lines.values():
                if line.group:
                    line.send_group()
            # Set before the deque is looked at: who appends after that look sees it set, and wakes this thread.
            self._may_sleep = True
            timeout_ms = 0 if tasks or self._is_stopping else max(0, int((next_tick_s - now_s) * 1000) + 1)
            ready = self._poller.poll(timeout_ms)
            self._may_sleep = False
            for source, _ in ready:
                if (what := self._ready.get(source)) is not None:  # else it has been closed
                    what()

    def _look_at_sent(self, now_s: float) -> None:
        for line in tuple(self._lines.values()):
            unsent_bytes = line.zero_copy.unread_bytes()
            line.zero_copy.release()
            if line.zero_copy.unread_bytes() < unsent_bytes:
                line.channel.moved(now_s)

    def _receive(self, line: _Line, most: int) -> None:
        """Receive what is there, at most so many messages."""
        for _ in range(most):
            if not line.is_open:
                return
            try:
                frame = line.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = [frame.buffer]
            while frame.more:
                frame = line.socket.recv(copy=False)
                frames[MAX_FRAMES:] = [frame.buffer]  # one too many is enough for ``decode`` to refuse them
            now_s = time.monotonic()
            for part in split(frames):
                try:
                    message = decode(part)
                except ProtocolError as error:
                    line.channel.garbled(error)
                else:
                    if message.type is MessageType.RESUMED and message.sequence:
                        self.segments.resumed(line.channel.address, line.way, message)
                    if message.place is None or self.segments.fetch(line.channel.address, message):
                        line.channel.received(message, now_s)
                    else:
                        self._end(line)  # on another connection the shard answers by bytes

    def _read_events(self, line: _Line) -> None:
        while line.is_open and line.events.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event, now_s = int(recv_monitor_message(line.events, zmq.NOBLOCK)["event"]), time.monotonic()
            error = line.handshakes.ended(event, line.way, now_s) if event & _HANDSHAKES else None
            # A client that is refused at a TCP address may have been too early for the socket beside it.
            if error is not None and (line.handshakes.way or self._way_to(line.channel.address) == line.way):
                refuse(line.channel, error)
                self._end(line)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                line.socket.getsockopt(zmq.EVENTS)  # else a send may not see the connection yet
                line.channel.connected(now_s)
            elif event & _ENDS:
                self._receive(line, sys.maxsize)  # what came before the end
                self._end(line)

    def _end(self, line: _Line) -> None:
        if not line.is_open:
            return
        self._drop(line)
        line.channel.disconnected(time.monotonic())
        # An embedded server that ended does not come back: nobody waits for its answers until a deadline.
        with contextlib.suppress(OSError):  # such as no free descriptor to look with
            if self._options.is_embedded and not local_sockets.is_listening(line.channel.address):
                text = f"the embedded parameter server at {line.channel.address} is gone: rank 0, which started it,"
                self._job.fail(ServerLostError(f"{text} failed or closed its strategy. See its output."))

    def _close_sockets(self) -> None:
        for line in self._lines.values():
            line.close(LINGER_MS)
        self._context.term()  # waits for the linger of the sockets
        self._waker.close()
        self.segments.withdraw()


# The runtime of a client in a process.
PROCESS = Runtime(now_s=time.monotonic, connect=Connection)
