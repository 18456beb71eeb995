"""The name "psengine" among torch.distributed's backends."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from psengine.collectives.torch_backend import NAME


def register() -> None:
    """Make ``init_process_group("psengine")`` and ``new_group(backend="psengine")`` work; safe to call again.

    For CPU tensors, and for CUDA ones, which the group hands to nccl: a single name makes a group for both, as "gloo"
    does. Does nothing where torch was built without torch.distributed.
    """
    if dist.is_available():
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from psengine.collectives.torch_backend.process_group import SharedMemoryProcessGroup

    return SharedMemoryProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
        backend_options,
    )
