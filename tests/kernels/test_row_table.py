"""Rows found by id: values against NumPy, steps against torch.optim on a sparse embedding, bit for bit."""

import os
import random
import subprocess
import sys

import numpy
import pytest
import torch
from support.native_extension import KERNELS, using_kernels
from support.tensors import assert_same_bits
from torch import nn

from psengine.kernels import native, ops, row_table
from psengine.kernels.row_table import RowTable, first_not_finite, part_of, sum_by_row

pytestmark = pytest.mark.skipif(not ops.native_available(), reason="psengine was built without its native extension")

MASK = 2**64 - 1
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]


@pytest.fixture(params=KERNELS)
def kernels(request):
    with using_kernels(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def generator():
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown where a test fails
    torch.manual_seed(seed)
    return random.Random(seed)


def table_of(dim=4, optimizer="sgd", **options):
    return RowTable(dim, optimizer=optimizer, **{"eps": 1e-10, "seed": 3, "number": 1, "std": 1.0, **options})


def ids_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def rows_of(table, ids):
    out = torch.full((len(ids), table.dim), torch.nan)
    table.gather(ids, out)
    return out


def draw_ids(kind, bound, count):
    """Ids with repeats."""
    if kind == "random":
        return torch.randint(bound, (count,))
    return torch.from_numpy(numpy.random.default_rng(torch.randint(2**31, ()).item()).zipf(1.2, count) % bound)


def rotated(value, bits):
    return ((value << bits) | (value >> (64 - bits))) & MASK


def siphash(key, number):
    low, high = key
    v = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D, low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]

    def round_():
        v[0], v[2] = (v[0] + v[1]) & MASK, (v[2] + v[3]) & MASK
        v[1], v[3] = rotated(v[1], 13) ^ v[0], rotated(v[3], 16) ^ v[2]
        v[0] = rotated(v[0], 32)
        v[2], v[0] = (v[2] + v[1]) & MASK, (v[0] + v[3]) & MASK
        v[1], v[3] = rotated(v[1], 17) ^ v[2], rotated(v[3], 21) ^ v[0]
        v[2] = rotated(v[2], 32)

    for block in (number, 8 << 56):
        v[3] ^= block
        round_()
        v[0] ^= block
    v[2] ^= 0xFF
    for _ in range(3):
        round_()
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def initial_row(row, dim, seed, number, std):
    with numpy.errstate(over="ignore"):
        golden = numpy.uint64(0x9E3779B97F4A7C15)
        z = numpy.uint64(siphash((seed, number), row)) + numpy.arange(1, dim + 1, dtype=numpy.uint64) * golden
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    z ^= z >> numpy.uint64(31)
    total = sum(((z >> numpy.uint64(shift)) & numpy.uint64(0xFFFF)).astype(numpy.int64) for shift in (0, 16, 32, 48))
    scale = numpy.float32(std / numpy.sqrt((65536.0**2 - 1) / 3))
    return torch.from_numpy((total - 131070).astype(numpy.float32) * scale)


@pytest.mark.parametrize("dim", [1, 3, 16, 64, 100])
def test_absent_rows_have_the_same_bits_on_every_processor(kernels, dim):
    table = table_of(dim, seed=2**63 + 5, number=7, std=0.3)
    ids = [0, 5, 2**62, 12345678901]
    expected = torch.stack([initial_row(row, dim, 2**63 + 5, 7, 0.3) for row in ids])
    assert_same_bits(rows_of(table, ids_of(*ids)), expected)
    assert table.rows == 0
    table.step(ids_of(5), torch.zeros(1, dim), 0.1, 1)
    assert_same_bits(rows_of(table, ids_of(*ids)), expected)
    assert (table.rows, table.count_absent(ids_of(*ids))) == (1, 3)


def test_absent_rows_are_normal_in_mean_and_deviation():
    values = rows_of(table_of(64, std=2.0), torch.arange(20_000))
    assert abs(values.mean().item()) < 0.01
    assert abs(values.std().item() - 2) < 0.01
    assert not rows_of(table_of(64, std=0.0), torch.arange(10)).view(torch.int32).any()


@pytest.mark.parametrize("kind", ["random", "zipf"])
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 100, 1031])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_step_has_the_bits_of_torch(kernels, optimizer, dim, kind):
    if (kernels == "baseline") != (torch.backends.cpu.get_cpu_capability() == "DEFAULT"):
        pytest.skip("torch multiplies and adds in one operation, and these kernels do not, or the reverse")
    bound = 700
    table = table_of(dim, optimizer, std=0.5)
    embedding = nn.Embedding(bound, dim, sparse=True)
    table.gather(torch.arange(bound), embedding.weight.data)
    reference = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad)(embedding.parameters(), lr=0.1)
    for step in range(20):
        lr = reference.param_groups[0]["lr"] = 0.1 / (1 + step)
        embedding.weight.grad = None
        used = draw_ids(kind, bound, 400)
        embedding(used).backward(torch.randn(len(used), dim))
        gradient = embedding.weight.grad = embedding.weight.grad.coalesce()
        table.step(gradient.indices()[0], gradient.values(), lr, step)
        reference.step()
    assert_same_bits(rows_of(table, torch.arange(bound)), embedding.weight.data)


def test_a_step_has_the_bits_of_torch_on_a_processor_that_does_not_fuse():
    some = "bits_of_torch and baseline and 64"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, __file__]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "4 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("dim", [1, 3, 16, 64, 100])
def test_rowwise_adagrad_has_one_accumulator_for_each_row(kernels, dim):
    table, ids, sums = table_of(dim, "rowwise_adagrad", eps=1e-3), torch.arange(50), torch.zeros(50, 1)
    expected = rows_of(table, ids)
    for step in range(5):
        gradient = torch.randn(50, dim)
        table.step(ids, gradient, 0.1, step)
        sums += gradient.square().mean(dim=1, keepdim=True)
        expected -= 0.1 * gradient / (sums.sqrt() + 1e-3)
        torch.testing.assert_close(rows_of(table, ids), expected)
    assert table.state_numel == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_kernels_compute_the_same_accumulators(optimizer):
    best, found = ops.native_kernels(), []
    gradient = torch.randn(50, 37)
    for kernels in KERNELS:
        if native.extension._use_kernels(kernels):
            table = table_of(37, optimizer)
            table.step(torch.arange(50), gradient, 0.1, 1)
            found.append(table.changed_since(-1)[2])
    assert native.extension._use_kernels(best)
    assert all(torch.equal(states, found[0]) for states in found)


class Model:
    """A table as a dictionary: id -> (row, stamp)."""

    def __init__(self, table):
        self.table, self.rows = table, {}

    def value(self, row):
        return self.rows[row][0] if row in self.rows else rows_of(table_of(self.table.dim), ids_of(row))[0]

    def evict(self, count, keep):
        order = sorted((stamp, row) for row, (_, stamp) in self.rows.items() if row not in keep)
        gone = [row for _, row in order[:count]]
        for row in gone:
            del self.rows[row]
        return gone


def test_a_table_is_what_a_dictionary_would_be(generator):
    """Pushes, evictions, stores and restarts, in an order drawn anew each time."""
    table = table_of(2)
    model, stamp = Model(table), 0
    for _ in range(400):
        ids = sorted(generator.sample(range(300), generator.randrange(1, 40)))
        what = generator.choice(["step", "step", "step", "evict", "store", "restart"])
        stamp += generator.randrange(2)
        if what == "step":
            gradients = torch.randint(-4, 5, (len(ids), 2)).float()  # exact, fused or not
            for row, gradient in zip(ids, gradients, strict=True):
                model.rows[row] = (model.value(row) - gradient, stamp)
            table.step(ids_of(*ids), gradients, 1.0, stamp)
        elif what == "evict":
            count = generator.randrange(30)
            assert table.evict(count, ids_of(*ids)).tolist() == model.evict(count, ids)
        elif what == "store":
            generator.shuffle(ids)
            rows = torch.randn(len(ids), 2)
            table.store(ids_of(*ids), rows, stamp)
            model.rows.update((row, (value, stamp)) for row, value in zip(ids, rows, strict=True))
        else:
            kept = table.changed_since(-1)
            table = model.table = table_of(2)
            table.restore(*kept)
        assert table.rows == len(model.rows)
        sample = sorted(generator.sample(range(300), 20))
        assert_same_bits(rows_of(table, ids_of(*sample)), torch.stack([model.value(row) for row in sample]))
    ids, rows, states, stamps = table.changed_since(stamp // 2)
    changed = {row: pair for row, pair in model.rows.items() if pair[1] > stamp // 2}
    assert dict(zip(ids.tolist(), stamps.tolist(), strict=True)) == {row: pair[1] for row, pair in changed.items()}
    assert all(torch.equal(value, changed[row][0]) for row, value in zip(ids.tolist(), rows, strict=True))
    assert states.shape == (len(ids), 0)


def test_a_scan_meets_each_row_once():
    table = table_of(3)
    table.step(torch.arange(0, 1000, 7), torch.ones(143, 3), 0.1, 1)
    table.evict(20, ids_of())
    found, start = [], 0
    while start is not None:
        ids, rows, start = table.scan(start, 10)
        assert_same_bits(rows, rows_of(table, ids))
        found += ids.tolist()
    assert sorted(found) == list(range(140, 1000, 7))
    assert table.scan(5000, 10)[2] is None


def test_growth_and_eviction_lose_no_row():
    table, ids = table_of(1, std=0.0), torch.randperm(2**40 // 2**20).to(torch.int64)[:60_000].sort().values * 2**20
    for stamp, some in enumerate(ids.split(7000)):
        table.step(some, some.float()[:, None], -1.0, stamp)
    assert torch.equal(rows_of(table, ids)[:, 0], ids.float())
    assert table.evict(30_000, ids[:10]).tolist() == ids[10:30_010].tolist()
    bytes_before = table.size_bytes
    assert (table.rows, table.count_absent(ids)) == (30_000, 30_000)
    assert torch.equal(rows_of(table, ids[30_010:])[:, 0], ids[30_010:].float())
    table.step(ids[10:30_010], torch.ones(30_000, 1), 1.0, 100)
    assert table.size_bytes == bytes_before
    assert torch.equal(rows_of(table, ids[10:30_010]), torch.full((30_000, 1), -1.0))


@pytest.mark.parametrize(
    ("ids", "says"),
    [((3, 2), "3 and then 2 at place 1"), ((2, 2), "none twice"), ((-1, 2), "-1 at place 0")],
)
def test_a_push_that_is_refused_changes_nothing(ids, says):
    table = table_of(2)
    with pytest.raises(ValueError, match=says):
        table.step(ids_of(*ids), torch.ones(2, 2), 0.1, 1)
    assert table.rows == 0
    assert table.count_absent(ids_of(2)) == 1


def test_negative_ids_are_refused_everywhere():
    table, bad = table_of(2), ids_of(*range(40), -5)
    for call in (lambda: rows_of(table, bad), lambda: table.count_absent(bad), lambda: table.evict(1, ids_of(-5))):
        with pytest.raises(ValueError, match="must not be negative"):
            call()
    with pytest.raises(ValueError, match="got -5 at place 40"):
        table.store(bad, torch.ones(41, 2), 1)
    assert table.rows == 0


def test_tensors_that_do_not_fit_are_refused():
    table, ids, rows = table_of(2), ids_of(1, 2, 3), torch.ones(3, 2)
    unaligned = torch.zeros(25, dtype=torch.uint8)
    misfits = [
        (ids.int(), rows),
        (ids[:2], rows),
        (ids[:, None], rows),
        (ids, rows.double()),
        (ids, torch.ones(3, 3)),
        (ids, torch.ones(2, 3).T),
        (torch.from_numpy(numpy.frombuffer(unaligned.numpy(), dtype=numpy.int64, count=3, offset=1)), rows),
    ]
    for bad_ids, bad_rows in misfits:
        for call in (lambda i, r: table.step(i, r, 0.1, 1), table.gather, lambda i, r: table.store(i, r, 1)):
            with pytest.raises(ValueError, match="contiguous, aligned tensors on the CPU"):
                call(bad_ids, bad_rows)
    with pytest.raises(ValueError, match=r"1 to 65536 elements \(got 0\)"):
        table_of(0)
    assert table.rows == 0


def test_without_the_extension_there_is_a_sentence(monkeypatch):
    assert row_table.refusal() == ""
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(native, "reason", "no compiler")
    assert "native extension (no compiler)" in row_table.refusal()


def test_parts_are_those_of_siphash_and_of_equal_size():
    ids = torch.arange(20_000)
    for parts in (1, 3, 8):
        found = part_of(ids, parts, -2)
        counts = torch.bincount(found, minlength=parts)
        assert len(counts) == parts
        assert (counts - 20_000 / parts).abs().max() < 400
        for row in (0, 1, 777):
            assert found[row] == ((siphash((2**64 - 2, 0x7061727473), row) >> 32) * parts) >> 32
    assert not torch.equal(part_of(ids, 3, 1), part_of(ids, 3, 2))
    with pytest.raises(ValueError, match="parts"):
        part_of(ids, 0, 1)


def test_rows_are_summed_in_the_order_given_as_gloo_adds_ranks():
    pairs = [
        (ids, torch.randn(len(ids), 7)) for ids in (*(draw_ids("zipf", 200, 150).unique() for _ in range(5)), ids_of())
    ]
    expected = {}
    for ids, rows in pairs:
        for row, values in zip(ids.tolist(), rows, strict=True):
            expected[row] = expected[row] + values if row in expected else values
    ids, rows = sum_by_row(pairs)
    assert ids.tolist() == sorted(expected)
    assert_same_bits(rows, torch.stack([expected[row] for row in sorted(expected)]))
    assert sum_by_row(pairs[:1]) == pairs[0]
    with pytest.raises(ValueError, match="must ascend"):
        sum_by_row([pairs[0], (ids_of(2, 1), torch.ones(2, 7))])


def test_the_first_row_that_is_not_finite_is_found():
    rows = torch.randn(100, 5)
    assert first_not_finite(rows) == -1
    assert first_not_finite(rows[:0]) == -1
    rows[70, 0], rows[41, 4] = torch.nan, -torch.inf
    assert first_not_finite(rows) == 41
