"""A strategy's state in the wrapped model's ``state_dict``, where the user asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psengine.errors import ConfigurationError
from psengine.strategies.base import Strategy

# Beside "module.weight" and the like, which are native DDP's keys.
KEY = "_psengine_strategy"


def saved(strategy: Strategy) -> dict[str, Any]:
    """What stands under ``KEY``."""
    return {"name": strategy.name, "state": strategy.state_dict()}


def restore(strategy: Strategy, entry: Mapping[str, Any]) -> None:
    """Let ``strategy`` go on from what ``saved`` returned.

    Raises:
        ConfigurationError: it is another strategy's.
    """
    if entry["name"] != strategy.name:
        raise ConfigurationError(
            f"the checkpoint holds the state of another strategy (expected {strategy.name!r}, got {entry['name']!r})."
            f" Fix: wrap the model with strategy={entry['name']!r}, or remove {KEY!r} from the checkpoint."
        )
    strategy.load_state_dict(entry["state"])
