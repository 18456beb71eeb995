"""Backends of torch.distributed that this torch has on this machine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from psengine.errors import ConfigurationError


def default_backend() -> str:
    """Return nccl where there is a CUDA device, else gloo."""
    return "nccl" if _is_available("nccl") else "gloo"


def _is_available(backend: str) -> bool:
    return bool(dist.is_backend_available(backend)) and (backend != "nccl" or torch.cuda.is_available())


def check_backend(backend: str) -> None:
    """Raise ``ConfigurationError`` unless ``backend`` names one, or a list such as "cpu:gloo,cuda:nccl" of them."""
    if not all(_is_available(part.rpartition(":")[2]) for part in str(backend).lower().split(",")):
        known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        raise ConfigurationError(
            "backend must be one that this torch offers on this machine (expected one of"
            f" {', '.join(filter(_is_available, known))}, or a list such as 'cpu:gloo,cuda:nccl' of them; got"
            f" {backend!r}). Fix: leave it out, for nccl with CUDA and gloo else."
        )
