"""Fused passes over a flat tensor and the tensors that make it up.

``pack_`` gathers tensors into a flat one, ``unpack_`` spreads it again; both scale and convert in the same pass over
memory. The native operators are ``torch.ops.psengine.*`` (csrc/kernels). They cover floats of 16, 32 and 64 bits on the
CPU and, where built, on CUDA. Plain torch serves other dtypes and devices of the flat tensor, with the same bits, and
does not check a call. Autograd records nothing, leaves may be written, and the native operators leave version counters
unchanged.

The native operators check that a call's tensors fit together before they write.

A tensor's *place* is its part of the flat tensor. A dense tensor, whose elements fill their span of memory exactly once
in any order of dimensions, travels in the order of its memory; any other in row-major order. For another order, such as
that of parameters whose gradients are strided differently, pass the parameters' ``layout_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psengine.kernels import native

# csrc/kernels/kernels.h, the floating kinds of ScalarKind
NATIVE_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})

Strides = tuple[int, ...]


def _fake_counts(flat: torch.Tensor, tensors: Sequence[torch.Tensor], *_: Any, **_options: Any) -> torch.Tensor:
    return flat.new_empty(len(tensors), dtype=torch.int64)


_pack = native.operator("pack_")
_unpack = native.operator("unpack_")
_pack_counting = native.operator("pack_counting_", _fake_counts)
_accumulate = native.operator("accumulate_")


def native_available() -> bool:
    """Whether the native extension is loaded."""
    return native.extension is not None


def native_kernels() -> str | None:
    """The instruction set of the CPU kernels in use ("avx512", "avx2", "baseline"); None without the extension."""
    return None if native.extension is None else str(native.extension.kernels())


def covers(flat: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether native kernels pack tensors of ``dtype`` into ``flat``, and unpack them; else torch's own are faster."""
    return _is_native(flat) and dtype in NATIVE_DTYPES


def layout_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Describe the places of these tensors, for calls with other tensors of the same shapes.

    Returns int64 on the CPU: for each tensor the number of dimensions, the sizes, and the strides of its place.
    """
    numbers: list[int] = []
    for tensor in tensors:
        numbers += [tensor.dim(), *tensor.shape, *_place_strides(tensor)]
    return torch.tensor(numbers, dtype=torch.int64)


def pack_(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0, layout: torch.Tensor | None = None
) -> None:
    """Write every tensor, times ``scale``, to its place in ``flat``, which is mutated.

    Products are taken in float64 where either side is float64, else in float32, and rounded to ``flat``'s dtype.

    Args:
        flat: contiguous, 1-D, as many elements as all tensors together; shares no memory with them.
        tensors: of any floating dtypes and strides, on ``flat``'s device.
        scale: multiplies every element.
        layout: from ``layout_of``; None derives the places from the tensors themselves.

    Raises:
        RuntimeError: the tensors do not fit together.
    """
    if _is_native(flat):
        _pack(flat, tensors, scale, layout)
        return
    _convert_(_places(flat, tensors, layout), tensors, scale)


def unpack_(
    tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float = 1.0, layout: torch.Tensor | None = None
) -> None:
    """Write every place of ``flat``, times ``scale``, to its tensor; tensors are mutated, and lie apart. See ``pack_``.

    Raises:
        RuntimeError: the tensors do not fit together.
    """
    if _is_native(flat):
        _unpack(tensors, flat, scale, layout)
        return
    _convert_(tensors, _places(flat, tensors, layout), scale)


def pack_counting_(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0, layout: torch.Tensor | None = None
) -> torch.Tensor:
    """``pack_``; return for each tensor how many of the values written are not finite: int64, on ``flat``'s device."""
    if _is_native(flat):
        counts: torch.Tensor = _pack_counting(flat, tensors, scale, layout)
        return counts
    pack_(flat, tensors, scale, layout)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return torch.stack([part.isfinite().logical_not_().sum() for part in parts])


def accumulate_(destination: torch.Tensor, source: torch.Tensor, scale: float = 1.0) -> None:
    """Add ``source`` times ``scale`` to ``destination``, which is mutated.

    Product and sum are taken in float64 where either side is float64, else in float32, and rounded once.

    Args:
        destination: of any floating dtype; dense.
        source: of any floating dtype, and of ``destination``'s shape, strides and device; shares no memory with it.
        scale: multiplies every element of ``source``.

    Raises:
        RuntimeError: the two do not fit together.
    """
    if _is_native(destination):
        _accumulate(destination, source, scale)
        return
    work = _work_dtype(destination, source)
    with torch.no_grad():
        destination.copy_(destination.to(work) + source.to(work) * scale)


def _is_native(flat: torch.Tensor) -> bool:
    return flat.dtype in NATIVE_DTYPES and native.runs_on("pack_", flat.device)


@torch.no_grad()
def _convert_(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], scale: float) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source if scale == 1 else source.to(_work_dtype(destination, source)) * scale)


def _work_dtype(first: torch.Tensor, second: torch.Tensor) -> torch.dtype:
    """What products and sums of these are taken in."""
    return torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)


# ---- places ----


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of these sizes and strides fill their span of memory exactly once, in some order."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return 0 in shape
        expected *= size
    return True


def in_memory_order(tensor: torch.Tensor, shape: Sequence[int], strides: Strides) -> torch.Tensor:
    """The elements of ``tensor``, which has this shape, as they lie in a dense tensor of these strides.

    Returns 1-D: a view where the tensor's own strides are equal, else of a copy.
    """
    if tensor.stride() != strides:
        tensor = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _row_major(shape: Sequence[int]) -> Strides:
    strides: list[int] = []
    expected = 1
    for size in reversed(shape):
        strides.append(expected)
        expected *= size
    return tuple(reversed(strides))


def _place_strides(tensor: torch.Tensor) -> Strides:
    return tensor.stride() if is_dense(tensor.shape, tensor.stride()) else _row_major(tensor.shape)


def _places(flat: torch.Tensor, tensors: Sequence[torch.Tensor], layout: torch.Tensor | None) -> list[torch.Tensor]:
    """Each tensor's place: a view of ``flat`` of the tensor's shape."""
    numbers = None if layout is None else layout.tolist()
    places, offset, begin = [], flat.storage_offset(), 0
    for tensor in tensors:
        if numbers is None:
            strides = _place_strides(tensor)
        else:
            strides = tuple(numbers[begin + 1 + tensor.dim() : begin + 1 + 2 * tensor.dim()])
            begin += 1 + 2 * tensor.dim()
        places.append(flat.as_strided(tensor.shape, strides, offset))
        offset += tensor.numel()
    return places
