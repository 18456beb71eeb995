"""The name "psengine" among torch.distributed's backends.

``init_process_group("psengine")`` works wherever psengine is imported, before torch or after it, and importing psengine
does not import torch. So the backend is registered now if torch.distributed is there, else once it has been imported.
"""

from __future__ import annotations

from typing import Any

from psengine.collectives.torch_backend import NAME
from psengine.environment.imports import after_import


def register() -> None:
    """Make ``init_process_group("psengine")`` and ``new_group(backend="psengine")`` work; safe to call again.

    For CPU tensors, and for CUDA ones, which the group hands to nccl: a single name makes a group for both, as "gloo"
    does. Does nothing where torch was built without torch.distributed.
    """
    after_import("torch.distributed.distributed_c10d", _register_in)


def _register_in(registry: Any) -> None:
    registry.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from psengine.collectives.torch_backend.process_group import SharedMemoryProcessGroup

    return SharedMemoryProcessGroup(options, backend_options)
