"""The states of a worker's own optimizers, on their way from a worker that trains to one that joins."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from psengine.errors import ServerError

if TYPE_CHECKING:
    from psengine.strategies.servers.worker_state import WorkerState

logger = logging.getLogger(__name__)


class OptimizerStates:
    """The optimizers of this worker, and what a donor left for them.

    ``names`` is the name of each parameter of the model, by which two workers know their optimizers to be the same.
    """

    def __init__(self) -> None:
        # In the order they were made; a program may have done with one and dropped it.
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # What a donor left for this worker, until its first step is over.
        self._arrived: WorkerState | None = None
        self._loaded: set[int] = set()

    def bind(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        """An optimizer was made: its state goes to workers that join, and comes from a donor if one left it.

        Raises:
            ServerError: this worker has joined others, who have no such optimizer.
        """
        self._optimizers.append(weakref.ref(optimizer))
        self._load(optimizer, names)

    def alive(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the program still has, in the order they were made."""
        if len(self._optimizers) > 1:
            gc.collect()  # those that a program has dropped, on all workers alike
        alive = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        self._optimizers = [weakref.ref(optimizer) for optimizer in alive]
        return alive

    def pack(self, steps: int, names: Mapping[torch.Tensor, str]) -> list[torch.Tensor]:
        """Return the states of all optimizers after so many ``steps``, as pieces for a worker that joins."""
        from psengine.strategies.servers.worker_state import pack

        optimizers = self.alive()
        if not optimizers:
            logger.warning(
                "a worker joins, but this one's optimizer is unknown, so the joiner starts without its state. Fix:"
                " optimizer = psengine.DistributedOptimizer(optimizer, model)"
            )
        return pack(steps, optimizers, names)

    def take(self, pieces: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> int:
        """Load what a donor left, into optimizers that exist and those that are to come; return its number of steps."""
        from psengine.strategies.servers.worker_state import unpack

        self._arrived = unpack(pieces)
        self._loaded = set()
        for optimizer in self.alive():
            self._load(optimizer, names)
        return self._arrived.steps

    def _load(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        """Load what a donor left of ``optimizer``: the first state of its kind that no other has taken."""
        from psengine.strategies.servers.worker_state import OptimizerState

        if self._arrived is None or not self._arrived.optimizers:
            return
        own = OptimizerState.of(optimizer, names)
        fitting = [
            number
            for number, state in enumerate(self._arrived.optimizers)
            if number not in self._loaded and state.belongs_to(own)
        ]
        problem = f"expected one of {'; '.join(map(str, self._arrived.optimizers))}; got {own}"
        if fitting:
            self._loaded.add(fitting[0])
            state_dict = self._arrived.optimizers[fitting[0]].state_dict
            if state_dict is None:
                return
            try:
                optimizer.load_state_dict(state_dict)
            except (ValueError, KeyError) as error:
                problem = str(error)
            else:
                return
        raise ServerError(
            f"the optimizers of the other workers are not this one's ({problem}). Fix: give every worker the same"
            " optimizers, with the same parameter groups, before its first step."
        )

    def forget_arrived(self, completed_steps: int) -> None:
        """With the second step: optimizers that are made from now on are made by all workers, and begin anew."""
        if self._arrived is None or completed_steps <= self._arrived.steps:
            return
        left = [str(s) for number, s in enumerate(self._arrived.optimizers) if number not in self._loaded]
        if left:
            logger.warning(
                "the other workers' state of %s was not asked for by an optimizer of this worker. Fix: optimizer ="
                " psengine.DistributedOptimizer(optimizer, model), for each",
                "; ".join(left),
            )
        self._arrived = None
