"""A worker's offer of a segment to a shard, and the shard's answer, as bytes. Pure.

    segment   | place of chunk 0 | place of chunk 3 | ...        on the wire: | magic, version, size | msgpack |
    a place     gradient: the worker writes, the server reads
                answer:   the server writes, the worker reads

A place is found by its chunk's key. The table comes with the offer, is checked once and then the server's own: frames
have no offsets. A worker pushes a chunk again when the step of its last push is complete; so each side has left a place
before the other one writes to it.

With its answer the server may lend memory of its own, which workers only read: where it keeps the weights of chunks, or
forms their averages. It has equal parts, so that neighbouring chunks are neighbours in each of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from psengine.errors import ProtocolError
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, NO_KEY, NOBODY

MAGIC = b"PSEG"
VERSION = 3
# Of both places of a chunk: kernels may count on aligned elements.
ALIGNMENT_BYTES = 8
TOKEN_CHARS = 32
# Of one shard: chunks are cut to 1 MiB.
MAX_PLACES = 1 << 16
MAX_TEXT_CHARS = 1000
MAX_MESSAGE_BYTES = 1 << 22
# Of the server's memory: places of one chunk, and chunks, whose table goes at once into a socket's buffer.
MAX_LENT_CHUNKS = 4096
MAX_LENT_PLACES = 4
LENT_ALIGNMENT_BYTES = 64
LENT_PART_BYTES = 4096

# magic, version, zeros, size of what follows
_PREFIX = struct.Struct("<4sHHI")
PREFIX_BYTES = _PREFIX.size

_Message = TypeVar("_Message", bound=Struct)
Unsigned64 = Annotated[int, Meta(ge=0)]
Offset = Annotated[int, Meta(ge=0, le=1 << 62)]
Key = Annotated[int, Meta(ge=0, le=NO_KEY - 1)]


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Travels as an array."""


class Place(_Part, frozen=True):
    """Where a chunk's payloads lie in a segment, in bytes from its begin."""

    gradient: Offset
    answer: Offset
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD_BYTES)]


class Member(_Part, frozen=True):
    """The worker whose segment it is: a life of a rank of a job, as the header of its messages has them."""

    job: Unsigned64
    worker: Annotated[int, Meta(ge=0, le=NOBODY - 1)]
    incarnation: Unsigned64


class Offer(_Part, frozen=True):
    """A segment for one shard.

    Attributes:
        member: whose it is.
        token: as RESUMED gave it to this member.
        size_bytes: of the segment.
        places: chunk's key -> its place; of the chunks of this shard.
    """

    member: Member
    token: Annotated[str, Meta(min_length=TOKEN_CHARS, max_length=TOKEN_CHARS, pattern=r"\A[\x21-\x7e]*\Z")]
    size_bytes: Offset
    places: Annotated[dict[Key, Place], Meta(min_length=1, max_length=MAX_PLACES)]


class LentTable(_Part, frozen=True):
    """The server's own segment, as a worker is told of it.

    Attributes:
        part_bytes: of each of its equal parts, of which every one has a place for each chunk.
        parts: how many; 0 where there are none.
        offsets: chunk's key -> where its place begins, in each part.
    """

    part_bytes: Offset = 0
    parts: Annotated[int, Meta(ge=0, le=MAX_LENT_PLACES)] = 0
    offsets: Annotated[dict[Key, Offset], Meta(max_length=MAX_LENT_CHUNKS)] = {}

    @property
    def size_bytes(self) -> int:
        """Of the segment."""
        return self.parts * self.part_bytes


class Answer(_Part, frozen=True):
    """A shard's to an offer: why it is not taken, or what it lends in turn."""

    refusal: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] = ""
    lent: LentTable = LentTable()


NOTHING_LENT = LentTable()


def part_of(specs: Iterable[ChunkSpec]) -> tuple[int, dict[int, int]]:
    """The bytes of one part of a lent segment, whole pages, and where in it each chunk's place begins."""
    offsets, end = {}, 0
    for spec in specs:
        offsets[spec.key] = end
        end += -(-spec.size_bytes // LENT_ALIGNMENT_BYTES) * LENT_ALIGNMENT_BYTES
    return -(-end // LENT_PART_BYTES) * LENT_PART_BYTES, offsets


def to_bytes(message: Offer | Answer) -> bytes:
    """As it travels."""
    body = msgspec.msgpack.encode(message)
    return _PREFIX.pack(MAGIC, VERSION, 0, len(body)) + body


def body_bytes(prefix: bytes) -> int:
    """How many bytes follow the first ``PREFIX_BYTES``; ProtocolError where this is no message, or too large a one."""
    magic, version, zeros, size_bytes = _PREFIX.unpack(prefix)
    if magic != MAGIC or zeros:
        raise ProtocolError(f"this is no message about a segment (expected it to begin with {MAGIC!r}, got {magic!r})")
    if version != VERSION:
        raise ProtocolError(f"a message of another version (expected {VERSION}, got {version})")
    if size_bytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message is too large (expected at most {MAX_MESSAGE_BYTES} bytes, got {size_bytes})")
    return int(size_bytes)


def read_offer(data: bytes) -> Offer:
    """The offer in these bytes; every place is within its segment.

    Raises:
        ProtocolError: it is none, or a place is out of bounds.
    """
    offer = _read(data, _OFFER)
    for key, place in offer.places.items():
        for offset in (place.gradient, place.answer):
            if offset % ALIGNMENT_BYTES or offset + place.size_bytes > offer.size_bytes:
                raise ProtocolError(
                    f"chunk {key}: a place outside the segment, or not aligned (expected a multiple of"
                    f" {ALIGNMENT_BYTES} and an end of at most {offer.size_bytes}, got {offset} and"
                    f" {offset + place.size_bytes})"
                )
    return offer


def read_answer(data: bytes, offer: Offer) -> LentTable:
    """What the server lends, in its answer to this offer; every place is within the server's segment.

    Raises:
        ProtocolError: the offer was refused; or it is no answer, or lends a place that is out of bounds or not offered.
    """
    answer = _read(data, _ANSWER)
    if answer.refusal:
        raise ProtocolError(answer.refusal)
    lent = answer.lent
    if lent.offsets and (not lent.parts or lent.part_bytes % LENT_PART_BYTES):
        raise ProtocolError(
            f"the server lends {lent.parts} parts of {lent.part_bytes} bytes (expected multiples of {LENT_PART_BYTES})"
        )
    for key, offset in lent.offsets.items():
        if key not in offer.places:
            raise ProtocolError(f"the server lends chunk {key}, which was not offered")
        if offset % LENT_ALIGNMENT_BYTES or offset + offer.places[key].size_bytes > lent.part_bytes:
            raise ProtocolError(f"the server lends chunk {key} outside its parts of {lent.part_bytes} bytes")
    return lent


def _read(data: bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    if len(data) != PREFIX_BYTES + body_bytes(data[:PREFIX_BYTES]):
        raise ProtocolError(f"a message of a wrong size (got {len(data)} bytes)")
    try:
        return decoder.decode(data[PREFIX_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"this is no message about a segment: {error}") from None


_OFFER, _ANSWER = msgspec.msgpack.Decoder(Offer), msgspec.msgpack.Decoder(Answer)
