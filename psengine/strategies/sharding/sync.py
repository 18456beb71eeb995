"""Strategy "sync:shard_optimizer=true": each rank steps its share of the parameters (ZeRO stage 1).

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054. It is a parameter server whose servers are the ranks::

    one host     backward ─ all-reduce, gradients whole ──── step: barrier ─ own blocks in shared memory ─ barrier
    otherwise    backward ─ all-to-all, averages of a share ─ step: own blocks ─ all-gather of parameters

The bits are those of "sync" with the plain optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from psengine.collectives.base import CompletedWork, Work
from psengine.errors import ConfigurationError, ReductionError
from psengine.strategies.exchange import BucketExchange, CommHook, Step
from psengine.strategies.life_cycle import Replica
from psengine.strategies.sharding.flat_parameters import FlatParameters, flat_parameters, make_sections
from psengine.strategies.sharding.plan import Piece
from psengine.strategies.sharding.share_exchange import ShareExchange
from psengine.strategies.sharding.share_gradients import ShareGradients
from psengine.strategies.sharding.share_optimizer import ShareOptimizer
from psengine.strategies.step_hooks import take_step
from psengine.strategies.stepping import check_one
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.strategies.verification import verify_replicas
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share

DTYPES = (torch.float32, torch.float64)


class SyncShardedOptimizer(SyncAllReduce):
    """Average gradients like "sync"; step a share of the parameters on each rank. Needs ``DistributedOptimizer``.

    Each rank keeps 1/W of the optimizer's state, W being the world size. On one host the parameters live once, in
    memory that all ranks map, from the moment ``psengine.DistributedOptimizer`` is made; nobody writes it between two
    steps. Otherwise each rank has its own, and gradients of its share only.
    """

    capabilities = replace(SyncAllReduce.capabilities, steps_together=True, lends_gradients=True)

    def __init__(self) -> None:
        super().__init__()
        self._options = {}
        self._forget()

    def _forget(self) -> None:
        self._flat: FlatParameters | None = None
        self._optimizer: ShareOptimizer | None = None
        self._buckets: Sequence[Bucket] = ()
        # Where each rank gets the gradients of its share only: by index of the bucket.
        self._share_exchanges: list[ShareExchange] | None = None
        self._gradients: ShareGradients | None = None
        self._pieces: dict[int, list[Piece]] = {}
        self._hook_handle: Any = None

    @property
    @override
    def agreed_options(self) -> dict[str, str]:
        return super().agreed_options | {"shard_optimizer": "true"}

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def prepare(self, replica: Replica) -> None:
        for name, parameter in replica.parameters.items():
            got = None
            if name in replica.sparse:
                got = "sparse gradients"
            elif parameter.dtype not in DTYPES:
                got = str(parameter.dtype)
            elif parameter.device.type != "cpu":
                got = str(parameter.device)
            if got is not None:
                raise ConfigurationError(
                    "shard_optimizer=true steps dense float32 and float64 parameters on the CPU (expected these, got"
                    f" {got} for {name!r}). Fix: strategy='sync'."
                )
        super().prepare(replica)
        parameters = list(replica.parameters.values())
        self._pieces = {
            index: list(section.plan.pieces_of(place))
            for section in make_sections(parameters, replica.collective.world_size)
            for place, index in enumerate(section.indices)
        }
        self._hook_handle = register_optimizer_step_pre_hook(_refusing_others(weakref.ref(self)))

    @override
    def close(self) -> None:
        """The parameters get memory of their own again."""
        if self._hook_handle is not None:
            self._hook_handle.remove()
        if self._flat is not None:
            self._flat.release()
        if self._gradients is not None:
            self._gradients.close()
        self._forget()
        super().close()

    def refuse_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise where ``optimizer`` would step this replica's parameters beside the one that is bound."""
        if self._replica is None or (self._optimizer is not None and self._optimizer.optimizer is optimizer):
            return
        exchanged = set(self._replica.parameters.values())
        if not any(parameter in exchanged for group in optimizer.param_groups for parameter in group["params"]):
            return
        expected = "optimizer = psengine.DistributedOptimizer(optimizer, model), and its step()"
        raise ConfigurationError(
            "with shard_optimizer=true each rank steps only its share of the parameters (expected"
            f" {expected}, got a step of {type(optimizer).__name__}, which would step all of them on every rank)."
            " Fix: step the optimizer that psengine.DistributedOptimizer returned."
        )

    # ---- gradients ---------------------------------------------------------------------------------------------

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        super().lay_out(buckets)
        self._buckets = buckets
        self._share_exchanges = None

    @property
    def _scatters(self) -> bool:
        """Whether each rank gets the averages of its share only; known once ranks have met."""
        return self.collective.world_size > 1 and not self.collective.shares_memory

    @override
    def begin(self, step: Step) -> Share:
        """As "sync"; but an all-to-all does not scale, also where the collective's all-reduce does."""
        share = super().begin(step)
        if self._scatters and self._scale != 1.0:
            self._scale, share = 1.0, Share(step.live_world_size)
        return share

    @override
    def exchange(self, bucket: Bucket) -> BucketExchange:
        if not self._scatters:
            return super().exchange(bucket)
        if self._share_exchanges is None:
            note = self._share_gradients().note
            self._share_exchanges = [ShareExchange(b, self.collective, self._pieces, note) for b in self._buckets]
        return self._share_exchanges[bucket.index].exchange()

    def _share_gradients(self) -> ShareGradients:
        if self._gradients is None:
            assert self._replica is not None, "reduced before it was prepared"
            rank = self.collective.rank
            own = {index: [p for p in pieces if p.owner == rank] for index, pieces in self._pieces.items()}
            parameters = self._replica.parameters
            self._gradients = ShareGradients(list(parameters), list(parameters.values()), own, self.collective)
        return self._gradients

    @override
    def finish(self) -> Work:
        return self._share_gradients().end_backward() if self._scatters else CompletedWork()

    @override
    def whole_norm(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        return norm if self._gradients is None else self._gradients.whole_norm(norm, norm_type)

    @override
    def register_comm_hook(self, hook: CommHook) -> None:
        raise ConfigurationError(
            "shard_optimizer=true exchanges gradients for the shares of ranks (expected no communication hook, and no"
            " optimizer that is overlapped with backward through one). Fix: leave the hook out, or strategy='sync'."
        )

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Place the parameters in flat memory; all ranks call it.

        Raises:
            ConfigurationError: an optimizer that cannot be sharded, or a second one.
            ReplicaMismatchError: the ranks' optimizers differ.
        """
        if self._optimizer is not None:
            check_one((self._optimizer.optimizer, optimizer), "sync:shard_optimizer=true")
        self.collective.connect()
        assert self._replica is not None, "prepared"
        if self._flat is None:
            chosen = ShareOptimizer.agreed_options(optimizer, list(self._replica.parameters.values()))
            verify_replicas(self.collective, {}, {}, self._replica.device, chosen)
            self._flat = flat_parameters(self._replica.parameters, self.collective)
        self._optimizer = ShareOptimizer(optimizer, self._flat)

    def _bound(self) -> ShareOptimizer:
        _ = self.collective  # a closed strategy raises
        if self._optimizer is None:
            raise ReductionError(
                "the model's strategy was closed or moved to another group since psengine.DistributedOptimizer was"
                " made. Fix: make it again from a plain optimizer."
            )
        return self._optimizer

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share; return when all parameters are stepped. All ranks call it."""
        bound = self._bound()

        def step_share() -> None:
            end_compare = self._gradients.begin_compare() if self._gradients is not None else None
            bound.step()
            if end_compare is not None:
                end_compare()

        return take_step(bound.optimizer, closure, step_share)

    @override
    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self._bound().give_state()

    @override
    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self._bound().take_state()


def _refusing_others(reference: weakref.ref[SyncShardedOptimizer]) -> Callable[..., None]:
    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        strategy = reference()
        if strategy is not None:
            strategy.refuse_other(optimizer)

    return refuse
