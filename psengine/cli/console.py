"""Where the commands that watch and diagnose print for people."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def printable(text: str) -> str:
    """The text with what a terminal would obey instead of show (escapes, line ends, reversed writing) spelled out."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def open_console() -> Console:
    """Make stdout a rich console: colours on a terminal unless NO_COLOR is set, plain text elsewhere.

    What stdout's encoding lacks is replaced: a micro sign must not end a report in the C locale.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # In a file a finding or an address is one line, however long.
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())
