"""``join``: ranks that ran out of data shadow the collectives of those that still have some.

One iteration of a rank with data, and what a joined rank does beside it, in this order::

    with data    notify (counted by Join)   rebuild   buffers: who is the source?   sync this time?   buckets, used-map
    joined       (Join counts)              rebuild   buffers: who is the source?   sync this time?   zeros,   zeros
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed.algorithms.join import JoinHook

from psengine.collectives.base import Collective
from psengine.errors import ModuleError
from psengine.gradients.reducer import Reducer
from psengine.wrapper.native_features.logging_data import LoggingData


class Joinable(Protocol):
    """What joining needs of the wrapped model."""

    logger: LoggingData
    reducer: Reducer
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool

    def _shadow_buffer_sync(self) -> None: ...

    def _any_rank_syncs_gradients(self, *, this_rank_syncs: bool) -> bool: ...

    def _sync_final_model(self, is_last_joiner: bool) -> None: ...


class ShadowHook(JoinHook):
    """What ``torch.distributed.algorithms.join.Join`` calls on ranks that have no data left.

    Args:
        replica: the wrapped model of this rank.
        divide_by_initial_world_size: divide gradients by all ranks, so that each sample weighs the same; else by
            those that still have data.
    """

    def __init__(self, replica: Joinable, *, divide_by_initial_world_size: bool) -> None:
        replica.logger._set_uneven_input_join()
        replica._divide_by_initial_world_size = divide_by_initial_world_size
        self._replica = replica
        super().__init__()

    def main_hook(self) -> None:
        """Shadow one forward and backward."""
        replica = self._replica
        replica.reducer._rebuild_buckets()
        replica._shadow_buffer_sync()
        should_sync = replica._any_rank_syncs_gradients(this_rank_syncs=False)
        # After an iteration without gradient exchange the next forward exchanges no buffers either.
        replica.require_forward_param_sync = should_sync
        if should_sync:
            replica.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give everybody the model of the rank that trained longest."""
        self._replica._sync_final_model(is_last_joiner)


def highest_rank(collective: Collective, device: torch.device, is_candidate: bool) -> int:
    """The highest rank of those that are candidates; the same answer on every rank, and all ask."""
    mine = torch.tensor([collective.rank if is_candidate else -1], dtype=torch.int64, device=device)
    highest = max(int(t.item()) for t in collective.gather(mine, what="join: source of the model"))
    if highest == -1:
        raise ModuleError("join: expected at least one rank to offer its model, got none")
    return highest
