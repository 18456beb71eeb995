"""Codec "fp4": each value in four bits, with a scale for every 32."""

from __future__ import annotations

from psengine.codecs.blocks import BlockCodec
from psengine.kernels.codec_ops import FP4


class Fp4(BlockCodec):
    """An eighth of float32's bytes: MXFP4 of the OCP Microscaling Formats specification 1.0, with error feedback.

    A value is E2M1, one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, times its block's power of two (E8M0). The
    specification leaves the choice of the power to implementations: here it is the smallest with which no value is
    beyond 6, so that nothing is clipped. Values go to the nearest, ties to the even code.
    """

    name = "fp4"
    form = FP4
