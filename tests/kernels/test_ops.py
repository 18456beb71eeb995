"""The fused operators, native and in plain torch, against torch's own arithmetic."""

import math
import platform
import random
import re
import subprocess
import sys

import pytest
import torch
from support.native_extension import KERNELS, using_kernels
from support.tensors import FLOATS, assert_same_bits

from psengine.kernels import native, ops

needs_native = pytest.mark.skipif(not ops.native_available(), reason="psengine._native was not built")

PAIRS = [(a, b) for a in FLOATS for b in FLOATS]
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
# Below, at and above a vector, a cache block (1,024) and a block of a thread's work (4,096).
SIZES = [0, 1, 3, 15, 16, 17, 31, 0, 1023, 1025, 4096, 4097, 10_001]
SCALES = [1.0, 1 / 3, 65536.0]


@pytest.fixture
def generator():
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown where a test fails
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=[*KERNELS, "torch"])
def table(request, monkeypatch):
    """Run the test with each table of kernels that this processor can run, and in plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "_is_native", lambda flat: False)
        yield request.param
        return
    if not ops.native_available():
        pytest.skip("psengine._native was not built")
    with using_kernels(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def threads():
    """One thread, unless a test says otherwise: several would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def work_dtype(*dtypes):
    return torch.float64 if torch.float64 in dtypes else torch.float32


def poisoned(*shape, dtype):
    return torch.full(shape, math.nan, dtype=dtype)


def unaligned(numel, dtype, generator, lead=1):
    """Values that begin `lead` elements into their memory."""
    return torch.randn(numel + lead, generator=generator, dtype=torch.float64).to(dtype)[lead:]


def special_values(dtype, generator):
    """Every 16-bit value, or random bits and the neighbourhood of every border of the narrower kinds."""
    kind = BITS[dtype.itemsize]
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(kind).view(dtype)
    bits = torch.randint(
        -(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1, (50_000,), generator=generator
    )
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    exact = torch.cat([halves.view(torch.float16).to(dtype), halves.view(torch.bfloat16).to(dtype)])
    exact = exact[exact.isfinite()]
    between = torch.cat([(exact + exact.roll(1)) / 2, (exact + exact.roll(-1)) / 2])  # ties of rounding, among others
    near = between.view(kind)
    edges = torch.tensor([math.inf, -math.inf, math.nan, 65504, 65519.99, 65520, 3.3895e38, 3.4028e38, 0.0, -0.0])
    return torch.cat(
        [bits.to(kind).view(dtype), exact, between, (near + 1).view(dtype), (near - 1).view(dtype), edges.to(dtype)]
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("flat_dtype", "dtype"), PAIRS)
def test_tensors_are_packed_and_unpacked_scaled(flat_dtype, dtype, scale, table, generator):
    tensors = [unaligned(numel, dtype, generator, lead=i % 3) for i, numel in enumerate(SIZES)]
    tensors.append(special_values(dtype, generator))
    numels = [tensor.numel() for tensor in tensors]
    work = work_dtype(flat_dtype, dtype)
    memory = poisoned(sum(numels) + 5, dtype=flat_dtype)
    flat = memory[3:-2]

    ops.pack_(flat, tensors, scale)

    assert_same_bits(flat, (torch.cat(tensors).to(work) * scale).to(flat_dtype))
    assert memory[:3].isnan().all()
    assert memory[-2:].isnan().all()

    memories = [poisoned(numel + 2, dtype=dtype) for numel in numels]
    tensors, given = [memory[1:-1] for memory in memories], flat.clone()

    ops.unpack_(tensors, flat, scale)

    assert_same_bits(torch.cat(tensors), (given.to(work) * scale).to(dtype))
    assert all(memory[0].isnan() and memory[-1].isnan() for memory in memories)
    assert_same_bits(flat, given)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("dtype", "source_dtype"), PAIRS)
def test_accumulate_adds_scaled(dtype, source_dtype, scale, table, generator):
    pairs = [(unaligned(n, dtype, generator), unaligned(n, source_dtype, generator, lead=n % 5)) for n in SIZES]
    pairs.append((special_values(dtype, generator), special_values(source_dtype, generator)))
    for values, addends in pairs:
        numel = min(len(values), len(addends))
        memory = torch.cat([poisoned(1, dtype=dtype), values[:numel], poisoned(1, dtype=dtype)])
        destination, source = memory[1:-1], addends[:numel]
        before = destination.clone()

        ops.accumulate_(destination, source, scale)

        work = work_dtype(dtype, source_dtype)
        assert_same_bits(destination, (before.to(work) + source.to(work) * scale).to(dtype))
        assert memory[0].isnan()
        assert memory[-1].isnan()


def strided_tensors(dtype, generator):
    """Tensors in every kind of memory that a gradient may have; none shares memory with another."""

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    columns = randn(9, 12)
    return [
        randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
        randn(6, 5, 4).permute(2, 0, 1),
        randn(11, 8).t(),
        randn(13, 30)[:, 3:20],
        randn(40)[1::3],
        randn(3, 4, 50, 6)[:, 1:3, ::7].permute(3, 1, 0, 2),
        columns[:, :5],
        columns[:, 5:],
        randn(()),
        randn(5, 1, 3).as_strided((5, 1, 3), (3, 77, 1)),
        randn(0, 4),
        randn(2, 3000)[:, :2500],
        randn(6000, 2)[:, 1],
        randn(129, 65).t()[:, ::2],
    ]


def in_place_order(tensor, like):
    """The elements of `tensor` in the order of the memory of `like`, or in row-major order where that is not dense."""
    if not ops.is_dense(like.shape, like.stride()):
        return tensor.reshape(-1)
    order = sorted(range(tensor.dim()), key=lambda d: (like.stride(d), d), reverse=True)
    return tensor.permute(order).reshape(-1)


@pytest.mark.parametrize("with_layout", [False, True])
@pytest.mark.parametrize(
    ("flat_dtype", "dtype"), [(torch.float32,) * 2, (torch.float64, torch.bfloat16), (torch.float16,) * 2]
)
def test_strided_tensors_travel_in_the_order_of_their_places(flat_dtype, dtype, with_layout, table, generator):
    tensors = strided_tensors(dtype, generator)
    # Gradients whose strides are not those of their places: contiguous for channels_last and the other way round.
    likes = [t.contiguous() for t in reversed(tensors)] + list(tensors) if with_layout else tensors
    tensors = (
        list(reversed(tensors)) + [t.contiguous() for t in strided_tensors(dtype, generator)]
        if with_layout
        else tensors
    )
    expanded = torch.randn(3, 1, 5, generator=generator).to(dtype).expand(3, 4, 5)
    tensors.append(expanded)
    likes = [*likes, expanded] if with_layout else tensors
    layout = ops.layout_of(likes) if with_layout else None
    flat = poisoned(sum(t.numel() for t in tensors), dtype=flat_dtype)
    ops.pack_(flat, tensors, 0.5, layout)
    expected = torch.cat([in_place_order(t, like) for t, like in zip(tensors, likes, strict=True)])
    assert_same_bits(flat, (expected.to(work_dtype(flat_dtype, dtype)) * 0.5).to(flat_dtype))

    # And back, into memory of the same strides; an expanded tensor cannot be written.
    targets = strided_tensors(dtype, generator)
    if with_layout:
        targets = list(reversed(targets)) + [t.contiguous() for t in strided_tensors(dtype, generator)]
    if layout is not None:
        layout = ops.layout_of(likes[:-1])
    flat = flat[: -expanded.numel()]
    ops.unpack_(targets, flat, 2.0, layout)
    for target, tensor in zip(targets, tensors[:-1], strict=True):
        assert_same_bits(
            target.contiguous(), tensor.contiguous() if flat_dtype != dtype else (tensor * 0.5 * 2).contiguous()
        )


@pytest.mark.parametrize(("flat_dtype", "dtype"), PAIRS)
def test_what_is_not_finite_is_counted_by_tensor(flat_dtype, dtype, table, generator):
    tensors = [unaligned(numel, dtype, generator) for numel in SIZES] + strided_tensors(dtype, generator)
    tensors[8][5] = math.inf
    tensors[10][[0, 4000, 4095]] = math.nan
    tensors[12][::7], tensors[12][1::7] = -math.inf, torch.finfo(dtype).max
    numel = sum(t.numel() for t in tensors)
    flat, packed = poisoned(numel, dtype=flat_dtype), poisoned(numel, dtype=flat_dtype)

    counts = ops.pack_counting_(flat, tensors, 1 / 3)

    ops.pack_(packed, tensors, 1 / 3)
    assert_same_bits(flat, packed)
    written = flat.split([t.numel() for t in tensors])
    assert counts.tolist() == [int((~part.isfinite()).sum()) for part in written]
    assert counts.tolist()[8] == 1
    assert counts.tolist()[10] == 3


@pytest.mark.parametrize("thread_count", [1, 2])
def test_calls_larger_than_the_caches(thread_count, table, threads, generator):
    threads(thread_count)
    dense = torch.randn(4_500_001, generator=generator)
    dense[-7] = math.inf
    tensors = [dense[1:2_000_000], dense[:3], dense[2_300_000:], torch.randn(300, 400, generator=generator).t()[1:]]
    numel = sum(t.numel() for t in tensors)
    memory = poisoned(numel + 9, dtype=torch.float32)
    flat = memory[5:-4]
    assert flat.nbytes >= 16 * 2**20
    assert ops.pack_counting_(flat, tensors, 1 / 3).tolist() == [0, 0, 1, 0]
    assert_same_bits(flat, torch.cat([t.flatten() for t in tensors]) * (1 / 3))
    total = flat.clone()
    ops.accumulate_(total, flat, 1 / 3)
    assert_same_bits(total, flat + flat * (1 / 3))
    targets = [poisoned(t.numel() + 3, dtype=torch.float32)[2:-1].view(t.shape) for t in tensors]
    ops.unpack_(targets, flat, 0.7)
    assert_same_bits(torch.cat([t.flatten() for t in targets]), flat * 0.7)
    assert memory.isnan().sum() == 9


@needs_native
@pytest.mark.parametrize("carries_float32", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("kind", range(6))
def test_sum_adds_in_order_into_every_destination(kind, scale, carries_float32, table, generator):
    dtype = [*FLOATS, torch.int32, torch.int64][kind]
    if not dtype.is_floating_point:
        scale = 1.0
    for source_count in (1, 2, 3, 4, 5, 6, 8):
        for destination_count in {1, 2, source_count}:
            for numel in (0, 1, 17, 1024, 5003):
                sources = [
                    (unaligned(numel, torch.float64, generator, lead=k % 3) * 100).to(dtype)
                    for k in range(source_count)
                ]
                work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
                products = [(s.to(work) * scale).to(dtype).to(work) if scale != 1 else s.to(work) for s in sources]
                expected = products[0]
                for product in products[1:]:
                    expected = expected + product
                    if not carries_float32:
                        expected = expected.to(dtype).to(work)
                expected = expected.to(dtype)
                # In place, as the all-reduce has it, as far as there are sources.
                targets = (sources + [torch.zeros(numel, dtype=dtype) for _ in range(destination_count)])[
                    :destination_count
                ]
                addresses = [t.data_ptr() for t in targets], [s.data_ptr() for s in sources]
                native.extension._sum(*addresses, kind, numel, scale, carries_float32)
                for target in targets:
                    assert torch.equal(target, expected)


def flat_of(numel=10, **options):
    return torch.full((numel,), 7.0, **options)


def bad_calls():
    """name -> (function's stem, arguments, what the message says)"""
    shared = torch.zeros(20)
    crooked = torch.tensor([1, 10, 2])
    return {
        "numel": ("pack", (flat_of(), [torch.zeros(4), torch.zeros(5)]), r"expected 10 elements, got 9 in 2 tensors"),
        "strided flat": ("unpack", ([torch.zeros(10)], torch.zeros(20)[::2]), r"contiguous.* strides \[2\]"),
        "flat among sources": (
            "pack",
            (shared[:10], [shared[5:15]]),
            r"tensor 0 and flat must not share memory",
        ),
        "expanded target": (
            "unpack",
            ([torch.zeros(1, 5).expand(2, 5)], flat_of()),
            r"tensor 0 must not overlap itself.*\[0, 1\]",
        ),
        "foreign layout": (
            "pack",
            (flat_of(), [torch.zeros(10)], 1.0, ops.layout_of([torch.zeros(5, 2)])),
            r"made for these tensors \(tensor 0 has sizes \[10\]",
        ),
        "layout not dense": (
            "pack",
            (flat_of(), [torch.zeros(10)], 1.0, crooked),
            r"place of tensor 0 must be dense.*strides \[2\]",
        ),
        "shapes": ("accumulate", (torch.zeros(4), torch.zeros(2, 2)), r"expected \[4\], got \[2, 2\]"),
        "orders": (
            "accumulate",
            (torch.zeros(4, 2), torch.zeros(2, 4).t()),
            r"strides \[2, 1\] and \[1, 4\] of sizes \[4, 2\]",
        ),
    }


@pytest.mark.skipif(not ops.native_available(), reason="the native operators check their calls")
@pytest.mark.parametrize("name", bad_calls())
def test_bad_calls_are_refused_and_nothing_is_written(name):
    stem, arguments, message = bad_calls()[name]
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    messages = set()
    for function in [f"{stem}_", f"{stem}_counting_"] if stem == "pack" else [f"{stem}_"]:
        with pytest.raises(RuntimeError, match=message) as raised:
            getattr(ops, function)(*arguments)
        messages.add(str(raised.value))
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert len(messages) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_other_dtypes_run_in_plain_torch(dtype):
    tensors = [torch.arange(-3, 5).to(dtype), torch.full((2, 3), 6).to(dtype)]
    flat = torch.zeros(14, dtype=dtype)
    ops.pack_(flat, tensors, 2.0)
    expected = torch.cat([t.flatten().to(torch.complex64) for t in tensors])
    assert torch.equal(flat.to(torch.complex64), expected * 2)
    ops.unpack_(tensors, flat, 0.5)
    assert torch.equal(torch.cat([t.flatten().to(torch.complex64) for t in tensors]), expected)
    counts = ops.pack_counting_(flat, tensors, 2.0)
    assert counts.tolist() == [0, 0]
    total = torch.ones(14, dtype=dtype)
    ops.accumulate_(total, flat, 0.5)
    assert torch.equal(total.to(torch.complex64), expected + 1)


def test_autograd_sees_nothing():
    parameters = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    flat = torch.zeros(5)
    ops.pack_(flat, parameters, 2.0)
    ops.unpack_(parameters, flat, 2.0)
    ops.accumulate_(parameters[0], flat[:3], 1.0)
    assert not flat.requires_grad
    assert parameters[0].is_leaf
    assert parameters[0].tolist() == [6.0] * 3
    assert parameters[1].tolist() == [4.0] * 2


@needs_native
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_operators_keep_torchs_contract():
    tensors = [torch.randn(4, 3), torch.randn(5, 2).t(), torch.randn(0)]
    flat = torch.zeros(22)
    layout = ops.layout_of(tensors)
    for name, first, second in (
        ("pack_", flat, tensors),
        ("pack_counting_", flat, tensors),
        ("unpack_", tensors, flat),
    ):
        for given in (None, layout):
            torch.library.opcheck(getattr(torch.ops.psengine, name).default, (first, second, 0.5, given))
    torch.library.opcheck(torch.ops.psengine.accumulate_.default, (torch.zeros(4, 3), tensors[0], 0.5))


WITHOUT_EXTENSION = """
import logging
import sys

import pytest
import torch

sys.modules["psengine._native"] = None  # where it is imported, ModuleNotFoundError
logging.basicConfig(level=logging.DEBUG)
import psengine
from psengine.codecs.registry import resolve_codec
from psengine.kernels import ops

assert ops.native_kernels() is None
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
for compress in (None, "bf16", "topk"):
    model = psengine.DistributedDataParallel(torch.nn.Linear(3, 2), strategy=psengine.SyncAllReduce(compress=compress))
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad is not None
    torch.distributed.barrier()
for name in ("int8", "fp4", "onebit"):
    said = f"codec '{name}' needs psengine's native extension [(]import of psengine._native halted.*pip install"
    with pytest.raises(psengine.ConfigurationError, match=said):
        resolve_codec(name)
"""

EARLIER_VERSION = """
import torch
import psengine._native

psengine._native.interface = 1
from psengine.kernels import native

assert native.extension is None
assert native.reason == "it was built from an earlier version of psengine"
"""


CAN_BE_BUILT = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(WITHOUT_EXTENSION, ["WARNING" if CAN_BE_BUILT else "INFO"], id="none"),
        pytest.param(EARLIER_VERSION, [], id="earlier", marks=needs_native),
    ],
)
def test_without_an_extension_of_this_version(program, said):
    """Plain torch runs, one line says so, and what needs the extension is refused."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+):\S+:psengine runs without its native extension", done.stderr, re.MULTILINE) == said
