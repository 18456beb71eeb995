"""All tables of a wrapped model: their jobs at the servers, one for each rule, and their steps.

rule "async"     each worker's rows are stepped when they arrive (the servers' "apply")
rule "average"   those of all workers together (the servers' "merge" of all of them)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec import to_builtins
from msgspec.structs import asdict

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.client.addresses import keys_from_environment
from psengine.parameter_server.client.identity import ending_with_the_job, taking_reservation
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.table_parts import JOB_SUFFIXES, tables_in
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ChunkKind, ChunkSpec, TableSpec
from psengine.protocol.messages import MAX_WORKERS
from psengine.strategies.base import Strategy
from psengine.strategies.servers.discovery import Rendezvous, leave, meet
from psengine.tables.embedding import RULES, ServerEmbedding, Table


def find_tables(module: torch.nn.Module) -> dict[str, ServerEmbedding]:
    """The tables of a model by their names.

    Raises:
        ConfigurationError: two have the same; or another wrapped model has a table.
    """
    found: dict[str, ServerEmbedding] = {}
    for path, layer in module.named_modules():
        if not isinstance(layer, ServerEmbedding):
            continue
        name = layer.options.name or path
        if name in found:
            raise ConfigurationError(
                f"two tables of the model have one name (expected another name= for each, got {name!r} twice). Fix:"
                " leave out name=, or use one module in both places"
            )
        if layer.table is not None:
            raise ConfigurationError(
                f"table {name!r} belongs to another wrapped model (expected a table that no model has, or that left its"
                " servers, got one in use). Fix: call the other model's leave(), or give each model a table"
            )
        found[name] = layer
    return found


class Tables:
    """See the module's text. Without tables its methods do nothing.

    Args:
        layers: by name; they are bound from ``enter`` until ``close``.
    """

    def __init__(self, layers: Mapping[str, ServerEmbedding]) -> None:
        self.layers = layers
        self._exchanges: Callable[[], int] = int
        self._pushed_at = 0  # the exchanges before the last push
        self._sessions: list[WorkerSession] = []
        self._tables: list[Table] = []
        self._own: Rendezvous | None = None

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def stand_ins(self) -> set[torch.nn.Parameter]:
        """Those of all tables, which replicas do not exchange, and no optimizer steps."""
        return {layer.stand_in for layer in self.layers.values()}

    @property
    def options(self) -> dict[str, str]:
        """What all ranks have to choose alike, by name."""
        return {
            f"{option} of table {name!r}": str(value)
            for name, layer in self.layers.items()
            for option, value in to_builtins(layer.options).items()
        }

    def enter(
        self, strategy: Strategy, collective: Collective, device: torch.device, exchanges: Callable[[], int]
    ) -> None:
        """Take the tables to their servers; once.

        Args:
            strategy: the model's, whose servers the tables share, if it has some.
            collective: of the model's ranks.
            device: of its messages.
            exchanges: returns how many backwards have exchanged dense gradients.

        Raises:
            ReplicaMismatchError: the servers have other tables.
            ConfigurationError: their options contradict each other; or see ``meet``.
            ServerError: see ``WorkerSession.start``.
        """
        if not self.layers:
            return
        self._exchanges = exchanges
        found = strategy.rendezvous
        if found is None:
            found = self._own = meet(None, None, collective, device)
        try:
            suffixes = iter(JOB_SUFFIXES)
            for rule in RULES:
                chosen = {name: layer for name, layer in self.layers.items() if layer.options.rule == rule}
                if chosen:
                    self._enter(next(suffixes), chosen, found, strategy.worker_rank)
        except BaseException:
            self.close()
            raise

    def _enter(
        self, suffix: str, layers: Mapping[str, ServerEmbedding], rendezvous: Rendezvous, rank: int | None
    ) -> None:
        """Take part in the job of these tables."""
        rule = _wire_rule(layers)
        options = SessionOptions(
            addresses=rendezvous.addresses,
            job=rendezvous.job + suffix,
            rule=rule,
            rank=rendezvous.rank if rank is None else rank,
            world_size=rendezvous.world_size,
            keys=keys_from_environment(),
            is_embedded=rendezvous.is_embedded,
            keeps_step=rule["name"] == "merge",
        )
        with ending_with_the_job(), taking_reservation(options) as options:
            session = WorkerSession(options)
            self._sessions.append(session)
            session.start()
            parts = len(session.job_connection.links)
            tables = [_described(*item, part, parts) for item in layers.items() for part in range(parts)]
            layout = [
                ChunkSpec(key, ChunkKind.TABLE, torch.float32, table.dim, (), table) for key, table in enumerate(tables)
            ]
            session.enter(layout, lambda chunk: None)
        for name, parts_of_table in tables_in(session, layout).items():
            layers[name].table = table = Table(layers[name], parts_of_table)
            self._tables.append(table)
            table.check_version(layers[name]._loaded_version)

    # ---- steps -------------------------------------------------------------------------------------------------

    def distribute(self) -> None:
        """A distributed optimizer was made, whose steps push."""
        for table in self._tables:
            table.is_pushed = True

    def begin_step(self, scale: float | None = None) -> None:
        """Push what backwards left, of which ``scale`` is the scale."""
        if not self._tables:
            return
        self._pushed_at = self._exchanges()
        taken = list[tuple[Table, int, tuple[torch.Tensor, torch.Tensor]]]()
        for table in self._tables:
            session = table.parts.session
            # At the beginning some may be on their way.
            workers = max(len(session.members), session.options.world_size) if table.averages else 1
            taken.append((table, workers, table.take(scale, workers)))
        # Under "async" servers refuse the rows of such a table, and name the first.
        overflow = scale is not None and any(table.averages and not is_finite(rows) for table, _, (_, rows) in taken)
        for table, workers, gradients in taken:
            table.begin_push(*gradients, workers=workers, overflow=overflow and table.averages)
        for session in self._sessions:
            session.end_step()

    def end_step(self) -> bool:
        """Wait until the servers have stepped; whether they left out what is averaged, for a worker's overflow."""
        left_out = [table.end_push() for table in self._tables]
        for session in self._sessions:
            session.telemetry.step_ended()
        return any(left_out)

    def drop(self) -> None:
        """``zero_grad``: what backwards left does not count.

        Where a backward has met other workers and no step has followed, they may be in that step: this one contributes
        nothing to it.
        """
        for table in self._tables:
            table.drop()
        if self._tables and self._exchanges() != self._pushed_at:
            self.begin_step()
            self.end_step()

    # ---- leaving -----------------------------------------------------------------------------------------------

    def close(self, *, frees_name: bool = True) -> None:
        """Leave the servers. Safe to call twice.

        Args:
            frees_name: whether the next model may have the job's name; see ``ServerStrategy.abandon``.
        """
        tables, self._tables = self._tables, []
        for table in tables:
            table.layer.table = None
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()
        if self._own is not None and self._own.embedded is not None:
            self._own.embedded.stop()
        if self._own is not None and frees_name:
            leave(self._own)
            self._own = None


def _wire_rule(layers: Mapping[str, ServerEmbedding]) -> dict[str, Any]:
    """The servers' rule of these tables, as in HELLO."""
    if next(iter(layers.values())).options.rule == "average":
        # All workers that there are, in every run.
        return {"name": "merge", "quorum": MAX_WORKERS, "grace": 0.0, "tables": True}
    bounds = {name: layer.options.max_staleness for name, layer in layers.items()}
    if len(set(bounds.values())) > 1:
        raise ConfigurationError(
            f"tables of one model step together (expected one max_staleness for all of rule 'async', got {bounds})"
        )
    bound = next(iter(bounds.values()))
    options = {"max_staleness": bound, "staleness_scaling": None, "delay_compensation": 0.0}
    return {"name": "apply", **options, "tables": True}


def _described(name: str, layer: ServerEmbedding, part: int, parts: int) -> TableSpec:
    given = {field: value for field, value in asdict(layer.options).items() if field in TableSpec.__struct_fields__}
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    given |= {"name": name, "max_rows": layer.options.max_rows or 0, "padding": padding}
    return TableSpec(**given, part=part, parts=parts)
