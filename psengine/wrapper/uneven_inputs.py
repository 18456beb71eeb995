"""``join``: what ranks with different numbers of batches ask of the wrapped model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from psengine.collectives.base import Collective
from psengine.gradients.reducer import Reducer
from psengine.strategies.base import Strategy
from psengine.wrapper import arguments as checks
from psengine.wrapper.module_state import shared_state
from psengine.wrapper.native_features.joining import ShadowHook, highest_rank
from psengine.wrapper.native_features.logging_data import LoggingData


class UnevenInputs(Joinable):
    """The part of ``DistributedDataParallel`` that is a ``Joinable``."""

    module: torch.nn.Module
    device: torch.device
    strategy: Strategy
    reducer: Reducer
    process_group: dist.ProcessGroup | None
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    _collective: Collective
    require_forward_param_sync: bool
    logger: LoggingData
    batch_weight: float | None
    _divide_by_initial_world_size: bool
    _shadow_buffer_sync: Callable[[], None]

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context manager for ranks with different numbers of batches: those done shadow the others' collectives.

        Args:
            divide_by_initial_world_size: divide gradients by all ranks (every sample weighs the same), else by those
                that still have data.
            enable: False where inputs are known to be even.
            throw_on_early_termination: raise on every rank as soon as one is done; needed where the model has other
                collectives, such as SyncBatchNorm.
        """
        if enable:
            self._check_can_join(divide_by_initial_world_size)
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def _check_can_join(self, by_all: bool) -> None:
        # In forward too: Join([model]) does not call join(), and tells no joinable whether it is enabled.
        checks.check_can_join(self.strategy, self.process_group is not None, divide_by_initial_world_size=by_all)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``torch.distributed.algorithms.join.Join`` asks each joinable for."""
        divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self, divide_by_initial_world_size=divide_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` puts its own tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group ``Join`` counts in."""
        if self.process_group is None:
            self._check_can_join(self._divide_by_initial_world_size)
        assert self.process_group is not None, "strategies over collectives have a group"
        return self.process_group

    def _any_rank_syncs_gradients(self, *, this_rank_syncs: bool) -> bool:
        """Whether any rank's next backward exchanges gradients; every rank asks once per iteration inside join."""
        weighs = this_rank_syncs and self.batch_weight is not None
        flags = torch.tensor([float(this_rank_syncs), float(weighs)], device=self.device)
        self._collective.all_reduce(flags, what="join: does anybody synchronise gradients").wait()
        syncing_ranks, weighing_ranks = flags.tolist()
        self.reducer.contribution.shadows_weights = weighing_ranks != 0
        return bool(syncing_ranks != 0)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of the highest rank among those that trained longest."""
        self._authoritative_rank = highest_rank(self._collective, self.device, is_last_joiner)
        state = shared_state(self.module, self.parameters_to_ignore, with_buffers=self.forward_sync_buffers)
        # Whoever averages: Join has a group, and servers carry gradients only.
        self._collective.broadcast(list(state.values()), self._authoritative_rank, what="the final model").wait()
