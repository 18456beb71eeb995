"""An offer of a segment as bytes: every place lies inside, whatever a peer sends."""

from __future__ import annotations

import random
import struct

import pytest

from psengine.errors import ProtocolError
from psengine.parameter_server.segments.offer import (
    HEADER_BYTES,
    LENT_BYTES,
    MAX_LENT_CHUNKS,
    MAX_PLACES,
    NOTHING_LENT,
    LentTable,
    Member,
    Offer,
    Place,
    accepted,
    answer_text_bytes,
    lent_rows_bytes,
    offer_bytes,
    read_lent_table,
    read_offer,
    refused,
)

MEMBER = Member(7, 1, 1_700_000_000_000)
GOOD = Offer(MEMBER, "0123456789abcdef" * 2, 4096, {0: Place(0, 1024, 1000), 9: Place(2048, 3072, 1024)})


def with_place(**changes):
    place = {"gradient": 0, "answer": 1024, "size_bytes": 1000} | changes
    return Offer(MEMBER, GOOD.token, GOOD.size_bytes, {0: Place(**place)}).to_bytes()


def test_what_goes_in_comes_out():
    data = GOOD.to_bytes()
    assert offer_bytes(data[:HEADER_BYTES]) == len(data)
    assert read_offer(data) == GOOD


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"x" * HEADER_BYTES, "this is no offer"),
        (GOOD.to_bytes()[:4] + b"\1\0" + GOOD.to_bytes()[6:], r"another version \(expected 2, got 1\)"),
        (Offer(MEMBER, GOOD.token, 4096, {}).to_bytes(), f"expected 1 to {MAX_PLACES}, got 0"),
        (GOOD.to_bytes()[:-1], "a wrong size"),
        (GOOD.to_bytes() + b"\0", "a wrong size"),
        (with_place(gradient=4), "not aligned"),
        (with_place(gradient=3104), "an end of at most 4096, got 3104 and 4104"),
        (with_place(answer=2**64 - 8), "outside the segment"),
        (with_place(size_bytes=0), "a place of a wrong size"),
        (with_place(size_bytes=2**40), "a place of a wrong size"),
        (GOOD.to_bytes()[: HEADER_BYTES + 4] + b"\1" + GOOD.to_bytes()[HEADER_BYTES + 5 :], "chunk 0 wrongly"),
        (GOOD.to_bytes()[: -32] + with_place()[-32:], "chunk 0 wrongly or twice"),
    ],
)  # fmt: skip
def test_a_bad_offer_is_refused_in_words(data, words):
    with pytest.raises(ProtocolError, match=words):
        read_offer(data)


def test_no_mutation_gets_a_place_outside_the_segment():
    rng = random.Random(1)
    good, taken = bytearray(GOOD.to_bytes()), 0
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 4))):
            start = rng.randrange(len(data) - 8)
            if rng.random() < 0.5:
                data[start] ^= 1 << rng.randrange(8)
            else:
                struct.pack_into("<Q", data, start // 8 * 8, rng.choice((0, 8, 4096, 2**32, 2**63, 2**64 - 8)))
        try:
            offer = read_offer(bytes(data))
        except ProtocolError:
            continue
        taken += 1
        for place in offer.places.values():
            assert 0 < place.size_bytes <= offer.size_bytes
            assert max(place.gradient, place.answer) + place.size_bytes <= offer.size_bytes
    assert taken > 100


def test_answers():
    assert answer_text_bytes(accepted()[:4]) is None
    assert read_lent_table(accepted()[4:], GOOD) == NOTHING_LENT
    answer = refused("näin" * 1000)
    assert answer_text_bytes(answer[:4]) == len(answer) - 4 == 1000
    with pytest.raises(ProtocolError, match="no answer"):
        answer_text_bytes(b"HTTP")


def test_the_server_lends_places_of_offered_chunks_inside_its_segment():
    lent = LentTable(8192, 2, {0: 0, 9: 1024})
    data = lent.to_bytes()
    assert len(data) == LENT_BYTES + lent_rows_bytes(data[:LENT_BYTES])
    assert read_lent_table(data, GOOD) == lent
    for bad in (
        LentTable(8192, 1, {1: 0}),
        LentTable(8192, 5, {0: 0}),
        LentTable(8192, 0, {0: 0}),
        LentTable(8128, 2, {0: 0}),
        LentTable(8192, 1, {0: 8}),
        LentTable(8192, 2, {0: 8192}),
        LentTable(8192, 1, {9: 2**63}),
    ):
        with pytest.raises(ProtocolError, match="the server lends"):
            read_lent_table(bad.to_bytes(), GOOD)
    with pytest.raises(ProtocolError, match="too many chunks"):
        lent_rows_bytes(LentTable(8192, 1, dict.fromkeys(range(MAX_LENT_CHUNKS + 1), 0)).to_bytes()[:LENT_BYTES])
