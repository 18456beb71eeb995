"""Batch normalisation over the batches of all ranks, on CPU too.

torch's layer computes on accelerators only; ours leaves those to it and adds the CPU. n values per channel lie on one
rank, N on all::

    forward    local mean, variance, n ── all-gather ── global mean, variance, N ── normalise
    backward   local sum dy, sum dy*x̂ ── all-reduce ── / N ── gradient of the input
               └── gradients of bias and weight: local sums, which data-parallel training averages like any other

Statistics are merged by Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979), in float64: no sum of squares minus a squared sum, which cancels where |mean| >> deviation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for, default_group
from psengine.errors import ArgumentTypeError, ConfigurationError, ModuleError


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
        if self.num_features != input.size(1):
            raise ConfigurationError(
                "SyncBatchNorm's input has another number of channels (expected"
                f" {self.num_features} in dimension 1, got input size {input.size()})"
            )
        with torch.no_grad():
            mean, variance, count = _global_statistics(input, collective)
            if count == 1:
                raise ConfigurationError(
                    f"Expected more than 1 value per channel when training, got input size {input.size()} on rank"
                    f" {collective.rank} and 1 value on all {collective.world_size} ranks together. Use a larger batch,"
                    " or drop the last incomplete one."
                )
            self._track(mean, variance, count)
            dtype = _compute_dtype(input)
            mean, variance = mean.to(dtype), variance.to(dtype)
        return cast(
            Tensor,
            _Normalize.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.bias, mean, variance, max(count, 1), self.eps, collective
            ),
        )

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

    Raises:
        ModuleError: a lazy layer does not know its number of channels yet; nothing has been changed then.
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    for name, layer in layers.items():
        if isinstance(layer, LazyModuleMixin):
            raise ModuleError(
                f"{name or 'the module'} is a {type(layer).__name__} that has not seen a batch, so its number of"
                " channels is unknown (expected an initialised layer). Run one batch through the model, then convert."
            )
    for layer in layers.values():
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


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def _global_statistics(input: Tensor, collective: Collective) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance per channel over all ranks, in float64, and the number of values of each."""
    channels = input.size(1)
    # float64 carries counts beyond 2**24 as well, and a few kilobytes more do not show in the time of a collective.
    local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if input.numel() > 0:
        mean, variance = _local_statistics(input.to(_compute_dtype(input)))
        local = torch.cat([mean, variance, local.new_tensor([input.numel() // channels])])
    gathered = local.new_empty((collective.world_size, local.numel()))
    collective.all_gather(gathered, local, what="batch normalisation statistics").wait()
    means, variances, counts = torch.split(gathered, [channels, channels, 1], dim=1)
    total = int(counts.sum())
    shares = counts / max(total, 1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return mean, variance, total


def _local_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, in float64, by two passes over ``x`` in its own dtype.

    The second pass also measures by how much rounding put the first mean off: differences between the ranks' means
    enter the variance, so an error relative to the mean instead of the deviation would show. On CPU this takes a
    quarter of the time of ``torch.var_mean`` or the kernel of ``torch.nn.BatchNorm2d``, channels-last input aside.
    """
    count = x.numel() // x.size(1)
    axes = [dimension for dimension in range(x.dim()) if dimension != 1]
    mean = x.mean(axes)
    centred = x - mean.view(_per_channel(x))
    offset = centred.sum(axes).to(torch.float64) / count
    variance = centred.square_().sum(axes).to(torch.float64) / count - offset.square()
    return mean.to(torch.float64) + offset, variance


class _Normalize(torch.autograd.Function):
    """Normalisation by given statistics; its gradient accounts for all ranks' inputs, which they were computed from."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        collective: Collective,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.collective = count, eps, collective
        dtype = mean.dtype
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        return F.batch_norm(input.to(dtype), mean, variance, weight, bias, False, 0.0, eps).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        memory_format = _memory_format(input)
        x = _dense(input, memory_format).to(mean.dtype)
        dy = _dense(grad_output, memory_format).to(mean.dtype)
        sum_dy, sum_dy_xhat = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel() > 0:
            # With statistics given, the kernel's gradients of weight and bias are the local sums.
            _, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
                dy, x, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = _grad_input(ctx, dy, x, sum_dy, sum_dy_xhat).to(input.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = sum_dy_xhat.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _grad_input(ctx: Any, dy: Tensor, x: Tensor, sum_dy: Tensor, sum_dy_xhat: Tensor) -> Tensor:
    """Return weight / deviation * (dy - mean(dy) - x̂ * mean(dy * x̂)), the means over all ranks."""
    _, weight, mean, variance = ctx.saved_tensors
    sums = torch.cat([sum_dy, sum_dy_xhat]).to(torch.float64)
    ctx.collective.sum(sums, what="batch normalisation gradients")
    mean_dy, mean_dy_xhat = sums.div_(ctx.count).to(mean.dtype).chunk(2)
    inverse_deviation = torch.rsqrt(variance + ctx.eps)
    factor = inverse_deviation if weight is None else inverse_deviation * weight.to(mean.dtype)
    shape = _per_channel(x)
    result = x - mean.view(shape)
    result.mul_((-inverse_deviation * mean_dy_xhat).view(shape))
    return cast(Tensor, result.add_(dy).sub_(mean_dy.view(shape)).mul_(factor.view(shape)))


def _per_channel(x: Tensor) -> list[int]:
    """The shape in which a vector of one number per channel meets ``x``."""
    return [1, -1] + [1] * (x.dim() - 2)


def _memory_format(input: Tensor) -> torch.memory_format:
    for dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if input.dim() == dimensions and input.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format


def _dense(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    return tensor.contiguous(memory_format=memory_format)
