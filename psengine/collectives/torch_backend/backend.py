"""The name "psengine" among torch.distributed's backends.

``init_process_group("psengine")`` works wherever psengine is imported, before torch or after it, and importing psengine
does not import torch. So the backend is registered now if torch.distributed is there, else once it has been imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from psengine.collectives.torch_backend import NAME

_REGISTRY = "torch.distributed.distributed_c10d"


def register() -> None:
    """Make ``init_process_group("psengine")`` and ``new_group(backend="psengine")`` work; safe to call again.

    For CPU tensors, and for CUDA ones, which the group hands to nccl: a single name makes a group for both, as "gloo"
    does. Does nothing where torch was built without torch.distributed.
    """
    if _REGISTRY in sys.modules:
        # Waits for the end of its import, where another thread has begun it.
        _register_in(importlib.import_module(_REGISTRY))
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_in(registry: Any) -> None:
    registry.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


class _AfterImport(MetaPathFinder):
    """Has the backend registered when torch.distributed's registry has been imported; finds no module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the registry's own spec, whose loader registers the backend after it has run the module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _REGISTRY else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register_in(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _create(options: Any, backend_options: Any) -> Any:
    from psengine.collectives.torch_backend.process_group import SharedMemoryProcessGroup

    return SharedMemoryProcessGroup(options, backend_options)
