"""The largest messages of the largest job fit: what a message can hold is computed from bytes."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from psengine.errors import ProtocolError
from psengine.protocol import bodies
from psengine.protocol.bounds import INT64_MAX, MAX_VIEW_NUMBER
from psengine.protocol.frames import decode, encode
from psengine.protocol.messages import (
    MAX_BODY_BYTES,
    MAX_CHUNKS,
    MAX_COUNTED,
    MAX_MEET_BYTES,
    MAX_SHARDS,
    MAX_VIEW_BYTES,
    MAX_WORKERS,
    Message,
    MessageType,
)
from psengine.protocol.views import MemberState, Release, View, ViewMember, message_of, view_of

# What grows with a model, not with a job: names of tensors, and hyperparameters. Who sends it is refused by the limit.
OF_THE_MODEL = {"segments", "groups"}
U64 = 2**64 - 1
HEADS = ((31, 1), (255, 2), (65_535, 3), (2**32 - 1, 5))  # of a text


def integer_bytes(largest: int | None) -> int:
    sizes = ((127, 1), (255, 2), (65_535, 3), (2**32 - 1, 5))
    return next((size for limit, size in sizes if largest is not None and largest <= limit), 9)


def most_bytes(one: Any) -> int:
    """The most that a value of a type takes in msgpack, as ``msgspec.inspect`` knows the type."""
    match one:
        case inspect.IntType():
            return integer_bytes(one.le if one.ge is not None and one.ge >= 0 else None)
        case inspect.FloatType():
            return 9
        case inspect.NoneType() | inspect.BoolType():
            return 1
        case inspect.StrType():
            if one.pattern is not None and (words := re.fullmatch(r"\\A\((.*)\)\\Z", one.pattern)):
                return 5 + max(map(len, words[1].split("|")))
            is_ascii = one.pattern is not None and not re.search(one.pattern, "\u4e2d")
            size_bytes = one.max_length * (1 if is_ascii else 4)
            return size_bytes + next(head for limit, head in HEADS if size_bytes <= limit)
        case inspect.BytesType():
            return 5 + one.max_length
        case inspect.ListType() | inspect.VarTupleType():
            return 5 + one.max_length * most_bytes(one.item_type)
        case inspect.TupleType():
            return 1 + sum(map(most_bytes, one.item_types))
        case inspect.DictType():
            return 5 + one.max_length * (most_bytes(one.key_type) + most_bytes(one.value_type))
        case inspect.UnionType():
            return max(map(most_bytes, one.types))
        case inspect.StructType():
            fields = [field for field in one.fields if field.name not in OF_THE_MODEL]
            names = 0 if one.array_like else sum(5 + len(field.encode_name) for field in fields)
            tag = 0 if one.tag is None else 10 + len(one.tag_field) + len(str(one.tag))
            return 5 + tag + names + sum(most_bytes(field.type) for field in fields)
    raise AssertionError(f"nobody knows how large a {one} is")


# A page of CHUNKS ends before it is too large; the next test has VIEW.
KINDS = [kind for kind in MessageType if kind not in (MessageType.CHUNKS, MessageType.VIEW)]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_largest_body_fits(kind):
    assert most_bytes(inspect.type_info(bodies.TYPES[kind])) <= MAX_BODY_BYTES


def largest_view(**fields: Any) -> View:
    members = tuple(ViewMember(rank, U64, "x" * 40, INT64_MAX) for rank in range(MAX_WORKERS))
    shards, chunks = (U64,) * MAX_SHARDS, (INT64_MAX,) * MAX_SHARDS
    return View(MAX_VIEW_NUMBER, U64, members, shards, INT64_MAX, MAX_WORKERS, 0, chunks, **fields)


def test_the_largest_view_fits():
    states = (MemberState(MAX_COUNTED, MAX_COUNTED, "h" * 64, INT64_MAX, "p" * 64),) * MAX_WORKERS
    # A worker's contribution stays until it commits the next, and once more where the answer was lost with a server.
    releases = tuple(Release(INT64_MAX, INT64_MAX, ((rank, INT64_MAX),)) for rank in range(MAX_WORKERS)) * 2
    servers = ("s" * 561,) * MAX_SHARDS
    for view in (largest_view(states=states), largest_view(releases=releases, servers=servers)):
        message = message_of(view, b"k" * 32, 1)
        assert len(msgspec.msgpack.encode(message.body)) <= MAX_VIEW_BYTES
        assert view_of(decode(encode(message)).body) == view


def test_the_limits_are_those_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    words = (
        f"{MAX_WORKERS:,} workers",
        f"{MAX_SHARDS} shards",
        f"{MAX_CHUNKS:,} chunks at a shard",
        f"body {MAX_BODY_BYTES // 1024} KiB, of VIEW {MAX_VIEW_BYTES // 2**20} MiB",
        f"a value of MEET {MAX_MEET_BYTES // 1024} KiB",
    )
    assert [one for one in words if one not in " ".join(page.split())] == []


def test_who_sends_more_is_refused():
    message = Message(MessageType.RESUME, body={"open": [[key, 1] for key in range(MAX_CHUNKS + 1)]})
    with pytest.raises(ProtocolError, match=rf"open: \(expected array of length <= {MAX_CHUNKS}"):
        decode(encode(message))
