"""Batch normalisation over the batches of all ranks, on CPU too.

torch's layer computes on accelerators only; ours leaves those to it and adds the CPU. N values per channel lie on all
ranks::

    forward    sum x, n ── all-gather ── shift = sum x / N          no gradient: a shift changes no result
               c = x - shift;  sum c, sum c² ── all-reduce ── mean and variance of c ── normalise
    backward   autograd's, with one all-reduce: that of the second sum
               └── gradients of bias and weight: local sums, which data-parallel training averages like any other

Squares are summed of values near zero: a sum of squares minus a squared sum would cancel where |mean| >> deviation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for, default_group
from psengine.errors import ArgumentTypeError, ConfigurationError


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Batch normalisation over the batches of all ranks: ``torch.nn.SyncBatchNorm`` that also works on the CPU.

    Takes the arguments of ``torch.nn.SyncBatchNorm`` and has its state dict, which is that of ``torch.nn.BatchNorm*d``.
    On accelerators its forward is torch's. Ranks may have batches of different sizes, and empty ones. In evaluation
    mode, with one rank, or without a process group it is plain batch normalisation and does not communicate.

    Shape:
        input: (N, C, ...), floating point, 2 dimensions or more; C is the same on every rank.
        output: as the input, in its dtype and memory format.

    Raises:
        ConfigurationError: all ranks together have one value per channel, which has no variance.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; in training, update the running statistics by those of all ranks' batches."""
        if input.device.type != "cpu" or not self.training:
            return super().forward(input)
        if torch.compiler.is_compiling():
            # Statistics travel in the middle of forward and backward, where no graph can follow: break it here. Only
            # while compiling, for the decorator would import torch._dynamo, which takes seconds, in every program.
            return cast(Tensor, torch.compiler.disable(self._forward_on_cpu)(input))
        return self._forward_on_cpu(input)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """See the function ``convert_sync_batchnorm``."""
        return convert_sync_batchnorm(module, process_group)

    def _forward_on_cpu(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        collective = collective_for(self.process_group or default_group())
        if collective.world_size == 1:
            return _BatchNorm.forward(self, input)
        if not input.is_floating_point():
            raise ArgumentTypeError(f"SyncBatchNorm normalises floating-point input (got {input.dtype})")
        if input.size(1) != self.num_features:
            raise ConfigurationError(
                f"SyncBatchNorm normalises {self.num_features} channels, dimension 1 (got {input.size()})"
            )
        axes = [dimension for dimension in range(input.dim()) if dimension != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        dtype = torch.promote_types(input.dtype, torch.float32)
        x = input.to(dtype)
        with torch.no_grad():
            own = torch.cat([x.sum(axes).double(), torch.tensor([input.numel() // input.size(1)]).double()])
            gathered = own.new_empty((collective.world_size, own.numel()))
            collective.all_gather(gathered, own, what="batch normalisation statistics").wait()
            *_, count = sums = gathered.sum(0)
            if count == 1:
                raise ConfigurationError(
                    f"Expected more than 1 value per channel when training, got input size {input.size()} on rank"
                    f" {collective.rank} and 1 value on all {collective.world_size} ranks. Fix: a larger batch."
                )
            shift = (sums[:-1] / count.clamp(min=1)).to(dtype)
        centred = x - shift.view(shape)
        own = torch.stack([centred.sum(axes), centred.square().sum(axes)]).to(torch.float64)
        mean, square = _SumOverRanks.apply(own, collective) / count.clamp(min=1)  # type: ignore[no-untyped-call]
        variance = square - mean.square()
        with torch.no_grad():
            self._track(shift + mean, variance, int(count))
        factor = torch.rsqrt(variance + self.eps).to(dtype)
        if self.weight is not None:
            factor = factor * self.weight
        y = (centred - mean.to(dtype).view(shape)) * factor.view(shape)
        return (y if self.bias is None else y + self.bias.view(shape)).to(input.dtype)  # type: ignore[no-any-return]

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics; an empty batch counts as a batch, and changes nothing else."""
        if not self.track_running_stats:
            return
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None or count == 0:
            return
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)


def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
    """Turn every ``BatchNorm*d`` and ``torch.nn.SyncBatchNorm`` in ``module`` into ``psengine.SyncBatchNorm``.

    The layers stay the same objects, with their parameters, buffers and hooks, and change class.

    Args:
        module: mutated: the class of its layers, or its own where it is a batch normalisation.
        process_group: the ranks that share statistics; None means the default group, save for a layer that was a
            ``SyncBatchNorm`` with a group of its own, which keeps it.

    Returns:
        ``module``.
    """
    for layer in [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]:
        layer.process_group = process_group or getattr(layer, "process_group", None)  # type: ignore[assignment]
        layer.__class__ = SyncBatchNorm
    return module


def adopt_sync_batchnorm(module: torch.nn.Module) -> None:
    """Turn every ``torch.nn.SyncBatchNorm`` in ``module`` into ``psengine.SyncBatchNorm``, but not its subclasses.

    Mutates the layers: they stay the same objects and change class.
    """
    for layer in module.modules():
        if type(layer) is torch.nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm


class _SumOverRanks(torch.autograd.Function):
    """The sum of every rank's tensor; the gradient of each is the sum of every rank's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collective: Collective) -> Tensor:
        ctx.collective = collective
        total = tensor.clone()
        collective.sum(total, what="batch normalisation statistics")
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        ctx.collective.sum(total, what="batch normalisation gradients")
        return total, None
