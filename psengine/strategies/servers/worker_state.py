"""The state of a worker that the servers do not hold, its optimizers and step count, and its way to a worker that
joins.

It travels as a file of ``tensors/documents.py``: no pickle.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psengine.errors import ArgumentTypeError, ServerError
from psengine.protocol.hyperparameters import users_class
from psengine.tensors.documents import from_file, take_apart, to_file

logger = logging.getLogger(__name__)

PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class OptimizerState:
    """One optimizer's state as it travels.

    Attributes:
        kind: the name of its class.
        parameters: for each group the names of its parameters, by which a joiner knows its own optimizer.
        state_dict: None where it cannot travel.
    """

    kind: str
    parameters: list[list[str]]
    state_dict: dict[str, Any] | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> OptimizerState:
        """Describe ``optimizer`` without its state; ``names`` are the model's."""
        parameters = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
        return cls(users_class(type(optimizer)).__name__, parameters)

    def __str__(self) -> str:
        names = [name for group in self.parameters for name in group]
        return f"{self.kind} over {len(names)} parameters" + (f" from {names[0]!r} on" if names else "")


def unpack(pieces: Sequence[torch.Tensor]) -> tuple[int, list[OptimizerState]]:
    """Inverse of ``OptimizerStates.pack``: the steps, and the states in the order in which the optimizers were made.

    Raises:
        ServerError: the bytes are not what ``OptimizerStates.pack`` makes.
    """
    try:
        value = from_file(bytes(torch.cat(list(pieces)).numpy()) if pieces else b"")
        return int(value["steps"]), [OptimizerState(**one) for one in value["optimizers"]]
    except (LookupError, ValueError, TypeError) as error:
        raise ServerError(f"the state that another worker left for this one cannot be read: {error}") from error


class OptimizerStates:
    """The optimizers of this worker, and their states that a donor sent. ``names`` are those of the model's
    parameters.
    """

    def __init__(self) -> None:
        # In the order they were made; the program may drop one.
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # The donor's state, until this worker's first step is over.
        self._arrived: list[OptimizerState] = []
        self._arrived_steps = 0
        self._loaded: set[int] = set()

    def bind(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        """An optimizer was made: send its state to workers that join, and load a donor's, if one arrived.

        Raises:
            ServerError: this worker has joined others, which have no such optimizer.
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
        """Return the states of all optimizers after so many ``steps``, as pieces for a worker that joins.

        Pieces are 1-D uint8 tensors of at most PIECE_BYTES. An optimizer whose state is not of the kinds of
        ``tensors/documents.py`` travels without it; the log says so.
        """
        optimizers = self.alive()
        if not optimizers:
            logger.warning(
                "a worker joins, but this one's optimizer is unknown, so the joiner starts without its state. Fix:"
                " optimizer = psengine.DistributedOptimizer(optimizer, model)"
            )
        states = []
        for optimizer in optimizers:
            one = OptimizerState.of(optimizer, names)
            states.append(vars(one))
            try:
                state_dict = optimizer.state_dict()
                take_apart(state_dict)
                states[-1] = vars(replace(one, state_dict=state_dict))
            except (ArgumentTypeError, KeyError) as error:
                logger.warning(
                    "the state of %s cannot travel to a worker that joins (%s); it starts without", one, error
                )
        data = to_file(take_apart({"steps": steps, "optimizers": states}).copied())
        return list(torch.frombuffer(bytearray(data), dtype=torch.uint8).split(PIECE_BYTES))

    def take(self, pieces: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> int:
        """Load a donor's state into optimizers, existing and future ones; return its number of steps."""
        self._arrived_steps, self._arrived = unpack(pieces)
        self._loaded = set()
        for optimizer in self.alive():
            self._load(optimizer, names)
        return self._arrived_steps

    def _load(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        """Load the donor's first state of this kind that no other optimizer has taken."""
        if not self._arrived:
            return
        own = OptimizerState.of(optimizer, names)
        states = [replace(state, state_dict=None) for state in self._arrived]
        fitting = [number for number, state in enumerate(states) if number not in self._loaded and state == own]
        try:
            if not fitting:
                raise ValueError(f"expected one of {'; '.join(map(str, self._arrived))}; got {own}")
            self._loaded.add(fitting[0])
            if (state_dict := self._arrived[fitting[0]].state_dict) is not None:
                optimizer.load_state_dict(state_dict)
        except (ValueError, KeyError) as error:
            raise ServerError(
                f"the optimizers of the other workers are not this one's ({error}). Fix: give every worker the same"
                " optimizers, with the same parameter groups, before its first step."
            ) from error

    def forget_arrived(self, completed_steps: int) -> None:
        """From the second step on, all workers make new optimizers together, and those begin anew."""
        if completed_steps <= self._arrived_steps:
            return
        left = [str(s) for number, s in enumerate(self._arrived) if number not in self._loaded]
        if left:
            logger.warning(
                "the other workers' state of %s was not asked for by an optimizer of this worker. Fix: optimizer ="
                " psengine.DistributedOptimizer(optimizer, model), for each",
                "; ".join(left),
            )
        self._arrived = []
