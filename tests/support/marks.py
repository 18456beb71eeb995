"""Marks for parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A row of parameters that differs from one that always runs in a value alone: `make test-slow` runs it."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
