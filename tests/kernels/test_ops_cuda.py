"""The fused operators on CUDA, against those on the CPU: the same bits."""

import itertools

import pytest
import torch
from support.tensors import FLOATS, assert_same_bits

from psengine.kernels import codec_ops, ops

DEVICE = "cuda"


def has_cuda_kernels() -> bool:
    return ops.native_available() and torch._C._dispatch_has_kernel_for_dispatch_key("psengine::pack_", "CUDA")


pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not has_cuda_kernels(), reason="psengine was built without CUDA kernels"),
]

PAIRS = list(itertools.product(FLOATS, FLOATS))
# Around the lengths of packs (2 to 8 elements) and chunks (2048, 4096, 8192).
SIZES = [1, 3, 16, 17, 0, 255, 2047, 2048, 4096, 4097, 8193, 12289, 5, 100_003, 0]
SCALE = 1 / 3


def name_of(value):
    return str(value).removeprefix("torch.")


def values(numel, dtype=torch.float32, seed=0):
    """On the CPU: many magnitudes, some of which overflow or vanish in 16 bits, and a NaN and infinities."""
    generator = torch.Generator().manual_seed(seed + numel)
    exponents = torch.randint(-30, 20, (numel,), generator=generator)
    made = torch.randn(numel, dtype=torch.float64, generator=generator) * torch.exp2(exponents.double())
    made[7::1013] = torch.inf
    made[11::2003] = -torch.inf
    made[13::3001] = torch.nan
    return made.to(dtype)


def tensors_of(sizes, dtype, device, seed=0):
    return [values(numel, dtype, seed + index).to(device) for index, numel in enumerate(sizes)]


def assert_same_counts(actual, expected):
    assert (actual.device.type, actual.dtype) == (DEVICE, torch.int64)
    assert torch.equal(actual.cpu(), expected)


def check(build, flat_dtype, flat_lead=3):
    """Every list operator on ``build(device)``'s tensors; the flat tensor begins ``flat_lead`` elements into memory."""
    ours, theirs = build(DEVICE), build("cpu")
    numel = sum(tensor.numel() for tensor in ours)
    for counts_too in (False, True):
        flat = torch.full((flat_lead + numel + 8,), 7.0, dtype=flat_dtype, device=DEVICE)
        expected = torch.zeros(numel, dtype=flat_dtype)
        inner = flat[flat_lead : flat_lead + numel]
        if counts_too:
            counts = ops.pack_counting_(inner, ours, SCALE)
            assert_same_counts(counts, ops.pack_counting_(expected, theirs, SCALE))
        else:
            ops.pack_(inner, ours, SCALE)
            ops.pack_(expected, theirs, SCALE)
        assert_same_bits(inner, expected)
        assert (flat[:flat_lead] == 7).all()
        assert (flat[flat_lead + numel :] == 7).all()
    source = values(flat_lead + numel, flat_dtype, seed=99)
    ours, theirs = build(DEVICE), build("cpu")
    ops.unpack_(ours, source.to(DEVICE)[flat_lead:], SCALE)
    ops.unpack_(theirs, source[flat_lead:], SCALE)
    for tensor, expected in zip(ours, theirs, strict=True):
        assert_same_bits(tensor, expected)


@pytest.mark.parametrize("flat_lead", [0, 7])
@pytest.mark.parametrize(("dtype", "flat_dtype"), PAIRS, ids=name_of)
def test_every_pair_of_kinds(dtype, flat_dtype, flat_lead):
    check(lambda device: tensors_of(SIZES, dtype, device), flat_dtype, flat_lead)


VIEWS = {
    "transposed": lambda base: base.view(60, 70).t(),
    "columns": lambda base: base.view(60, 70)[:, 3:40:2],
    "every third": lambda base: base[::3],
    "a corner": lambda base: base.view(3, 4, 5, 7, 10)[1:, :3, 1:4, 2:, ::3],
    "channels last": lambda base: base.view(4, 5, 21, 10).permute(0, 3, 1, 2),
    "one element": lambda base: base.view(60, 70)[5:6, 6:7],
    "nothing": lambda base: base.view(60, 70)[:0, ::2],
    "a scalar": lambda base: base[17],
}


@pytest.mark.parametrize(
    ("dtype", "flat_dtype"), [(torch.float32,) * 2, (torch.float16, torch.float64), (torch.bfloat16,) * 2], ids=name_of
)
@pytest.mark.parametrize("view", VIEWS)
def test_strides(view, dtype, flat_dtype):
    def build(device):
        bases = tensors_of([4200] * 3, dtype, device)
        return [bases[0], VIEWS[view](bases[1]), bases[2]]

    check(build, flat_dtype)


@pytest.mark.parametrize("count", [126, 127, 400, 1000, 1022, 2500])
def test_many_tensors(count):
    """As many as one launch takes (126 or 1021), one more, and several launches."""
    sizes = [index * 37 % 101 for index in range(count)]
    sizes[count // 2] = 50_000
    check(lambda device: tensors_of(sizes, torch.float32, device), torch.float32)


@pytest.mark.parametrize(("dtype", "source_dtype"), PAIRS, ids=name_of)
@pytest.mark.parametrize(("destination_lead", "source_lead"), [(0, 0), (1, 1), (0, 1), (3, 2)])
def test_accumulate(dtype, source_dtype, destination_lead, source_lead):
    for numel in (0, 1, 7, 4096, 100_003):
        source = values(numel + source_lead, source_dtype, seed=1)
        expected = values(numel + destination_lead, dtype, seed=2)
        actual = expected.to(DEVICE)
        ops.accumulate_(actual[destination_lead:], source.to(DEVICE)[source_lead:], SCALE)
        ops.accumulate_(expected[destination_lead:], source[source_lead:], SCALE)
        assert_same_bits(actual, expected)


def arguments_of(operator):
    flat = torch.randn(26, device=DEVICE)
    tensors = [torch.randn(20, device=DEVICE), torch.randn(3, 4, device=DEVICE)[:, ::2]]
    return {
        "pack_": (flat, tensors, SCALE),
        "pack_counting_": (flat, tensors, SCALE),
        "unpack_": (tensors, flat, SCALE),
        "accumulate_": (flat, torch.randn(26, device=DEVICE), SCALE),
    }[operator]


OPERATORS = ["pack_", "unpack_", "pack_counting_", "accumulate_"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator):
    torch.library.opcheck(getattr(torch.ops.psengine, operator).default, arguments_of(operator))


def test_a_captured_graph_reads_what_lies_at_its_addresses_when_replayed():
    tensors = tensors_of([1000 + index for index in range(400)], torch.float32, DEVICE)
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors), device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.pack_counting_(flat, tensors, SCALE)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts = ops.pack_counting_(flat, tensors, SCALE)
    for seed in range(3):
        for tensor in tensors:
            tensor.copy_(values(tensor.numel(), seed=seed))
        graph.replay()
        expected = torch.zeros(flat.numel())
        assert_same_counts(counts, ops.pack_counting_(expected, [tensor.cpu() for tensor in tensors], SCALE))
        assert_same_bits(flat, expected)


def sleep():
    """Keep the current stream busy for some tenths of a second."""
    torch.cuda._sleep(500_000_000)


@pytest.mark.parametrize("operator", OPERATORS)
def test_work_is_ordered_by_the_current_stream(operator):
    arguments = arguments_of(operator)
    targets, sources = [part if isinstance(part, list) else [part] for part in arguments[:2]]
    for tensor in (*targets, *sources):
        tensor.fill_(1.0)
    call = getattr(torch.ops.psengine, operator)
    call(*arguments)  # loads the kernels
    for tensor in targets:
        tensor.fill_(1.0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        sleep()
        for tensor in sources:
            tensor.fill_(5.0)
        call(*arguments)
    side.synchronize()
    # On another stream it would have run ahead, and met ones.
    expected = (1.0 if operator == "accumulate_" else 0.0) + 5.0 * SCALE
    for tensor in targets:
        torch.testing.assert_close(tensor, torch.full_like(tensor, expected))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_waits_for_the_device(operator):
    arguments = arguments_of(operator)
    call = getattr(torch.ops.psengine, operator)
    call(*arguments)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sleep()
        call(*arguments)
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", [codec_ops.INT8, codec_ops.FP4, codec_ops.ONEBIT], ids=["int8", "fp4", "onebit"])
@pytest.mark.parametrize("numel", [1, 33, 513, 100_003])
def test_codecs(form, numel):
    gradient, residual, into = (values(numel, seed=seed).nan_to_num(0.0, 1.0, -1.0) for seed in range(3))
    gradient[numel // 2] = torch.nan
    results = []
    for device in ("cpu", DEVICE):
        payload = torch.zeros(form.payload_bytes(numel), dtype=torch.uint8, device=device)
        kept, total = residual.to(device, copy=True), into.to(device, copy=True)
        codec_ops.encode_blocks_(payload, gradient.to(device), form, kept, kept)
        codec_ops.decode_blocks_(total, payload, form, adds=True)
        results.append((payload, kept, total))
    (expected_payload, *expected), (payload, *actual) = results
    assert torch.equal(payload.cpu(), expected_payload)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("numel", [1, 900, 20_000])
def test_largest(numel):
    gradient, results = values(numel), []
    for device in ("cpu", DEVICE):
        count = max(1, numel // 50)
        places = torch.empty(count, dtype=torch.int32, device=device)
        found, kept = torch.empty(count, device=device), torch.zeros(numel, device=device)
        codec_ops.encode_largest_(places, found, gradient.to(device), kept, kept)
        results.append((places.cpu(), found.cpu(), kept.cpu()))
    assert torch.equal(results[1][0], results[0][0])
    for got, wanted in zip(results[1][1:], results[0][1:], strict=True):
        assert_same_bits(got, wanted)
