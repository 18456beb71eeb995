"""Refuses forwards inside a context of torch.distributed.autograd (RPC), whose gradients never come to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed.autograd
import torch.distributed.rpc

from psengine.gradients.error_texts import DISTRIBUTED_AUTOGRAD_MESSAGE


def refuse_distributed_autograd(fail: Callable[[str], object]) -> None:
    """Call ``fail`` with the reason where this thread is in such a context; 0.1 µs in programs without RPC."""
    if not torch.distributed.rpc.is_available() or not torch.distributed.rpc.api._is_current_rpc_agent_set():
        return
    try:
        torch.distributed.autograd._current_context()
    except RuntimeError:  # "Current thread doesn't have a valid autograd context."
        return
    fail(DISTRIBUTED_AUTOGRAD_MESSAGE)
