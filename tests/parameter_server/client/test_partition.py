import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.partition import CHUNK_BYTES, MAX_DESCRIPTION_BYTES, cut
from psengine.protocol.frames import decode, encode
from psengine.protocol.layout import ChunkKind, balance
from psengine.protocol.messages import MAX_SEGMENTS, Message, MessageType


def described(*numels):
    return [(f"w{i}", (n,), (1,), n) for i, n in enumerate(numels)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(8, 20_000), st.sampled_from(["float32", "bfloat16"]))
def test_every_element_lies_in_exactly_one_chunk_in_order(numels, chunk_bytes, dtype):
    dtype = getattr(torch, dtype)
    tensors = described(*numels)
    specs = cut(ChunkKind.PARAMETER, tensors, dtype, 7, chunk_bytes)
    row = [(s.name, s.start + i) for spec in specs for s in spec.segments for i in range(s.numel)]
    assert row == [(name, i) for name, _, _, numel in tensors for i in range(numel)]
    assert [spec.key for spec in specs] == list(range(7, 7 + len(specs)))
    for spec in specs:
        assert 0 < spec.size_bytes <= max(chunk_bytes, dtype.itemsize)
        assert spec.numel == sum(segment.numel for segment in spec.segments)
        # At whole cache lines, beside which torch's kernels round as inside a tensor.
        if chunk_bytes >= 64 * dtype.itemsize:
            assert all(segment.start % 64 == 0 for segment in spec.segments)


LONG_NAMES = [("x" * 500 + str(i), (2, 2), (2, 1), 4) for i in range(200)]
# Eight dimensions, each with numbers that take nine bytes.
LONG_LAYOUTS = [(f"w{i}", (1,) * 8, (1 << 40,) * 8, 1) for i in range(2000)]


@pytest.mark.parametrize("tensors", [[*LONG_NAMES, *described(*[1] * 2000)], LONG_LAYOUTS], ids=["names", "layouts"])
def test_many_small_tensors_respect_the_bounds_of_a_message(tensors):
    specs = cut(ChunkKind.PARAMETER, tensors, torch.float32, 0)
    assert len(specs) > 1
    for spec in specs:
        assert len(spec.segments) <= MAX_SEGMENTS
        body = {name: value for name, value in spec.to_body().items() if name in ("kind", "segments")}
        frames = encode(Message(MessageType.REGISTER, key=spec.key, body=body, payload=torch.zeros(spec.numel)))
        assert len(frames[1]) <= MAX_DESCRIPTION_BYTES
        assert decode(frames).numel == spec.numel


def test_a_dtype_that_cannot_travel_is_refused():
    with pytest.raises(ConfigurationError, match=r"expected one of float32, float64, .*float8_e4m3fn"):
        cut(ChunkKind.PARAMETER, described(3), torch.float8_e4m3fn, 0)


def test_shards_hold_about_equal_bytes():
    specs = cut(ChunkKind.PARAMETER, described(5_000_000, 100), torch.float32, 0)
    shards = balance([spec.size_bytes for spec in specs], 3)
    filled = [sum(s.size_bytes for s, shard in zip(specs, shards, strict=True) if shard == k) for k in range(3)]
    assert max(filled) - min(filled) <= CHUNK_BYTES
