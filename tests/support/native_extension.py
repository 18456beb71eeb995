"""For tests that insist on what only the native extension does; without it they skip."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from psengine.kernels import native, ops

KERNELS = ["avx512", "avx2", "baseline"]

needs_shared_memory = pytest.mark.skipif(
    not native.has_shared_memory(), reason="shared memory needs the native extension, on Linux"
)
# The name of the collective, as a parameter.
SHARED_MEMORY = pytest.param("shared_memory", marks=needs_shared_memory)


@contextmanager
def using_kernels(name: str) -> Iterator[None]:
    """Run the block with these of ``KERNELS``; skip the test where this processor cannot run them."""
    best = ops.native_kernels()
    if not native.extension._use_kernels(name):
        pytest.skip("this processor cannot run them")
    yield
    assert native.extension._use_kernels(best)
