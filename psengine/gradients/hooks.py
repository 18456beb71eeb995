"""Where a reducer listens to autograd: the parameters' accumulation nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

# Whether this torch was built with RPC.
HAS_RPC = torch.distributed.rpc.is_available()
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class AccumulationNodes:
    """The nodes of ``parameters``, kept alive: autograd holds them weakly, and a new node would lack our hook.

    torch gives a parameter another node when its dtype or device changes (``model.double()``, ``model.to(device)``),
    without the hooks of the former one.

    Attributes:
        nodes: by parameter.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._parameters = parameters
        self._kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
        self._handles: list[Any] = []

    def listen(self, make_hook: Callable[[int], Callable[..., object]]) -> None:
        """Register ``make_hook(index)`` at each node.

        Post-hooks of the node fire for undefined gradients too (an output that is not part of the loss);
        ``Tensor.register_post_accumulate_grad_hook`` does not.
        """
        self._handles = [node.register_hook(make_hook(index)) for index, node in enumerate(self.nodes)]

    def stop_listening(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def was_converted(self, index: int) -> bool:
        """Whether the parameter's dtype or device is another now; cheap, and blind to a conversion there and back."""
        parameter = self._parameters[index]
        return (parameter.dtype, parameter.device) != self._kinds[index]

    def replaced(self, indices: Iterable[int]) -> Iterator[int]:
        """Those of the parameters that have another node now; some microseconds for each."""
        for index in indices:
            parameter = self._parameters[index]
            if parameter.requires_grad and _current_node(parameter) is not self.nodes[index]:
                yield index


def _current_node(parameter: torch.nn.Parameter) -> Any:
    """The parameter's accumulation node. torch takes a view to find it, which no dispatch mode must see: selective
    checkpointing counts the operations of a forward and of its recomputation, and they must be the same.
    """
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() > 0 else nullcontext():
        return get_gradient_edge(parameter).node


def is_transformed() -> bool:
    """Whether a torch.func transform (grad, vmap, ...) runs around this call. Takes 0.1 µs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let ``method`` compute with plain tensors although a torch.func transform runs around it: a transform wraps what
    is computed, so that it has no memory to exchange, and hides accumulation nodes.
    """

    @functools.wraps(method)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not is_transformed():
            return method(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return method(*args, **kwargs)

    return call


def is_in_distributed_autograd() -> bool:
    """Whether this thread is in a context of torch.distributed.autograd (RPC): its gradients never come to ``.grad``.

    It takes 0.1 µs in programs without RPC.
    """
    if not HAS_RPC or not torch.distributed.rpc.api._is_current_rpc_agent_set():
        return False
    try:
        torch.distributed.autograd._current_context()
    except RuntimeError:  # "Current thread doesn't have a valid autograd context."
        return False
    return True
