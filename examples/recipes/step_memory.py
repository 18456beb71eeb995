"""How much memory a step of training takes on this rank: what autograd keeps for backward, and the peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass
class StepMemory:
    """Bytes that the steps inside ``measured_memory`` took.

    Attributes:
        activations: kept by autograd from forward to backward, with inputs, without parameters; of the last step.
        peak: taken beyond what was there before: on a GPU by tensors, on the CPU by the whole process (0: not known).
    """

    activations: int = 0
    peak: int = 0


@contextmanager
def measured_memory(module: nn.Module, device: torch.device) -> Iterator[StepMemory]:
    """Measure the block; each forward of ``module`` begins the count of activations anew."""
    found = StepMemory()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()  # several layers may keep the same one
        return tensor

    def forget(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        kept.clear()

    hook = module.register_forward_pre_hook(forget)
    before = begin_peak(device)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield found
    finally:
        hook.remove()
        parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        found.activations = sum(size for address, size in kept.items() if address not in parameters)
        found.peak = max(0, peak(device) - before)


def begin_peak(device: torch.device) -> int:
    """Begin the peak anew; return what is taken now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return 0
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
