"""What codecs do with each value, one pass over memory, with a reference in plain torch.

``encode_blocks_`` adds the residual, writes a payload and the next residual; ``decode_blocks_`` writes or adds a
payload's values; ``encode_largest_`` takes the values of the largest magnitude. The native operators
(csrc/kernels/codecs*) are for float32, and for narrower floats by a copy in float32; they have the references' bits.
The references run everything else, "topk" on CUDA too.

csrc/kernels/kernels.h has the form of a block's payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from psengine.kernels import native


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """How values are written.

    Attributes:
        number: of the enum BlockFormat in csrc/kernels/kernels.h.
        numel: values in a block.
        scale_bytes, code_bytes: of a block's payload.
    """

    number: int
    numel: int
    scale_bytes: int
    code_bytes: int

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the payload of so many values; its last block is whole."""
        return -(-numel // self.numel) * (self.scale_bytes + self.code_bytes)


INT8 = BlockForm(number=0, numel=256, scale_bytes=4, code_bytes=256)
FP4 = BlockForm(number=1, numel=32, scale_bytes=1, code_bytes=16)
ONEBIT = BlockForm(number=2, numel=512, scale_bytes=4, code_bytes=64)


@torch.no_grad()
def encode_blocks_(
    payload: torch.Tensor,
    values: torch.Tensor,
    form: BlockForm,
    residual: torch.Tensor | None = None,
    next_residual: torch.Tensor | None = None,
) -> None:
    """Write the payload of ``values + residual``, and to ``next_residual`` what the payload leaves out.

    A block with a value that is not finite decodes to NaN, and leaves zeros.

    Args:
        payload: uint8, 1-D, of ``form.payload_bytes``; mutated.
        values: 1-D, of any floating dtype; contiguous.
        form: of the payload.
        residual: like ``values`` in size; None is zeros.
        next_residual: mutated; may be ``residual``.
    """
    if _is_native(values, residual, next_residual):
        torch.ops.psengine.encode_blocks_(payload, values.float(), residual, next_residual, form.number)
        return
    encode_blocks_reference_(payload, values, form, residual, next_residual)


@torch.no_grad()
def decode_blocks_(into: torch.Tensor, payload: torch.Tensor, form: BlockForm, *, adds: bool = False) -> None:
    """Write the values of ``payload`` to ``into``, or add them to it."""
    if _is_native(into):
        wide = into.float() if adds or into.dtype is torch.float32 else torch.empty_like(into, dtype=torch.float32)
        torch.ops.psengine.decode_blocks_(wide, payload, form.number, adds)
        if wide is not into:
            into.copy_(wide)
        return
    decode_blocks_reference_(into, payload, form, adds=adds)


@torch.no_grad()
def encode_largest_(
    places: torch.Tensor,
    found: torch.Tensor,
    values: torch.Tensor,
    residual: torch.Tensor | None = None,
    next_residual: torch.Tensor | None = None,
) -> None:
    """Write the places, ascending, and the values of the largest magnitudes of ``values + residual``.

    Of equal magnitudes the first are taken; NaN is above infinity. ``next_residual`` gets the rest, and 0 for what is
    not finite.

    Args:
        places: int32, 1-D; mutated.
        found: float32, as many as ``places``; mutated.
        values: as in ``encode_blocks_``.
        residual: likewise.
        next_residual: likewise.
    """
    if _is_native(values, residual, next_residual) and values.device.type == "cpu":
        torch.ops.psengine.encode_largest_(places, found, values.float(), residual, next_residual)
        return
    encode_largest_reference_(places, found, values, residual, next_residual)


def _is_native(values: torch.Tensor, *residuals: torch.Tensor | None) -> bool:
    """Narrower values are computed with in float32, by references and operators alike."""
    return (
        values.device.type in _NATIVE_DEVICES
        and values.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and all(residual is None or residual.dtype is torch.float32 for residual in residuals)
    )


# ---- references ----

# Below it the reciprocal of a scale is infinite, and such values are zero.
_SMALLEST_LARGEST = 127 * torch.finfo(torch.float32).tiny
# What is larger counts as infinite, because a code may stand for more than the value.
_LARGEST = 3 * 2.0**126
# Magnitudes of the codes 0 to 7 of E2M1.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midway between two of them; of a tie the even code is taken.
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_blocks_reference_(
    payload: torch.Tensor,
    values: torch.Tensor,
    form: BlockForm,
    residual: torch.Tensor | None = None,
    next_residual: torch.Tensor | None = None,
) -> None:
    """``encode_blocks_`` in plain torch. Codes are computed in float32, the residual in the values' own dtype."""
    if not values.numel():
        return
    corrected = _corrected(values, residual)
    blocks = torch.zeros(-(-values.numel() // form.numel) * form.numel, dtype=torch.float32, device=values.device)
    blocks[: values.numel()] = corrected
    blocks = blocks.view(-1, form.numel)
    if form == INT8:
        scale, codes = _int8_codes(blocks)
    elif form == FP4:
        scale, codes = _fp4_codes(blocks)
    else:
        counts = torch.full((len(blocks), 1), float(form.numel), device=values.device)
        counts[-1:] = values.numel() - (len(blocks) - 1) * form.numel
        scale, codes = _signs(blocks, counts)
    payload.copy_(torch.cat([scale, codes], dim=1).view(-1))
    if next_residual is not None:
        decoded = torch.empty_like(corrected)
        decode_blocks_reference_(decoded, payload, form)
        _keep(next_residual, corrected - decoded)


def decode_blocks_reference_(into: torch.Tensor, payload: torch.Tensor, form: BlockForm, *, adds: bool = False) -> None:
    """``decode_blocks_`` in plain torch."""
    if not into.numel():
        return
    blocks = payload.view(-1, form.scale_bytes + form.code_bytes)
    scale, codes = (
        part.clone(memory_format=torch.contiguous_format) for part in blocks.tensor_split([form.scale_bytes], dim=1)
    )
    if form == INT8:
        values = codes.view(torch.int8).float() * scale.view(torch.float32)
    elif form == FP4:
        exponents = scale.int()
        bits = torch.where(exponents == 0, 0x400000, torch.where(exponents == 255, 0x7FC00000, exponents << 23))
        both = torch.cat([codes & 15, codes >> 4], dim=1)
        magnitudes = torch.tensor(_E2M1, device=payload.device)[(both & 7).int()] * bits.int().view(torch.float32)
        values = torch.where(both >= 8, -magnitudes, magnitudes)
    else:
        signs = (codes.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=payload.device)) & 1
        wide = scale.view(torch.float32).expand(-1, form.numel)
        values = torch.where(signs.view(-1, form.numel).bool(), -wide, wide)
    flat = values.reshape(-1)[: into.numel()]
    if adds:
        into.copy_(into + flat)
    else:
        into.copy_(flat)


def encode_largest_reference_(
    places: torch.Tensor,
    found: torch.Tensor,
    values: torch.Tensor,
    residual: torch.Tensor | None = None,
    next_residual: torch.Tensor | None = None,
) -> None:
    """``encode_largest_`` in plain torch."""
    corrected = _corrected(values, residual)
    magnitudes = corrected.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    keys = torch.where(corrected.isnan(), 2, torch.where(magnitudes.isinf(), 1, 0))
    # The order by magnitude, then that by what is above all magnitudes; both keep the order of equals.
    order = magnitudes.argsort(descending=True, stable=True)
    order = order[keys[order].argsort(descending=True, stable=True)]
    taken = order[: places.numel()].sort().values
    places.copy_(taken)
    found.copy_(corrected[taken])
    if next_residual is not None:
        left = corrected.clone()
        left[taken] -= found.to(left.dtype)
        _keep(next_residual, left)


def _corrected(values: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What is encoded, in float32 at least."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.to(dtype) if residual is None else values.to(dtype) + residual.to(dtype)


def _keep(next_residual: torch.Tensor, left: torch.Tensor) -> None:
    next_residual.copy_(left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


def _bytes_of(scale: torch.Tensor) -> torch.Tensor:
    return scale.contiguous().view(torch.uint8)


def _int8_codes(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = blocks.abs().amax(dim=1, keepdim=True)
    is_finite = largest <= _LARGEST
    is_large = is_finite & (largest >= _SMALLEST_LARGEST)
    # By numbers torch multiplies with their reciprocal: ``127 / largest``, and on CUDA ``largest / 127``.
    steps_above_zero = torch.full_like(largest, 127)
    scale = torch.where(is_finite, torch.where(is_large, largest / steps_above_zero, 0.0), torch.nan)
    inverse = torch.where(is_large, steps_above_zero / largest, 0.0)
    steps = torch.where(is_finite, (blocks * inverse).round(), 0.0)  # ties to even
    return _bytes_of(scale), steps.to(torch.int8).view(torch.uint8)


def _fp4_codes(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = blocks.abs().amax(dim=1, keepdim=True)
    is_finite = largest <= _LARGEST
    bits = largest.contiguous().view(torch.int32)
    # 6 is 1.5 * 2^2: the smallest power of two with which no value is beyond it.
    exponent = ((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).int()).clamp(min=1)
    inverse = ((254 - exponent).clamp(min=1) << 23).view(torch.float32)
    magnitudes = (blocks * inverse).abs()
    codes = torch.zeros_like(blocks, dtype=torch.int32)
    for index, bound in enumerate(_E2M1_BOUNDS):
        codes += magnitudes >= bound if index % 2 else magnitudes > bound
    codes = torch.where(is_finite, codes | (blocks.signbit().int() << 3), 0).to(torch.uint8)
    scale = torch.where(is_finite, exponent, 255).to(torch.uint8)
    return scale, codes[:, :16] | (codes[:, 16:] << 4)


def _signs(blocks: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lanes = torch.zeros(len(blocks), 16, device=blocks.device)
    for part in blocks.abs().split(16, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:  # in the order of the kernels
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    scale = torch.where(lanes.isfinite(), lanes / counts, torch.nan)
    bits = blocks.signbit().view(len(blocks), -1, 8).to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return _bytes_of(scale), (bits * weights).sum(dim=2, dtype=torch.uint8)


# ---- the native operators ----

_NATIVE_DEVICES: frozenset[str] = frozenset()

if native.extension is not None:
    _NATIVE_DEVICES = frozenset(
        device
        for device, key in {"cpu": "CPU", "cuda": "CUDA"}.items()
        if torch._C._dispatch_has_kernel_for_dispatch_key("psengine::encode_blocks_", key)
    )
    # Autograd has nothing to record.
    _autograd = torch.library.Library("psengine", "IMPL")
    for _name in ("encode_blocks_", "decode_blocks_", "encode_largest_"):
        _autograd.impl(_name, torch.library.fallthrough_kernel, "Autograd")
        _fake: Any = lambda *_, **__: None  # noqa: E731
        torch.library.register_fake(f"psengine::{_name}", _fake)
