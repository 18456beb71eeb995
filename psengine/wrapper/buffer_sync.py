"""When the module's buffers are made equal: before a forward, under native DDP's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.gradients.reducer import Reducer
from psengine.strategies.base import Strategy
from psengine.wrapper.module_buffers import BufferBroadcast, named_buffers
from psengine.wrapper.native_features.joining import highest_rank


class BufferSync:
    """The part of ``DistributedDataParallel`` that keeps buffers equal, where the strategy does not."""

    module: torch.nn.Module
    device: torch.device
    strategy: Strategy
    reducer: Reducer
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    _collective: Collective
    _buffer_broadcast: BufferBroadcast
    _join_config: Any
    # Native DDP's.
    _check_sync_bufs_pre_fwd: Callable[[], bool]
    _check_sync_bufs_post_fwd: Callable[[], bool]

    @property
    def broadcast_buffers(self) -> bool:
        """Older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _assign_modules_buffers(self) -> None:
        # Looked up each time: a module may assign new buffers (https://github.com/pytorch/pytorch/issues/63916).
        self.named_module_buffers = named_buffers(self.module, self.parameters_to_ignore)
        self.modules_buffers = list(self.named_module_buffers.values())

    def _sync_buffers(self) -> None:
        if self.strategy.capabilities.carries_buffers:
            return
        source_rank = highest_rank(self._collective, self.device, True) if self._join_config.enable else 0
        with torch.no_grad():
            self._assign_modules_buffers()
            # Forwards that came before may still need the overwritten values' version for their backward.
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                self._sync_module_buffers(source_rank)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if not hasattr(self, "buffer_hook"):
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        hook = self.buffer_hook
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcast ``bufs`` (default: the module's buffers) from ``authoritative_rank``; what buffer hooks call."""
        if self._collective.world_size == 1 or self.strategy.capabilities.carries_buffers:
            return
        self._buffer_broadcast.run(
            self.modules_buffers if bufs is None else bufs,
            lambda packed: self._collective.broadcast(packed, authoritative_rank, what="buffers").wait(),
            is_source=self._collective.rank == authoritative_rank,
        )

    def _shadow_buffer_sync(self) -> None:
        if self._check_sync_bufs_pre_fwd() and not self.strategy.capabilities.carries_buffers:
            self._sync_module_buffers(highest_rank(self._collective, self.device, False))
