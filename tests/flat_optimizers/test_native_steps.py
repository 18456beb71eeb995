"""SGD in one native pass, against torch.optim's arithmetic, bit for bit."""

import itertools

import pytest
import torch
from support.native_extension import KERNELS, using_kernels
from torch.optim.sgd import sgd

from psengine.flat_optimizers import native_steps
from psengine.flat_optimizers.finite import is_finite
from psengine.kernels import ops

pytestmark = pytest.mark.skipif(not ops.native_available(), reason="psengine was built without its native extension")

OPTIONS = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov, "maximize": maximize}
    for momentum, dampening, decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.01), (False, True), (False, True)
    )
    if not nesterov or (momentum and not dampening)
]


@pytest.fixture(params=KERNELS)
def table(request):
    with using_kernels(request.param):
        native_steps._has_bits_of_torch.cache_clear()
        yield request.param
    native_steps._has_bits_of_torch.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 7, 16, 31, 65, 1000, 4099])
def test_a_step_has_the_bits_of_torch_or_is_left_to_it(table, dtype, numel):
    torch.manual_seed(numel)
    for options, is_in_place in itertools.product(OPTIONS, (False, True)):
        options = {"lr": 0.1, **options}
        values = torch.randn(numel, dtype=dtype)
        expected, buffer, buffers = values.clone(), torch.zeros(numel, dtype=dtype), [None]
        for step in range(3):
            gradient = torch.randn(numel, dtype=dtype)
            before, into = values.clone(), values if is_in_place else torch.full_like(values, 7.0)
            slot = buffer if options["momentum"] else None
            if not native_steps.step_sgd(values, gradient, slot, options, is_first=step == 0, into=into):
                # torch multiplies and adds in one operation, and this table does not.
                assert table == "baseline" or torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2")
                assert torch.equal(values, before)
                assert is_in_place or bool((into == 7.0).all())
                return
            sgd([expected], [gradient], buffers, foreach=False, fused=False, **options)
            assert torch.equal(into, expected), options
            assert slot is None or torch.equal(slot, buffers[0]), options
            assert is_in_place or torch.equal(values, before)
            values = into


def test_torch_steps_what_the_native_pass_cannot():
    options = {"lr": 0.1, **OPTIONS[0]}
    for values in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.complex64)):
        assert not native_steps.step_sgd(values, values.clone(), None, options, is_first=False, into=values)
        assert bool((values == 1).all())
    values, strided = torch.ones(4), torch.ones(8)[::2]
    assert not native_steps.step_sgd(values, strided, None, options, is_first=False, into=values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(table, dtype):
    values = torch.full((2100,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(values)
    for index, bad in itertools.product((0, 15, 16, 1023, 1024, 2047, 2099), (torch.nan, torch.inf, -torch.inf)):
        poisoned = values.clone()
        poisoned[index] = bad
        assert not is_finite(poisoned), (index, bad)
        assert is_finite(poisoned[index + 1 :])
