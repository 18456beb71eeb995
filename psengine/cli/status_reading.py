"""A server's JSON, read as the status model. Another version's, or another program's, is refused.

Texts come out with whatever a terminal would obey spelled out; numbers are finite and small enough to be shown.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import is_dataclass
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
    """``value`` as a ``kind`` of the model, or a ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_one_of(arguments, value, name)
    if origin is Literal:
        return value if value in arguments else _refuse(name, f"one of {arguments}", value)
    if origin is tuple:
        items = value if isinstance(value, list) else _refuse(name, "a list", value)
        return tuple(_read(arguments[0], item, name) for item in items)
    if origin is not None or is_dataclass(kind):
        members = value if isinstance(value, dict) else _refuse(name, "an object", value)
        if origin is not None:  # a mapping from names
            return {printable(key): _read_member(arguments[1], item, key) for key, item in members.items()}
        hints = _hints(kind)
        return kind(**{field: _read(hints[field], members[field], field) for field in hints if field in members})
    if kind is Any:
        return _plain(value, MAX_LEVELS)
    if kind is str:
        return printable(value) if isinstance(value, str) else _refuse(name, "a text", value)
    if kind is bool:
        return value if isinstance(value, bool) else _refuse(name, "true or false", value)
    lowest, highest = (0, MAX_UNIX_S) if name == "unix_s" else (-MAX_NUMBER, MAX_NUMBER)
    is_number = isinstance(value, int if kind is int else int | float) and lowest <= value <= highest  # nor is NaN
    return value if is_number else _refuse(name, "a number that can be shown", value)


def _read_member(kind: Any, value: Any, name: str) -> Any:
    """A member of a mapping; counts are not negative, nor is what is counted."""
    found = _read(kind, value, name)
    is_count = kind is not int or (found >= 0 and not name.strip().startswith("-"))
    return found if is_count else _refuse(f"{name:.40}", "a count", value)


def _read_one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    first_error = None
    for kind in kinds:
        if kind is not types.NoneType:
            try:
                return _read(kind, value, name)
            except (ValueError, TypeError) as error:
                first_error = first_error or error
    assert first_error is not None
    raise first_error


def _plain(value: Any, levels: int) -> Any:
    if not levels:
        raise ValueError(f"nested too deeply (expected at most {MAX_LEVELS} levels)")
    if isinstance(value, dict):
        return {printable(name): _plain(item, levels - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, levels - 1) for item in value]
    return printable(value) if isinstance(value, str) else value


def _refuse(name: str, expected: str, value: Any) -> Any:
    raise ValueError(f"{name} is not understood (expected {expected}, got {value!r:.40})")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
