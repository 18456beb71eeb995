"""The segments that workers of this host share with the shards of a server, and pass on over small Unix sockets.

    worker ══ stream: offer, descriptor ══► who is it, is it sealed, map it ── ask ──► the shard's thread: yes or no
           ══ end of the stream         ══► forget it                       ── ask ──►

A thread for each stream, which waits for its end. The user is checked by the kernel's word, the memory by its seals and
its size, the table by its bounds; the token and the chunks in the shard's thread. A frame says only that its payload is
in shared memory: the server's own copy of the worker's table says where.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.segments.memory import (
    IS_AVAILABLE,
    SegmentMapping,
    check_segment,
    machine_memory_bytes,
    make_lent_segment,
)
from psengine.parameter_server.segments.offer import (
    MAX_LENT_CHUNKS,
    MAX_LENT_PLACES,
    MAX_TEXT_CHARS,
    NOTHING_LENT,
    TOKEN_CHARS,
    Answer,
    LentTable,
    Member,
    Offer,
    part_of,
    read_offer,
    to_bytes,
)
from psengine.parameter_server.segments.passing import END, check_user, passing_path, receive
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.transport.endpoint import SocketFile
from psengine.protocol.messages import NOBODY, ErrorCode, Message
from psengine.tracing.logging_format import RateLimit

if TYPE_CHECKING:
    from psengine.parameter_server.server.transport.shard_thread import ShardThread

logger = logging.getLogger(__name__)

# A worker sends its offer at once; a shard that is busy with a snapshot answers within a second.
OFFER_S = 2.0
ANSWER_S = 60.0
MAX_STREAMS = 4096


@dataclass(eq=False)
class WorkerSegment:
    """One worker's segment: its memory, and the table that came with it."""

    offer: Offer
    mapping: SegmentMapping | None  # until the worker takes part no more
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    lent: LentMemory | None = None
    # By chunk, the last step whose answer it was told to read in the server's memory, and that memory.
    reads: dict[int, tuple[int, Place]] = field(default_factory=dict)
    # By chunk, the last step whose answer was written to its own memory.
    written: dict[int, int] = field(default_factory=dict)

    def lends(self) -> tuple[LentTable, list[int]]:
        """What the worker is lent in turn, and the descriptors of it."""
        table = NOTHING_LENT if self.lent is None else self.lent.table(self.offer)
        return table, [] if self.lent is None or not table.offsets else [self.lent.descriptor]

    def leave(self, key: int) -> None:
        """The worker does not read the chunk's values any more."""
        _, place = self.reads.pop(key)
        place.readers -= 1

    def drop(self) -> None:
        """The worker takes part no more, or not this way; it may still be reading."""
        self.mapping = None
        self.gradients.clear()

    def gradient(self, key: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory of a chunk's gradient; None where the table has none of this size."""
        known = self.gradients.get(key)
        if known is not None and known.numel() == numel and known.dtype is dtype:
            return known
        place = self.offer.places.get(key)
        if place is None or numel * dtype.itemsize != place.size_bytes or self.mapping is None:
            return None
        self.gradients[key] = made = self.mapping.tensor(place.gradient, numel, dtype)
        return made


class LentMemory:
    """Memory of this server where a job's answers are made, and read by the job's workers of this host.

    Args:
        job: whose answers are made there, of each chunk from its next change on.
        parts: places of each chunk: so many that one is free whenever an answer is made.

    Raises:
        OSError, ProtocolError: there is no memory.
    """

    def __init__(self, job: Job, parts: int) -> None:
        rules = {key: rule for key, rule in sorted(job.rules.items()) if rule.lent_places(job.expected_workers)}
        self._rules = dict(itertools.islice(rules.items(), MAX_LENT_CHUNKS))
        self.token = object()
        part_bytes, offsets = part_of(rule.spec for rule in self._rules.values())
        self._table = LentTable(part_bytes, parts, offsets)
        job.take_memory((parts - 1) * part_bytes, "answers that workers of this host read")
        self.descriptor, mapping = make_lent_segment(self._table.size_bytes)
        weakref.finalize(self, os.close, self.descriptor)
        for key, rule in self._rules.items():
            spec, begins = rule.spec, [part * part_bytes + offsets[key] for part in range(parts)]
            tensors = [mapping.tensor(begin, spec.numel, spec.dtype) for begin in begins]
            rule.memory.lend([Place(tensor, part, self.token) for part, tensor in enumerate(tensors)])

    def table(self, offer: Offer) -> LentTable:
        """What the worker of this offer is told of it."""
        own = {key: offset for key, offset in self._table.offsets.items() if key in offer.places}
        return LentTable(self._table.part_bytes, self._table.parts, own) if own else NOTHING_LENT

    def is_of(self, job: Job) -> bool:
        """Whether the job's chunks are still those that are here."""
        return all(job.rules.get(key) is rule for key, rule in self._rules.items())


class ShardSegments:
    """The segments of a shard's workers; used in the shard's thread alone."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._segments: dict[Member, WorkerSegment] = {}
        self.is_open = False  # whether workers can pass segments

    def __len__(self) -> int:
        return len(self._segments)

    def token(self, member: Member) -> str:
        """What this member's offer has to name; nobody else is told."""
        text = f"{member.job} {member.worker} {member.incarnation}".encode()
        return hashlib.blake2b(text, key=self._secret, digest_size=TOKEN_CHARS // 2).hexdigest()

    def sign(self, resumed: Message) -> None:
        """Tell a worker its token."""
        if self.is_open and resumed.worker != NOBODY:
            resumed.body["local"] = self.token(_sender(resumed))

    def find(self, push: Message) -> None:
        """A PUSH came: give it its payload, if that lies in memory that its worker shares.

        Raises:
            ProtocolError: it does not; the worker sends the payload then.
        """
        segment = self._segments.get(_sender(push))
        read = None if segment is None else segment.reads.get(push.key)
        if segment is not None and read is not None and push.sequence > read[0]:
            segment.leave(push.key)  # it has completed the step of its last push
        if push.in_segment and push.dtype is not None:
            push.payload = None if segment is None else segment.gradient(push.key, push.numel, push.dtype)
            if push.payload is None:
                raise ProtocolError(
                    f"the payload of chunk {push.key} is in memory that this shard does not have (any more)",
                    ErrorCode.SEGMENT,
                )

    def put(self, answer: Message, place: Place | None) -> bool:
        """Tell a worker where an answer's payload is, in the server's memory or in its own; whether it need not travel.

        ``place``: the payload's memory, where that does not change while it is read.
        """
        segment = self._segments.get(_sender(answer))
        values = answer.payload
        if segment is None or segment.mapping is None or not isinstance(values, torch.Tensor):
            return False
        own = segment.offer.places.get(answer.key)
        if own is None or values.nbytes != own.size_bytes:
            return False
        if answer.key in segment.reads or answer.sequence <= segment.written.get(answer.key, 0):
            return False  # it may be reading the answer to the same push, or to a later one
        if place is not None and segment.lent is not None and place.lender is segment.lent.token:
            place.readers += 1
            segment.reads[answer.key] = answer.sequence, place
            answer.in_segment, answer.body["place"] = True, place.number
            return True
        segment.written[answer.key] = answer.sequence
        ctypes.memmove(segment.mapping.address + own.answer, values.data_ptr(), own.size_bytes)
        answer.in_segment = True
        return True

    def attach(self, shard: Shard, segment: WorkerSegment) -> str:
        """Take a segment; why not, or ""."""
        offer, member = segment.offer, segment.offer.member
        if not hmac.compare_digest(self.token(member), offer.token):
            return "the token is not the one that this worker was given"
        job = shard.jobs.get(member.job)
        if job is None or not _is_member(shard, member):
            return f"worker {member.worker} is no member (any more)"
        for key, place in offer.places.items():
            rule = job.rules.get(key)
            if rule is None or rule.spec.size_bytes != place.size_bytes:
                held = "no such chunk" if rule is None else f"{rule.spec.size_bytes} bytes"
                return f"chunk {key}: the offer has {place.size_bytes} bytes, this shard {held}"
        if member in self._segments:
            self._segments[member].drop()
        self._segments[member] = segment
        segment.lent = self._lend(job)
        return ""

    def _lend(self, job: Job) -> LentMemory | None:
        """The memory with the job's values; None where there are none here, or too many workers for it."""
        for other in self._segments.values():
            if other.offer.member.job == job.number and other.lent is not None and other.lent.is_of(job):
                return other.lent
        parts = max((rule.lent_places(job.expected_workers) for rule in job.rules.values()), default=0)
        if not 1 <= parts <= MAX_LENT_PLACES:
            return None
        try:
            return LentMemory(job, parts)
        except (OSError, ProtocolError) as error:
            logger.info("workers of job %r get a copy of every answer: %s", job.name, error)
            return None

    def forget(self, segment: WorkerSegment, *, reads_on: bool = False) -> None:
        """Its worker has released it. Gradients in it that an exchange needs keep their memory.

        ``reads_on``: the worker may still be reading the places that it was told of.
        """
        if self._segments.get(segment.offer.member) is segment:
            del self._segments[segment.offer.member]
        segment.drop()
        for read in () if reads_on else tuple(segment.reads):
            segment.leave(read)

    def keep_members(self, shard: Shard) -> None:
        """Forget the segments of those who are no members any more."""
        for member in [member for member in self._segments if not _is_member(shard, member)]:
            self._segments.pop(member).drop()


def _sender(message: Message) -> Member:
    return Member(message.job, message.worker, message.incarnation)


def _is_member(shard: Shard, member: Member) -> bool:
    job = shard.jobs.get(member.job)
    return job is not None and job.is_member(member.worker, member.incarnation)


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
        if (suppressed := self._complaints.allows(time.monotonic())) is not None:
            logger.warning("%s (%d more unmentioned)", what, suppressed, exc_info=exc_info)
