"""The seam between a replica and the way replicas agree: a strategy, which is three small interfaces.

Exchange    how the gradients of a backward travel     called by the reducer
LifeCycle   coming into service, state, leaving        called by the wrapper
Stepping    what an optimizer's step does              called by DistributedOptimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import override

from psengine.errors import ConfigurationError
from psengine.strategies.exchange import Exchange, Step
from psengine.strategies.life_cycle import LifeCycle, Replica
from psengine.strategies.stepping import Stepping, check_one
from psengine.tensors.share import WHOLE, Share

Stepper = TypeVar("Stepper")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the rest of psengine knows about a strategy, before any object of it is made.

    Attributes:
        needs_process_group: the replicas are the ranks of a process group. False: workers meet at servers, so that a
            process may be a world of its own.
        keeps_first_layout: buckets stay as they were first laid out. False: the reducer rebuilds them once, in the
            order in which gradients arrive.
        carries_buffers: running statistics travel with the gradients. False: they are broadcast before each forward.
        gathers: replicas can tell each other facts through their collective.
        workers_step: each worker steps its own optimizers, of any kind and number. False: servers step.
        defines_gradients: backward leaves zeros where a gradient is undefined, as an average of several gradients does.
            False: gradients are applied elsewhere, which can leave such a parameter alone.
        steps_alone: each replica's optimizer has a state of its own. False: they are equal, or there is one.
        counts_absent: inside ``join``, a rank without data counts in every average like any other.
        exchange_name: what a timeline calls the exchange of a bucket.
    """

    needs_process_group: bool = True
    keeps_first_layout: bool = False
    carries_buffers: bool = False
    gathers: bool = False
    workers_step: bool = True
    defines_gradients: bool = True
    steps_alone: bool = False
    counts_absent: bool = False
    exchange_name: str = "reduce"


class Strategy(Exchange, LifeCycle, Stepping):
    """How replicas agree. One object serves one replica; nothing outside ``strategies/`` asks which kind it is.

    Attributes:
        capabilities: what the rest of psengine knows about it.
    """

    capabilities: Capabilities = Capabilities()


class ConfiguredStrategy(Strategy):
    """A strategy that is shown, copied and pickled as the arguments of its constructor, which has set ``_options``.

    A copy of the model is prepared anew.
    """

    _options: dict[str, Any]

    def __repr__(self) -> str:
        given = {name: value for name, value in self._options.items() if value is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __getstate__(self) -> dict[str, Any]:
        return self._options

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


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
        self.check_in_service()
        if self.stepper is None:
            raise ConfigurationError(
                f"strategy {self.name!r} exchanges in the optimizer's step (expected optimizer ="
                " psengine.DistributedOptimizer(optimizer, model) before the first backward, got a plain optimizer)"
            )
        return self.stepper

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
