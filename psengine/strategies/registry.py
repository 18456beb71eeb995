"""From what a user writes (a name, a name with options, an object) to a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psengine.codecs.base import Codec
from psengine.codecs.registry import CODECS
from psengine.environment.variables import default_strategy
from psengine.errors import ConfigurationError
from psengine.specification import Registry
from psengine.strategies.base import Strategy
from psengine.strategies.elastic.sync import SyncVirtualWorkers
from psengine.strategies.local.diloco_server import DilocoServer
from psengine.strategies.local.rounds import Diloco, LocalSteps
from psengine.strategies.servers.asynchronous import AsyncServer
from psengine.strategies.servers.sync import SyncServer
from psengine.strategies.sharding import SyncShardedOptimizer
from psengine.strategies.sync_all_reduce import SyncAllReduce

STRATEGIES: Registry[Strategy] = Registry("strategy")
# By option of a strategy, the registry of its values: a value gets the options that the strategy does not name.
PARTS: dict[str, Registry[Any]] = {"compress": CODECS}


def register_strategy(name: str, factory: Callable[..., Strategy]) -> None:
    """Let users write ``strategy=name``, in this process, for what ``factory`` makes.

    Args:
        name: what stands before the colon, in PSENGINE_STRATEGY too.
        factory: the strategy's class, or a function. Its parameters are the options of ``name:option=value``; it gets
            those that are written and checks their values.

    Raises:
        ConfigurationError: the name is taken, or is none.
    """
    STRATEGIES.register(name, factory)


def _sync(
    *, compress: str | Codec | None = None, shard_optimizer: bool = False, virtual_workers: int | None = None
) -> Strategy:
    """Strategy "sync": gradients are averaged, of ranks or of virtual workers; the optimizer may be sharded."""
    if virtual_workers is not None:
        if compress is not None or shard_optimizer:
            other = "shard_optimizer" if compress is None else "compress"
            raise ConfigurationError(f"strategy 'sync' (expected virtual_workers alone, got {other} beside it)")
        return SyncVirtualWorkers(virtual_workers=virtual_workers)
    if not isinstance(shard_optimizer, bool):
        raise ConfigurationError(
            f"shard_optimizer of strategy 'sync' (expected true or false, got {shard_optimizer!r})"
        )
    return (SyncShardedOptimizer if shard_optimizer else SyncAllReduce)(compress=compress)


register_strategy(SyncAllReduce.name, _sync)
for _class in (SyncServer, AsyncServer, LocalSteps, Diloco, DilocoServer):
    register_strategy(_class.name, _class)


def resolve_strategy(specification: Any) -> Strategy:
    """Return the strategy that ``specification`` names: an object, "sync", or "name:option=value,option=value".

    None takes PSENGINE_STRATEGY, else "sync"; the errors of a strategy that comes from the variable say so.

    Options that the strategy does not name go to the codec of its option ``compress``.

    An option whose parameter is annotated as ``str`` gets text or None; of others the values are read as int, float,
    true/false, none, else text. A list where items without ``=`` follow.

    Raises:
        ConfigurationError: unknown name or option; the message lists what there is.
    """
    if isinstance(specification, Strategy):
        return specification
    if specification is None:
        named = default_strategy()
        try:
            return resolve_strategy(named)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"PSENGINE_STRATEGY={named}, which psengine run --strategy sets: {error}"
            ) from error
    if not isinstance(specification, str):
        hint = "; call it to make an object" if isinstance(specification, type) else ""
        raise ConfigurationError(f"strategy must be a name or a psengine.Strategy object (got {specification!r}{hint})")
    return STRATEGIES.read(specification, PARTS)()
