"""The random generators that a training draws from: torch's, Python's and, where it is loaded, NumPy's global ones."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

_NUMPY_SEEDS = 2**32


@dataclass(frozen=True)
class RandomState:
    """Where the generators stood; ``restore`` puts them back."""

    torch_cpu: torch.Tensor
    torch_device: torch.Tensor | None
    python: Any
    numpy: Any
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The state now, with that of ``device`` where it has a generator of its own."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_device=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            device=device,
        )

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.cuda.set_rng_state(self.torch_device, self.device)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


def seed_all(seed: int) -> None:
    """Seed every generator that ``RandomState`` covers."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)
