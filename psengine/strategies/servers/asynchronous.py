"""Strategy "async": the servers apply each worker's gradients when they arrive, and weights come back.

    worker 0   backward ─ step: gradients ──► servers: apply ──► weights ─ forward ...
    worker 1        backward ─ step: gradients ──► servers: apply ──► weights ─ forward ...

No worker waits for another (with ``max_staleness``, only for those too far behind); in exchange, gradients are computed
from weights that other workers have changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Unpack, override

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.operation import wait_all
from psengine.protocol.hyperparameters import optimizer_name, wire_groups
from psengine.protocol.layout import ChunkKind
from psengine.strategies.base import StepStrategy
from psengine.strategies.life_cycle import Replica
from psengine.strategies.servers.base import ServerOptions, ServerStrategy
from psengine.strategies.servers.pushes import Pushes
from psengine.strategies.servers.server_optimizer import ServerOptimizer
from psengine.strategies.step_hooks import take_step
from psengine.tracing.timeline import span

logger = logging.getLogger(__name__)


class AsyncServer(StepStrategy[ServerOptimizer], ServerStrategy):
    """Push gradients in ``optimizer.step()``, get the servers' weights back; needs ``psengine.DistributedOptimizer``.

    Args:
        max_staleness: hold a worker that is more than this many steps ahead of the slowest (stale-synchronous
            parallel, Ho et al. 2013); None never does.
        staleness_scaling: "inverse" divides the learning rate of a gradient that is s updates old by s + 1 (Zhang et
            al. 2016, https://arxiv.org/abs/1511.05950); None does not.
        delay_compensation: strength of DC-ASGD's correction g + strength * g * g * (w_now - w_then) (Zheng et al.
            2017, https://arxiv.org/abs/1609.08326); costs the servers a copy of the model for each worker. 0 is off.
        compensation_decay: from 0 up to 1: each element's strength is divided by the root of a running mean of its
            squared gradients with this decay (their DC-ASGD-a; 0.95, with a strength of 2); costs the servers one more
            copy of the model. None: the strength is constant.
        **options: see ``ServerStrategy``.

    Attributes:
        completed_steps: how many steps this worker took.
    """

    name = "async"
    capabilities = replace(ServerStrategy.capabilities, workers_step=False)

    # Whether the job began with this worker's model.
    _gave_values: bool
    # The writes to parameters that were there when these were as the servers sent them.
    _known_writes: tuple[int, int]
    # Made when an optimizer is bound.
    _pushes: Pushes

    def __init__(
        self,
        max_staleness: int | None = None,
        staleness_scaling: str | None = None,
        delay_compensation: float = 0.0,
        *,
        compensation_decay: float | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        rule = {
            "max_staleness": max_staleness,
            "staleness_scaling": staleness_scaling,
            "delay_compensation": delay_compensation,
            "compensation_decay": compensation_decay,
        }
        super().__init__({"name": "apply", **rule}, **options)
        if compensation_decay is not None and not delay_compensation:
            raise ConfigurationError(
                f"compensation_decay={compensation_decay!r} changes a strength of 0. Fix: delay_compensation=2 too"
            )

    @override
    def _entered(self, state: str) -> None:
        self._gave_values = state == "initialised"
        self._known_writes = self._count_writes()

    # ---- the optimizer -----------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """The servers get the optimizer's class, groups and hyperparameters.

        Raises:
            ConfigurationError: the servers cannot run this optimizer.
            ServerRefusedError: the job's other workers use another one.
        """
        super().bind(optimizer)
        parameters = self.replica.parameters
        trained = self.session.attach_optimizer(self.chunks.specs, optimizer, parameters)
        self.stepper = ServerOptimizer(optimizer, parameters, self.session, trained)
        self._pushes = Pushes(self.session, self.chunks, trained)
        if optimizer.state and self._gave_values:
            # Loaded before, from a checkpoint as the model was: like the model it counts where the job began with it.
            self.stepper.store()

    # ---- a step ------------------------------------------------------------------------------------------------

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Push all gradients; return with the servers' new weights."""
        bound = self.bound()

        def push_and_pull() -> None:
            bound.check()
            self._store_written()
            groups = wire_groups(bound.optimizer)
            for bucket in self._buckets:
                gradients = [parameter.grad for parameter in bucket.parameters]
                with span("pack", bucket.facts):
                    bucket.pack(gradients)
                missing = {name for name, gradient in zip(bucket.names, gradients, strict=True) if gradient is None}
                self._pushes.push(bucket, missing=missing, groups=groups)
            self._pushes.push_buffers()
            self._pushes.wait()
            self._known_writes = self._count_writes()
            self.completed_steps += 1

        return take_step(bound.optimizer, closure, push_and_pull)

    def _count_writes(self) -> tuple[int, int]:
        """Changes with every write that torch counts, and when a parameter is given other memory."""
        parameters = self.replica.parameters.values()
        return sum(p._version for p in parameters), hash(tuple(p.data_ptr() for p in parameters))

    def _store_written(self) -> None:
        """After a write (``load_state_dict``), send worker 0's values to the servers; those of others are lost.

        Before the first step others wait for worker 0's, so that nobody trains the values of before.
        """
        if self._count_writes() == self._known_writes:
            return
        parameters = [spec for spec in self.chunks.specs if spec.kind is ChunkKind.PARAMETER]
        if self.session.rank != 0 and not self.completed_steps:
            self.await_worker_0({spec.key: self.chunks.values(spec) for spec in parameters})
        elif self.session.rank != 0:
            logger.warning("parameters were written on worker %d; only worker 0's writes count", self.session.rank)
        else:
            logger.warning("parameters were written on worker 0; they become the servers' weights")
            wait_all([self.session.store(spec.key, self.chunks.values(spec)) for spec in self.chunks.specs])

    # ---- another strategy follows ------------------------------------------------------------------------------

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer_name(optimizer)
            wire_groups(optimizer)
        super().check_ready(replica, optimizers)

    @override
    def conclude(self) -> None:
        """All workers that share a process group have what the servers have after the last push of each."""
        self.collective.barrier().wait()
        self.pull_values()

    # ---- the optimizer's state ---------------------------------------------------------------------------------

    @override
    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        self.bound().fetch()

    @override
    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        bound = self.bound()
        bound.note_state()
        if self.session.rank == 0:
            bound.store()
        else:
            logger.info("worker %d loaded optimizer state; the servers' (worker 0's) counts", self.session.rank)
