"""Marks for parameters of tests."""

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A row of parameters that differs from one that always runs in a value alone: `make test-slow` runs it."""
    is_test = any(getattr(value, "__name__", "").startswith("test_") for value in values)
    assert not is_test, "a test is marked by @pytest.mark.slow: as a row of parameters nobody would collect it"
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
