"""The codec of the tests' own, registered by the public call, as a user's module would."""

from __future__ import annotations

import psengine
from psengine.codecs.registry import CODECS
from support.top_one_codec import TopOne


def register() -> None:
    """Register it in this process: a rank, a server, the tests themselves; a second time does nothing."""
    if TopOne.name not in CODECS:
        psengine.register_codec(TopOne.name, TopOne)
