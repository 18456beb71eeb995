"""Marks for tests that insist on what only the native extension does; without it they skip."""

from __future__ import annotations

import pytest

from psengine.kernels import native

needs_shared_memory = pytest.mark.skipif(
    not native.has_shared_memory(), reason="shared memory needs the native extension, on Linux"
)
# The name of the collective, as a parameter.
SHARED_MEMORY = pytest.param("shared_memory", marks=needs_shared_memory)
