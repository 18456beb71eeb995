"""A promise that was broken."""

from __future__ import annotations


class Violation(AssertionError):
    """The oracle's finding."""


def require(holds: object, text: str, *values: object) -> None:
    """Raise Violation with ``text.format(*values)`` unless ``holds``."""
    if not holds:
        raise Violation(text.format(*values))
