"""The memory that a worker shares with the shards of its host, so that payloads need not travel.

    training   allocate, adopt ─► gradients are packed here ─ push ─► stage: offer the memory, or copy to it
    I/O thread                        resumed (token) ─ place: PUSH without bytes ─► ◄─ fetch: UPDATED without bytes

A gradient's place is not written before the push's step is complete: the shard, or one that comes after it, may need
the same bytes until then. A shard does not write an answer's place before the chunk's next push.

Whatever is missing (no such system, another host, another user, CURVE keys, an older server), payloads travel through
the sockets as they do elsewhere. See ``docs/protocol.md``, "Shared memory".
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.environment import local_sockets
from psengine.errors import ProtocolError
from psengine.parameter_server.chunk_codecs import answer_codec, gradient_codec
from psengine.parameter_server.client.chunk_map import ChunkMap
from psengine.parameter_server.segments.memory import IS_AVAILABLE, PAGE_BYTES, SegmentMapping, make_segment
from psengine.parameter_server.segments.offer import ALIGNMENT_BYTES as ALIGNED_PLACE_BYTES
from psengine.parameter_server.segments.offer import TOKEN_CHARS, Member, Offer, Place
from psengine.parameter_server.segments.passing import END, Lent, pass_segment, passing_path
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import NOBODY, Message

if TYPE_CHECKING:
    from psengine.parameter_server.client.operation import Push

logger = logging.getLogger(__name__)

# Of what is allocated: a line of the cache.
ALIGNMENT_BYTES = 64
# A shard that does not answer holds a step up for two seconds.
RETRY_S = 30.0


def aligned(size_bytes: int) -> int:
    """The bytes that an allocation takes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bytes_for(specs: Sequence[ChunkSpec]) -> int:
    """How large a segment for these chunks is, with a place for each one's gradient and one for its answer."""
    return sum(2 * aligned(spec.size_bytes) for spec in specs)


class Arena:
    """One segment of this process, handed out from its begin to its end."""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError where there is no memory."""
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self.descriptor = make_segment(size_bytes)
        try:
            self.mapping = SegmentMapping(self.descriptor, size_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.mapping.keep_from_children(self.descriptor)
        self._used_bytes = 0

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of new memory; None where there is not as much left."""
        offset, end = self._used_bytes, self._used_bytes + aligned(size_bytes)
        if end > self.mapping.size_bytes:
            return None
        self._used_bytes = end
        return offset


@dataclass(slots=True)
class _Invitation:
    """RESUMED's: a shard would take a segment of this member, in this life of the server."""

    member: Member
    epoch: int
    token: str
    # An offer that failed is made again, after this long, and twice as long each time.
    not_before_s: float = -math.inf
    wait_s: float = field(default_factory=lambda: RETRY_S)


@dataclass(slots=True)
class _Attachment:
    """A shard has the segment for as long as ``stream`` is open. The table says where its chunks' payloads lie."""

    stream: socket.socket
    member: Member
    epoch: int
    address: int
    places: dict[int, Place]
    # By chunk, the last push whose payload lay in its place, and the place of its answers.
    placed: dict[int, Push] = field(default_factory=dict)
    answers: dict[int, torch.Tensor] = field(default_factory=dict)
    lent: Lent | None = None
    lent_answers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def answer_in_lent(self, index: int, message: Message) -> bool:
        """Take an answer's payload from the server's memory; False where the table has no such place."""
        at, place = (message.key, index), self.places.get(message.key)
        known = self.lent_answers.get(at)
        if known is None or known.dtype is not message.dtype or known.numel() != message.numel:
            assert message.dtype is not None
            if self.lent is None or place is None or message.numel * message.dtype.itemsize != place.size_bytes:
                return False
            known = self.lent.place(message.key, index, message.numel, message.dtype)
            if known is None:
                return False
            self.lent_answers[at] = known
        message.payload = known
        return True

    def end(self) -> None:
        """The shard has the segment no more. It leaves alone what this process was told to read: see ``Lent``."""
        with contextlib.suppress(OSError):
            self.stream.send(END)
        self.stream.close()

    def forked(self) -> None:
        """In a forked child: the stream is the parent's."""
        self.stream.close()
        if self.lent is not None:
            self.lent.keeper()

    def has(self, message: Message) -> bool:
        """Whether the payload lies in its chunk's place."""
        place, payload = self.places.get(message.key), message.payload
        if place is None or not isinstance(payload, torch.Tensor):
            return False
        return payload.data_ptr() == self.address + place.gradient and payload.nbytes == place.size_bytes

    def is_of(self, message: Message) -> bool:
        """Whether it is between the members and lives that a message names."""
        member = self.member
        return (message.incarnation, message.worker, message.epoch) == (member.incarnation, member.worker, self.epoch)


class WorkerSegments:
    """See the module's text.

    Args:
        is_wanted: whether payloads may lie in shared memory at all.
        codec: the job's. What it encodes travels: a payload that is more than values must not change while it is read.
    """

    def __init__(self, *, is_wanted: bool, codec: Codec = IDENTITY) -> None:
        self._is_wanted = is_wanted and IS_AVAILABLE
        self._codec = codec
        self._arena: Arena | None = None
        self._invitations: dict[str, _Invitation] = {}
        self._attachments: dict[str, _Attachment] = {}
        # Of chunks: where their gradients are packed, and their answers land.
        self._gradients: dict[int, int] = {}
        self._answers: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        self._lock = threading.Lock()
        self._told: set[tuple[str, str]] = set()
        if self._is_wanted:
            _of_this_process.add(self)

    # ---- threads of the training -------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Make memory to allocate from, unless there is some."""
        if not self._is_wanted or self._arena is not None or size_bytes <= 0:
            return
        try:
            self._arena = Arena(size_bytes)
        except (OSError, ProtocolError) as error:
            self._is_wanted = False
            self._tell("", f"there is no shared memory ({error})")

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised flat memory, shared where ``reserve`` made enough."""
        arena = self._arena
        offset = None if arena is None or not numel else arena.allocate(numel * dtype.itemsize)
        if arena is None or offset is None:
            return torch.empty(numel, dtype=dtype)
        return arena.mapping.tensor(offset, numel, dtype)

    def adopt(self, key: int, gradient: torch.Tensor, answer: torch.Tensor | None = None) -> None:
        """Gradients of the chunk ``key`` are packed into ``gradient``; before its first push.

        ``answer`` is the destination of all its pushes. Its values may be overwritten as soon as the next exchange has
        ended at the server, even if that answer is lost. Both are of use where they are memory of ``allocate``.
        """
        for adopted, values in ((self._gradients, gradient), (self._answers, answer)):
            if self._arena is None or values is None:
                continue
            offset = values.data_ptr() - self._arena.mapping.address
            if 0 <= offset <= self._arena.mapping.size_bytes - values.nbytes and offset % ALIGNED_PLACE_BYTES == 0:
                adopted[key] = offset

    def stage(
        self, address: str, key: int, payload: torch.Tensor, chunks: ChunkMap, now_s: Callable[[], float]
    ) -> torch.Tensor:
        """The payload of a push: in the chunk's place, if the shard at ``address`` shares it, else as it is."""
        if address in self._invitations:
            self._offer(address, chunks, chunks.shard_of[key], now_s)
        attachment = self._attachments.get(address)
        place = None if attachment is None else attachment.places.get(key)
        if attachment is None or place is None or payload.nbytes != place.size_bytes:
            return payload
        if (arena := self._arena) is None or payload.data_ptr() == attachment.address + place.gradient:
            return payload
        last = attachment.placed.get(key)
        if last is not None and (not last.is_done or last.error is not None):
            return payload  # the shard may still read what is there
        staged = arena.mapping.tensor(place.gradient, payload.numel(), payload.dtype)
        staged.copy_(payload)
        return staged

    def note(self, address: str, push: Push) -> None:
        """Remember a push that is about to be sent."""
        attachment = self._attachments.get(address)
        if attachment is not None and attachment.has(push.message):
            attachment.placed[push.key] = push

    def withdraw(self) -> None:
        """From now on this process may write to the memory whatever it likes, and shards see nothing of it.

        After a wait that failed: a shard may hold gradients of that step, which others' averages may still need.
        """
        with self._lock:
            if self._arena is not None and self._attachments:
                self._arena.mapping.detach()
            for attachment in self._end_all():
                attachment.end()

    def close(self) -> None:
        """Close every connection; tensors stay valid, and the segment lives as long as they do."""
        with self._lock:
            self._arena = None
            for attachment in self._end_all():
                attachment.end()

    def forked(self) -> None:
        """In a forked child: the memory is shared with nobody, and the streams are the parent's alone."""
        self._lock = threading.Lock()  # a thread that the child has not may have held it
        self._arena = None
        for attachment in self._end_all():
            attachment.forked()

    def _end_all(self) -> list[_Attachment]:
        self._is_wanted = False
        self._invitations.clear()
        attachments, self._attachments = self._attachments, {}
        return list(attachments.values())

    # ---- the I/O thread ----------------------------------------------------------------------------------------

    def resumed(self, address: str, message: Message) -> None:
        """RESUMED came: remember the token with which this shard takes a segment, unless it has it."""
        if not self._is_wanted or message.worker == NOBODY:
            return
        token = message.body.get("local", "")
        if len(token) != TOKEN_CHARS:
            if local_sockets.is_loopback(address):
                self._tell(address, "the server has no Unix socket: it listens for other hosts, or it could make none")
            return
        attachment = self._attachments.get(address)
        if attachment is None or not attachment.is_of(message):
            member = Member(message.job, message.worker, message.incarnation)
            self._invitations[address] = _Invitation(member, message.epoch, token)

    def place(self, address: str, message: Message) -> None:
        """A PUSH is about to be encoded: its bytes need not travel where they lie in the chunk's place."""
        attachment = self._attachments.get(address)
        message.in_segment = attachment is not None and attachment.is_of(message) and attachment.has(message)

    def fetch(self, address: str, message: Message) -> bool:
        """An UPDATED without bytes came: its payload is in the chunk's answer place, or in the server's own memory.

        False: it is not there (any more). The shard has the segment no more, and answers by bytes on a new connection.
        """
        attachment, arena = self._attachments.get(address), self._arena
        if attachment is None or arena is None or message.dtype is None or not attachment.is_of(message):
            return False
        if "place" in message.body:
            return attachment.answer_in_lent(message.body["place"], message)
        known = attachment.answers.get(message.key)
        if known is None or known.dtype is not message.dtype or known.numel() != message.numel:
            place = attachment.places.get(message.key)
            if place is None or message.numel * message.dtype.itemsize != place.size_bytes:
                return False
            known = arena.mapping.tensor(place.answer, message.numel, message.dtype)
            attachment.answers[message.key] = known
        message.payload = known
        return True

    def lost(self, address: str, reason: str) -> None:
        """A shard does not have the segment."""
        attachment = self._attachments.pop(address, None)
        if attachment is not None:
            attachment.end()
        self._tell(address, reason)

    # ---- offering ----------------------------------------------------------------------------------------------

    def _offer(self, address: str, chunks: ChunkMap, shard: int, now_s: Callable[[], float]) -> None:
        with self._lock:
            invitation = self._invitations.get(address)
            if invitation is None or now_s() < invitation.not_before_s:
                return
            del self._invitations[address]
            former = self._attachments.pop(address, None)
            if former is not None:
                former.end()
            path = self._path_to(address)
            if path is None:
                if local_sockets.is_loopback(address):
                    self._tell(address, "this user's server has no Unix socket there (another container's /tmp?)")
                return
            self.reserve(bytes_for([spec for spec in chunks.specs.values() if self._is_shared(spec)]))
            places = self._find_places([spec for spec in chunks.at(shard) if self._is_shared(spec)])
            arena = self._arena
            if arena is None or not places:
                return
            try:
                offer = Offer(invitation.member, invitation.token, arena.mapping.size_bytes, places)
                stream, lent = self._pass(path, offer, arena.descriptor)
            except (OSError, ProtocolError) as error:
                self._tell(address, str(error))
                invitation.not_before_s = now_s() + invitation.wait_s
                invitation.wait_s *= 2
                self._invitations.setdefault(address, invitation)
                return
            self._attachments[address] = _Attachment(
                stream, invitation.member, invitation.epoch, arena.mapping.address, places, lent=lent
            )
            total = sum(place.size_bytes for place in places.values())
            logger.info("%s shares memory with this worker: %d chunks of %d bytes in all", address, len(places), total)

    def _path_to(self, address: str) -> str | None:
        """Where the shard at ``address`` takes segments; None where that is nowhere."""
        return passing_path(local_sockets.way_to(address))

    def _pass(self, path: str, offer: Offer, descriptor: int) -> tuple[socket.socket, Lent | None]:
        """See ``pass_segment``."""
        return pass_segment(path, offer, descriptor)

    def _find_places(self, specs: Sequence[ChunkSpec]) -> dict[int, Place]:
        """Those of these chunks for which there is memory."""
        arena = self._arena
        if arena is None:
            return {}
        for spec in specs:
            if spec.key in self._places:
                continue
            gradient, answer = (
                adopted[spec.key] if spec.key in adopted else arena.allocate(spec.size_bytes)
                for adopted in (self._gradients, self._answers)
            )
            if gradient is not None and answer is not None:
                self._places[spec.key] = Place(gradient, answer, spec.size_bytes)
        return {spec.key: self._places[spec.key] for spec in specs if spec.key in self._places}

    def _is_shared(self, spec: ChunkSpec) -> bool:
        codecs = gradient_codec(self._codec, spec), answer_codec(self._codec, spec)
        return spec.kind is not ChunkKind.CONSTANT and all(codec.is_identity for codec in codecs)

    def _tell(self, address: str, reason: str) -> None:
        """Log, once, why payloads travel."""
        if (address, reason) in self._told:
            return
        self._told.add((address, reason))
        to = f" to {address}" if address else ""
        logger.info("payloads%s travel through sockets, not through shared memory: %s", to, reason)


_of_this_process: weakref.WeakSet[WorkerSegments] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for segments in list(_of_this_process):
        segments.forked()


if IS_AVAILABLE:
    os.register_at_fork(after_in_child=_after_fork_in_child)
