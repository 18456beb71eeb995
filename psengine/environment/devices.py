"""Which backends of torch.distributed and which CUDA devices this process may use."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from psengine.errors import ConfigurationError, EnvironmentVariableError


def default_backend() -> str:
    """Return nccl where there is a CUDA device, else gloo."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def check_backend(backend: str) -> None:
    """Raise ``ConfigurationError`` unless ``backend`` names one, or a list such as "cpu:gloo,cuda:nccl" of them."""
    if not all(dist.is_backend_available(part.rpartition(":")[2]) for part in str(backend).lower().split(",")):
        known = filter(dist.is_backend_available, dist.Backend.backend_list[1:])
        raise ConfigurationError(
            f"backend must be one of this torch's (expected one of {', '.join(known)}, or a list such as"
            f" 'cpu:gloo,cuda:nccl' of them; got {backend!r}). Fix: leave it out, for nccl with CUDA and gloo else."
        )


def choose_device(local_rank: int, device_count: int) -> torch.device:
    """Return the device of ``local_rank`` where ``device_count`` CUDA devices are visible.

    If exactly one device is visible, every rank gets it: the launcher gave each rank its own, or ranks share it.

    Raises:
        EnvironmentVariableError: more ranks than devices, and more than one device.
    """
    if device_count == 0:
        return torch.device("cpu")
    if device_count > 1 and local_rank >= device_count:
        raise EnvironmentVariableError(
            f"Every local rank needs a CUDA device of its own (expected a local rank below {device_count} visible"
            f" devices, got {local_rank} on {socket.gethostname()}). Fix: start at most {device_count} processes there."
        )
    return torch.device("cuda", min(local_rank, device_count - 1))


def select_device(local_rank: int) -> torch.device:
    """Return the device of ``local_rank`` among those that are visible, and make it the current one.

    Raises:
        EnvironmentVariableError: see ``choose_device``.
    """
    device = choose_device(local_rank, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
