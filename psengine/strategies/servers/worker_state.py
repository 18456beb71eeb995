"""The state of a worker that the servers do not hold, as bytes for a worker that joins: its optimizers, its step count.

A safetensors file in memory: tensors as "index/name" of the optimizer's state (of further optimizers as
"number:index/name"), everything else as JSON in its metadata. No pickle; what comes in is checked by safetensors and by
``Optimizer.load_state_dict``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.errors import ServerError
from psengine.protocol.hyperparameters import users_class

logger = logging.getLogger(__name__)

PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class OptimizerState:
    """One optimizer's state as it travels.

    Attributes:
        kind: the name of its class; None where the worker that sends it does not say.
        parameters: for each group the names of its parameters, by which a joiner knows its own; None likewise.
        state_dict: None where it cannot travel.
    """

    kind: str | None
    parameters: list[list[str]] | None
    state_dict: dict[str, Any] | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> OptimizerState:
        """Whose optimizer it is, without its state; ``names`` are the model's."""
        parameters = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
        return cls(users_class(type(optimizer)), parameters, None)

    def belongs_to(self, other: OptimizerState) -> bool:
        """Whether both are of the same class over the same parameters, as far as both say."""
        return self.kind in (None, other.kind) and self.parameters in (None, other.parameters)

    def __str__(self) -> str:
        names = [name for group in self.parameters or () for name in group]
        return f"{self.kind} over {len(names)} parameters" + (f" from {names[0]!r} on" if names else "")


@dataclass(frozen=True)
class WorkerState:
    """What travels: completed steps, and the states of the optimizers, in the order they were made."""

    steps: int
    optimizers: tuple[OptimizerState, ...]


def pack(
    steps: int, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]
) -> list[torch.Tensor]:
    """Return the state as pieces: 1-D uint8 tensors of at most PIECE_BYTES.

    An optimizer whose state is neither tensors nor what JSON knows travels without it; the log says so.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    described = []
    for number, optimizer in enumerate(optimizers):
        one = OptimizerState.of(optimizer, names)
        document: dict[str, Any] = {"kind": one.kind, "parameters": one.parameters, "param_groups": None}
        try:
            state_tensors, state_document = _take_apart(optimizer.state_dict())
        except (TypeError, ValueError, KeyError) as error:
            logger.warning("the state of %s cannot travel to a worker that joins (%s); it starts without", one, error)
        else:
            document.update(state_document)
            prefix = f"{number}:" if number else ""
            tensors.update({f"{prefix}{key}": tensor for key, tensor in state_tensors.items()})
        described.append(document)
    # Workers of older versions know one optimizer, and write no name.
    metadata = {"steps": steps, "optimizer": described[0] if described else None, "further_optimizers": described[1:]}
    data = save(tensors, metadata={"psengine": json.dumps(metadata)})
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return list(flat.split(PIECE_BYTES))


def _take_apart(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an optimizer's state by "index/name", and the rest as a document that JSON takes.

    Raises:
        TypeError, ValueError: something is neither.
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, state in state_dict["state"].items():
        scalars[str(index)] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}/{name}"] = value.detach().cpu().contiguous().clone()
            else:
                scalars[str(index)][name] = value
    document = {"scalars": scalars, "param_groups": _plain(state_dict["param_groups"])}
    json.dumps(document)
    return tensors, document


def unpack(pieces: Sequence[torch.Tensor]) -> WorkerState:
    """Inverse of ``pack``.

    Raises:
        ServerError: the bytes are not what ``pack`` makes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = bytes(torch.cat(list(pieces)).numpy()) if pieces else b""
    try:
        tensors = load(data)  # checks the header first
        header_bytes = int.from_bytes(data[:8], "little")
        document = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["psengine"])
        steps = int(document["steps"])
        described = [d for d in (document["optimizer"], *document.get("further_optimizers", ())) if d is not None]
        optimizers = [_put_together(d, f"{number}:" if number else "", tensors) for number, d in enumerate(described)]
        return WorkerState(steps, tuple(optimizers))
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ServerError(f"the state that another worker left for this one cannot be read: {error}") from error


def _put_together(document: Mapping[str, Any], prefix: str, tensors: Mapping[str, torch.Tensor]) -> OptimizerState:
    kind, parameters = document.get("kind"), document.get("parameters")
    if document["param_groups"] is None:
        return OptimizerState(kind, parameters, None)
    state: dict[int, dict[str, Any]] = {int(index): dict(s) for index, s in document["scalars"].items()}
    for key, tensor in tensors.items():
        place, _, name = key.partition("/")
        number, colon, index = place.rpartition(":")
        if f"{number}{colon}" == prefix:
            state[int(index)][name] = tensor
    return OptimizerState(kind, parameters, {"state": state, "param_groups": document["param_groups"]})


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups as JSON takes them: a learning rate that is a tensor becomes a number."""
    return [
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]
