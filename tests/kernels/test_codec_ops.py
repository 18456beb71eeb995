"""The operators of codecs with each table of kernels: the bits of the payloads in tests/oracles."""

import pytest
import torch
from oracles import payloads
from support.native_extension import KERNELS, using_kernels
from support.tensors import assert_same_bits

from psengine.kernels import codec_ops, native, ops
from psengine.kernels.codec_ops import FP4, INT8, ONEBIT

pytestmark = pytest.mark.skipif(not ops.native_available(), reason="psengine._native was not built")

FORMS = {"int8": INT8, "fp4": FP4, "onebit": ONEBIT}
# Below, at and above a block of each form, and with a payload that begins at an odd byte.
NUMELS = [0, 1, 31, 32, 33, 255, 256, 257, 511, 512, 513, 3000]


@pytest.fixture(params=[*KERNELS, "no operators for the device"])
def table(request, monkeypatch):
    if request.param.startswith("no"):
        monkeypatch.setattr(native, "runs_on", lambda *_: False)
        yield
        return
    with using_kernels(request.param):
        yield


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def ordinary(numel, generator):
    return torch.randn(numel, generator=generator)


def of_all_magnitudes(numel, generator):
    """Subnormal and overflowing sums, ties between two codes, zeros with both signs."""
    exponents = torch.randint(-150, 128, (numel,), generator=generator)
    values = torch.ldexp(torch.randint(-12, 13, (numel,), generator=generator).float() / 4, exponents)
    values[: numel // 4] = torch.randint(-24, 25, (numel // 4,), generator=generator) / 4
    return torch.where(values == 0, torch.copysign(values, ordinary(numel, generator)), values)


def poisoned(numel, generator):
    values = ordinary(numel, generator)
    values[numel // 2 :: 700] = torch.nan
    values[::900] = -torch.inf
    return values


def unaligned(numel, dtype):
    return torch.zeros(numel + 1, dtype=dtype)[1:]


@pytest.mark.parametrize("make", [ordinary, of_all_magnitudes, poisoned])
@pytest.mark.parametrize("codec", FORMS)
def test_blocks(table, codec, make, generator):
    form = FORMS[codec]
    for numel in NUMELS:
        values, residual = make(numel, generator), make(numel, generator)
        for left, dtype in ((residual, torch.float32), (None, torch.float32), (residual, torch.bfloat16)):
            given, payload = values.to(dtype), unaligned(form.payload_bytes(numel), torch.uint8)
            expected = torch.empty_like(payload)
            kept, expected_kept = unaligned(numel, torch.float32), torch.empty(numel)
            codec_ops.encode_blocks_(payload, given, form, left, kept)
            payloads.encode_blocks_(expected, given, codec, left, expected_kept)
            assert torch.equal(payload, expected) or make is poisoned, "of a NaN the sign may differ"
            assert_same_bits(kept, expected_kept)
            for adds in (False, True):
                into, expected_into = unaligned(numel, dtype).copy_(residual), residual.to(dtype)
                codec_ops.decode_blocks_(into, payload, form, adds=adds)
                payloads.decode_blocks_(expected_into, expected, codec, adds=adds)
                assert_same_bits(into, expected_into)


@pytest.mark.parametrize("codec", FORMS)
def test_a_residual_that_is_larger_than_caches(table, codec, generator):
    """It is written past them, from whole cache lines on."""
    form = FORMS[codec]
    numel = (1 << 20) + 700
    values, residual = ordinary(numel, generator), unaligned(numel, torch.float32).copy_(ordinary(numel, generator))
    payload, expected = (torch.empty(form.payload_bytes(numel), dtype=torch.uint8) for _ in range(2))
    expected_kept = torch.empty(numel)
    payloads.encode_blocks_(expected, values, codec, residual, expected_kept)
    for kept in (torch.empty(numel), unaligned(numel, torch.float32), residual):  # the last: in place
        codec_ops.encode_blocks_(payload, values, form, residual, kept)
        assert torch.equal(payload, expected)
        assert_same_bits(kept, expected_kept)


@pytest.mark.parametrize("codec", FORMS)
def test_any_bytes_are_decoded_as_the_reference_decodes_them(table, codec, generator):
    form = FORMS[codec]
    payload = torch.randint(0, 256, (form.payload_bytes(5000),), dtype=torch.uint8, generator=generator)
    into, expected = ordinary(5000, generator), torch.empty(5000)
    expected.copy_(into)
    codec_ops.decode_blocks_(into, payload, form, adds=True)
    payloads.decode_blocks_(expected, payload, codec, adds=True)
    assert_same_bits(into, expected)


def mostly_zeros(numel, generator):
    return ordinary(numel, generator) * (torch.rand(numel, generator=generator) < 0.001)


def all_equal(numel, generator):
    return torch.full((numel,), -0.5)


def of_two_magnitudes(numel, generator):
    """The sample of 4,096 values meets the large ones too seldom."""
    values = ordinary(numel, generator).sign()
    values[: numel // 50] *= 1000
    return values


def nans(numel, generator):
    return torch.where(ordinary(numel, generator) > 0, torch.nan, torch.inf)


@pytest.mark.parametrize(
    "make", [ordinary, of_all_magnitudes, poisoned, mostly_zeros, all_equal, of_two_magnitudes, nans]
)
def test_largest(table, make, generator):
    for numel, wanted in ((1, 1), (40, 3), (900, 900), (20_000, 30), (20_000, 500)):
        values, residual = make(numel, generator), make(numel, generator)
        for left, is_in_place in ((residual, False), (None, False), (residual, True)):
            results = []
            for encode in (codec_ops.encode_largest_, payloads.encode_largest_):
                places, found = torch.empty(wanted, dtype=torch.int32), torch.empty(wanted)
                kept = residual.clone() if is_in_place else torch.empty(numel)
                encode(places, found, values, kept if is_in_place else left, kept)
                results.append((places, found, kept))
            (places, found, kept), expected = results
            assert torch.equal(places, expected[0])
            assert_same_bits(found, expected[1])
            assert torch.equal(kept, expected[2])


def test_operators_have_a_schema_and_a_fake():
    payload, kept = torch.zeros(260, dtype=torch.uint8), torch.zeros(9)
    for name, arguments in (
        ("encode_blocks_", (payload, torch.ones(9), torch.ones(9), kept, 0)),
        ("decode_blocks_", (kept, payload, 0, True)),
        ("encode_largest_", (torch.zeros(2, dtype=torch.int32), torch.zeros(2), torch.arange(9.0), None, kept)),
    ):
        torch.library.opcheck(getattr(torch.ops.psengine, name).default, arguments)


def test_tensors_that_do_not_fit_are_refused_before_anything_is_written():
    payload, values = torch.zeros(260, dtype=torch.uint8), torch.ones(9)
    for text, arguments in (
        (r"payload must fit the values \(expected 260 elements, got 259\)", (payload[1:], values, None, None, 0)),
        (r"residual must fit the values \(expected 9 elements, got 8\)", (payload, values, values[1:], None, 0)),
        ("values must be 1-D, contiguous and of float32", (payload, values[::2], None, None, 0)),
        (r"format must be 0 to 2 \(got 3\)", (payload, values, None, None, 3)),
    ):
        with pytest.raises(RuntimeError, match=text):
            torch.ops.psengine.encode_blocks_(*arguments)
    with pytest.raises(RuntimeError, match="found must hold no more than the values"):
        torch.ops.psengine.encode_largest_(torch.zeros(10, dtype=torch.int32), torch.zeros(10), values, None, None)
    assert not payload.any()
