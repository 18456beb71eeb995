"""The correction of stale gradients of DC-ASGD (Zheng et al. 2017, https://arxiv.org/abs/1609.08326)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the adaptive strength; the paper's.
EPSILON = 1e-7


@dataclass(slots=True)
class DelayCompensation:
    """Moves a stale gradient to where the weights are now.

    Attributes:
        strength: the paper's lambda; with ``decay`` its lambda_0.
        decay: None: the strength is constant (DC-ASGD-c). Else each element's strength is divided by the root of a
            running mean of its squared gradients with this decay (DC-ASGD-a).
        mean_squares: that mean, of the chunk's shape; None before the first gradient, and without ``decay``.
    """

    strength: float
    decay: float | None
    mean_squares: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Memory of the mean."""
        return 0 if self.mean_squares is None else self.mean_squares.nbytes

    def observe(self, gradient: torch.Tensor) -> None:
        """Take a gradient that will be applied, stale or not, into the mean."""
        if self.decay is None:
            return
        if self.mean_squares is None:
            self.mean_squares = torch.zeros_like(gradient)
        self.mean_squares.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)

    def correct(self, gradient: torch.Tensor, values: torch.Tensor, backup: torch.Tensor) -> torch.Tensor:
        """``gradient`` + strength * gradient * gradient * (``values`` - ``backup``), elementwise; a new tensor.

        Args:
            gradient: as the worker computed it, and as ``observe`` got it.
            values: the current weights.
            backup: those that the worker had.
        """
        change = torch.sub(values, backup).mul_(gradient)
        if self.mean_squares is not None:
            change.div_((self.mean_squares + EPSILON).sqrt_())
        return torch.addcmul(gradient, change, gradient, value=self.strength)
