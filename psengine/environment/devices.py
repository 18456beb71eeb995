"""Which CUDA device a rank of this host takes."""

from __future__ import annotations

import socket

import torch

from psengine.errors import EnvironmentVariableError


def choose_device(local_rank: int, device_count: int) -> torch.device:
    """Return the device of ``local_rank`` where ``device_count`` CUDA devices are visible.

    If exactly one device is visible, every rank gets it: the launcher gave each rank its own, or ranks share it.

    Raises:
        EnvironmentVariableError: more ranks than devices, and more than one device.
    """
    if device_count == 0:
        return torch.device("cpu")
    if device_count == 1:
        return torch.device("cuda", 0)
    if local_rank >= device_count:
        raise EnvironmentVariableError(
            f"Every local rank needs a CUDA device of its own (expected a local rank below {device_count} visible"
            f" devices, got local rank {local_rank}). Fix: start at most {device_count} processes on"
            f" {socket.gethostname()}, or make more devices visible in CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", local_rank)


def select_device(local_rank: int) -> torch.device:
    """Return the device of ``local_rank`` among those that are visible, and make it the current one.

    Raises:
        EnvironmentVariableError: see ``choose_device``.
    """
    device = choose_device(local_rank, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
