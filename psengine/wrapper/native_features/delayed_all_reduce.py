"""Parameters whose gradients are averaged when a chosen parameter's gradient arrives, not when their own does.

What ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` ask for: a pipeline stage runs several
micro-batches and exchanges the gradients of all of them at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from psengine.collectives.base import Collective


def delay_all_reduce(replica: Any, trigger: Any, collective: Collective) -> None:
    """Let delayed gradients be views of one flat tensor, all-reduced when the parameter ``trigger`` gets its gradient.

    Native DDP's ``_clear_grad_buffer`` hands the views out after each forward. The delayed parameters, of one dtype and
    device, are made equal to rank 0's here.
    """
    parameters = replica._delay_all_reduce_params
    sizes = [p.numel() for p in parameters]
    flat = parameters[0].new_zeros(sum(sizes))
    replica._delay_grad_buffer = flat
    replica._delay_grad_views = [v.view(p.shape) for v, p in zip(flat.split(sizes), parameters, strict=True)]
    collective.broadcast([p.detach() for p in parameters], 0, what="delayed parameters").wait()

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        # The trigger may come before the delayed gradients of the same backward, as native DDP allows; the exchange
        # itself is over before backward returns.
        # Divided, as native DDP does: a product with the reciprocal rounds otherwise.
        work = collective.all_reduce(flat.div_(collective.world_size), 1.0, what="delayed gradients")
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]  # for None
        return gradient

    weakref.finalize(replica, trigger.register_hook(reduce).remove).atexit = False
