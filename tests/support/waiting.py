"""Waiting for what another thread or process does, with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def eventually(
    condition: Callable[[], Found], what: str = "the condition", *, timeout_s: float = 120.0, interval_s: float = 0.02
) -> Found:
    """The first true value of ``condition``; it fails with ``what`` that was not true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} was not true within {timeout_s:g} s"
        time.sleep(interval_s)
    return found
