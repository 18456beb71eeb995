"""Python objects as bytes for another rank, and back: ``torch.save``, and ``torch.load`` that runs nobody's code."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def to_bytes(value: Any) -> bytes:
    """Return ``value`` as bytes; of its tensors only the elements travel."""
    file = io.BytesIO()
    torch.save(tree_map_only(torch.Tensor, lambda t: t.detach().resolve_conj().resolve_neg().clone(), value), file)
    return file.getvalue()


def from_bytes(payload: bytes) -> Any:
    """Undo ``to_bytes``. Tensors on an accelerator come back on this process's current one, or on the host.

    Raises:
        UnpicklingError: it holds what ``torch.load(weights_only=True)`` does not read.
    """
    return torch.load(io.BytesIO(payload), map_location=_to_this_process, weights_only=True)


def _to_this_process(storage: Any, location: str) -> Any:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if location == "cpu" or accelerator is None:
        return storage
    return storage.to(device=torch.device(accelerator.type, torch.accelerator.current_device_index()))
