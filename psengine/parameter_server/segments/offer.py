"""A worker's offer of a segment to a shard, and the shard's answer, as bytes. Pure.

    segment   | place of chunk 0 | place of chunk 3 | ...          an answer: | "ok" or "no", size of the text | text |
    a place     gradient: the worker writes, the server reads
                answer:   the server writes, the worker reads

A place is found by its chunk's key. The table comes with the offer, is checked once and then the server's own: frames
have no offsets. A worker has one exchange of a chunk under way, and begins the next when it has the answer of the last;
so each side has left a place before the other one writes to it.

With "ok" the server may lend memory of its own, which workers only read: where it keeps the weights of chunks, or forms
their averages. It has equal parts, so that neighbouring chunks are neighbours in each of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from psengine.errors import ProtocolError
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, NO_KEY

MAGIC = b"PSEG"
VERSION = 2
# Of both places of a chunk: kernels may count on aligned elements.
ALIGNMENT_BYTES = 8
TOKEN_CHARS = 32
# Of one shard: chunks are cut to 1 MiB.
MAX_PLACES = 1 << 16
MAX_TEXT_BYTES = 1000
# Of the server's memory: rows of its table, which goes at once into a socket's buffer, and places of one chunk.
MAX_LENT_CHUNKS = 4096
MAX_LENT_PLACES = 4
LENT_ALIGNMENT_BYTES = 64
LENT_PART_BYTES = 4096

# magic, version, zeros, worker, places, job, incarnation, size of the segment, token
_HEADER = struct.Struct(f"<4sHHIIQQQ{TOKEN_CHARS}s")
HEADER_BYTES = _HEADER.size
# key, zeros, offset of the gradient, offset of the answer, bytes of each
_PLACE = struct.Struct("<IIQQQ")
_ANSWER = struct.Struct("<2sH")
ANSWER_BYTES = _ANSWER.size
# after "ok": size of the server's segment, chunks in its table, equal parts of the segment
_LENT = struct.Struct("<QII")
LENT_BYTES = _LENT.size
# key, zeros, offset in each part
_LENT_ROW = struct.Struct("<IIQ")
_ACCEPTED, _REFUSED = b"ok", b"no"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's payloads lie in a segment, in bytes from its begin."""

    gradient: int
    answer: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """The worker whose segment it is: a life of a rank of a job, as the header of its messages has them."""

    job: int
    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A segment for one shard.

    Attributes:
        member: whose it is.
        token: as WELCOME gave it to this member.
        size_bytes: of the segment.
        places: chunk's key -> its place; of the chunks of this shard.
    """

    member: Member
    token: str
    size_bytes: int
    places: Mapping[int, Place]

    def to_bytes(self) -> bytes:
        """As it travels."""
        member = self.member
        header = _HEADER.pack(
            MAGIC, VERSION, 0, member.worker, len(self.places), member.job, member.incarnation, self.size_bytes,
            self.token.encode(),
        )  # fmt: skip
        rows = [_PLACE.pack(key, 0, p.gradient, p.answer, p.size_bytes) for key, p in self.places.items()]
        return header + b"".join(rows)


@dataclass(frozen=True, slots=True)
class LentTable:
    """The server's own segment, as a worker is told of it.

    Attributes:
        part_bytes: of each of its equal parts, of which every one has a place for each chunk.
        parts: how many; 0 where there are none.
        offsets: chunk's key -> where its place begins, in each part.
    """

    part_bytes: int
    parts: int
    offsets: Mapping[int, int]

    @property
    def size_bytes(self) -> int:
        """Of the segment."""
        return self.parts * self.part_bytes

    def to_bytes(self) -> bytes:
        """As it travels."""
        rows = [_LENT_ROW.pack(key, 0, offset) for key, offset in self.offsets.items()]
        return _LENT.pack(self.size_bytes, len(rows), self.parts) + b"".join(rows)


NOTHING_LENT = LentTable(0, 0, {})


def part_of(specs: Iterable[ChunkSpec]) -> tuple[int, dict[int, int]]:
    """The bytes of one part of a lent segment, whole pages, and where in it each chunk's place begins."""
    offsets, end = {}, 0
    for spec in specs:
        offsets[spec.key] = end
        end += -(-spec.size_bytes // LENT_ALIGNMENT_BYTES) * LENT_ALIGNMENT_BYTES
    return -(-end // LENT_PART_BYTES) * LENT_PART_BYTES, offsets


def lent_rows_bytes(header: bytes) -> int:
    """How many bytes of rows follow the first ``LENT_BYTES`` of a table.

    Raises:
        ProtocolError: too many.
    """
    _, rows, _ = _LENT.unpack(header)
    if rows > MAX_LENT_CHUNKS:
        raise ProtocolError(f"the server lends too many chunks (expected at most {MAX_LENT_CHUNKS}, got {rows})")
    return int(rows) * _LENT_ROW.size


def read_lent_table(data: bytes, offer: Offer) -> LentTable:
    """The table in these bytes; every place is within the server's segment.

    Raises:
        ProtocolError: a place is out of bounds, or of a chunk that was not offered.
    """
    size_bytes, rows, parts = _LENT.unpack(data[:LENT_BYTES])
    if not rows:
        return NOTHING_LENT
    if not 1 <= parts <= MAX_LENT_PLACES or size_bytes % (parts * LENT_PART_BYTES):
        raise ProtocolError(f"the server lends {size_bytes} bytes in {parts} parts (expected 1 to {MAX_LENT_PLACES})")
    part_bytes = size_bytes // parts
    offsets: dict[int, int] = {}
    for key, _, offset in _LENT_ROW.iter_unpack(data[LENT_BYTES:]):
        if key not in offer.places or key in offsets:
            raise ProtocolError(f"the server lends chunk {key} wrongly, or twice")
        if offset % LENT_ALIGNMENT_BYTES or offset + offer.places[key].size_bytes > part_bytes:
            raise ProtocolError(f"the server lends chunk {key} outside its parts of {part_bytes} bytes")
        offsets[key] = offset
    return LentTable(part_bytes, parts, offsets)


def offer_bytes(header: bytes) -> int:
    """How many bytes an offer has, by its first ``HEADER_BYTES``.

    Raises:
        ProtocolError: it is none, or too large.
    """
    magic, version, zeros, _, count, *_ = _HEADER.unpack(header)
    if magic != MAGIC or zeros:
        raise ProtocolError(f"this is no offer of a segment (expected it to begin with {MAGIC!r}, got {magic!r})")
    if version != VERSION:
        raise ProtocolError(f"an offer of another version (expected {VERSION}, got {version})")
    if not 1 <= count <= MAX_PLACES:
        raise ProtocolError(f"an offer of a wrong number of places (expected 1 to {MAX_PLACES}, got {count})")
    return HEADER_BYTES + int(count) * _PLACE.size


def read_offer(data: bytes) -> Offer:
    """The offer in ``offer_bytes`` bytes; every place is within its segment.

    Raises:
        ProtocolError: it is none, or a place is out of bounds.
    """
    expected_bytes = offer_bytes(data[:HEADER_BYTES])
    if len(data) != expected_bytes:
        raise ProtocolError(f"an offer of a wrong size (expected {expected_bytes} bytes, got {len(data)})")
    _, _, _, worker, _, job, incarnation, size_bytes, token = _HEADER.unpack(data[:HEADER_BYTES])
    if not token.isascii():
        raise ProtocolError("an offer's token is no text")
    places: dict[int, Place] = {}
    for key, zeros, gradient, answer, place_bytes in _PLACE.iter_unpack(data[HEADER_BYTES:]):
        if zeros or key == NO_KEY or key in places:
            raise ProtocolError(f"an offer names chunk {key} wrongly or twice")
        if not 1 <= place_bytes <= MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"chunk {key}: a place of a wrong size (expected 1 to {MAX_PAYLOAD_BYTES} bytes, got {place_bytes})"
            )
        for offset in (gradient, answer):
            if offset % ALIGNMENT_BYTES or offset + place_bytes > size_bytes:
                raise ProtocolError(
                    f"chunk {key}: a place outside the segment, or not aligned (expected a multiple of"
                    f" {ALIGNMENT_BYTES} and an end of at most {size_bytes}, got {offset} and {offset + place_bytes})"
                )
        places[key] = Place(gradient, answer, place_bytes)
    return Offer(Member(job, worker, incarnation), token.decode(), size_bytes, places)


def accepted(lent: LentTable = NOTHING_LENT) -> bytes:
    """The shard's answer to an offer that it takes."""
    return _ANSWER.pack(_ACCEPTED, 0) + lent.to_bytes()


def refused(text: str) -> bytes:
    """The shard's answer to an offer that it does not take."""
    words = text.encode()[:MAX_TEXT_BYTES]
    return _ANSWER.pack(_REFUSED, len(words)) + words


def answer_text_bytes(answer: bytes) -> int | None:
    """How many bytes of text follow the first ``ANSWER_BYTES`` of an answer; None where the offer was accepted.

    Raises:
        ProtocolError: it is no answer.
    """
    word, size_bytes = _ANSWER.unpack(answer)
    if word not in (_ACCEPTED, _REFUSED) or size_bytes > MAX_TEXT_BYTES:
        raise ProtocolError(f"this is no answer to an offer of a segment (got {answer!r})")
    return None if word == _ACCEPTED else int(size_bytes)
