"""What workers must have alike so that their gradients have the same bits, by name."""

from __future__ import annotations

from collections.abc import Mapping


def difference(expected: Mapping[str, object], got: Mapping[str, object]) -> str:
    """Say in which fact two workers differ, for an error; "" where they are alike."""
    for name in sorted({*expected, *got}):
        there, here = expected.get(name), got.get(name)
        if there != here:
            return f"in {name!r} (expected {there}, got {here}), so its gradients would have other bits"
    return ""
