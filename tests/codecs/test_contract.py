"""The contract of codecs, parametrized over every codec: one line of registration puts a new one under it."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from support.top_one_codec import TopOne, register

import psengine
from psengine.codecs.base import Codec, CodecState
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import CODECS, codec_for, resolve_codec
from psengine.errors import ConfigurationError, ProtocolError
from psengine.strategies.registry import resolve_strategy

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64]
NUMELS = [1, 7, 1000]


def rounded_to(digits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Half a unit in the last of so many binary digits, down to float16's smallest number."""
    return lambda values: values.abs().double() * 2.0**-digits + 2.0**-25


# The codecs that the contract holds, and how far a decoded value may be from the one that was encoded.
ERROR_BOUNDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda values: torch.zeros_like(values, dtype=torch.float64),
    "bf16": rounded_to(8),
    "fp16": rounded_to(11),
    "fp32": rounded_to(24),
    "int8": lambda values: values.abs().double().amax() / 127 / 2 * (1 + 2.0**-7) + values.abs().double() * 2.0**-8,
    # Steps of 2 for values whose largest is at least 3 times the scale.
    "fp4": lambda values: (values.abs().double().amax() / 3).expand_as(values),
    "onebit": lambda values: values.abs().double().amax().expand_as(values),
    "topk": lambda values: values.abs().double().amax().expand_as(values),
    "top1": lambda values: values.abs().double().sort().values[-2:-1].expand_as(values),
}
register()


@pytest.fixture(params=list(ERROR_BOUNDS))
def codec(request) -> Codec:
    return resolve_codec(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(12)


def values_of(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-1000, 1000, (numel,), dtype=dtype, generator=generator)
    drawn_dtype = torch.complex64 if dtype.is_complex else torch.float64
    return torch.randn(numel, dtype=drawn_dtype, generator=generator).to(dtype)


def encoded(codec: Codec, values: torch.Tensor, state: CodecState | None = None) -> torch.Tensor:
    """The payload; what stands before and behind the payload's memory must stay what it was."""
    spec = codec.payload_spec(values.numel(), values.dtype)
    memory = torch.full((spec.numel + 2,), 99, dtype=torch.float64).to(spec.dtype)
    before = values.clone()
    codec.encode(values, memory[1:-1], state)
    assert torch.equal(values, before) or not before.isfinite().all(), "encode mutated the values"
    assert (memory[0], memory[-1]) == (99, 99), "encode wrote beyond the payload"
    assert spec.size_bytes == memory[1:-1].nbytes
    return memory[1:-1]


def decoded(codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    memory = torch.full((numel + 2,), 7, dtype=dtype)
    codec.decode(payload, memory[1:-1])
    assert (memory[0], memory[-1]) == (7, 7), "decode wrote beyond the values"
    return memory[1:-1]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


def test_every_codec_of_the_registry_is_held_to_the_contract():
    assert set(CODECS) == set(ERROR_BOUNDS)
    assert all(resolve_codec(name).name == name for name in CODECS)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back_within_the_error_bound(codec, dtype, numel, generator):
    values = values_of(numel, dtype, generator)
    chosen = codec_for(codec, dtype)
    result = decoded(chosen, encoded(chosen, values), numel, dtype)
    bound = ERROR_BOUNDS[chosen.name]
    if chosen.is_lossless:
        assert bits(result) == bits(values), "what a codec does not cover travels as it is"
    elif numel > 1 or chosen.name != "top1":
        assert ((result.double() - values.double()).abs() <= bound(values)).all()


def test_lossless_says_so_truly(codec, generator):
    odd = torch.tensor([0.1, -0.0, 1e-300, 1e300, torch.nan, torch.inf], dtype=torch.float64)
    assert (bits(decoded(codec, encoded(codec, odd), odd.numel(), odd.dtype)) == bits(odd)) == codec.is_lossless


def test_payloads_that_a_collective_may_add_are_values_in_another_dtype(codec, generator):
    values = values_of(100, torch.float64, generator)
    dtype = codec.summed_dtype(values.dtype)
    if dtype is None:
        return
    assert codec.make_state(100, values.dtype, values.device) is None
    assert codec.payload_spec(100, values.dtype).dtype is dtype
    assert bits(encoded(codec, values)) == bits(values.to(dtype))
    payload = encoded(codec, values) + encoded(codec, values.flip(0))
    assert bits(decoded(codec, payload, 100, values.dtype)) == bits(payload.to(values.dtype))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(codec, poison, generator):
    values = values_of(100, torch.float64, generator)
    values[37] = poison
    state = codec.make_state(100, values.dtype, values.device)
    assert not decoded(codec, encoded(codec, values, state), 100, values.dtype).isfinite().all()
    if state is not None:
        assert state.residual.isfinite().all(), "a residual that is not finite would spoil every later payload"


def test_zeros_are_zeros(codec):
    zeros = torch.zeros(10, dtype=torch.float64)
    assert decoded(codec, encoded(codec, zeros), 10, zeros.dtype).tolist() == [0.0] * 10


def test_what_a_payload_leaves_out_goes_with_later_ones(codec, generator):
    """The sum of what arrived is the sum of what was sent, but for the residual. Two buckets share nothing."""
    values, device = values_of(50, torch.float64, generator), torch.device("cpu")
    state, other = (codec.make_state(50, values.dtype, device) for _ in range(2))
    if state is None:
        assert other is None
        return
    arrived = torch.zeros_like(values)
    for _ in range(20):
        arrived += decoded(codec, encoded(codec, values, state), 50, values.dtype)
    assert torch.allclose(arrived + state.residual, 20 * values, rtol=0, atol=1e-9)
    assert other.residual.tolist() == [0.0] * 50


def test_a_payload_that_may_be_cut_is_that_of_the_cut_values(codec, generator):
    grain = codec.slice_numel
    if grain is None:
        return
    values = values_of(2 * grain + 5, torch.float32, generator)
    payload = encoded(codec, values)
    for first in (0, grain, 2 * grain):
        skipped = codec.payload_spec(first, values.dtype).numel
        assert bits(encoded(codec, values[first:])) == bits(payload[skipped:])


def test_decode_add_is_decode_and_an_addition(codec, generator):
    values, total = values_of(600, torch.float64, generator), values_of(600, torch.float64, generator)
    payload = encoded(codec, values)
    expected = total + decoded(codec, payload, 600, total.dtype)
    codec.decode_add(payload, total)
    assert torch.equal(total, expected)


def test_a_residual_is_given_back_once(codec, generator):
    values = values_of(400, torch.float32, generator)
    state = codec.make_state(400, values.dtype, values.device)
    if state is None:
        return
    encoded(codec, values, state)
    kept = state.residual.clone()
    encoded(codec, values, state)
    for _ in range(2):
        state.give_back()
        assert torch.equal(state.residual, kept)
    encoded(codec, values, state)
    assert not torch.equal(state.residual, kept)
    state.reset()
    assert not state.residual.any()


def descend(codec: Codec, rate: float, steps: int, state: CodecState | None) -> torch.Tensor:
    """Gradient descent on the mean of three quadratics <a_i, x>^2 + |x|^2 / 4, a gradient encoded for each."""
    directions = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
    x, states = torch.ones(3, dtype=torch.float64), [copy.deepcopy(state) for _ in directions]
    for _ in range(steps):
        gradients = [2 * (a @ x) * a + x / 2 for a in directions]
        x = x - rate / 3 * sum(
            decoded(codec, encoded(codec, gradient, own), 3, x.dtype)
            for gradient, own in zip(gradients, states, strict=True)
        )
    return x


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_without_error_feedback_top_1_diverges_by_the_predicted_factor_and_with_it_converges(rate):
    """Beznosikov et al. 2020, https://arxiv.org/abs/2002.12410, example 1."""
    codec = resolve_codec("topk:ratio=0.33")
    factor = 1 + 11 * rate / 6
    assert torch.allclose(descend(codec, rate, 10, None), torch.full((3,), factor**10, dtype=torch.float64), rtol=1e-5)
    state = codec.make_state(3, torch.float64, torch.device("cpu"))
    assert descend(codec, rate, 2000, state).abs().max() < 0.05


def test_any_bytes_of_the_right_size_are_decoded_or_refused(codec, generator):
    """A server decodes what a worker sent."""
    spec = codec.payload_spec(100, torch.float64)
    for _ in range(200):
        raw = torch.randint(0, 256, (spec.size_bytes,), dtype=torch.uint8, generator=generator)
        try:
            decoded(codec, raw.view(spec.dtype), 100, torch.float64)
        except ProtocolError:
            assert codec.name in ("top1", "topk")


def test_a_codec_travels_to_other_processes(codec, generator):
    values = values_of(9, torch.float64, generator)
    copy = pickle.loads(pickle.dumps(codec))
    assert bits(encoded(copy, values)) == bits(encoded(codec, values))
    assert repr(copy) == codec.name


def test_what_users_write():
    assert resolve_codec(None) is IDENTITY
    assert resolve_codec(IDENTITY) is IDENTITY
    with pytest.raises(ConfigurationError, match=r"unknown codec \(expected one of .*'bf16'.* got 'bf61'\).*mean bf16"):
        resolve_codec("bf61")
    with pytest.raises(ConfigurationError, match=r"'powersgd'\). Fix: strategy 'sync' with model.register_comm_hook\("):
        resolve_strategy("sync-server:compress=powersgd,rank=4")
    with pytest.raises(ConfigurationError, match=r"unknown option 'ratio' \(expected .*no options of codec 'bf16'"):
        resolve_codec("bf16:ratio=0.01")
    with pytest.raises(ConfigurationError, match=r"unknown codec \(expected None, .* got 8\)"):
        resolve_codec(8)
    with pytest.raises(ConfigurationError, match="codec 'bf16' is registered already"):
        psengine.register_codec("bf16", TopOne)


class Rounded(TopOne):
    """Its options are those that the constructor was given."""

    def __init__(self, ratio: float = 0.5, *, is_fast: bool = False) -> None:
        self.ratio = ratio


def test_servers_make_an_equal_codec_from_the_constructors_arguments():
    codec = pickle.loads(pickle.dumps(Rounded(0.25, is_fast=True)))
    assert codec.options == {"ratio": 0.25, "is_fast": True}
    assert str(Rounded()) == TopOne.name
    with pytest.raises(TypeError, match="speed"):
        Rounded(speed=3)
    name = "rounded"
    try:
        CODECS.register(name, Rounded)
        made = resolve_codec(str(codec).replace(TopOne.name, name))  # as HELLO carries it
        assert (made.ratio, made.options) == (0.25, codec.options)
    finally:
        del CODECS._factories[name]
