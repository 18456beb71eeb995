"""Fused passes over a flat tensor and the tensors that make it up, each with a reference in plain torch.

``pack_`` gathers tensors into a flat one, ``unpack_`` spreads it again; both scale and convert in the same pass over
memory. The native operators are ``torch.ops.psengine.*`` (csrc/kernels). They cover floats of 16, 32 and 64 bits on the
CPU and, where built, on CUDA. The references run everything else, with the same bits. Autograd records nothing, leaves
may be written, and the native operators leave version counters unchanged.

The native operators check that a call's tensors fit together before they write. The references do not check.

A tensor's *place* is its part of the flat tensor. A dense tensor, whose elements fill their span of memory exactly once
in any order of dimensions, travels in the order of its memory; any other in row-major order. For another order, such as
that of parameters whose gradients are strided differently, pass the parameters' ``layout_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.kernels import native

# csrc/kernels/kernels.h, the floating kinds of ScalarKind
NATIVE_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})

# setup.py, CUDA_ARCHITECTURES
OLDEST_CUDA_CAPABILITY = (7, 5)

Strides = tuple[int, ...]


def native_available() -> bool:
    """Whether the native extension is loaded."""
    return native.extension is not None


def native_kernels() -> str | None:
    """The instruction set of the CPU kernels in use ("avx512", "avx2", "baseline"); None without the extension."""
    return None if native.extension is None else str(native.extension.kernels())


def covers(flat: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether native kernels pack tensors of ``dtype`` into ``flat``, and unpack them; else torch's own are faster."""
    return _runs_natively(flat.device) and flat.dtype in NATIVE_DTYPES and dtype in NATIVE_DTYPES


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
    _call(_pack, pack_reference_, flat, (flat, tensors, scale, layout))


def unpack_(
    tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float = 1.0, layout: torch.Tensor | None = None
) -> None:
    """Write every place of ``flat``, times ``scale``, to its tensor; the tensors are mutated. See ``pack_``.

    Raises:
        RuntimeError: the tensors do not fit together, or dense ones share memory.
    """
    _call(_unpack, unpack_reference_, flat, (tensors, flat, scale, layout))


def pack_counting_(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0, layout: torch.Tensor | None = None
) -> torch.Tensor:
    """``pack_``; return for each tensor how many of the values written are not finite: int64, on ``flat``'s device."""
    counts: torch.Tensor = _call(_pack_counting, pack_counting_reference_, flat, (flat, tensors, scale, layout))
    return counts


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
    _call(_accumulate, accumulate_reference_, destination, (destination, source, scale))


def _runs_natively(device: torch.device) -> bool:
    """Whether the extension has kernels for this device: on CUDA, for GPUs of its oldest architecture and later."""
    if device.type not in _NATIVE_DEVICES:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_CUDA_CAPABILITY


def _call(operator: Any, reference: Callable[..., Any], flat: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
    if not ((flat.is_cpu and _RUNS_ON_CPU) or _runs_natively(flat.device)):
        native.say_if_missing()
        return reference(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError:
        # Checks come before writes, so the reference starts from what was given.
        given = [part for side in arguments[:2] for part in ((side,) if isinstance(side, torch.Tensor) else side)]
        if all(tensor.dtype in NATIVE_DTYPES for tensor in given):
            raise
        return reference(*arguments)


# ---- references ----


@torch.no_grad()
def pack_reference_(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0, layout: torch.Tensor | None = None
) -> None:
    """``pack_`` in plain torch, for any dtype."""
    for place, tensor in zip(_places(flat, tensors, layout), tensors, strict=True):
        _convert_(place, tensor, scale)


@torch.no_grad()
def unpack_reference_(
    tensors: Sequence[torch.Tensor], flat: torch.Tensor, scale: float = 1.0, layout: torch.Tensor | None = None
) -> None:
    """``unpack_`` in plain torch, for any dtype."""
    for place, tensor in zip(_places(flat, tensors, layout), tensors, strict=True):
        _convert_(tensor, place, scale)


@torch.no_grad()
def pack_counting_reference_(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float = 1.0, layout: torch.Tensor | None = None
) -> torch.Tensor:
    """``pack_counting_`` in plain torch, for any dtype."""
    pack_reference_(flat, tensors, scale, layout)
    counts = flat.new_empty(len(tensors), dtype=torch.int64)
    for index, values in enumerate(flat.split([tensor.numel() for tensor in tensors]) if tensors else ()):
        wide = (values.abs() if values.is_complex() else values).to(torch.float64)
        counts[index] = wide.numel() - wide.isfinite().sum()
    return counts


@torch.no_grad()
def accumulate_reference_(destination: torch.Tensor, source: torch.Tensor, scale: float = 1.0) -> None:
    """``accumulate_`` in plain torch, for any dtype."""
    work = _work_dtype(destination.dtype, source.dtype)
    destination.copy_(destination.to(work) + source.to(work) * scale)


def _work_dtype(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """What products and sums of these dtypes are taken in."""
    floats = [dtype for dtype in (first, second) if dtype.is_floating_point or dtype.is_complex]
    if not floats:
        return torch.promote_types(first, second)
    is_wide = bool({torch.float64, torch.complex128} & set(floats))
    if any(dtype.is_complex for dtype in floats):
        return torch.complex128 if is_wide else torch.complex64
    return torch.float64 if is_wide else torch.float32


def _convert_(destination: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    if scale == 1:
        destination.copy_(source)
    else:
        destination.copy_(source.to(_work_dtype(destination.dtype, source.dtype)) * scale)


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


# ---- the native operators ----

_pack: Any = None
_unpack: Any = None
_pack_counting: Any = None
_accumulate: Any = None
_NATIVE_DEVICES: frozenset[str] = frozenset()
_RUNS_ON_CPU = False


def _fake_pack_counting(flat: torch.Tensor, tensors: Sequence[torch.Tensor], *_: Any, **_options: Any) -> torch.Tensor:
    return flat.new_empty(len(tensors), dtype=torch.int64)


if native.extension is not None:
    _pack = torch.ops.psengine.pack_.default
    _unpack = torch.ops.psengine.unpack_.default
    _pack_counting = torch.ops.psengine.pack_counting_.default
    _accumulate = torch.ops.psengine.accumulate_.default
    _NATIVE_DEVICES = frozenset({"meta"}) | {
        device
        for device, key in {"cpu": "CPU", "cuda": "CUDA"}.items()
        if torch._C._dispatch_has_kernel_for_dispatch_key("psengine::pack_", key)
    }
    _RUNS_ON_CPU = "cpu" in _NATIVE_DEVICES
    # Autograd has nothing to record: without this every call would search its arguments for something to warn about.
    _autograd = torch.library.Library("psengine", "IMPL")
    for _name in ("pack_", "unpack_", "pack_counting_", "accumulate_"):
        _autograd.impl(_name, torch.library.fallthrough_kernel, "Autograd")
        _fake: Any = _fake_pack_counting if _name == "pack_counting_" else lambda *_, **__: None
        torch.library.register_fake(f"psengine::{_name}", _fake)
