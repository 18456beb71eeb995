"""From what a user writes (a name, a name with options, an object) to a strategy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from psengine.errors import ConfigurationError
from psengine.strategies.base import Strategy
from psengine.strategies.servers.asynchronous import AsyncServer
from psengine.strategies.servers.sync import SyncServer
from psengine.strategies.sync_all_reduce import SyncAllReduce

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (SyncAllReduce, SyncServer, AsyncServer)}


def resolve_strategy(specification: Any) -> Strategy:
    """Return the strategy that ``specification`` names: an object, "sync", or "name:option=value,option=value".

    Option values are read as int, float, true/false, none, else text.

    Raises:
        ConfigurationError: unknown name or option; the message lists what there is.
    """
    if isinstance(specification, Strategy):
        return specification
    if not isinstance(specification, str):
        hint = "; call it to make an object" if isinstance(specification, type) else ""
        raise ConfigurationError(f"strategy must be a name or a psengine.Strategy object (got {specification!r}{hint})")
    name, _, options = specification.partition(":")
    if name not in STRATEGIES:
        raise ConfigurationError(
            f"unknown strategy (expected one of {sorted(STRATEGIES)}, got {name!r}){did_you_mean(name, STRATEGIES)}"
        )
    strategy_class = STRATEGIES[name]
    return strategy_class(**_parse_options(strategy_class, options, specification))


def _parse_options(strategy_class: type[Strategy], options: str, specification: str) -> dict[str, Any]:
    accepted = list(inspect.signature(strategy_class).parameters)
    parsed: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if key not in accepted:
            raise ConfigurationError(
                f"strategy {specification!r}: unknown option {key!r}"
                f" (expected some of {accepted or 'no options'}, got {option!r})"
                f"{did_you_mean(key, accepted)}"
            )
        if not equals or key in parsed:
            raise ConfigurationError(
                f"strategy {specification!r}: options are written option=value, each once"
                f" (expected some of {accepted}, got {option!r})"
            )
        parsed[key] = _parse_value(value)
    return parsed


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's text: the known name that was probably meant; "" where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
