"""Codecs of the tests' own, registered by the public call, as a user's module would."""

from __future__ import annotations

import psengine
from psengine.codecs.registry import CODECS
from support.int8_codec import Int8
from support.top_one_codec import TopOne


def register() -> None:
    """Register them in this process: a rank, a server, the tests themselves; a second time does nothing."""
    for codec in (Int8, TopOne):
        if codec.name not in CODECS:
            psengine.register_codec(codec.name, codec)
