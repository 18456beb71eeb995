"""A module's tensors by name: whose gradients are exchanged, and what replicas must have in common."""

from __future__ import annotations

from collections.abc import Set

import torch

from psengine.wrapper.module_buffers import named_buffers


def reducible_parameters(module: torch.nn.Module, ignored: Set[str]) -> list[tuple[str, torch.nn.Parameter, bool]]:
    """(name, parameter, has sparse gradients) for each parameter whose gradient is exchanged, in model order."""
    found: list[tuple[str, torch.nn.Parameter, bool]] = []
    seen: set[torch.nn.Parameter] = set()
    for module_name, submodule in module.named_modules():
        is_sparse = isinstance(submodule, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and submodule.sparse
        for short_name, parameter in submodule.named_parameters(recurse=False):
            name = f"{module_name}.{short_name}" if module_name else short_name
            if parameter.requires_grad and name not in ignored and parameter not in seen:
                seen.add(parameter)
                found.append((name, parameter, is_sparse))
    return found


def shared_state(module: torch.nn.Module, ignored: set[str], *, with_buffers: bool) -> dict[str, torch.Tensor]:
    """What replicas must have in common: all parameters that are not ignored, and the buffers, by name; detached."""
    state = {name: p.detach() for name, p in module.named_parameters() if name not in ignored}
    if with_buffers:
        state.update({name: b.detach() for name, b in named_buffers(module, ignored).items()})
    return state
