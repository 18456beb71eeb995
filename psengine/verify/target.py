"""Find the target function by its name, and check the ``(model, batch_fn, loss_fn, optimizer_fn)`` it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import distributed as native

from psengine.errors import ConfigurationError

FORMS = "module:function or path/to/file.py:function"
PARTS = "(model, batch_fn, loss_fn, optimizer_fn) or (model, batch_fn, loss_fn, optimizer_fn, ddp_options)"
# Captured at import: a program may put psengine's class in the native one's place.
_NATIVE_ARGUMENTS = tuple(inspect.signature(native.DistributedDataParallel.__init__).parameters)[2:]
# The comparison itself chooses group and device.
_OUR_ARGUMENTS = ("process_group", "device_mesh", "device_ids", "output_device")


class TargetError(ConfigurationError):
    """The target cannot be found, or is not what a target has to be."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One training, made anew by each call of the target function.

    Attributes:
        model: the module to wrap.
        batch_fn: ``batch_fn(step, rank, world_size)`` returns this rank's batch of a step, counted from 0.
        loss_fn: ``loss_fn(wrapped_model, batch)`` returns a scalar tensor.
        optimizer_fn: ``optimizer_fn(parameters)`` returns a ``torch.optim.Optimizer`` over a list of parameters.
        ddp_options: keyword arguments for both wrappers.
    """

    model: torch.nn.Module
    batch_fn: Callable[[int, int, int], Any]
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor]
    optimizer_fn: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ddp_options: Mapping[str, Any]


def check_name(name: str) -> None:
    """Check ``name`` without running the user's code.

    Raises:
        TargetError: ``name`` has another form than "place:function", or its file does not exist.
    """
    place, function = _split(name)
    if _is_path(place) and not Path(place).is_file():
        raise TargetError(f"target {name!r}: no such file (expected {FORMS}, got the path {place!r})")
    if not all(part.isidentifier() for part in function.split(".")):
        raise TargetError(f"target {name!r}: {function!r} is no function's name (expected {FORMS})")


def load_function(name: str) -> Callable[[], Any]:
    """Import the module that ``name`` names and return the function. Errors of the user's module are not caught.

    Raises:
        TargetError: no such file, module or function, or the function needs arguments.
    """
    check_name(name)
    place, attribute = _split(name)
    try:
        module = _load_file(Path(place)) if _is_path(place) else _load_module(place, name)
    except SystemExit as error:
        raise TargetError(
            f"target {name!r}: importing {place} ended the process (exit code {error.code!r}; expected it to define"
            f" {attribute!r} and go on). Fix: parse_args(), and the training, belong under"
            ' if __name__ == "__main__":'
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetError(
                f"target {name!r}: {place} has no function {attribute!r} (expected one of"
                f" {', '.join(_functions_of(module)) or 'the functions it defines, of which there are none'})"
            )
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"target {name!r} is called (expected a function, got {type(found).__name__})")
    if not _accepts(found):
        raise TargetError(
            f"target {name!r} is called without arguments (expected none that must be given, got"
            f" {inspect.signature(found)}). Fix: write a function of no arguments that calls it."
        )
    return found  # type: ignore[no-any-return]


def check_target(returned: Any, name: str) -> Target:
    """Make a ``Target`` of what the target function returned.

    Raises:
        TargetError: a part is missing or of the wrong type; the message names the part.
    """
    what = f"target {name!r} returns {PARTS}"
    if not isinstance(returned, tuple | list) or len(returned) not in (4, 5):
        got = f"{len(returned)} parts" if isinstance(returned, tuple | list) else f"{type(returned).__name__}"
        raise TargetError(
            f"{what} (expected 4 or 5 parts, got {got}). Fix: name a function that makes these and returns them, not"
            " one that trains."
        )
    model, batch_fn, loss_fn, optimizer_fn = returned[:4]
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{what}: model is a module (expected a torch.nn.Module, got {_kind(model)})")
    if isinstance(model, native.DistributedDataParallel):
        raise TargetError(f"{what}: model is the plain module, which the comparison wraps (got it wrapped already)")
    for function, part, arguments in (
        (loss_fn, "loss_fn", ("model", "batch")),
        (optimizer_fn, "optimizer_fn", ("parameters",)),
    ):
        if not callable(function):
            raise TargetError(f"{what}: {part} is a function of ({', '.join(arguments)}) (got {_kind(function)})")
        if not _accepts(function, *arguments):
            raise TargetError(
                f"{what}: {part} is called with ({', '.join(arguments)}) (got a function of"
                f" {inspect.signature(function)})"
            )
    return Target(
        model=model,
        batch_fn=_batch_function(batch_fn, what),
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        ddp_options=_checked_options(returned[4] if len(returned) == 5 else {}, what),
    )


def check_loss(loss: Any, name: str) -> torch.Tensor:
    """Return ``loss`` if a backward can start from it.

    Raises:
        TargetError: it is no scalar tensor, or nothing in it requires a gradient.
    """
    rule = f"target {name!r}: loss_fn returns a scalar tensor that requires grad"
    if not isinstance(loss, torch.Tensor):
        raise TargetError(f"{rule} (got {_kind(loss)})")
    if loss.numel() != 1:
        raise TargetError(f"{rule} (expected one number, got shape {tuple(loss.shape)}). Fix: return its mean.")
    if not loss.requires_grad:
        raise TargetError(f"{rule} (got one that does not). Fix: do not detach it or use .item().")
    return loss


def check_called(was_called: bool, name: str) -> None:
    """Check that a step's loss came through the wrapper.

    Raises:
        TargetError: it did not.
    """
    if not was_called:
        raise TargetError(
            f"target {name!r}: loss_fn computes the loss with the model it is given, which exchanges the gradients"
            " (expected a call of model(...) with gradients enabled in each step, got none, so nothing would be"
            " compared). Fix: call the argument itself, not the plain module from outside, model.module or"
            " model.forward."
        )


def check_optimizer(optimizer: Any, name: str) -> torch.optim.Optimizer:
    """Return ``optimizer`` if it is one.

    Raises:
        TargetError: it is not.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(
            f"target {name!r}: optimizer_fn returns an optimizer (expected a torch.optim.Optimizer, got"
            f" {_kind(optimizer)})"
        )
    return optimizer


def _split(name: str) -> tuple[str, str]:
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise TargetError(f"a target names a function (expected {FORMS}, got {name!r})")
    return place, function


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    # As when Python runs the file: what lies beside it can be imported.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not Python source (expected a file whose name ends in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look for it there
    spec.loader.exec_module(module)
    return module


def _load_module(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Not a module that the user's module imports, which is a fault of that one and has a traceback.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"target {name!r}: there is no module {error.name!r} (expected {FORMS}; modules are looked for in"
                f" {here} and among installed packages)"
            ) from error
        raise


def _functions_of(module: ModuleType) -> Iterator[str]:
    return (
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
    )


def _accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # of a built-in, which tells nothing about its arguments
    return True


def _batch_function(batch_fn: Any, what: str) -> Callable[[int, int, int], Any]:
    if not callable(batch_fn):
        raise TargetError(f"{what}: batch_fn is a function of (step, rank, world_size) (got {_kind(batch_fn)})")
    if _accepts(batch_fn, 0, 0, 1):
        return batch_fn  # type: ignore[no-any-return]
    if _accepts(batch_fn, 0, 0):
        return lambda step, rank, world_size: batch_fn(step, rank)
    raise TargetError(
        f"{what}: batch_fn is called with (step, rank, world_size) or (step, rank) (got a function of"
        f" {inspect.signature(batch_fn)})"
    )


def _checked_options(options: Any, what: str) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise TargetError(f"{what}: ddp_options is a dict of keyword arguments (got {_kind(options)})")
    accepted = [name for name in _NATIVE_ARGUMENTS if name not in _OUR_ARGUMENTS]
    for key in options:
        if key not in accepted:
            raise TargetError(
                f"{what}: ddp_options holds arguments of DistributedDataParallel (expected some of"
                f" {', '.join(accepted)}; got {key!r})"
            )
    return dict(options)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
