"""The clocks a shard is given besides the time that comes with each message; nothing here reads one by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """See the module's text. Neither decides about leases: these follow the ``now_s`` of ``Shard.handle``.

    Attributes:
        wall_s: seconds since 1970; dates events and reports, and lets incarnations grow from one server to the next.
        measure_s: seconds since any moment, never going back; measures what work costs.
    """

    wall_s: Callable[[], float]
    measure_s: Callable[[], float]
