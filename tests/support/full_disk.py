"""A server whose disk is full while a file exists."""

from __future__ import annotations

import os
from collections.abc import Sequence


def fill_up() -> None:
    """For ``running_server(sabotage=fill_up)``; FULL in its environment names the file."""

    def write(descriptor: int, pieces: Sequence[bytes], offset: int) -> int:
        if os.path.exists(flag):
            raise OSError(28, "No space left on device")
        return real(descriptor, pieces, offset)

    real, os.pwritev, flag = os.pwritev, write, os.environ["FULL"]  # type: ignore[assignment]
