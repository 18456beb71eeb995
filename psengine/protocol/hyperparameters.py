"""The optimizers that servers run: their hyperparameters with bounds, and the state they keep. Pure.

CONFIGURE and PUSH carry the hyperparameters of a ``torch.optim`` optimizer in this form; the server checks them again.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol.messages import ErrorCode

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number: low <= value < high, or <= high."""

    low: float
    high: float
    includes_high: bool = False

    def rule(self, name: str) -> str:
        """The bounds, in words."""
        return f"{self.low:g} <= {name} {'<=' if self.includes_high else '<'} {self.high:g}"

    def read(self, value: Any) -> float | None:
        """The number as a float; None where it is none, or out of bounds."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        is_inside = self.low <= value < self.high or (self.includes_high and value == self.high)
        return float(value) if is_inside else None


@dataclass(frozen=True, slots=True)
class Pair:
    """A list of two numbers of equal bounds."""

    number: Number

    def rule(self, name: str) -> str:
        """The bounds, in words."""
        return f"two numbers, {self.number.rule(name)}"

    def read(self, value: Any) -> list[float] | None:
        """The numbers as a list of floats; None where they are not two, or out of bounds."""
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            return None
        numbers = [number for v in value if (number := self.number.read(v)) is not None]
        return numbers if len(numbers) == 2 else None


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean."""

    def rule(self, name: str) -> str:
        """What it is, in words."""
        return f"{name} true or false"

    def read(self, value: Any) -> bool | None:
        """The boolean; None where it is none."""
        return value if isinstance(value, bool) else None


# torch's schedulers may end a hair below 0 (LinearLR(end_factor=0) at -4e-18), which torch steps with; so do servers.
_LEARNING_RATE = Number(-1e-9, 1e6)
_FRACTION = Number(0, 1, includes_high=True)
_SMALL = Number(0, 1e6)
_ADAM: dict[str, Number | Pair | Flag] = {
    "lr": _LEARNING_RATE,
    "betas": Pair(Number(0, 1)),
    "eps": _SMALL,
    "weight_decay": _SMALL,
    "amsgrad": Flag(),
    "maximize": Flag(),
    "decoupled_weight_decay": Flag(),
}

# The arguments of the constructors, without those that choose an implementation (foreach, capturable): on a CPU
# they change hardly a bit. "fused" does, and may stand in a group where it is true.
HYPERPARAMETERS: dict[str, dict[str, Number | Pair | Flag]] = {
    "SGD": {
        "lr": _LEARNING_RATE,
        "momentum": _FRACTION,
        "dampening": _FRACTION,
        "weight_decay": _SMALL,
        "nesterov": Flag(),
        "maximize": Flag(),
    },
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": {
        "lr": _LEARNING_RATE,
        "lr_decay": _SMALL,
        "weight_decay": _SMALL,
        "initial_accumulator_value": _SMALL,
        "eps": _SMALL,
        "maximize": Flag(),
    },
    "RMSprop": {
        "lr": _LEARNING_RATE,
        "alpha": _FRACTION,
        "eps": _SMALL,
        "weight_decay": _SMALL,
        "momentum": _FRACTION,
        "centered": Flag(),
        "maximize": Flag(),
    },
}

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")

# Tensors of state by torch's names -> the hyperparameter that makes the optimizer keep them, "" where it always does.
SLOTS: dict[str, dict[str, str]] = {
    "SGD": {"momentum_buffer": "momentum"},
    "Adam": {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    "AdamW": {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    "Adagrad": {"sum": ""},
    "RMSprop": {"square_avg": "", "momentum_buffer": "momentum", "grad_avg": "centered"},
}


def slot_names(name: str, groups: list[dict[str, Any]]) -> tuple[str, ...]:
    """The tensors of state that optimizer ``name`` keeps with these (checked) groups, in a fixed order."""
    return tuple(slot for slot, switch in SLOTS[name].items() if not switch or any(group[switch] for group in groups))


def check_groups(name: Any, groups: Any) -> list[dict[str, Any]]:
    """A checked copy of the groups that a peer sent for optimizer ``name``, numbers as floats.

    Every group has all of the optimizer's hyperparameters and no others.

    Raises:
        ProtocolError: an unknown optimizer or hyperparameter, one that is missing, or a value out of its bounds.
    """
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise _refusal(
            f"servers do not run this optimizer (expected one of {', '.join(OPTIMIZERS)}, got {_show(name)})"
        )
    if not isinstance(groups, (list, tuple)) or not groups:
        raise _refusal(f"an optimizer has groups (expected a list of at least one map, got {_show(groups)})")
    return [_check_group(name, index, group) for index, group in enumerate(groups)]


def _check_group(name: str, index: int, group: Any) -> dict[str, Any]:
    known = {**HYPERPARAMETERS[name], "fused": Flag()} if name in FUSED else HYPERPARAMETERS[name]
    if not isinstance(group, Mapping):
        raise _refusal(
            f"group {index} of {name} is a map of hyperparameters (expected {', '.join(known)}, got {_show(group)})"
        )
    for key in group:
        if key not in known:
            raise _refusal(
                f"{name} has no such hyperparameter (expected {', '.join(known)}, got {_show(key)} in group {index})"
            )
    checked: dict[str, Any] = {}
    for key, kind in known.items():
        if key not in group and key != "fused":
            raise _refusal(
                f"hyperparameter {key!r} of {name} is missing (expected {kind.rule(key)}, got nothing in group {index})"
            )
        checked[key] = kind.read(group.get(key, False))
        if checked[key] is None:
            raise _refusal(
                f"hyperparameter {key!r} of {name} is out of bounds"
                f" (expected {kind.rule(key)}, got {_show(group[key])} in group {index})"
            )
    if not checked.get("fused"):
        checked.pop("fused", None)
    if checked.get("nesterov") and (checked["momentum"] <= 0 or checked["dampening"] != 0):
        raise _refusal(
            "nesterov needs a momentum and no dampening (expected momentum > 0 and dampening 0,"
            f" got momentum {checked['momentum']:g} and dampening {checked['dampening']:g} in group {index})"
        )
    return checked


def _refusal(text: str) -> ProtocolError:
    return ProtocolError(text, ErrorCode.BAD_VALUE)


def _show(value: Any) -> str:
    # A peer's value may be as long as a body.
    return reprlib.repr(value)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name in OPTIMIZERS of the class whose step ``optimizer`` takes: that class, or a subclass with the same step.

    Raises:
        ConfigurationError: another optimizer, or a subclass with a step of its own.
    """
    mro = type(optimizer).__mro__
    for depth, base in enumerate(mro):
        if OPTIMIZERS.get(base.__name__) is base:
            for subclass in mro[:depth]:
                _check_subclass(subclass, base)
            return base.__name__
    raise ConfigurationError(
        f"servers do not run this optimizer (expected one of {', '.join(OPTIMIZERS)}, got"
        f" {users_class(type(optimizer))})."
        ' Use one of them, or strategy "sync-server", where every worker steps by itself.'
    )


def users_class(optimizer_class: type) -> str:
    """The name of the class that the user wrote, under psengine's own."""
    return next(base.__name__ for base in optimizer_class.__mro__ if base.__module__.partition(".")[0] != "psengine")


def _check_subclass(subclass: type, base: type[torch.optim.Optimizer]) -> None:
    if subclass.__module__.partition(".")[0] == "psengine":
        return
    for method in ("step", "_init_group"):
        # torch wraps the step of every class that is instantiated, also an inherited one.
        if method in vars(subclass) and inspect.unwrap(vars(subclass)[method]) is not inspect.unwrap(
            getattr(base, method)
        ):
            raise ConfigurationError(
                f"servers do not run an optimizer's own step (expected torch.optim.{base.__name__}'s, got"
                f' {subclass.__name__}.{method}). Use torch.optim.{base.__name__}, or strategy "sync-server", where'
                " every worker steps by itself."
            )


def wire_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each of ``optimizer``'s groups as they are now, as CONFIGURE and PUSH carry them.

    Tensors are read as numbers. Keys that are not the class's own (a scheduler's "initial_lr") are left out.

    Raises:
        ConfigurationError: an optimizer or a value that servers refuse.
    """
    name = optimizer_name(optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigurationError(
                "servers take no differentiable steps (expected differentiable=False, got True in group"
                f" {index}). Leave the argument out."
            )
        sent = {key: _plain(group[key]) for key in HYPERPARAMETERS[name] if key in group}
        groups.append({**sent, "fused": True} if group.get("fused") else sent)
    if name == "Adagrad":
        for adagrad_group in groups:
            # torch fills every group's state from the constructor's argument, not from the group's.
            adagrad_group["initial_accumulator_value"] = _plain(optimizer.defaults["initial_accumulator_value"])
    try:
        return check_groups(name, groups)
    except ProtocolError as error:
        raise ConfigurationError(f'{error}. Change it, or use strategy "sync-server".') from None


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value  # tensors and NumPy's scalars
