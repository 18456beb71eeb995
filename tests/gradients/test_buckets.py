"""Bucket layout against native DDP's own function, and the two copies against plain arithmetic."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native_twins import Net, seeded
from support.processes import in_ranks
from support.top_one_codec import TopOne

import psengine
from psengine.errors import ConfigurationError, ReductionError
from psengine.gradients.packing import Packing, SparsePacking, ViewPacking
from psengine.tensors.bucket import EAGER_PACK_BYTES, Bucket
from psengine.tensors.bucket_plan import bucket_limits_bytes, plan_buckets
from psengine.tensors.share import Share

DTYPES = [torch.float32, torch.float64, torch.float16]


@st.composite
def layouts(draw):
    count = draw(st.integers(1, 40))
    sizes = draw(st.lists(st.integers(0, 3000), min_size=count, max_size=count))
    kinds = draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count))
    sparse = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    limits = draw(st.lists(st.integers(1, 9000), min_size=1, max_size=4))
    order = draw(st.none() | st.permutations(range(count)))
    return [torch.empty(n, dtype=d) for n, d in zip(sizes, kinds, strict=True)], limits, sparse, order


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_plan_equals_native(layout):
    tensors, limits, sparse, order = layout
    plans = plan_buckets(tensors, limits, sparse, order)
    if order is None:
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits, sparse)
        assert [list(p) for p in plans] == expected
    else:
        # With an order native takes tensors in that order; what is left over at the end it emits in the order of a
        # hash table, so only the set of buckets is defined.
        in_order = [tensors[i] for i in order]
        expected, _ = dist._compute_bucket_assignment_by_size(in_order, limits, sparse, list(order))
        assert sorted(list(p) for p in plans) == sorted(expected)


@pytest.mark.parametrize(
    ("cap_mib", "caps_mib", "limits_bytes"),
    [(None, None, [2**20, 25 * 2**20]), (0.5, None, [2**19]), (7, [1, 2], [2**20, 2 * 2**20])],
)
def test_limits_of_buckets(cap_mib, caps_mib, limits_bytes):
    assert bucket_limits_bytes(cap_mib, caps_mib) == limits_bytes
    with pytest.raises(ConfigurationError, match=r"expected a number >= 0, got -1"):
        bucket_limits_bytes(-1, None)


def make_bucket(parameters, *, sparse=False):
    plan = tuple(range(len(parameters)))
    names = [f"p{i}" for i in range(len(parameters))]

    def allocate(numel, dtype, device):
        return torch.full((numel,), torch.nan, dtype=dtype, device=device)  # poisoned: all must be written

    return Bucket(0, plan, parameters, names, sparse=sparse, allocate=allocate)


def random_parameters(dtype=torch.float32):
    large = EAGER_PACK_BYTES // 4
    shapes = [(3,), (2, 3, 4, 5), (large,), (), (0,), (7, 1), (large // 8, 8), (5,)]
    parameters = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape).to(dtype))
        if len(shape) == 4:
            p = torch.nn.Parameter(p.detach().to(memory_format=torch.channels_last))
        p.grad = torch.randn_like(p)
        parameters.append(p)
    return parameters


def pack_all(packing, divisor):
    for position in packing.bucket.eager_runs:
        packing.pack_one(position, Share(divisor))
    packing.pack_rest(Share(divisor))


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("divisor", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_pack_multiplies_by_the_reciprocal_like_native(as_view, divisor, dtype):
    parameters = random_parameters(dtype)
    expected = [p.grad * (1.0 / divisor) if divisor != 1 else p.grad.clone() for p in parameters]
    bucket = make_bucket(parameters)
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    packing = (ViewPacking if as_view else Packing)(bucket)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    pack_all(packing, divisor)
    assert not bucket.flat.isnan().any()
    for parameter, view, want in zip(parameters, bucket.views, expected, strict=True):
        assert torch.equal(view, want)
        assert view.stride() == parameter.stride()
        assert (parameter.grad.data_ptr() == view.data_ptr()) == as_view or view.numel() == 0


@pytest.mark.parametrize("missing", [0, 2])  # one of a batch, one packed eagerly
def test_undefined_gradient_counts_as_zero_and_is_created(missing):
    parameters = random_parameters()
    parameters[missing].grad = None
    bucket = make_bucket(parameters)
    packing = Packing(bucket)
    pack_all(packing, 2)
    assert torch.equal(bucket.views[missing], torch.zeros_like(parameters[missing]))
    result = torch.randn_like(bucket.flat)
    packing.unpack(result, None)
    for parameter, want in zip(parameters, bucket.views_of(result), strict=True):
        assert torch.equal(parameter.grad, want)
        assert parameter.grad.untyped_storage().data_ptr() != result.untyped_storage().data_ptr() or want.numel() == 0


def test_sparse_gradient_in_a_dense_bucket_is_named():
    parameters = random_parameters()
    parameters[0].grad = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    with pytest.raises(ReductionError, match=r"'p0' received a sparse gradient"):
        pack_all(Packing(make_bucket(parameters)), 2)


def test_a_dense_gradient_in_a_sparse_bucket_is_named():
    parameter = torch.nn.Parameter(torch.randn(4, 2))
    packing = SparsePacking(make_bucket([parameter], sparse=True))
    parameter.grad = torch.zeros(4, 2)
    with pytest.raises(ReductionError, match="Expected variable to have sparse gradient"):
        packing.pack_rest(Share(2))


@in_ranks(1)
def test_a_codec_changes_the_gradients_of_one_rank_with_views_and_without(rank, world_size):
    for codec in ("bf16", TopOne()):
        results = []
        for as_view in (False, True):
            model = seeded(Net)
            strategy = psengine.SyncAllReduce(compress=codec)
            ddp = psengine.DistributedDataParallel(model, strategy=strategy, gradient_as_bucket_view=as_view)
            ddp(torch.linspace(0, 1, 8).view(2, 4), use_spare=True).pow(2).sum().backward()
            results.append([p.grad.clone() for p in model.parameters()])
        exact = seeded(Net)
        exact(torch.linspace(0, 1, 8).view(2, 4), use_spare=True).pow(2).sum().backward()
        for plain, view, gradient in zip(*results, [p.grad for p in exact.parameters()], strict=True):
            assert torch.equal(plain, view)
            assert not torch.equal(plain, gradient)
            assert codec != "bf16" or torch.equal(plain, gradient.bfloat16().float())
