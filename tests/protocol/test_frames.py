"""Messages to frames and back; and whatever else a peer may send is refused in words."""

import copy
import json
import math
import random
import re
import struct
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest
import torch
from fuzz.fuzz_frames import IN_HEADER, check, mutate
from hypothesis import given, settings
from hypothesis import strategies as st

from psengine.errors import ProtocolError
from psengine.protocol import bodies
from psengine.protocol.frames import HEADER_BYTES, MAX_GROUP, buffer_of, decode, encode, payload_tensor, refusal, split
from psengine.protocol.layout import TableSpec
from psengine.protocol.messages import DTYPES, NO_KEY, PROTOCOL_VERSION, ErrorCode, Message, MessageType
from psengine.protocol.views import View


def with_bytes(value):
    return bytes.fromhex(value["bytes"]) if value.keys() == {"bytes"} else value


VECTORS = json.loads((Path(__file__).parent / "protocol_vectors.json").read_text(), object_hook=with_bytes)
FRAMES = {vector["name"]: [bytes.fromhex(frame) for frame in vector["frames"]] for vector in VECTORS}

# Written down here a second time, from docs/protocol.md.
LAYOUT = struct.Struct("<4sHBBQQQIIQQQQQIBBHQ")
NAMES = (
    "magic", "protocol", "type", "flags", "job", "epoch", "view", "worker", "key", "incarnation", "sequence",
    "version", "numel", "payload_bytes", "body_bytes", "dtype", "zero", "term", "place",
)  # fmt: skip


def raises(error_type, words):
    return pytest.raises(error_type, match=re.escape(words))


def fields_of(frames):
    return dict(zip(NAMES, LAYOUT.unpack(frames[0]), strict=True))


def with_fields(frames, **changes):
    fields = fields_of(frames) | changes
    return [LAYOUT.pack(*fields.values()), *frames[1:]]


def with_body(name, raw, **changes):
    """A vector with another body: bytes, or something to pack."""
    frames = FRAMES[name]
    raw = raw if isinstance(raw, bytes) else msgspec.msgpack.encode(raw)
    payload = frames[-1:] if fields_of(frames)["flags"] & 4 else []
    flags = fields_of(frames)["flags"] | 2
    return with_fields([frames[0], raw, *payload], flags=flags, body_bytes=len(raw), **changes)


def body_of(name):
    return msgspec.msgpack.decode(FRAMES[name][1])


def same(a, b):
    assert (a.payload is None) == (b.payload is None)
    if a.payload is not None:
        assert bytes(a.payload) == bytes(b.payload)
    for name in IN_HEADER:
        assert getattr(a, name) == getattr(b, name), name
    assert a.body == b.body


def test_every_type_has_a_vector_and_a_schema():
    assert {vector["type"] for vector in VECTORS} == {kind.name for kind in MessageType}
    assert set(bodies.TYPES) == set(MessageType)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_vectors(vector):
    frames = FRAMES[vector["name"]]
    dtype = DTYPES.get(vector["dtype"])
    payload = frames[-1] if fields_of(frames)["flags"] & 4 else None
    message = Message(
        MessageType[vector["type"]], dtype=dtype, numel=vector["numel"], payload=payload, body=vector["body"],
        **vector["header"],
    )  # fmt: skip
    assert [bytes(frame) for frame in encode(message)] == frames
    decoded = decode(frames)
    same(decoded, message)
    assert check(frames)


uint64 = st.integers(0, 2**64 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
hyperparameters = st.dictionaries(
    st.from_regex(r"\A[a-z_]{1,20}\Z"),
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), finite, st.lists(finite, min_size=2, max_size=2)
    ),
    max_size=8,
)


# What a frame may be, at whatever address.
FORMS = bytes, bytearray, lambda raw: memoryview(bytes(raw)), lambda raw: memoryview(bytearray(b"x" + raw))[1:]


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES.values(), key=str)),
    st.integers(0, 40),
    st.sampled_from(FORMS),
    st.tuples(uint64, uint64, uint64, uint64, uint64, st.integers(1, 2**64 - 1)),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, NO_KEY - 1)),
    st.lists(hyperparameters, max_size=4),
)
def test_round_trip_of_every_dtype_at_every_address_without_a_warning(dtype, numel, form, longs, shorts, groups):
    job, epoch, view, incarnation, version, sequence = longs
    worker, key = shorts
    tensor = torch.randint(0, 2, (numel,)).to(dtype)
    message = Message(
        MessageType.PUSH, job, epoch, worker, incarnation, key, sequence, version, payload=tensor, view=view
    )
    message.body = {"groups": groups} if groups else {}
    frames = encode(message)
    assert len(frames) == 2 + bool(groups)
    decoded = decode([form(bytes(frame)) for frame in frames])
    same(decoded, Message(MessageType.PUSH, job, epoch, worker, incarnation, key, sequence, version, dtype, numel,
                          message.body, buffer_of(tensor), view=view))  # fmt: skip
    values = payload_tensor(decoded)
    assert torch.equal(values, tensor)
    assert values.data_ptr() % dtype.itemsize == 0


def test_encode_and_decode_do_not_copy_the_payload():
    tensor = torch.zeros(1000)
    frames = encode(Message(MessageType.PUSH, key=0, sequence=1, payload=tensor))
    message = decode([bytes(frames[0]), frames[-1]])
    tensor[7] = 3.0
    assert payload_tensor(message)[7] == 3.0
    assert payload_tensor(message).data_ptr() == tensor.data_ptr()


def test_a_payload_in_shared_memory_is_described_and_does_not_travel():
    values = torch.arange(3.0)
    message = Message(MessageType.PUSH, key=0, sequence=1, payload=values, place=64)
    (frame,) = encode(message)
    assert frame == with_fields(FRAMES["push"][:1], flags=8, numel=3, payload_bytes=12, job=0, worker=2**32 - 1,
                                place=64, epoch=0, view=0, incarnation=0, sequence=1, version=0)[0]  # fmt: skip
    decoded = decode([frame])
    assert (decoded.place, decoded.dtype, decoded.numel, decoded.payload) == (64, torch.float32, 3, None)


def push(frames=2, **fields):
    """A PUSH with a payload of two float32, of so many frames."""
    return with_fields(FRAMES["push"], **fields)[:frames]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "expected 96 bytes, got 0"),
        ([b"GET / HTTP/1.1"], "no psengine message"),
        (push(magic=b"PSEM"), "no psengine message (expected b'PSEN' first"),
        (push(type=0), f"unknown message type (expected 1 to {max(MessageType)}, got 0)"),
        (push(dtype=0), "unknown dtype (expected 1 to 12, got 0)"),
        (push(dtype=2), "numel and dtype, in bytes (expected 16, got 8)"),
        (push(flags=20), "reserved bits"),
        (push(zero=1), "reserved bits"),
        (push(place=1), "reserved bits"),
        (push(flags=12), "cannot have its payload in shared memory, or twice (got flags 12)"),
        (with_fields(FRAMES["store_blob"][:1], flags=8, body_bytes=0), "STORE cannot have its payload in shared"),
        (push(flags=8), "wrong number of frames for its flags (expected 1, got 2)"),
        (push(1, flags=8, numel=3), "in bytes (expected 12, got 8)"),
        (push(numel=2**62), "does not match its numel"),
        (push(payload_bytes=12, numel=3), "header's number of bytes (expected 12, got 8)"),
        (push(payload_bytes=2**40, numel=2**38), "too large (expected at most 16777216"),
        ([push()[0], push()[1][:-1]], "header's number of bytes (expected 8, got 7)"),
        (with_fields(FRAMES["push_abstain"], numel=1), "describes a payload and has none"),
        (push(key=NO_KEY), "names no chunk"),
        (push(sequence=0), "has no step"),
        (with_fields(FRAMES["push_abstain"], type=MessageType.STORE), "STORE lacks its payload"),
        (push(type=MessageType.HEARTBEAT), "HEARTBEAT has a payload"),
        (with_fields(FRAMES["hello"], body_bytes=3), "header's number of bytes (expected 3, got"),
        (with_fields(FRAMES["hello"], job=5), "header has the number of another job than its body"),
        ([*with_fields(FRAMES["register"], payload_bytes=4, numel=1)[:2], b"1234"], "sum of the segments"),
    ],
)
def test_malformed_headers(frames, words):
    with raises(ProtocolError, words) as caught:
        decode(frames)
    assert caught.value.code == ErrorCode.BAD_MESSAGE


def bomb(levels, opener=b"\x91"):
    return b"\x81\xa6groups" + opener * levels + b"\xc0"


SOME_DATE = datetime.fromtimestamp(5, timezone.utc)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no valid msgpack"),
        (b"\xc0", "PUSH body: (expected object, got None"),
        (b"\x81\xa6groups\xdd\xff\xff\xff\xff", "no valid msgpack"),
        (bomb(7), " body.groups[0]: (expected"),
        (bomb(60_000), "no valid msgpack"),
        (b"\x81\xa6groups\xd4\x05\x00", " body.groups: (expected"),  # an extension
        ({"groups": [{"lr": SOME_DATE}]}, " body.groups[0][...]: (expected"),
        (b"\x81\xc4\x06groups\x90", "PUSH body: (expected str"),
        (b"\x81\xa6groups\xa1\xff", "no valid msgpack"),
        ({"colour": 1}, "unknown field `colour`, got {'colour': 1}"),
        ({"x - at `$.y": 1}, "PUSH body.y: Object contains unknown field"),
        ({"groups": [{"betas": [0.9]}]}, "groups[0][...]: (expected array of length 2"),
        ({"groups": [{"x" * 65: 1}]}, "groups[0]: (expected str of length <= 64"),
        ({"groups": [{"a b": 1}]}, "groups[0]: (expected str matching"),
        ({"absent": [512]}, " body.absent[0]: (expected"),
        ({"groups": ["x" * 263_000]}, "PUSH body is too large (expected at most 262144 bytes"),
    ],
)
def test_malformed_bodies(raw, words):
    frames = with_body("push", raw)
    for _ in range(2):  # a refusal is not remembered as anything else
        with raises(ProtocolError, words):
            decode(frames)


def test_declared_sizes_allocate_nothing():
    frames = with_body("push", bomb(1000, b"\xdd\x00\x00\xfd\xe8") + b"\xc0" * 60_000)  # arrays of 65,000 items
    tracemalloc.start()
    try:
        with raises(ProtocolError, "no valid msgpack"):
            decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def changed(name, **changes):
    """A vector's body with other fields; None: without."""
    return {field: value for field, value in (body_of(name) | changes).items() if value is not None}


def register(*segment):
    return {"kind": "parameter", "segments": [list(segment)]}


def table(**changes):
    fields = dict(zip(TableSpec.__struct_fields__, body_of("register_table")["table"], strict=True)) | changes
    return changed("register_table", table=list(fields.values()))


def view(**changes):
    fields = dict(zip(View.__struct_fields__, body_of("view")["view"], strict=True)) | changes
    return {"view": list(fields.values()), "digest": b"x" * 16}


APPLY = body_of("hello_again_apply")["rule"]


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("hello", changed("hello", job=""), " body.job: (expected"),
        ("hello", changed("hello", job="a\nb"), "body.job: (expected str without controls, got 'a\\nb'"),
        ("hello", changed("hello", world_size=4097), " body.world_size: (expected"),
        ("hello", changed("hello", host=None), "HELLO body: Object missing required field `host`"),
        ("hello", changed("hello", world_size=None), "lacks the field `world_size`"),
        ("hello", changed("hello", rule={"name": "vote"}), "rule.name: Invalid value 'vote'"),
        ("hello", changed("hello", rule=APPLY | {"delay_compensation": -0.1}), " body.rule.delay_compensation: (exp"),
        ("hello_again_apply", changed("hello_again_apply", key=None), "has a view without `rule`, `key`"),
        ("hello_again_apply", changed("hello_again_apply", key="x" * 44), " body.key: (expected bytes, got 'xx"),
        ("resume_registrar", {"key": b"x" * 32}, "has some of `job`, `rule`, `registration`, `key`"),
        ("commit_join", {"what": "sleep"}, "body.what: Invalid value 'sleep'"),
        ("view", view(from_step=0), " body.view[4]: (expected"),
        ("register", register("x" * 513, [2], [1], 0, 2), "segments[0][0]: (expected str of length <= 512"),
        ("register", register("a", [2], [1, 1], 0, 2), "needs a stride per dimension"),
        ("register", register("a", [2], [1], 1, 2), "reaches past its tensor's end"),
        ("register", register("a", [2, 3], [4, 1], 0, 2), "without gaps"),
        ("register", register("a", [2**62] * 64, [1] * 64, 0, 2), "without gaps"),
        ("register", register("fc1.weight", [2, 3], [3, 1], 0, 1), "sum of the segments"),
        ("register_table", table(part=2), "part must be below parts (expected less than 2, got 2)"),
        ("register_table", table(dim=0), " body.table[2]: (expected"),
        ("register_table", table(dim=3), "or than a row (expected 3, got 2)"),
        ("register_table", table(std=math.nan), " body.table[6]: (expected"),
        ("register_table", table(optimizer="adam"), "table[7]: (expected"),
        ("register_table", changed("register_table", table=None), "has `table`, and no segments, if its kind is table"),
        ("register_table", changed("register_table", kind="buffer"), "no other has it"),
        ("push_rows", changed("push_rows", lr=math.inf), " body.lr: (expected"),
        ("push_rows", changed("push_rows", lr=None), "has `rows` without `lr` and `divisor`"),
        ("push_rows", changed("push_rows", divisor=0), " body.divisor: (expected"),
        ("pull_scan", {"scan": 3, "most": 0}, " body.most: (expected"),
        ("push", {"weight": math.nan}, " body.weight: (expected"),
        ("heartbeat", {"steps": 2**53 + 1}, " body.steps: (expected"),
        ("heartbeat", {"loss": math.nan}, " body.loss: (expected"),
        ("configure", changed("configure", optimizer="LBFGS"), " body.optimizer: (expected"),
        ("hello", changed("hello", rule=APPLY | {"durability": "disk"}), "memory|snapshot|log|replica|log+replica"),
        ("follow", changed("follow", index=2), "`index` is below `shards`, and each shard has an address"),
    ],
)
def test_bodies_that_break_their_schema(name, body, words):
    with raises(ProtocolError, words) as caught:
        decode(with_body(name, body))
    assert len(str(caught.value)) < 500


def test_a_repeated_body_is_decoded_once_and_only_for_its_own_type():
    frames = FRAMES["push_groups"]
    assert decode(frames).body is decode(frames).body
    decoded = decode(with_body("push", {"groups": [{"lr": 1, "nesterov": True}]})).body["groups"][0]
    assert [type(value) for value in decoded.values()] == [int, bool]
    with raises(ProtocolError, "unknown field `groups`"):
        decode(with_body("updated", frames[1]))
    hello_frames = FRAMES["hello"]
    assert decode(hello_frames).body is not decode(hello_frames).body


@pytest.mark.parametrize("peer", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 65535])
@pytest.mark.parametrize("name", ["hello", "push", "status"])
def test_another_version_is_refused_naming_both(peer, name):
    frames = with_fields(FRAMES[name], protocol=peer)
    longer = [frames[0] + b"\0" * 8, *frames[1:]]
    for one in (frames, longer):
        with raises(ProtocolError, f"expected version {PROTOCOL_VERSION}, got version {peer}") as caught:
            decode(one)
        assert caught.value.code == ErrorCode.VERSION


def test_an_error_is_readable_from_any_version():
    assert decode(with_fields(FRAMES["error"], protocol=900)).body == body_of("error")


def test_a_refusal_finds_the_request_it_answers():
    frames = with_body("push", {"x": 1})
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    answer = decode(encode(refusal(frames, caught.value)))
    assert (answer.type, answer.key, answer.sequence, answer.worker) == (MessageType.ERROR, 0, 1, 1)
    assert answer.body == {"code": "bad_message", "text": str(caught.value)}


@pytest.mark.parametrize("frames", [[], [b""], [b"x" * 96], [b"PSEN"]])
def test_a_refusal_of_noise_is_plain(frames):
    answer = decode(encode(refusal(frames, ProtocolError("x" * 9000))))
    assert answer.key == NO_KEY
    assert len(answer.body["text"]) == 4000
    assert refusal(with_fields(FRAMES["error"], flags=8), ProtocolError("x")) is None  # errors are not answered


ints = st.integers(-(2**63), 2**64 - 1)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), ints, st.floats(), st.text(max_size=9), st.binary(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)),
    max_leaves=12,
)


@given(st.sampled_from([one for one in VECTORS if one["body"]]), values, st.randoms(use_true_random=False))
@settings(max_examples=500)
def test_bodies_with_one_wrong_value(vector, value, rng):
    body = copy.deepcopy(vector["body"])
    place = body
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
            break
        place = place[key]
    place[key] = value
    check(with_body(vector["name"], body))


@given(st.integers(0, 2**32))
@settings(max_examples=1000)
def test_mutated_frames(seed):
    rng = random.Random(seed)
    check(mutate(rng, rng.choice(list(FRAMES.values()))))


def in_segment(sequence, body=None):
    return Message(MessageType.PUSH, key=3, sequence=sequence, payload=torch.zeros(5), place=128, body=body or {})


def test_a_group_is_split_into_the_messages_that_it_was_joined_from():
    messages = [in_segment(1), in_segment(2, {"weight": 2.0}), in_segment(3, {"absent": [4, 3]}), in_segment(4)]
    group = b"".join(frame for message in messages for frame in encode(message))
    parts = split([memoryview(bytearray(group))])
    assert [(one.sequence, one.body, one.numel) for one in map(decode, parts)] == [
        (one.sequence, one.body, 5) for one in messages
    ]
    alone = b"".join(encode(messages[1]))
    assert decode(split([alone])[0]).body == {"weight": 2.0}


def test_what_is_no_group_is_refused_as_a_whole():
    one, with_body = b"".join(encode(in_segment(1))), b"".join(encode(in_segment(2, {"weight": 2.0})))
    for bad in (one + with_body[:-1], one + b"P", one + one[:-1], one * (MAX_GROUP + 1), with_body + b"\0"):
        assert split([bad]) == [[bad]]
        with raises(ProtocolError, "header has a wrong size"):
            decode(split([bad])[0])
    # The second header is checked like any other.
    parts = split([one + b"x" * HEADER_BYTES])
    with pytest.raises(ProtocolError, match=r"wrong size|no psengine message"):
        decode(parts[-1])


def test_a_group_cannot_carry_payloads():
    push = encode(Message(MessageType.PUSH, key=3, sequence=1, payload=torch.zeros(1)))
    parts = split([bytes(push[0]) + b"".join(encode(in_segment(2)))])
    with raises(ProtocolError, "wrong number of frames"):
        decode(parts[0])
    assert decode(parts[1]).sequence == 2
    three = encode(in_segment(1)) * 3
    assert split(three) == [three], "frames of a message that is no group"
