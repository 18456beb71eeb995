"""The optimizers that servers run: their hyperparameters with bounds, and the state they keep. Pure.

CONFIGURE and PUSH carry the hyperparameters of a ``torch.optim`` optimizer in this form; the server checks them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from msgspec.structs import asdict

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol.bodies import convert, learn
from psengine.protocol.messages import ErrorCode

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
learn(GROUPS.values())
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {name: getattr(torch.optim, name) for name in GROUPS}

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


def check_groups(name: str, groups: Iterable[Any]) -> list[dict[str, Any]]:
    """A checked copy of the groups that a peer sent for optimizer ``name``, numbers as floats.

    Every group has all of the optimizer's hyperparameters and no others.

    Raises:
        ProtocolError: an unknown hyperparameter, one that is missing, or a value out of its bounds.
    """
    checked = []
    for index, group in enumerate(groups):
        read = convert(group, GROUPS[name], f"{name}'s group {index}", ErrorCode.BAD_VALUE)
        fields = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(read).items()}
        checked.append({key: value for key, value in fields.items() if key != "fused" or value})
    return checked


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name in OPTIMIZERS of the class whose step ``optimizer`` takes: that class, or a subclass with the same step.

    Raises:
        ConfigurationError: another optimizer, or a subclass with a step of its own.
    """
    kind = users_class(type(optimizer))
    bases = [base for base in kind.__mro__ if OPTIMIZERS.get(base.__name__) is base]
    if not bases or _step_of(kind) != _step_of(bases[0]):
        raise ConfigurationError(
            f"servers do not run this optimizer's step (expected that of {', '.join(OPTIMIZERS)}, got"
            f' {kind.__name__}.step). Use one of them, or strategy "sync-server", where every worker steps by itself.'
        )
    return bases[0].__name__


def users_class(optimizer_class: type) -> type:
    """The class that the user wrote, under psengine's own."""
    return next(base for base in optimizer_class.__mro__ if base.__module__.partition(".")[0] != "psengine")


def _step_of(kind: Any) -> list[Any]:
    # torch wraps the step of every class that is instantiated, also an inherited one.
    return [inspect.unwrap(getattr(kind, method)) for method in ("step", "_init_group")]


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
                f"servers take no differentiable steps (expected differentiable=False, got True in group {index})"
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
