"""The seam between a replica and the way replicas synchronise: a strategy, which is three small interfaces.

Exchange    how the gradients of a backward travel     called by the reducer
LifeCycle   coming into service, state, leaving        called by the wrapper
Stepping    what an optimizer's step does              called by DistributedOptimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, ReductionError
from psengine.specification import Configured, specified, written
from psengine.strategies.exchange import Exchange, Step
from psengine.strategies.life_cycle import LifeCycle, Replica
from psengine.strategies.replica_watch import ReplicaWatch
from psengine.strategies.stepping import Stepping, check_one
from psengine.strategies.verification import verify_replicas
from psengine.tensors.share import WHOLE, Share
from psengine.tracing.timeline import span


class BoundOptimizer(Protocol):
    """What steps in the stead of ``optimizer``."""

    optimizer: torch.optim.Optimizer


Stepper = TypeVar("Stepper", bound=BoundOptimizer)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the rest of psengine knows about a strategy, before any object of it is made.

    Attributes:
        needs_process_group: the replicas are the ranks of a process group. False: workers meet at servers, so that a
            process may be a world of its own.
        keeps_first_layout: buckets stay as they were first laid out. False: the reducer rebuilds them once, in the
            order in which gradients arrive.
        orders_buckets: the strategy itself says when buckets are laid out in that order, and in which.
        has_virtual_workers: gradients are those of virtual workers, whose batches a loader deals out.
        carries_buffers: running statistics travel with the gradients. False: they are broadcast before each forward.
        workers_step: each worker steps its own optimizers, of any kind and number. False: servers step.
        averages_gradients: backward leaves averages over the ranks, for which they wait for each other: zeros where a
            gradient is undefined, and the error of ``check_finite`` on all ranks. False: gradients are applied
            elsewhere, which can leave a parameter alone.
        steps_alone: each replica's optimizer has a state of its own. False: they are equal, or there is one.
        pairs_by_position: parameters and buffers of other names at the same place are one, as under native DDP.
        exchanges_thawed: parameters that are thawed after wrapping are taken up (``exchange_thawed``).
        counts_absent: inside ``join``, a rank without data counts in every average like any other.
        exchange_name: what a timeline calls the exchange of a bucket.
    """

    needs_process_group: bool = True
    keeps_first_layout: bool = False
    orders_buckets: bool = False
    has_virtual_workers: bool = False
    carries_buffers: bool = False
    workers_step: bool = True
    averages_gradients: bool = True
    steps_alone: bool = False
    pairs_by_position: bool = False
    exchanges_thawed: bool = False
    counts_absent: bool = False
    exchange_name: str = "reduce"


class Strategy(Configured, Exchange, LifeCycle, Stepping):
    """How replicas synchronise. One object serves one replica; nothing outside ``strategies/`` asks which kind it is.

    It is shown, copied and pickled as the arguments of its constructor; a copy serves no replica. By default replicas
    are the ranks of a collective, whose models are compared and begin with rank 0's values.

    Attributes:
        capabilities: what the rest of psengine knows about it.
    """

    capabilities: Capabilities = Capabilities()
    _replica: Replica | None = None

    def __repr__(self) -> str:
        """What users write to get this one, such as "sync:compress=bf16"."""
        return specified(self.name, self._given)

    def __getstate__(self) -> dict[str, Any]:
        return self._given

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._given = state
        self.__init__(**state)  # type: ignore[misc]

    @property
    def replica(self) -> Replica:
        """The replica in service.

        Raises:
            ReductionError: there is none.
        """
        if self._replica is None:
            raise ReductionError(
                f"strategy {self.name!r} serves no model (expected one that was wrapped with"
                " psengine.DistributedDataParallel and has not left, got none). Fix: call this before model.leave()"
            )
        return self._replica

    @property
    def is_in_service(self) -> bool:
        """Whether there is a replica in service."""
        return self._replica is not None

    @property
    def collective(self) -> Collective:
        """The group of replicas."""
        return self.replica.collective

    @property
    def agreed_options(self) -> dict[str, str]:
        """What all ranks have to choose alike, by name."""
        return {"strategy": self.name} | {name: written(value) for name, value in self.options.items()}

    @override
    def prepare(self, replica: Replica) -> None:
        if self._replica is not None:
            raise ConfigurationError(
                "a strategy object serves one wrapped model (got a second); make a"
                f" psengine.{type(self).__name__}() for each"
            )
        if not replica.is_known_equal:
            options = {**self.agreed_options, **replica.options}
            verify_replicas(
                replica.collective,
                replica.parameters,
                replica.state,
                replica.device,
                options,
                pairs_by_position=self.capabilities.pairs_by_position,
            )
        self._replica = replica

    @override
    def join(self) -> None:
        """Rank 0's parameters and buffers overwrite everybody's."""
        if not self.replica.is_known_equal:
            state = list(self.replica.state.values())
            self.collective.broadcast(state, 0, what="initial parameters and buffers").wait()

    # ---- are replicas still equal? -----------------------------------------------------------------------------

    # Replicas are equal after each so many steps.
    equal_every = 1

    def equal_after(self, exchanges: int) -> int | None:
        """The step after which all replicas are equal now, as all of them count. None, the default: they may differ.

        Args:
            exchanges: backwards that this reducer has exchanged, or shadowed inside ``join``.
        """
        return None

    def compare_replicas(self, watch: ReplicaWatch, exchanges: int, *, abstains: bool = False) -> None:
        """Before a forward whose gradients will be exchanged: see that replicas are equal, if that is due.

        Args:
            watch: compares.
            exchanges: as for ``equal_after``.
            abstains: inside ``join``, this replica has no data any more.

        Raises:
            ReplicasDivergedError: they are not, and ``check_replicas`` is "error".
        """
        step = self.equal_after(exchanges)
        if step is not None and watch.asks(step, self.equal_every):
            compare_over(self.collective, watch, step, abstains=abstains)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What codecs left out, by name; not to be written. Default: nothing."""
        return {}

    def take_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what ``residuals`` returned, of the same names."""
        for name, residual in self.residuals().items():
            residual.copy_(residuals[name])

    def state_dict(self) -> dict[str, Any]:
        """The strategy's part of a checkpoint: tensors, numbers, text and containers of them. Each rank has its own.

        Default: what codecs left out.
        """
        return {name: residual.clone() for name, residual in self.residuals().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict`` of the same strategy with the same options.

        Raises:
            ConfigurationError: it is of another strategy, or of other options.
        """
        expected = sorted(self.residuals())
        if sorted(state) != expected:
            raise ConfigurationError(
                f"the saved state is not one of {self!r} (expected residuals of {expected or 'nothing'}, got"
                f" {sorted(state) or 'nothing'}). Fix: use the same compress=, or leave out the strategy's state."
            )
        self.take_residuals(state)

    @override
    def close(self) -> None:
        """The process group belongs to the caller and stays open."""
        self._replica = None


def compare_over(
    collective: Collective, watch: ReplicaWatch, step: int, *, abstains: bool = False, is_urgent: bool = False
) -> None:
    """Compare the replicas of a collective's ranks; see ``ReplicaWatch.compare``."""

    def share(own: torch.Tensor) -> dict[int, torch.Tensor]:
        gathered = collective.gather(torch.zeros_like(own) if abstains else own, what="comparison of replicas")
        return {rank: found for rank, found in enumerate(gathered) if found.any()}

    if collective.world_size > 1:
        with span("compare replicas"):
            watch.compare(step, collective.rank, share, is_urgent=is_urgent)


class StepStrategy(Strategy, Generic[Stepper]):
    """A strategy that exchanges in the step of its one optimizer: until then gradients stay what this process computed.

    Attributes:
        stepper: what steps in the optimizer's stead; None until ``bind`` was called.
    """

    stepper: Stepper | None = None

    def bound(self) -> Stepper:
        """What steps in the optimizer's stead.

        Raises:
            ConfigurationError: no optimizer was distributed.
        """
        _ = self.replica
        if self.stepper is None:
            raise ConfigurationError(
                f"strategy {self.name!r} exchanges in the optimizer's step (expected optimizer ="
                " psengine.DistributedOptimizer(optimizer, model) before the first backward, got a plain optimizer)"
            )
        return self.stepper

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        if self.stepper is not None:
            check_one((self.stepper.optimizer, optimizer), self.name)

    @property
    @override
    def needs_packing(self) -> bool:
        return False

    @override
    def begin(self, step: Step) -> Share:
        self.bound()
        return WHOLE

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_one(optimizers, self.name)
        super().check_ready(replica, optimizers)

    @override
    def close(self) -> None:
        super().close()
        self.stepper = None
