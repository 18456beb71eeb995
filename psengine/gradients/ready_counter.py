"""Counts a backward's gradients down, by parameter and by bucket; the function that autograd calls for each of them.

Most calls of a hook only count: the short way. The long way is for whatever needs more: recording, searching, packing
a large gradient, errors. Inside no_sync there may be nothing to do.

The numbers lie in plain memory, so that the native extension counts without a Python function: its hook
(csrc/bindings/ready_counter.cpp) takes 0.03 µs, the long way more than one. Without the extension every call takes it.
benchmarks/step_overhead has the rest of the path.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence

from psengine.kernels import native

# A hook's way, in place of the number of its bucket; csrc/bindings/ready_counter.cpp has them too.
LONG_WAY = -1
NO_WAY = -2


class ReadyCounter:
    """The counters of one reducer. Whoever changes them holds the GIL, and reads and writes without giving it up.

    Attributes:
        left: by parameter, how often its hook is still to fire in this backward until the gradient is ready.
        pending: by bucket, how many gradients are not yet ready.
    """

    def __init__(self, parameter_count: int) -> None:
        memories = [bytearray(bytes(array("i", [0] * parameter_count))) for _ in range(3)]
        # Never more buckets than parameters. The views keep the memories from being resized.
        self.left, self._ways, self.pending = (memoryview(memory).cast("i") for memory in memories)
        self._memories = tuple(memories)
        self._no_way = array("i", [NO_WAY] * parameter_count)
        self._long_way = array("i", [LONG_WAY] * parameter_count)
        self._short_way = self._long_way
        self._sizes = array("i", [0] * parameter_count)
        self._expected = array("i", [1] * parameter_count)

    def lay_out(self, buckets: Sequence[int | None], sizes: Sequence[int]) -> None:
        """Buckets were made.

        Args:
            buckets: by parameter, the number of its bucket where its hook may just count, None where it must not.
            sizes: by bucket, how many parameters it has.
        """
        self._short_way = array("i", [LONG_WAY if bucket is None else bucket for bucket in buckets])
        self._sizes[: len(sizes)] = array("i", sizes)

    def expect(self, counts: Sequence[int]) -> None:
        """In backwards from now on each parameter's hook fires as often as ``counts`` says before it is ready."""
        self._expected = array("i", counts)

    def begin(self, *, only_counts: bool) -> None:
        """A backward is expected; ``only_counts``: hooks take the short way where their bucket has one."""
        self.left[:] = self._expected
        self.pending[:] = self._sizes
        self._ways[:] = self._short_way if only_counts else self._long_way

    def ignore(self) -> None:
        """From now on hooks do nothing."""
        self._ways[:] = self._no_way

    def call(self) -> None:
        """From now on hooks take the long way."""
        self._ways[:] = self._long_way

    @property
    def has_begun(self) -> bool:
        """Whether some hook has fired since ``begin``."""
        return self.left != self._expected

    def missing(self) -> list[int]:
        """The parameters whose gradients are not ready."""
        return [index for index, left in enumerate(self.left) if left > 0]

    def hook(
        self, long_way: Callable[..., object], reduce_full_buckets: Callable[[], object], index: int
    ) -> Callable[..., object]:
        """Return the post-hook of parameter ``index``'s accumulation node.

        Args:
            long_way: called with ``index``, also where the gradient was ready already, or is undefined.
            reduce_full_buckets: called when a bucket's last gradient is ready.
            index: the parameter's.
        """
        if native.extension is None:
            return functools.partial(long_way, index)
        hook: Callable[..., object] = native.extension.counting_hook(
            *self._memories, long_way, reduce_full_buckets, index
        )
        return hook
