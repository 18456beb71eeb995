"""Which parameters travel together: native DDP's rules for the sizes of buckets and for their contents. Pure."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch

from psengine.errors import ConfigurationError

MIB_BYTES = 1024 * 1024
DEFAULT_CAP_MIB = 25
# A small first bucket starts the exchange early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
DEFAULT_FIRST_CAP_MIB = 1


def bucket_limits_bytes(cap_mib: float | None, caps_mib: Sequence[float] | None) -> list[int]:
    """Caps of the first, second, ... bucket, of which the last repeats.

    Args:
        cap_mib: ``bucket_cap_mb``; None means the default.
        caps_mib: ``bucket_cap_mb_list``, which wins.

    Raises:
        ConfigurationError: a cap is not a size.
    """
    if caps_mib is not None and not isinstance(caps_mib, (list, tuple)):
        raise ConfigurationError(f"bucket_cap_mb_list is a list of sizes in MiB (got {caps_mib!r})")
    for cap in [*(caps_mib or ()), *([] if cap_mib is None else [cap_mib])]:
        if not isinstance(cap, numbers.Real) or not 0 <= float(cap) < math.inf:
            raise ConfigurationError(f"bucket caps are sizes in MiB (expected a number >= 0, got {cap!r})")
    default = [DEFAULT_FIRST_CAP_MIB, DEFAULT_CAP_MIB] if cap_mib is None else [cap_mib]
    return [int(cap * MIB_BYTES) for cap in caps_mib or default]


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
