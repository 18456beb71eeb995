"""What torch offers to be used with DistributedDataParallel, as its documentation uses it: small programs of ours.

torch's own tests of these are not in its wheel. Each program wraps with the class that it is given and returns tensors,
which must have the same bits whichever class that was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

Tensors = dict[str, torch.Tensor]
WrapperClass = Callable[..., Any]
STEPS = 4
# Of DDPCommHookType, those that native DDP runs on gloo and the CPU: it refuses BF16_COMPRESS without NCCL, and both
# QUANTIZE hooks raise an IndexError in torch's own code.
HOOKS = {kind.name for kind in DDPCommHookType} - {"BF16_COMPRESS", "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"}


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(rank: int, number: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(number)]


def train(wrapped: Any, optimizer: torch.optim.Optimizer | None, inputs: list[torch.Tensor]) -> Tensors:
    for x in inputs:
        wrapped.zero_grad()
        wrapped(x).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
    return values(wrapped)


def values(wrapped: nn.Module) -> Tensors:
    found = {name: parameter.detach().clone() for name, parameter in wrapped.named_parameters()}
    return found | {f"{name}.grad": p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}


# ---- ZeroRedundancyOptimizer ---------------------------------------------------------------------------------------


def zero(wrap: WrapperClass, rank: int, directory: Path, *, as_view: bool = False) -> Tensors:
    wrapped = wrap(network())
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=0.01
    )
    found = train(wrapped, optimizer, batches(rank))
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": value for name, value in state.items()}
    return found


def zero_joined(wrap: WrapperClass, rank: int, directory: Path) -> Tensors:
    """Two joinables; rank 1 has two batches more."""
    wrapped = wrap(network())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    with Join([wrapped, optimizer]):
        train(wrapped, optimizer, batches(rank, STEPS + 2 * rank))
    return values(wrapped)


# ---- Join ----------------------------------------------------------------------------------------------------------


def two_models_joined(wrap: WrapperClass, rank: int, directory: Path, *, by_initial: bool) -> Tensors:
    first, second = wrap(network()), wrap(network())
    with Join([first, second], divide_by_initial_world_size=by_initial):
        for x in batches(rank, STEPS - rank):
            first.zero_grad()
            second.zero_grad()
            first(x).square().sum().backward()
            second(x + 1).square().sum().backward()
    return values(first) | {f"second.{name}": value for name, value in values(second).items()}


# ---- replicate -----------------------------------------------------------------------------------------------------


def replicated(wrap: WrapperClass, rank: int, directory: Path, **options: Any) -> Tensors:
    """``replicate`` wraps a list of the parameters when the module is first called."""
    module = _replicate(wrap, network(), **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return train(module, optimizer, batches(rank))


def replicated_accumulating(wrap: WrapperClass, rank: int, directory: Path) -> Tensors:
    module = _replicate(wrap, network())
    for index, x in enumerate(batches(rank)):
        module.set_requires_gradient_sync(index % 2 == 1)
        module(x).square().sum().backward()
    return values(module)


def replicated_parts(wrap: WrapperClass, rank: int, directory: Path) -> Tensors:
    """Two parts of one model, one of them without the layer that is left alone."""
    model = network()
    _replicate(wrap, model[0])
    _replicate(wrap, model[2], ignored_modules=[])
    return train(model, None, batches(rank, 1))


def replicated_with_hook(wrap: WrapperClass, rank: int, directory: Path) -> Tensors:
    module = _replicate(wrap, network())
    module.register_comm_hook(None, allreduce_hook)
    return train(module, None, batches(rank))


def _replicate(wrap: WrapperClass, module: nn.Module, **options: Any) -> Any:
    import importlib

    replicate_module = importlib.import_module("torch.distributed._composable.replicate")
    replicate_module.DistributedDataParallel = wrap
    return replicate_module.replicate(module, **options)


# ---- communication hooks by name -----------------------------------------------------------------------------------


def hooked(wrap: WrapperClass, rank: int, directory: Path, *, name: str) -> Tensors:
    wrapped = wrap(network(), gradient_as_bucket_view=True)
    register_ddp_comm_hook(DDPCommHookType[name], wrapped, state=dist.group.WORLD)
    return train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01), batches(rank))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def checkpointed(wrap: WrapperClass, rank: int, directory: Path) -> Tensors:
    """Saved halfway by torch.distributed.checkpoint, and loaded into another wrapped model."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    inputs = batches(rank)
    wrapped = wrap(network())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    train(wrapped, optimizer, inputs[:2])
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    assert set(model_state) == set(network().state_dict())
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)

    other = wrap(network())
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=directory)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(other, other_optimizer, inputs[2:])


PROGRAMS: dict[str, Callable[..., Tensors]] = {
    "zero": zero,
    "zero, parameters as views": functools.partial(zero, as_view=True),
    "zero, joined": zero_joined,
    "two models joined": functools.partial(two_models_joined, by_initial=True),
    "two models joined, by live ranks": functools.partial(two_models_joined, by_initial=False),
    "replicate": replicated,
    "replicate, finding unused parameters": functools.partial(replicated, find_unused_parameters=True),
    "replicate, accumulating": replicated_accumulating,
    "replicate, parts": replicated_parts,
    "replicate, with a hook": replicated_with_hook,
    "checkpoint": checkpointed,
    **{f"hook {name}": functools.partial(hooked, name=name) for name in sorted(HOOKS)},
}
# What strategies over servers refuse, with a message of their own.
NOT_OVER_SERVERS = {"two models joined, by live ranks", "replicate, with a hook", *(f"hook {name}" for name in HOOKS)}
