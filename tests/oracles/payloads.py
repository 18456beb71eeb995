"""What codecs' payloads mean, in plain torch; shares no code with the codecs.

``encode_blocks_``, ``decode_blocks_`` and ``encode_largest_`` are those of psengine.kernels.codec_ops, to the bit, with
a codec's name in place of its form.
"""

from typing import NamedTuple

import torch

# Below it the reciprocal of a scale is infinite, and such values are zero.
_SMALLEST_LARGEST = 127 * torch.finfo(torch.float32).tiny
# What is larger counts as infinite, because a code may stand for more than the value.
_LARGEST = 3 * 2.0**126
# Magnitudes of the codes 0 to 7 of E2M1.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midway between two of them; of a tie the even code is taken.
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Block(NamedTuple):
    """Values in a block, and bytes of its scale; codes follow."""

    numel: int
    scale_bytes: int
    code_bytes: int


BLOCKS = {"int8": Block(256, 4, 256), "fp4": Block(32, 1, 16), "onebit": Block(512, 4, 64)}


def decoded(codec: str, payload: torch.Tensor | bytes | memoryview, numel: int) -> torch.Tensor:
    """The values of a payload, in float32; without a codec, and of "fp32", in float64."""
    if isinstance(payload, torch.Tensor):
        data = payload.contiguous().view(torch.uint8)
    else:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if not codec:
        return data.view(torch.float64)
    if codec in CASTS:
        return data.view(CASTS[codec]).to(torch.float64 if codec == "fp32" else torch.float32)
    values = torch.zeros(numel)
    if codec == "topk":
        places, found = data.view(torch.int32).chunk(2)
        values[places.long()] = found.view(torch.float32)
    else:
        decode_blocks_(values, data, codec)
    return values


def encode_blocks_(
    payload: torch.Tensor,
    values: torch.Tensor,
    codec: str,
    residual: torch.Tensor | None = None,
    next_residual: torch.Tensor | None = None,
) -> None:
    """Codes are computed in float32, the residual in the values' own dtype."""
    if not values.numel():
        return
    form = BLOCKS[codec]
    corrected = _corrected(values, residual)
    blocks = torch.zeros(-(-values.numel() // form.numel) * form.numel, dtype=torch.float32, device=values.device)
    blocks[: values.numel()] = corrected
    blocks = blocks.view(-1, form.numel)
    if codec == "int8":
        scale, codes = _int8_codes(blocks)
    elif codec == "fp4":
        scale, codes = _fp4_codes(blocks)
    else:
        counts = torch.full((len(blocks), 1), float(form.numel), device=values.device)
        counts[-1:] = values.numel() - (len(blocks) - 1) * form.numel
        scale, codes = _signs(blocks, counts)
    payload.copy_(torch.cat([scale, codes], dim=1).view(-1))
    if next_residual is not None:
        arrived = torch.empty_like(corrected)
        decode_blocks_(arrived, payload, codec)
        _keep(next_residual, corrected - arrived)


def decode_blocks_(into: torch.Tensor, payload: torch.Tensor, codec: str, *, adds: bool = False) -> None:
    if not into.numel():
        return
    form = BLOCKS[codec]
    blocks = payload.view(-1, form.scale_bytes + form.code_bytes)
    scale, codes = (
        part.clone(memory_format=torch.contiguous_format) for part in blocks.tensor_split([form.scale_bytes], dim=1)
    )
    if codec == "int8":
        values = codes.view(torch.int8).float() * scale.view(torch.float32)
    elif codec == "fp4":
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


def encode_largest_(
    places: torch.Tensor,
    found: torch.Tensor,
    values: torch.Tensor,
    residual: torch.Tensor | None = None,
    next_residual: torch.Tensor | None = None,
) -> None:
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
