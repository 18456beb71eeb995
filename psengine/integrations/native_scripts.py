"""Scripts that were written for native DDP, unchanged: psengine's wrapper in the place of torch's.

``psengine run --replace-ddp`` has ``replacing/sitecustomize.py`` call ``install()`` right after ``import torch``, so
that whatever the script imports from torch is ours::

    an optimizer is made       noted: its class's __init__ may still be at work
    a model is wrapped         it is ours; optimizers that have its parameters are distributed
    the model runs forward     so are those that were made since
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from typing import Any

import torch
from typing_extensions import override

from psengine.environment.variables import read_variable, set_variables
from psengine.integrations.binding import WrappedModels
from psengine.strategies.stepping import Stepping
from psengine.wrapper import ddp

# Models whose strategy wants to know optimizers; under "sync" these stay as the script made them.
_wrapped = WrappedModels()
# Made by the script, and not distributed.
_plain: list[weakref.ref[torch.optim.Optimizer]] = []
_has_new, _has_wrapped = False, False


class DistributedDataParallel(ddp.DistributedDataParallel):
    """psengine's wrapper, which finds the optimizers of its parameters itself."""

    @override
    def __init__(self, *arguments: Any, **options: Any) -> None:
        global _has_wrapped
        super().__init__(*arguments, **options)
        _has_wrapped = True
        if type(self.strategy).bind is not Stepping.bind:
            _wrapped.add(self)
        _distribute()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if _has_new:
            _distribute()
        return super()._pre_forward(*inputs, **kwargs)


def install() -> None:
    """Have every name of torch for DistributedDataParallel mean ours, and note each optimizer that is made."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("DistributedDataParallel") is ddp.NativeDistributedDataParallel:
            module.DistributedDataParallel = DistributedDataParallel  # type: ignore[attr-defined]
    construct = torch.optim.Optimizer.__init__

    @functools.wraps(construct)
    def construct_and_note(self: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
        global _has_new
        construct(self, *arguments, **options)
        _plain.append(weakref.ref(self))
        _has_new = True

    torch.optim.Optimizer.__init__ = construct_and_note  # type: ignore[method-assign]
    spawning: Any = sys.modules["torch.multiprocessing.spawn"]
    start = spawning.start_processes

    @functools.wraps(start)
    def start_ranks(*arguments: Any, **options: Any) -> Any:
        # Ranks that a script starts itself meet at a store of their own, not at that of torchrun's agent.
        set_variables({"TORCHELASTIC_USE_AGENT_STORE": None})
        return start(*arguments, **options)

    spawning.start_processes = torch.multiprocessing.start_processes = start_ranks
    atexit.register(_say_if_unused)


def _distribute() -> None:
    """Let the strategies of wrapped models step the optimizers over their parameters."""
    global _has_new
    _has_new = False
    for reference in _plain[:]:
        optimizer = reference()
        if optimizer is None or "_psengine_strategy" in vars(_wrapped.bind(optimizer)):
            _plain.remove(reference)


def _say_if_unused() -> None:
    """At the end of rank 0, if it made an optimizer and wrapped nothing."""
    failed = getattr(sys, "last_value", None) is not None
    if _plain and not _has_wrapped and not failed and read_variable("RANK") == "0":
        print(
            "psengine: --replace-ddp changed nothing here (expected a model wrapped in"
            " torch.nn.parallel.DistributedDataParallel, got none). FSDP, DeepSpeed and replicate() are not replaced.",
            file=sys.stderr,
        )
