"""A server's JSON, read as the status model. Another version's, or another program's, is refused.

Texts come out with whatever a terminal would obey spelled out; numbers are finite and small enough to be shown.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from psengine.cli.console import printable
from psengine.parameter_server.status_model import ServerStatus

# More than anything that is counted, an epoch included, and less than what a float cannot hold.
MAX_NUMBER = 2**64
MAX_UNIX_S = 253402300799  # of the year 9999, the last that has a calendar
# Of what the model leaves free: a job's rule.
MAX_LEVELS = 8


class NoStatusError(ValueError):
    """No psengine-server's status, or another version's."""


def read_status(page: Mapping[str, Any], address: str) -> ServerStatus:
    """The status that a server at ``address`` sent; members that the model does not know are left out.

    Raises:
        NoStatusError: it does not have the model's shape.
    """
    try:
        status: ServerStatus = _read(ServerStatus, page, "status")
    except (ValueError, TypeError, RecursionError) as error:
        raise NoStatusError(
            f"{address} has a status that this psengine does not understand ({error}). Fix: install the same version on"
            " both sides"
        ) from error
    return status


def _read(kind: Any, value: Any, name: str) -> Any:
    """``value`` as a ``kind`` of the model."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is no object (got {value!r:.40})")
        build: Any = kind
        hints = _hints(build)
        names = [one.name for one in fields(kind) if one.name in value]
        return build(**{field: _read(hints[field], value[field], field) for field in names})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_one_of(arguments, value, name)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{name} is unknown (expected one of {arguments}, got {value!r:.40})")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} is no list (got {value!r:.40})")
        return tuple(_read(arguments[0], item, name) for item in value)
    if origin is not None:  # a mapping
        if not isinstance(value, dict):
            raise ValueError(f"{name} is no object (got {value!r:.40})")
        return {printable(key): _read_item(arguments[1], item, key) for key, item in value.items()}
    if kind is Any:
        return _plain(value, MAX_LEVELS)
    if kind is str:
        return printable(value) if isinstance(value, str) else _refuse(name, "text", value)
    if kind is bool:
        return value if isinstance(value, bool) else _refuse(name, "truth value", value)
    lowest, highest = (0, MAX_UNIX_S) if name == "unix_s" else (-MAX_NUMBER, MAX_NUMBER)
    is_number = isinstance(value, int if kind is int else int | float) and lowest <= value <= highest  # nor is NaN
    return value if is_number else _refuse(name, "number that can be shown", value)


def _read_item(kind: Any, value: Any, name: str) -> Any:
    """An item of a mapping; counts are not negative, nor is what is counted."""
    found = _read(kind, value, name)
    if kind is int and (found < 0 or name.strip().startswith("-")):
        raise ValueError(f"{name:.40} is no count that can be shown (got {value!r:.40})")
    return found


def _read_one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is not types.NoneType:
            try:
                return _read(kind, value, name)
            except (ValueError, TypeError) as error:
                errors.append(error)
    raise errors[0]


def _plain(value: Any, levels: int) -> Any:
    if not levels:
        raise ValueError(f"nested too deeply (expected at most {MAX_LEVELS} levels)")
    if isinstance(value, dict):
        return {printable(name): _plain(item, levels - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, levels - 1) for item in value]
    return printable(value) if isinstance(value, str) else value


def _refuse(name: str, expected: str, value: Any) -> Any:
    raise ValueError(f"{name} is no {expected} (got {value!r:.40})")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
