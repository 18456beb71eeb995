"""Find the target function by its name, and check the ``(model, batch_fn, loss_fn, optimizer_fn)`` it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
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
NativeDistributedDataParallel: Any = native.DistributedDataParallel


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


def check_name(name: str) -> tuple[str, str]:
    """Return the (module or file, function) that ``name`` names, without running the user's code.

    Raises:
        TargetError: ``name`` has another form than "place:function", or its file does not exist.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise TargetError(f"a target names a function (expected {FORMS}, got {name!r})")
    if _is_path(place) and not Path(place).is_file():
        raise TargetError(f"target {name!r}: no such file (expected {FORMS}, got the path {place!r})")
    return place, function


def load_function(name: str) -> Callable[[], Any]:
    """Import the module that ``name`` names and return the function. Errors of the user's module are not caught.

    Raises:
        TargetError: no such file, module or function, or the function needs arguments.
    """
    place, attribute = check_name(name)
    path = Path(place).resolve() if _is_path(place) else None
    # As when Python runs the file: what lies beside it can be imported.
    folder = str(path.parent if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _load_file(path) if path else _load_module(place, name)
    except SystemExit as error:
        raise TargetError(
            f"target {name!r}: importing {place} ended the process (exit code {error.code!r}). Fix: parse_args(), and"
            ' the training, belong under if __name__ == "__main__":'
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise TargetError(
            f"target {name!r}: {place} has no function {attribute!r} (expected one of {', '.join(functions) or 'none'})"
        )
    _check_function(found, f"target {name!r}", ())
    return found  # type: ignore[no-any-return]


def check_target(returned: Any, name: str) -> Target:
    """Make a ``Target`` of what the target function returned.

    Raises:
        TargetError: a part is missing or of the wrong type; the message names the part.
    """
    what = f"target {name!r} returns {PARTS}"
    if not isinstance(returned, tuple | list) or len(returned) not in (4, 5):
        got = f"{len(returned)} parts" if isinstance(returned, tuple | list) else type(returned).__name__
        raise TargetError(
            f"{what} (expected 4 or 5 parts, got {got}). Fix: name a function that returns these, not one that trains."
        )
    model, batch_fn, loss_fn, optimizer_fn = returned[:4]
    options = returned[4] if len(returned) == 5 else {}
    if not isinstance(model, torch.nn.Module) or isinstance(model, NativeDistributedDataParallel):
        raise TargetError(f"{what}: model is the plain module, which the comparison wraps (got {type_of(model)})")
    _check_function(loss_fn, f"{what}: loss_fn", ("model", "batch"))
    _check_function(optimizer_fn, f"{what}: optimizer_fn", ("parameters",))
    names = ("step", "rank", "world_size")
    takes_two = callable(batch_fn) and _accepts(batch_fn, names[:2]) and not _accepts(batch_fn, names)
    if not takes_two:
        _check_function(batch_fn, f"{what}: batch_fn", names)
    if not isinstance(options, Mapping):
        raise TargetError(f"{what}: ddp_options is a dict of arguments of DistributedDataParallel (got {options!r})")
    return Target(
        model=model,
        batch_fn=(lambda step, rank, world_size: batch_fn(step, rank)) if takes_two else batch_fn,
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        ddp_options=dict(options),
    )


def type_of(value: Any) -> str:
    """Such as "list" or "the class Linear"."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not Python source (expected a file whose name ends in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look for it there
    spec.loader.exec_module(module)
    return module


def _load_module(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module keeps its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"target {name!r}: there is no module {error.name!r} (expected {FORMS}; modules are looked for in"
            f" {Path.cwd()} and among installed packages)"
        ) from error


def _check_function(function: Any, what: str, arguments: tuple[str, ...]) -> None:
    """Raise unless ``function`` can be called with ``arguments``."""
    if not callable(function) or not _accepts(function, arguments):
        got = f"a function of {inspect.signature(function)}" if callable(function) else type_of(function)
        raise TargetError(f"{what} is called with ({', '.join(arguments)}) (expected such a function, got {got})")


def _accepts(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # of a built-in, which tells nothing about its arguments
    return True
