"""A strategy's state in the wrapped model's ``state_dict``, where the user asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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


class StrategyState(torch.nn.Module):
    """The part of ``DistributedDataParallel`` that saves what its strategy keeps."""

    strategy: Strategy
    saves_strategy_state: bool

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saves_strategy_state:
            destination[prefix + KEY] = saved(self.strategy)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *others: Any
    ) -> None:
        entry = state_dict.pop(prefix + KEY, None)
        if entry is not None:
            restore(self.strategy, entry)
        elif self.saves_strategy_state and strict:
            missing_keys.append(prefix + KEY)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)
