"""Takes the segments that workers of this host pass on, over a small Unix socket beside each shard's own.

    worker ══ stream: offer, descriptor ══► who is it, is it sealed, map it ── ask ──► the shard's thread: yes or no
           ══ end of the stream         ══► forget it                       ── ask ──►

One thread for all shards of a server. The user is checked by the kernel's word, the memory by its seals and its size,
the table by its bounds; the token and the chunks in the shard's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from psengine.errors import ProtocolError
from psengine.parameter_server.segments.memory import IS_AVAILABLE, SegmentMapping, check_segment, machine_memory_bytes
from psengine.parameter_server.segments.offer import HEADER_BYTES, Offer, offer_bytes, read_offer, refused
from psengine.parameter_server.segments.passing import END, NO_DESCRIPTOR, passing_path, peer_uid
from psengine.parameter_server.server.transport.segments import WorkerSegment, end_stream
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

# A worker sends its offer at once.
OFFER_S = 2.0
# Streams of one server, and of these how many whose offer is not complete.
MAX_STREAMS = 4096
MAX_OFFERS = 64
READ_BYTES = 1 << 16
# How often deadlines are looked at.
LOOK_S = 0.5


@dataclass(eq=False)
class _Stream:
    """A connection of a worker: first its offer, then only its end."""

    socket: socket.socket
    shard: int
    until_s: float
    data: bytearray = field(default_factory=bytearray)
    descriptor: int = -1
    segment: WorkerSegment | None = None
    has_ended: bool = False  # by the worker's word; it may still be reading


class SegmentListener(threading.Thread):
    """Takes segments for the shards of a server, each at a socket beside the shard's own.

    Args:
        addresses: of the shards' Unix sockets, in their order; "" where a shard has none.

    Attributes:
        refused: how many offers were not taken.

    A context manager: the sockets are open from the begin of the block, and ``serve`` begins to answer.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(name="psengine-segments", daemon=True)
        self.refused = 0
        self._addresses = addresses
        self._listeners: list[tuple[int, socket.socket, str]] = []
        self._files: dict[str, tuple[int, int] | None] = {}
        self._streams: set[_Stream] = set()
        self._threads: Sequence[ShardThread] = ()
        self._selector = selectors.DefaultSelector()
        self._complaints = RateLimit()
        self._most_bytes = machine_memory_bytes()
        self._wake_reader, self._wake_writer = socket.socketpair()

    def __enter__(self) -> SegmentListener:
        try:
            for index, address in enumerate(self._addresses):
                path = passing_path(address) if IS_AVAILABLE and address else None
                if path is not None:
                    self._listen(index, path)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_alive():
            self._wake_writer.send(b"e")
            self.join(timeout=2.0)
        self._close()

    def _listen(self, index: int, path: str) -> None:
        """The address is ours by now: what lies here was left by a server before."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        mask = os.umask(0o077)
        try:
            if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
            listener.bind(path)
            listener.listen(MAX_OFFERS)
        except OSError as error:
            listener.close()
            logger.warning("workers of this host share no memory with shard %d: %s: %s", index, path, error)
            return
        finally:
            os.umask(mask)
        self._listeners.append((index, listener, path))
        self._files[path] = _inode(path)

    @property
    def shards(self) -> set[int]:
        """Which shards take segments."""
        return {index for index, _, _ in self._listeners}

    def serve(self, threads: Sequence[ShardThread]) -> None:
        """Answer, from a thread of its own."""
        self._threads = threads
        self.start()

    # ---- in this thread ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop."""
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for index, listener, _ in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, index)
        while True:
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._wake_reader:
                    return
                try:
                    if isinstance(key.data, _Stream):
                        self._guarded(key.data)
                    else:
                        self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
                except Exception:
                    self._report_failure(key.data)
            now_s = time.monotonic()
            for stream in [one for one in self._streams if one.segment is None and now_s >= one.until_s]:
                self._refuse(stream, ProtocolError(f"no offer came within {OFFER_S:g} s"))

    def _accept(self, listener: socket.socket, shard: int) -> None:
        try:
            accepted_socket, _ = listener.accept()
        except OSError:  # it is gone, or there is no descriptor left
            time.sleep(0.01)
            return
        accepted_socket.setblocking(False)
        stream = _Stream(accepted_socket, shard, time.monotonic() + OFFER_S)
        self._selector.register(accepted_socket, selectors.EVENT_READ, stream)
        self._streams.add(stream)
        uid = peer_uid(accepted_socket)
        offers = sum(one.segment is None for one in self._streams)
        if uid not in (0, os.geteuid()):
            self._refuse(stream, ProtocolError(f"only user {os.geteuid()} and root share memory (got user {uid})"))
        elif len(self._streams) > MAX_STREAMS or offers > MAX_OFFERS:
            self._refuse(
                stream, ProtocolError(f"too many connections (expected at most {MAX_STREAMS}, {MAX_OFFERS} new)")
            )

    def _guarded(self, stream: _Stream) -> None:
        try:
            self._read(stream)
        except ProtocolError as error:
            self._refuse(stream, error)
        except OSError:
            self._drop(stream)

    def _read(self, stream: _Stream) -> None:
        if stream.segment is not None:
            self._end(stream, stream.segment)
            return
        data, descriptors, flags, _ = socket.recv_fds(stream.socket, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if stream.descriptor < 0 and len(descriptors) == 1:
            stream.descriptor = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC and stream.descriptor < 0:
            raise ProtocolError(NO_DESCRIPTOR.format("server"))
        if descriptors or flags & socket.MSG_CTRUNC:
            raise ProtocolError("an offer comes with one descriptor (got more)")
        if not data:
            self._drop(stream)
            return
        stream.data += data
        if len(stream.data) < HEADER_BYTES:
            return
        expected_bytes = offer_bytes(bytes(stream.data[:HEADER_BYTES]))
        if len(stream.data) < expected_bytes:
            return
        self._take(stream, read_offer(bytes(stream.data)))

    def _end(self, stream: _Stream, segment: WorkerSegment) -> None:
        if stream.socket.recv(len(END)) != END or stream.has_ended:
            self._drop(stream)  # its end, or what nobody asked for
            return
        stream.has_ended = True
        thread = self._threads[stream.shard]
        thread.ask(lambda: thread.segments.forget(segment, reads_on=True))

    def _take(self, stream: _Stream, offer: Offer) -> None:
        if stream.descriptor < 0:
            raise ProtocolError("an offer comes with one descriptor (got none)")
        check_segment(stream.descriptor, offer.size_bytes, self._most_bytes)
        segment = WorkerSegment(offer, SegmentMapping(stream.descriptor, offer.size_bytes))
        os.close(stream.descriptor)
        stream.descriptor, stream.data = -1, bytearray()
        stream.segment = segment
        thread = self._threads[stream.shard]

        def answer() -> None:
            reason = thread.segments.attach(thread.shard, segment)
            data, descriptors = (refused(reason), []) if reason else segment.accepted()
            sent = 0
            with contextlib.suppress(OSError):
                sent = socket.send_fds(stream.socket, [data], descriptors) if descriptors else stream.socket.send(data)
            if reason:
                self._note(stream.shard, reason)
            if reason or sent < len(data):
                end_stream(stream.socket)

        thread.ask(answer)

    def _refuse(self, stream: _Stream, error: ProtocolError) -> None:
        with contextlib.suppress(OSError):
            stream.socket.send(refused(str(error)))
        self._note(stream.shard, str(error))
        self._drop(stream)

    def _note(self, shard: int, reason: str) -> None:
        self.refused += 1
        suppressed = self._complaints.allows(time.monotonic())
        if suppressed is not None:
            logger.warning("shard %d took no segment: %s (%d more unmentioned)", shard, reason, suppressed)

    def _report_failure(self, data: object) -> None:
        """Log a bug of ours, or a lack of memory, and go on with the other streams."""
        suppressed = self._complaints.allows(time.monotonic())
        if suppressed is not None:
            logger.exception("taking workers' segments failed (%d more unmentioned)", suppressed)
        if isinstance(data, _Stream):
            self._drop(data)

    def _drop(self, stream: _Stream) -> None:
        if stream not in self._streams:
            return
        self._streams.discard(stream)
        self._selector.unregister(stream.socket)
        stream.socket.close()
        if stream.descriptor >= 0:
            os.close(stream.descriptor)
            stream.descriptor = -1
        segment, stream.segment = stream.segment, None
        if segment is not None:
            thread = self._threads[stream.shard]
            thread.ask(lambda: thread.segments.forget(segment))

    def _close(self) -> None:
        for stream in list(self._streams):
            self._drop(stream)
        for _, listener, path in self._listeners:
            listener.close()
            # The server that comes next may listen there by now.
            if self._files[path] is not None and self._files[path] == _inode(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._listeners.clear()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
