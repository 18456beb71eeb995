"""A module's tensors by name: parameters to exchange, and the state that replicas share."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Set
from typing import Any

import torch


def reducible_parameters(module: torch.nn.Module, ignored: Set[str]) -> dict[str, torch.nn.Parameter]:
    """Name to parameter, in model order, for those whose gradients are exchanged."""
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and name not in ignored:
            names.setdefault(parameter, name)
    return {name: parameter for parameter, name in names.items()}


def has_sparse_gradient(module: torch.nn.Module, name: str) -> bool:
    """Whether the parameter ``name`` belongs to an embedding with sparse gradients."""
    owner = module.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and owner.sparse


def named_buffers(module: torch.nn.Module, ignored: Set[str]) -> dict[str, torch.Tensor]:
    """Name to buffer, without duplicates and without the ``ignored`` names."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def shared_state(module: torch.nn.Module, ignored: Set[str], *, with_buffers: bool) -> dict[str, torch.Tensor]:
    """The tensors that must be equal on all replicas, by name: parameters and buffers, detached."""
    state = {name: p for name, p in module.named_parameters() if name not in ignored}
    buffers = named_buffers(module, ignored) if with_buffers else {}
    return {name: tensor.detach() for name, tensor in (state | buffers).items()}


class LoadHook:
    """Tells a wrapper that its module begins to load. In copies and pickles of the module it is a function of torch."""

    def __init__(self, begin: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._begin = begin

    def __call__(self, *_: Any) -> None:
        begin = self._begin()
        if begin is not None:
            begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (torch.nn.Identity,)  # takes whatever a hook is given
