"""The function autograd calls for one parameter: a few hundred of them make up the cost of a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from psengine.buckets import Bucket

# By parameter: the bucket to count down, None for the long way, False for no way at all.
ShortWay = list[Bucket | Literal[False] | None]


def counting_hook(
    short_way: ShortWay,
    ready: bytearray,
    long_way: Callable[[int], None],
    reduce_full_buckets: Callable[[], None],
    index: int,
) -> Callable[..., None]:
    """Return the post-hook of parameter ``index``'s accumulation node.

    Most calls only count their bucket down; they take the short way, about 0.3 µs. The long way is for whatever needs
    more: recording, searching, packing a large gradient, errors. Inside no_sync there may be nothing to do.

    Args:
        short_way: which way to take now, by parameter; the reducer changes it from step to step.
        ready: whose gradients are there, by parameter; mutated.
        long_way: called with ``index``.
        reduce_full_buckets: called when the bucket's last gradient is there.
        index: the parameter's.
    """

    def hook(_inputs: Any, _outputs: Any) -> None:
        bucket = short_way[index]
        if not bucket:
            if bucket is None:
                long_way(index)
            return
        if ready[index]:
            long_way(index)
            return
        ready[index] = 1
        bucket.pending -= 1
        if not bucket.pending:
            reduce_full_buckets()

    return hook
