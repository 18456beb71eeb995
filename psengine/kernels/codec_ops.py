"""What codecs do with each value, one pass over memory.

``encode_blocks_`` adds the residual, writes a payload and the next residual; ``decode_blocks_`` writes or adds a
payload's values; ``encode_largest_`` takes the values of the largest magnitude. The native operators
(csrc/kernels) are for float32, and for narrower floats by a copy in float32. The residual of float64 is float64,
and added and subtracted in torch. Values on a device without the operators travel through the CPU. Plain torch takes
the largest values where the CPU's operator cannot.

csrc/kernels/kernels.h has the form of a block's payload.
"""

from __future__ import annotations

from dataclasses import dataclass

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

_encode_blocks = native.operator("encode_blocks_")
_decode_blocks = native.operator("decode_blocks_")
_encode_largest = native.operator("encode_largest_")


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
    if native.runs_on("encode_blocks_", values.device) and _are_float32(residual, next_residual):
        _encode_blocks(payload, values.float(), residual, next_residual, form.number)
        return
    corrected = _corrected(values, residual)
    written = torch.empty_like(payload, device="cpu")
    _encode_blocks(written, corrected.float().cpu(), None, None, form.number)
    payload.copy_(written)
    if next_residual is not None:
        decoded = torch.empty_like(corrected)
        decode_blocks_(decoded, payload, form)
        _keep(next_residual, corrected - decoded)


@torch.no_grad()
def decode_blocks_(into: torch.Tensor, payload: torch.Tensor, form: BlockForm, *, adds: bool = False) -> None:
    """Write the values of ``payload`` to ``into``, or add them to it."""
    has_operator = native.runs_on("decode_blocks_", into.device)
    if has_operator and into.dtype is torch.float32:
        _decode_blocks(into, payload, form.number, adds)
        return
    values = torch.empty(into.numel(), device=into.device if has_operator else "cpu")
    _decode_blocks(values, payload.to(values.device), form.number, False)
    values = values.to(into.device)
    if adds:
        into.add_(values)
    else:
        into.copy_(values)


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
    if native.runs_on("encode_largest_", values.device) and _are_float32(residual, next_residual):
        _encode_largest(places, found, values.float(), residual, next_residual)
        return
    corrected = _corrected(values, residual)
    # A magnitude's bits have its order; all NaNs become alike, above infinity.
    magnitudes = corrected.float().abs().view(torch.int32).clamp_(max=0x7F800001)
    taken = magnitudes.argsort(descending=True, stable=True)[: places.numel()].sort().values
    places.copy_(taken)
    found.copy_(corrected[taken])
    if next_residual is not None:
        left = corrected.clone()
        left[taken] -= found.to(left.dtype)
        _keep(next_residual, left)


def _are_float32(*residuals: torch.Tensor | None) -> bool:
    return all(residual is None or residual.dtype is torch.float32 for residual in residuals)


def _corrected(values: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What is encoded, in float32 at least."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide if residual is None else wide + residual


def _keep(next_residual: torch.Tensor, left: torch.Tensor) -> None:
    next_residual.copy_(left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
