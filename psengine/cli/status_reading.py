"""A server's JSON, read as the status model. A page of another version, or of another program, is refused.

Texts come out with the characters that a terminal would obey spelled out; numbers are finite and can be shown.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from psengine.cli.console import printable
from psengine.parameter_server.status_model import ServerStatus

# More than any count, an epoch included, and less than what a float cannot hold.
MAX_NUMBER = 2.0**64
# By field, where the limits are others: the last year with a calendar is 9999; a loss that diverges may be anything.
_LIMITS = {"unix_s": (0.0, 253402300799.0), "loss": (-sys.float_info.max, sys.float_info.max)}


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
    """``value`` as a ``kind`` of the model.

    Raises:
        ValueError, TypeError: it is none.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for one in arguments:
            with suppress(ValueError, TypeError):
                return _read(one, value, name)
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_read(arguments[0], item, name) for item in value)
    elif origin is not None:  # a mapping from names
        if isinstance(value, dict):
            return {printable(key): _read(arguments[1], item, key) for key, item in value.items()}
    elif hasattr(kind, "__dataclass_fields__"):
        if isinstance(value, dict):
            hints = _hints(kind)
            return kind(**{field: _read(hints[field], value[field], field) for field in hints if field in value})
    elif kind is Any:
        return _printable(value)
    elif kind is str:
        if isinstance(value, str):
            return printable(value)
    elif kind in (bool, types.NoneType):
        if isinstance(value, kind):
            return value
    else:
        lowest, highest = _LIMITS.get(name, (-MAX_NUMBER, MAX_NUMBER))
        if isinstance(value, int if kind is int else int | float) and lowest <= value <= highest:  # NaN is neither
            return value
    raise ValueError(f"{name:.40} is not understood (expected {getattr(kind, '__name__', kind)}, got {value!r:.40})")


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
