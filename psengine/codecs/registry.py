"""From what a user writes to a codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psengine.codecs.base import Codec
from psengine.codecs.cast import Bfloat16, Float16, Float32
from psengine.codecs.fp4 import Fp4
from psengine.codecs.identity import IDENTITY, Identity
from psengine.codecs.int8 import Int8
from psengine.codecs.onebit import OneBit
from psengine.codecs.topk import TopK
from psengine.errors import ConfigurationError
from psengine.specification import Registry

_HOOK = "strategy 'sync' with model.register_comm_hook(PowerSGDState(...), powerSGD_hook) of torch"
CODECS: Registry[Codec] = Registry("codec", elsewhere={"powersgd": f"{_HOOK}; or compress=int8, fp4 or topk"})


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Let users write ``compress=name``, in this process, for what ``factory`` makes.

    Args:
        name: what stands behind ``compress=``; also the codec's own ``name``.
        factory: the codec's class, or a function. Its parameters are the codec's options.

    Raises:
        ConfigurationError: the name is taken, or is none.
    """
    CODECS.register(name, factory)


for codec_class in (Identity, Bfloat16, Float16, Float32, Int8, Fp4, OneBit, TopK):
    register_codec(codec_class.name, codec_class)


def resolve_codec(specification: Any) -> Codec:
    """Return the codec that ``compress=specification`` means: "name", "name:option=value", an object; None is "none".

    Args:
        specification: what the user wrote.

    Raises:
        ConfigurationError: unknown name or option; the message lists what there is.
    """
    if specification is None:
        return IDENTITY
    if not isinstance(specification, str | Codec):
        raise ConfigurationError(
            f"unknown codec (expected None, one of {sorted(CODECS)} or a psengine.Codec, got {specification!r})"
        )
    return CODECS.read(specification)() if isinstance(specification, str) else specification


def codec_for(codec: Codec, dtype: torch.dtype) -> Codec:
    """The codec of values of ``dtype`` where the user chose ``codec``: that one, or none where it does not cover it."""
    return codec if codec.covers(dtype) else IDENTITY
