"""Codec "onebit": the sign of each value, with a scale for every 512."""

from __future__ import annotations

from psengine.codecs.blocks import BlockCodec
from psengine.kernels.codec_ops import ONEBIT


class OneBit(BlockCodec):
    """A thirtieth of float32's bytes: signs, times the mean magnitude of the block.

    EF-SignSGD of Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (https://arxiv.org/abs/1901.09847), with a
    scale for a block instead of one for a layer. Without error feedback it may never converge.
    """

    name = "onebit"
    form = ONEBIT
