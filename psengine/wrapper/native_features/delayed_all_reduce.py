"""Parameters whose gradients are averaged when a chosen parameter's gradient arrives, not when their own does.

What ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` ask for: a pipeline stage runs several
micro-batches and exchanges the gradients of all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError


class DelayedAllReduce:
    """Gradients of ``parameters`` lie in one flat tensor, all-reduced when ``trigger`` gets its gradient.

    The parameters, of one dtype and device, are made equal to rank 0's here.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], trigger: torch.Tensor, collective: Collective) -> None:
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) != 1:
            raise ConfigurationError(
                f"delay_all_reduce_named_params must share one dtype and device (expected 1 kind, got {kinds})"
            )
        self.parameters = list(parameters)
        self._collective = collective
        dtype, device = kinds.pop()
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=device)
        sizes = [p.numel() for p in parameters]
        self._views = [v.view(p.shape) for v, p in zip(self._flat.split(sizes), parameters, strict=True)]
        collective.broadcast([p.detach() for p in parameters], 0, what="delayed parameters").wait()
        self._handle = trigger.register_hook(self._reduce)

    def attach(self) -> None:
        """Let gradients that were set to None be views of the flat tensor again, cleared. Before backward."""
        missing = [p.grad is None for p in self.parameters]
        if all(missing):
            self._flat.zero_()
        for parameter, view, is_missing in zip(self.parameters, self._views, missing, strict=True):
            if is_missing:
                if not all(missing):
                    view.zero_()
                parameter.grad = view

    def _reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        # The trigger may come before the delayed gradients of the same backward, as native DDP allows; the exchange
        # itself is over before backward returns.
        work = self._collective.all_reduce(self._flat, 1.0 / self._collective.world_size, what="delayed gradients")
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return gradient

    def close(self) -> None:
        """Stop listening."""
        self._handle.remove()
