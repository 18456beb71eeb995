"""The arithmetic of the rules, in NumPy and float64: shares no code with the servers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment

Values: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# The server-side optimizers that are drawn: name, and hyperparameters.
_SGD = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", _SGD),
    "momentum": ("SGD", _SGD | {"momentum": 0.5, "weight_decay": 0.125}),
    "Adam": (
        "Adam",
        {"lr": 0.125, "betas": [0.5, 0.75], "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
        | {"amsgrad": False, "decoupled_weight_decay": False},
    ),
    "merge": ("SGD", _SGD | {"lr": 1.0}),
}


def layout(chunks: int, numel: int, dtype: torch.dtype) -> list[ChunkSpec]:
    """The model."""
    return [
        ChunkSpec(key, ChunkKind.PARAMETER, dtype, numel, (Segment(f"p{key}", (numel,), (1,), 0, numel),))
        for key in range(chunks)
    ]


def numbers(count: int, *names: Any) -> Values:
    """``count`` numbers from -0.5 to 0.5 that are these names' own."""
    return _drawn(count, repr(names)) - 0.5


@lru_cache(maxsize=1024)  # the oracle draws again what a worker drew, and a generator takes long to make
def _drawn(count: int, names: str) -> Values:
    seed = hashlib.blake2b(names.encode(), digest_size=8).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little"))).random(count)


def is_near(values: Values, expected: Values, relative: float, absolute: float) -> bool:
    """``np.allclose`` of finite numbers, in a fifth of its time."""
    return bool((np.abs(values - expected) <= absolute + relative * np.abs(expected)).all())


def average(parts: Sequence[tuple[Values, float]]) -> Values:
    """The weighted average of contributions and their weights, added one after the other."""
    total = parts[0][0] * parts[0][1]
    for values, weight in parts[1:]:
        total = total + values * weight
    return np.asarray(total / sum(weight for _, weight in parts), dtype=parts[0][0].dtype)


class State(NamedTuple):
    """A chunk's weights, and what its optimizer keeps."""

    values: Values
    slots: tuple[Values, ...] = ()
    steps: int = 0


def step(optimizer: str, state: State, gradient: Values, rate: float) -> State:
    """One step with ``rate`` times the optimizer's learning rate."""
    name, group = OPTIMIZERS[optimizer]
    values, steps = state.values.astype(np.float64), state.steps + 1
    lr = group["lr"] * rate
    gradient = gradient.astype(np.float64) + group["weight_decay"] * values
    if name == "SGD":
        if not group["momentum"]:
            return State(values - lr * gradient, (), steps)
        momentum = group["momentum"] * state.slots[0] + gradient if state.slots else gradient
        return State(values - lr * momentum, (momentum,), steps)
    first, second = state.slots or (np.zeros_like(values), np.zeros_like(values))
    one, other = group["betas"]
    first, second = one * first + (1 - one) * gradient, other * second + (1 - other) * gradient**2
    root = np.sqrt(second / (1 - other**steps)) + group["eps"]
    return State(values - lr * (first / (1 - one**steps)) / root, (first, second), steps)


def compensated(gradient: Values, strength: float, values: Values, backup: Values) -> Values:
    """DC-ASGD: moved to where the weights are now."""
    return gradient + strength * gradient * gradient * (values - backup)
