"""Codec "int8": each value in eight bits, with a scale for every 256."""

from __future__ import annotations

from psengine.codecs.blocks import BlockCodec
from psengine.kernels.codec_ops import INT8


class Int8(BlockCodec):
    """A quarter of float32's bytes. The scale of 256 values is their largest magnitude / 127; an error is half a scale.

    Blocks as in Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (https://arxiv.org/abs/2110.02861),
    with evenly spaced steps and error feedback (Seide et al. 2014).
    """

    name = "int8"
    form = INT8
