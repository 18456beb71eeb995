"""Whether a gradient may be applied. Pure."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from psengine.kernels import native

# csrc/kernels/kernels.h, ScalarKind
_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def is_finite(gradient: Tensor) -> bool:
    """Whether every element is finite; integers are. Reads the tensor once, unless torch's sum over it overflows."""
    kind = _KINDS.get(gradient.dtype)
    if kind is not None and native.extension is not None and gradient.is_cpu and gradient.is_contiguous():
        return bool(native.extension.all_finite(kind, gradient.numel(), gradient.data_ptr()))
    if not gradient.is_floating_point() and not gradient.is_complex():
        return True
    total = gradient.sum()
    if cmath.isfinite(total.item()):
        return True
    parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    low, high = torch.aminmax(parts)  # either is NaN where an element is
    return math.isfinite(low.item()) and math.isfinite(high.item())
