"""Single key presses from a terminal, without waiting for Enter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator


class Keyboard:
    """The keys typed at a terminal; None: at none."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def pressed(self) -> str:
        """Keys since the last call; "" without any. Never blocks."""
        if self._descriptor is None or not select.select([self._descriptor], [], [], 0)[0]:
            return ""
        try:
            typed = os.read(self._descriptor, 64)
        except OSError:
            typed = b""
        if not typed:  # the terminal is gone
            self._descriptor = None
        return typed.decode(errors="replace")


@contextlib.contextmanager
def listening() -> Iterator[Keyboard]:
    """A keyboard on stdin; restores the terminal at the end."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        # A background job that changes its terminal would be stopped. OSError: another session's terminal.
        is_ours = os.tcgetpgrp(descriptor) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):
        is_ours = False
    if not is_ours:
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)  # keeps keys typed while the command started
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
