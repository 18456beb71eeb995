"""Which parameters travel together: their assignment to buckets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    size_limits_bytes: Sequence[int],
    is_sparse: Sequence[bool],
    order: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Assign parameters to buckets by native DDP's rule, so that sums associate alike and results agree bitwise.

    Walks the parameters in ``order`` (default: as given), keeps one open bucket per (dtype, device) and closes it as
    soon as it reaches its limit; the first bucket of each kind takes the first limit, the second the second, the last
    limit repeats. A parameter with sparse gradients gets a bucket of its own.

    Args:
        parameters: tensors whose numel, dtype and device count.
        size_limits_bytes: caps in bytes, at least one.
        is_sparse: whether a parameter's gradient is sparse, by index.
        order: indices in the order their gradients become ready. Without it buckets are sorted by their lowest index.

    Returns:
        The buckets, each as the indices of its parameters in packing order; every index stands in exactly one.
    """
    open_indices: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    limit_index: dict[tuple[torch.dtype, torch.device], int] = {}
    plans: list[tuple[int, ...]] = []
    for index in range(len(parameters)) if order is None else order:
        parameter = parameters[index]
        if is_sparse[index]:
            plans.append((index,))
            continue
        kind = (parameter.dtype, parameter.device)
        open_indices.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if open_bytes[kind] >= size_limits_bytes[limit_index.setdefault(kind, 0)]:
            plans.append(tuple(open_indices.pop(kind)))
            open_bytes[kind] = 0
            limit_index[kind] = min(limit_index[kind] + 1, len(size_limits_bytes) - 1)
    plans.extend(tuple(indices) for indices in open_indices.values())
    if order is None:
        plans.sort(key=min)
    return plans
