"""Which codec makes a chunk's payloads: both ends of a job conclude it from the job's rule. Pure.

::

    worker   gradient ─ gradient_codec ─► PUSH ─► values ─► the chunk's rule
    worker   values ◄─ answer_codec ◄─ UPDATED ◄─ average, or weights ◄─┘

Weights of jobs whose servers step travel as the difference from what the worker holds, unless payloads are values in
another dtype (``answers_differences``).

All else travels as it is: buffers and usage maps, and whatever REGISTER, PULL and STORE carry.
"""

from __future__ import annotations

import copy

import torch

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import codec_for
from psengine.protocol.layout import ChunkKind, ChunkSpec


def gradient_codec(codec: Codec, spec: ChunkSpec) -> Codec:
    """By which codec workers encode what they push for a chunk, in a job with ``codec``."""
    return codec_for(codec, spec.dtype) if spec.kind is ChunkKind.PARAMETER else IDENTITY


def answer_codec(codec: Codec, spec: ChunkSpec) -> Codec:
    """By which codec servers encode what they answer."""
    return gradient_codec(codec, spec) if codec.encodes_answers else IDENTITY


def only_gradients(codec: Codec) -> Codec:
    """The same codec for a job whose answers are never encoded."""
    changed = copy.copy(codec)
    changed.encodes_answers = False  # type: ignore[misc]  # of this object
    return changed


def answers_differences(codec: Codec, spec: ChunkSpec) -> bool:
    """Whether servers that hold the weights answer their difference from what the worker holds."""
    down = answer_codec(codec, spec)
    if down.is_identity or down.summed_dtype(spec.dtype) is not None:
        return False
    form = down.payload_spec(spec.numel, spec.dtype)
    return (form.dtype, form.numel) != (spec.dtype, spec.numel)  # or whole weights could be taken for a difference


def held_dtype(spec: ChunkSpec) -> torch.dtype:
    """In which dtype both ends keep what a worker holds."""
    return torch.promote_types(spec.dtype, torch.float32)
