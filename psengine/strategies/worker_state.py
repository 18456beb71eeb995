"""The state of a worker that the servers do not hold, as bytes for a worker that joins: its optimizer, its step count.

A safetensors file in memory: tensors as "index/name" of the optimizer's state, everything else as JSON in its metadata.
No pickle; what comes in is checked by safetensors and by ``Optimizer.load_state_dict``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.errors import ServerError

PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class WorkerState:
    """What travels: completed steps, and the optimizer's ``state_dict`` (None where no optimizer is known)."""

    steps: int
    optimizer: dict[str, Any] | None


def pack(steps: int, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the state as pieces: 1-D uint8 tensors of at most PIECE_BYTES."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    document: dict[str, Any] = {"steps": steps, "optimizer": None}
    if optimizer is not None:
        state_dict = optimizer.state_dict()
        scalars: dict[str, dict[str, Any]] = {}
        for index, state in state_dict["state"].items():
            scalars[str(index)] = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index}/{name}"] = value.detach().cpu().contiguous().clone()
                else:
                    scalars[str(index)][name] = value
        document["optimizer"] = {"scalars": scalars, "param_groups": _plain(state_dict["param_groups"])}
    data = save(tensors, metadata={"psengine": json.dumps(document)})
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return list(flat.split(PIECE_BYTES))


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
        optimizer = document["optimizer"]
        if optimizer is None:
            return WorkerState(steps, None)
        state: dict[int, dict[str, Any]] = {int(index): dict(s) for index, s in optimizer["scalars"].items()}
        for key, tensor in tensors.items():
            index, _, name = key.partition("/")
            state[int(index)][name] = tensor
        return WorkerState(steps, {"state": state, "param_groups": optimizer["param_groups"]})
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ServerError(f"the state that another worker left for this one cannot be read: {error}") from error


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups as JSON takes them: a learning rate that is a tensor becomes a number."""
    return [
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]
