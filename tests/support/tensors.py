"""Random tensors of any dtype, and comparisons to the bit."""

import functools
import hashlib

import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# What collectives add.
SUMMED = [*FLOATS, torch.int32, torch.int64, torch.complex64]
_SMALL = (torch.uint8, torch.int8, torch.bool)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def addend(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's values, the same each time: small ones where the dtype holds no others."""
    return _drawn(rank, numel, dtype).clone()


@functools.lru_cache(maxsize=256)
def _drawn(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + numel)
    if dtype.is_complex:
        return torch.complex(*torch.randn(2, numel, generator=generator)).to(dtype)
    if dtype in _SMALL:
        return torch.randint(0, 2, (numel,), generator=generator).to(dtype)
    return (torch.randn(numel, generator=generator) * 10).to(dtype)


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's bits."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return hashlib.sha256(bytes(real.contiguous().view(torch.uint8).numpy())).hexdigest()


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the last bit, zeros' signs included; of NaNs only the places must agree."""
    got, expected = got.cpu().contiguous(), expected.cpu().contiguous()
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    is_nan = expected.isnan()
    assert torch.equal(got.isnan(), is_nan)
    kind = _BITS[expected.element_size()]
    differing = ((got.view(kind) != expected.view(kind)) & ~is_nan).nonzero()
    assert not len(differing), (
        f"{len(differing)} of {got.numel()} differ, first at {differing[0].tolist()}: "
        f"{got[tuple(differing[0])]}, {expected[tuple(differing[0])]}"
    )
