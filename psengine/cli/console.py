"""Printing for people, from commands that watch and diagnose."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def printable(text: str) -> str:
    """The text with characters that a terminal would obey (escapes, line ends, reversed writing) spelled out."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def open_console() -> Console:
    """Make stdout a rich console: colours on a terminal unless NO_COLOR is set, plain text elsewhere.

    Characters that stdout's encoding lacks are replaced: a micro sign must not end a report in the C locale.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # In a file a finding or an address is one line, however long.
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def duration(seconds: float) -> str:
    """A duration with about three digits: 85 µs, 1.27 ms, 310 ms, 16.5 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds >= 10:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    digits = 2 if seconds < 1e-2 else 1 if seconds < 1e-1 else 0
    return f"{seconds * 1e3:.{digits}f} ms"
