"""The dtypes that shared memory sums, as the native side numbers them."""

from __future__ import annotations

import torch

# csrc/kernels/kernels.h, ScalarKind
SCALAR_KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
SUMMED_DTYPES = {*SCALAR_KINDS, torch.complex64, torch.complex128}
STRIDED = torch.strided
# These are never scaled.
INTEGER_KINDS = {SCALAR_KINDS[torch.int32], SCALAR_KINDS[torch.int64]}


def kind_at_once(flat: torch.Tensor, scale: float) -> int | None:
    """The kind of a tensor that is summed as it is; None where it must be looked at more closely, or refused."""
    kind = SCALAR_KINDS.get(flat.dtype)
    if kind is None or (scale != 1.0 and kind in INTEGER_KINDS):
        return None
    # What operands.is_plain asks of a real tensor, without a call.
    is_plain = flat.is_cpu and flat.layout is STRIDED and flat.is_contiguous() and not flat.is_neg()
    return kind if is_plain else None
