"""Takes the segments that workers of this host pass on, over a small Unix socket beside each shard's own.

    worker ══ stream: offer, descriptor ══► who is it, is it sealed, map it ── ask ──► the shard's thread: yes or no
           ══ end of the stream         ══► forget it                       ── ask ──►

A thread for each stream, which waits for its end. The user is checked by the kernel's word, the memory by its seals and
its size, the table by its bounds; the token and the chunks in the shard's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.segments.memory import IS_AVAILABLE, SegmentMapping, check_segment, machine_memory_bytes
from psengine.parameter_server.segments.offer import MAX_TEXT_CHARS, Answer, read_offer, to_bytes
from psengine.parameter_server.segments.passing import END, check_user, passing_path, receive
from psengine.parameter_server.server.transport.endpoint import SocketFile
from psengine.parameter_server.server.transport.segments import WorkerSegment
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

# A worker sends its offer at once; a shard that is busy with a snapshot answers within a second.
OFFER_S = 2.0
ANSWER_S = 60.0
MAX_STREAMS = 4096


class SegmentListener:
    """Takes segments for the shards of a server, each at a socket beside the shard's own.

    Args:
        addresses: of the shards' Unix sockets, in their order; "" where a shard has none.

    Attributes:
        refused: how many offers were not taken.

    A context manager: the sockets are open from the begin of the block, and ``serve`` begins to answer.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.refused = 0
        self._addresses = addresses
        self._listeners: dict[int, tuple[socket.socket, SocketFile]] = {}  # by shard
        self._streams: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._complaints = RateLimit()
        self._most_bytes = machine_memory_bytes()

    def __enter__(self) -> SegmentListener:
        for shard, address in enumerate(self._addresses):
            path = passing_path(address) if IS_AVAILABLE and address else None
            if path is not None:
                self._listen(shard, path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for listener, file in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # accept returns
            listener.close()
            file.remove()
        self._listeners.clear()
        with self._lock:
            for stream in self._streams:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)

    def _listen(self, shard: int, path: str) -> None:
        """The address is ours by now: what lies here was left by a server before."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        mask = os.umask(0o077)
        try:
            if Path(path).is_socket():
                os.unlink(path)
            listener.bind(path)
            listener.listen()
            self._listeners[shard] = listener, SocketFile(path)
        except OSError as error:
            listener.close()
            logger.warning("workers of this host share no memory with shard %d: %s: %s", shard, path, error)
            return
        finally:
            os.umask(mask)

    @property
    def shards(self) -> set[int]:
        """Which shards take segments."""
        return set(self._listeners)

    def serve(self, threads: Sequence[ShardThread]) -> None:
        """Answer, from threads of its own."""
        for shard, (listener, _) in self._listeners.items():
            self._start(self._accept, listener, threads[shard])

    # ---- in those threads --------------------------------------------------------------------------------------

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name="psengine-segments", daemon=True).start()

    def _accept(self, listener: socket.socket, thread: ShardThread) -> None:
        while listener.fileno() >= 0:
            try:
                stream, _ = listener.accept()
            except OSError:  # it is closed, or there is no descriptor left
                time.sleep(0.01)
                continue
            with self._lock:
                self._streams.add(stream)
            self._start(self._guarded, stream, thread)

    def _guarded(self, stream: socket.socket, thread: ShardThread) -> None:
        try:
            self._serve(stream, thread)
        except ProtocolError as error:
            with contextlib.suppress(OSError):
                stream.send(to_bytes(Answer(str(error)[:MAX_TEXT_CHARS])))
            self.refused += 1
            self._note(f"a segment was not taken: {error}")
        except OSError:
            pass  # its end
        except Exception:
            self._note("taking a worker's segment failed", exc_info=True)  # a bug of ours, or a lack of memory
        finally:
            with self._lock:
                self._streams.discard(stream)
                stream.close()

    def _serve(self, stream: socket.socket, thread: ShardThread) -> None:
        check_user(stream)
        if len(self._streams) > MAX_STREAMS:
            raise ProtocolError(f"too many connections (expected at most {MAX_STREAMS})")
        stream.settimeout(OFFER_S)
        segment, segments = self._receive(stream), thread.segments
        try:
            reason = thread.ask(lambda: segments.attach(thread.shard, segment)).result(ANSWER_S)
            if reason:
                raise ProtocolError(reason)
            lent, descriptors = segment.lends()
            data = to_bytes(Answer(lent=lent))
            sent = socket.send_fds(stream, [data], descriptors) if descriptors else 0
            stream.sendall(data[sent:])
            stream.settimeout(None)
            if stream.recv(len(END)) == END:
                thread.ask(lambda: segments.forget(segment, reads_on=True))
                stream.recv(len(END))
        finally:
            thread.ask(lambda: segments.forget(segment))

    def _receive(self, stream: socket.socket) -> WorkerSegment:
        try:
            data, descriptor = receive(stream, "server")
        except TimeoutError:
            raise ProtocolError(f"no offer came within {OFFER_S:g} s") from None
        try:
            offer = read_offer(data)
            if descriptor is None:
                raise ProtocolError("a segment comes with one descriptor (got none)")
            check_segment(descriptor, offer.size_bytes, self._most_bytes)
            return WorkerSegment(offer, SegmentMapping(descriptor, offer.size_bytes))
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _note(self, what: str, *, exc_info: bool = False) -> None:
        suppressed = self._complaints.allows(time.monotonic())
        if suppressed is not None:
            logger.warning("%s (%d more unmentioned)", what, suppressed, exc_info=exc_info)
