"""``RULES``: by name of the strategy, the rule that its results are compared with where that is not native DDP's."""

from __future__ import annotations

from collections.abc import Callable

from psengine.strategies.base import Strategy
from psengine.strategies.registry import resolve_strategy
from psengine.verify import async_rule, codec_rule, local_rule
from psengine.verify.rule import MakeRule

NATIVE, AUTO = "native", "auto"
# The name of a reference: "the rule of local:every=4".
PREFIX = "the rule of "

# From a strategy and the number of ranks to its rule; None: native DDP's. Raises ConfigurationError where the results
# depend on more than the rule knows, such as the order in which workers arrive.
RULES: dict[str, Callable[[Strategy, int], MakeRule | None]] = {
    "sync": codec_rule.of_collective,
    "sync-server": codec_rule.of_servers,
    "async": async_rule.of_servers,
    "local": local_rule.of_collective,
    "diloco": local_rule.of_collective,
    "diloco-server": local_rule.of_servers,
}


def rule_of(specification: str, world_size: int) -> MakeRule | None:
    """The rule of the strategy ``specification`` among so many ranks; None: it promises what native DDP computes.

    Raises:
        ConfigurationError: no such strategy, or one whose results follow from no rule.
    """
    strategy = resolve_strategy(specification)
    find = RULES.get(strategy.name)
    return None if find is None else find(strategy, world_size)


def reference_of(specification: str, world_size: int) -> str:
    """What ``against="auto"`` means for this candidate."""
    if specification == NATIVE or specification.startswith(PREFIX) or rule_of(specification, world_size) is None:
        return NATIVE
    return PREFIX + specification
