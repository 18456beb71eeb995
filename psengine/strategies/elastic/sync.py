"""Strategy "sync:virtual_workers=V": the averages of V virtual workers, whoever computes their gradients.

The bits are those of native DDP with V ranks: each virtual worker's gradients are divided by V, kept apart, and added
in the order of gloo's ring of V ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import CompletedWork, Work
from psengine.errors import ConfigurationError, ReductionError
from psengine.strategies.base import Capabilities, Strategy
from psengine.strategies.elastic.part import Part
from psengine.strategies.elastic.player import Player, player_for
from psengine.strategies.exchange import BucketExchange, CommHook, Gradients, Step
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share


class SyncVirtualWorkers(Strategy):
    """Average the gradients of ``virtual_workers`` batches in each step; ``psengine.ElasticLoader`` deals them out.

    Workers may die and others may come: as long as one has the state, the bits are those of the undisturbed run.

    Args:
        virtual_workers: V, the number of batches in a step; at least the number of workers.

    Raises:
        ConfigurationError: it is less than 1.
    """

    name = "sync"
    sums_at_servers = False
    capabilities = Capabilities(
        needs_process_group=False, orders_buckets=True, carries_buffers=True, has_virtual_workers=True
    )

    def __init__(self, *, virtual_workers: int) -> None:
        if not isinstance(virtual_workers, int) or virtual_workers < 1:
            raise ConfigurationError(
                f"virtual_workers of strategy {self.name!r} (expected a whole number of at least 1, got"
                f" {virtual_workers!r})"
            )
        self.virtual_workers = virtual_workers
        self._part: Part | None = None
        self._player: Player | None = None

    @property
    def player(self) -> Player:
        """Who plays this worker's virtual workers."""
        _ = self.replica
        assert self._player is not None, "a replica is in service"
        return self._player

    @property
    def part(self) -> Part:
        """The contributions to this replica's model."""
        assert self._part is not None, "a replica is in service"
        return self._part

    @override
    def prepare(self, replica: Replica) -> None:
        """Nothing is exchanged yet: workers meet when training begins."""
        if self._replica is not None:
            raise ConfigurationError("a strategy object serves one wrapped model (got a second)")
        if replica.sparse or replica.device.type != "cpu":
            got = f"sparse gradients of {replica.sparse[0]!r}" if replica.sparse else str(replica.device)
            raise ConfigurationError(
                f"virtual workers train dense gradients on the CPU (expected these, got {got}). Fix: strategy='sync'"
            )
        self._replica = replica
        self._player = player_for(self.virtual_workers, replica.collective, sums_at_servers=self.sums_at_servers)

    @override
    def serve(self, gradients: Gradients) -> None:
        self._part = Part(self.replica, gradients)
        self.player.parts.append(self._part)

    @override
    def join(self) -> None:
        """Workers are made equal when training begins."""

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, keeps_dtype: bool = False
    ) -> torch.Tensor:
        return self.part.allocate(numel, dtype, device)

    @property
    @override
    def slots(self) -> int:
        return self.part.slots

    @override
    def slot_memory(self, index: int, slot: int) -> torch.Tensor:
        return self.part.slot_memory(index, slot)

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self.part.take_layout(buckets)

    @override
    def begin(self, step: Step) -> Share:
        self.player.check_backward(self.part)
        return Share(self.virtual_workers)

    @override
    def exchange(self, bucket: Bucket) -> BucketExchange:
        yield from ()
        self.player.packed(self.part, bucket)
        return None

    @override
    def reduce_usage(self, used: torch.Tensor) -> Work:
        self.part.note_used(used)
        return CompletedWork()

    @override
    def register_state(self, name: str, holder: Any) -> None:
        self.player.state.register(name, holder)

    @override
    def checkpoint_every(self, steps: int, directory: str | os.PathLike[str]) -> None:
        self.player.checkpoint_every(steps, directory)

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        self.player.state.bind(optimizer)

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        raise ConfigurationError(
            f"virtual workers begin with the training (expected strategy={self!r} when the model is wrapped, got it"
            " from switch_strategy)"
        )

    @override
    def statistics(self) -> Mapping[str, Any]:
        return self.player.statistics()

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Each worker steps itself, with the averages."""
        if self.player.is_in_step:
            raise ReductionError(
                "gradients are averages once the loop over step.batches has ended (expected optimizer.step() after"
                " it, got one before). Fix: move it after the loop, and do not break out of the loop."
            )
        return local_step()

    @override
    def register_comm_hook(self, hook: CommHook) -> None:
        raise ConfigurationError(
            "virtual workers' gradients are kept apart until a step ends, so no communication hook can average them"
            " (expected none). Fix: leave out the hook, or virtual_workers="
        )

    @override
    def close(self) -> None:
        if self._player is not None and self._part is not None:
            self._player.drop(self._part)
        self._part = self._player = None
        super().close()


class ServerVirtualWorkers(SyncVirtualWorkers):
    """The same, and servers average the contributions: with the bits of "sync-server" with ``virtual_workers`` workers.

    Args:
        virtual_workers: see ``SyncVirtualWorkers``.
    """

    name = "sync-server"
    sums_at_servers = True
    # The servers' sums do not depend on how buckets are laid out.
    capabilities = replace(SyncVirtualWorkers.capabilities, keeps_first_layout=True, exchange_name="push")

    @override
    def begin(self, step: Step) -> Share:
        """Servers divide."""
        super().begin(step)
        return WHOLE
