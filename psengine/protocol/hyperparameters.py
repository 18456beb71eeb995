"""The optimizers that servers run: their hyperparameters with bounds, and the state they keep. Pure.

CONFIGURE and PUSH carry the hyperparameters of a ``torch.optim`` optimizer in this form; the server checks them again.
"""

from __future__ import annotations

import inspect
import reprlib
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from msgspec.structs import asdict

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol.bodies import convert
from psengine.protocol.messages import ErrorCode

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


# torch's schedulers may end a hair below 0 (LinearLR(end_factor=0) at -4e-18), which torch steps with; so do servers.
LearningRate = Annotated[float, Meta(ge=-1e-9, lt=1e6)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]
Small = Annotated[float, Meta(ge=0.0, lt=1e6)]


class Group(Struct, forbid_unknown_fields=True, kw_only=True):
    """The arguments of an optimizer's constructor, for one group.

    Those that choose an implementation (foreach, capturable) are left out: on a CPU they change hardly a bit. "fused"
    does.
    """

    lr: LearningRate
    weight_decay: Small
    maximize: bool


class SGD(Group, kw_only=True):
    """See ``torch.optim.SGD``."""

    momentum: Fraction
    dampening: Fraction
    nesterov: bool
    fused: bool = False

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(
                "nesterov needs a momentum and no dampening (expected momentum > 0 and dampening 0,"
                f" got momentum {self.momentum:g} and dampening {self.dampening:g})"
            )


class Adam(Group, kw_only=True):
    """See ``torch.optim.Adam`` and ``AdamW``."""

    betas: tuple[Decay, Decay]
    eps: Small
    amsgrad: bool
    decoupled_weight_decay: bool
    fused: bool = False


class Adagrad(Group, kw_only=True):
    """See ``torch.optim.Adagrad``."""

    lr_decay: Small
    initial_accumulator_value: Small
    eps: Small
    fused: bool = False


class RMSprop(Group, kw_only=True):
    """See ``torch.optim.RMSprop``."""

    alpha: Fraction
    eps: Small
    momentum: Fraction
    centered: bool


GROUPS: dict[str, type[Group]] = {"SGD": SGD, "Adam": Adam, "AdamW": Adam, "Adagrad": Adagrad, "RMSprop": RMSprop}

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
            f"servers do not run this optimizer (expected one of {', '.join(OPTIMIZERS)}, got {reprlib.repr(name)})"
        )
    if not isinstance(groups, (list, tuple)) or not groups:
        raise _refusal(f"an optimizer has groups (expected a list of at least one map, got {reprlib.repr(groups)})")
    checked = []
    for index, group in enumerate(groups):
        read = convert(group, GROUPS[name], f"{name}'s group {index}", ErrorCode.BAD_VALUE)
        fields = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(read).items()}
        checked.append({key: value for key, value in fields.items() if key != "fused" or value})
    return checked


def _refusal(text: str) -> ProtocolError:
    return ProtocolError(text, ErrorCode.BAD_VALUE)


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
        known = GROUPS[name].__struct_fields__
        groups.append({key: _plain(group[key]) for key in known if group.get(key) is not None})
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
