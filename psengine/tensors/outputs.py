"""The tensors in what a model's forward returns, and the autograd node that watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from psengine.errors import ModuleError


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, named tuples, dicts and dataclasses (and RRefs this process owns)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))
    elif _is_owned_rref(value):
        yield from find_tensors(value.local_value())


def _is_owned_rref(value: Any) -> bool:
    # A class check by name keeps torch.distributed.rpc out of the import; few programs have it loaded.
    return type(value).__name__ in ("RRef", "PyRRef") and hasattr(value, "is_owner") and value.is_owner()


class BackwardStart(torch.autograd.Function):
    """Identity on the outputs; its backward runs before any parameter's and calls ``on_start`` in the outermost graph.

    Gradients of outputs that the loss does not use stay undefined (None) rather than zero, so that the parameters
    behind them keep their gradients as they are.
    """

    @staticmethod
    def forward(ctx: Any, on_start: Callable[[], None], clone: bool, *outputs: Any) -> tuple[Any, ...]:
        """Return the outputs; cloned unless the caller promised not to modify them in place."""
        ctx.set_materialize_grads(False)
        ctx.on_start = on_start
        return tuple(o.clone() if clone and isinstance(o, torch.Tensor) else o for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Pass the gradients on."""
        ctx.on_start()
        return (None, None, *gradients)


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def watch_backward(output: Any, on_start: Callable[[], None], *, clone: bool, required: bool) -> Any:
    """Return ``output`` with every differentiable tensor of it passed through one ``BackwardStart`` node.

    Args:
        output: what forward returned; structures that torch's pytree knows are rebuilt around the new tensors.
        on_start: called when backward reaches the node.
        clone: whether the tensors may be modified in place afterwards.
        required: whether everything depends on it, so that tensors hidden from pytree are an error.

    Raises:
        ModuleError: ``required``, and the only differentiable tensors stand in classes that pytree does not know.
    """
    local_value = output.local_value() if _is_owned_rref(output) else output
    leaves, structure = pytree.tree_flatten(local_value)
    if required and not any(map(_has_history, leaves)) and any(map(_has_history, find_tensors(output))):
        raise ModuleError(
            f"static_graph=True must see backward begin, but the tensors of the output ({type(local_value).__name__})"
            " stand in a class that torch.utils._pytree does not know. Return a tuple or dict, or register the class"
            " with torch.utils._pytree.register_dataclass or register_pytree_node."
        )
    watched = BackwardStart.apply(on_start, clone, *leaves)  # type: ignore[no-untyped-call]
    # Tensors without history must come back as they went in (https://github.com/pytorch/pytorch/issues/60733).
    kept = [
        leaf if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None else new
        for leaf, new in zip(leaves, watched, strict=True)
    ]
    rebuilt = pytree.tree_unflatten(kept, structure)
    return type(output)(rebuilt) if local_value is not output else rebuilt
