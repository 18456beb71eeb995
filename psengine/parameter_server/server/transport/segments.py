"""The segments that workers of this host share with one shard; used in the shard's thread.

A frame says only that its payload is in shared memory. The server's own copy of the worker's table says where; it was
checked when the segment came (``segment_listener.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import itertools
import logging
import os
import weakref
from dataclasses import dataclass, field

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.segments.memory import SegmentMapping, make_lent_segment
from psengine.parameter_server.segments.offer import (
    MAX_LENT_CHUNKS,
    MAX_LENT_PLACES,
    NOTHING_LENT,
    TOKEN_CHARS,
    LentTable,
    Member,
    Offer,
    part_of,
)
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from psengine.protocol.messages import NOBODY, ErrorCode, Message

logger = logging.getLogger(__name__)


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
        rules = {key: rule for key, rule in sorted(job.chunks.rules.items()) if rule.lent_places(job.expected_workers)}
        self._rules = dict(itertools.islice(rules.items(), MAX_LENT_CHUNKS))
        self.token = object()
        part_bytes, offsets = part_of(rule.spec for rule in self._rules.values())
        self._table = LentTable(part_bytes, parts, offsets)
        job.chunks.take_memory((parts - 1) * part_bytes, "answers that workers of this host read")
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
        return all(job.chunks.rules.get(key) is rule for key, rule in self._rules.items())


class ShardSegments:
    """The segments of a shard's workers; used in the shard's thread alone."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._segments: dict[tuple[int, int, int], WorkerSegment] = {}
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
            resumed.body["local"] = self.token(Member(resumed.job, resumed.worker, resumed.incarnation))

    def find(self, push: Message) -> None:
        """A PUSH came: give it its payload, if that lies in memory that its worker shares.

        Raises:
            ProtocolError: it does not; the worker sends the payload then.
        """
        segment = self._segments.get((push.job, push.worker, push.incarnation))
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
        segment = self._segments.get((answer.job, answer.worker, answer.incarnation))
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
            rule = job.chunks.rules.get(key)
            if rule is None or rule.spec.size_bytes != place.size_bytes:
                held = "no such chunk" if rule is None else f"{rule.spec.size_bytes} bytes"
                return f"chunk {key}: the offer has {place.size_bytes} bytes, this shard {held}"
        former = self._segments.get(_key(member))
        if former is not None:
            former.drop()
        self._segments[_key(member)] = segment
        segment.lent = self._lend(job)
        return ""

    def _lend(self, job: Job) -> LentMemory | None:
        """The memory with the job's values; None where there are none here, or too many workers for it."""
        for other in self._segments.values():
            if other.offer.member.job == job.number and other.lent is not None and other.lent.is_of(job):
                return other.lent
        parts = max((rule.lent_places(job.expected_workers) for rule in job.chunks.rules.values()), default=0)
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
        key = _key(segment.offer.member)
        if self._segments.get(key) is segment:
            del self._segments[key]
        segment.drop()
        for read in () if reads_on else tuple(segment.reads):
            segment.leave(read)

    def keep_members(self, shard: Shard) -> None:
        """Forget the segments of those who are no members any more."""
        for key, segment in list(self._segments.items()):
            if not _is_member(shard, segment.offer.member):
                segment.drop()
                del self._segments[key]


def _key(member: Member) -> tuple[int, int, int]:
    return member.job, member.worker, member.incarnation


def _is_member(shard: Shard, member: Member) -> bool:
    job = shard.jobs.get(member.job)
    return job is not None and job.is_member(member.worker, member.incarnation)
