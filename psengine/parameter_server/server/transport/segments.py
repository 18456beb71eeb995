"""The segments that workers of this host share with one shard; used in the shard's thread.

A frame says only that its payload is in shared memory. The server's own copy of the worker's table says where; it was
checked when the segment came (``segment_listener.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import os
import socket
from dataclasses import dataclass, field

import torch

from psengine.parameter_server.segments.memory import SegmentMapping
from psengine.parameter_server.segments.offer import TOKEN_CHARS, Member, Offer
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.messages import NOBODY, Message


@dataclass(eq=False)
class WorkerSegment:
    """One worker's segment: its memory, and the table that came with it."""

    offer: Offer
    mapping: SegmentMapping
    stream: socket.socket
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def gradient(self, key: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory of a chunk's gradient; None where the table has none of this size."""
        known = self.gradients.get(key)
        if known is not None and known.numel() == numel and known.dtype is dtype:
            return known
        place = self.offer.places.get(key)
        if place is None or numel * dtype.itemsize != place.size_bytes:
            return None
        self.gradients[key] = made = self.mapping.tensor(place.gradient, numel, dtype)
        return made


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

    def sign(self, welcome: Message) -> None:
        """Tell a worker its token."""
        if self.is_open and welcome.worker != NOBODY:
            welcome.body["local"] = self.token(Member(welcome.job, welcome.worker, welcome.incarnation))

    def find(self, push: Message) -> None:
        """Give a PUSH without bytes its payload, where its worker shares the memory."""
        segment = self._segments.get((push.job, push.worker, push.incarnation))
        if segment is not None and push.dtype is not None:
            push.payload = segment.gradient(push.key, push.numel, push.dtype)

    def put(self, answer: Message) -> bool:
        """Write an answer's payload to its place, where its worker shares one; whether it need not travel."""
        segment = self._segments.get((answer.job, answer.worker, answer.incarnation))
        values = answer.payload
        if segment is None or not isinstance(values, torch.Tensor):
            return False
        place = segment.offer.places.get(answer.key)
        if place is None or values.nbytes != place.size_bytes:
            return False
        ctypes.memmove(segment.mapping.address + place.answer, values.data_ptr(), place.size_bytes)
        answer.in_segment = True
        return True

    def attach(self, shard: Shard, segment: WorkerSegment) -> str:
        """Take a segment; why not, or ""."""
        offer, member = segment.offer, segment.offer.member
        if not hmac.compare_digest(self.token(member), offer.token):
            return "the token is not the one that this worker was given"
        job = shard.jobs.by_number.get(member.job)
        if job is None or not _is_member(shard, member):
            return f"worker {member.worker} is no member (any more)"
        for key, place in offer.places.items():
            rule = job.chunks.rules.get(key)
            if rule is None or rule.spec.size_bytes != place.size_bytes:
                held = "no such chunk" if rule is None else f"{rule.spec.size_bytes} bytes"
                return f"chunk {key}: the offer has {place.size_bytes} bytes, this shard {held}"
        former = self._segments.get(_key(member))
        if former is not None:
            end_stream(former.stream)
        self._segments[_key(member)] = segment
        return ""

    def forget(self, segment: WorkerSegment) -> None:
        """Its worker has released it. Gradients in it that an exchange needs keep their memory."""
        key = _key(segment.offer.member)
        if self._segments.get(key) is segment:
            del self._segments[key]

    def keep_members(self, shard: Shard) -> None:
        """Forget the segments of those who are no members any more."""
        for key, segment in list(self._segments.items()):
            if not _is_member(shard, segment.offer.member):
                del self._segments[key]
                end_stream(segment.stream)


def _key(member: Member) -> tuple[int, int, int]:
    return member.job, member.worker, member.incarnation


def _is_member(shard: Shard, member: Member) -> bool:
    job = shard.jobs.by_number.get(member.job)
    known = None if job is None else job.membership.members.get(member.worker)
    return known is not None and known.incarnation == member.incarnation


def end_stream(stream: socket.socket) -> None:
    """The listener, which owns the stream, sees that it ends."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
