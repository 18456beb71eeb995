"""An offer of a segment as bytes: every place lies inside, whatever a peer sends."""

from __future__ import annotations

import random

import pytest

from psengine.errors import ProtocolError
from psengine.parameter_server.segments.offer import (
    MAX_LENT_CHUNKS,
    MAX_MESSAGE_BYTES,
    NOTHING_LENT,
    PREFIX_BYTES,
    Answer,
    LentTable,
    Member,
    Offer,
    Place,
    body_bytes,
    read_answer,
    read_offer,
    to_bytes,
)

MEMBER = Member(7, 1, 1_700_000_000_000)
GOOD = Offer(MEMBER, "0123456789abcdef" * 2, 4096, {0: Place(0, 1024, 1000), 9: Place(2048, 3072, 1024)})
DATA = to_bytes(GOOD)


def with_place(**changes):
    place = {"gradient": 0, "answer": 1024, "size_bytes": 1000} | changes
    return to_bytes(Offer(MEMBER, GOOD.token, GOOD.size_bytes, {0: Place(**place)}))


def test_what_goes_in_comes_out():
    assert PREFIX_BYTES + body_bytes(DATA[:PREFIX_BYTES]) == len(DATA)
    assert read_offer(DATA) == GOOD


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"x" * PREFIX_BYTES, "this is no message about a segment"),
        (DATA[:4] + b"\1\0" + DATA[6:], r"another version \(expected 3, got 1\)"),
        (DATA[:8] + b"\xff" * 4 + DATA[12:], f"expected at most {MAX_MESSAGE_BYTES} bytes"),
        (to_bytes(Offer(MEMBER, GOOD.token, 4096, {})), "length >= 1"),
        (to_bytes(Offer(MEMBER, "short", 4096, GOOD.places)), "length >= 32"),
        (DATA[:-1], "a wrong size"),
        (DATA + b"\0", "a wrong size"),
        (with_place(gradient=4), "not aligned"),
        (with_place(gradient=3104), "an end of at most 4096, got 3104 and 4104"),
        (with_place(answer=2**62), "outside the segment"),
        (with_place(answer=2**64 - 8), "no message"),
        (with_place(size_bytes=0), ">= 1"),
        (with_place(size_bytes=2**40), "<= 16777216"),
        (to_bytes(Answer("no")), "no message"),
    ],
)
def test_a_bad_offer_is_refused_in_words(data, words):
    with pytest.raises(ProtocolError, match=words):
        read_offer(data)


def test_no_mutation_gets_a_place_outside_the_segment():
    rng = random.Random(1)
    taken = 0
    for _ in range(20_000):
        data = bytearray(DATA)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data[rng.randrange(PREFIX_BYTES, len(data))] ^= 1 << rng.randrange(8)
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
    assert read_answer(to_bytes(Answer()), GOOD) == NOTHING_LENT
    with pytest.raises(ProtocolError, match="näin"):
        read_answer(to_bytes(Answer("näin")), GOOD)
    with pytest.raises(ProtocolError, match="no message"):
        read_answer(b"HTTP" * 10, GOOD)


def test_the_server_lends_places_of_offered_chunks_inside_its_segment():
    lent = LentTable(8192, 2, {0: 0, 9: 1024})
    assert read_answer(to_bytes(Answer(lent=lent)), GOOD) == lent
    for bad in (
        LentTable(8192, 1, {1: 0}),
        LentTable(8192, 0, {0: 0}),
        LentTable(8128, 2, {0: 0}),
        LentTable(8192, 1, {0: 8}),
        LentTable(8192, 2, {0: 8192}),
    ):
        with pytest.raises(ProtocolError, match="the server lends"):
            read_answer(to_bytes(Answer(lent=bad)), GOOD)
    for bad in (
        LentTable(8192, 5, {0: 0}),
        LentTable(8192, 1, {9: 2**63}),
        LentTable(8192, 1, dict.fromkeys(range(MAX_LENT_CHUNKS + 1), 0)),
    ):
        with pytest.raises(ProtocolError, match="no message"):
            read_answer(to_bytes(Answer(lent=bad)), GOOD)
