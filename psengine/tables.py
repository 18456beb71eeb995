"""``ServerEmbedding`` and ``ServerEmbeddingBag``: what a model has in place of ``torch.nn.Embedding``.

``Table`` is a module's table at its servers: what forwards read, what backwards leave, how a step takes it there::

    prefetch ── pull ┄┄┄┄┄┄┄┄┐
    forward ─── pull ─ wait ─ rows ─► ... ─► backward: gradients of rows, added up as torch adds those of a parameter
    step ────── gradients: unscale ─ divide ─ coalesce ─► push ─ wait ─► pulls of what was prefetched

``Tables`` are those of a wrapped model: their jobs at the servers, one for each rule, and their steps::

    rule "async"     each worker's rows are stepped when they arrive (the servers' "apply")
    rule "average"   those of all workers together (the servers' "merge" of all of them)

May import ``strategies``, ``collectives``, ``parameter_server.client`` and all that comes after them.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, to_builtins
from msgspec.structs import asdict
from torch.nn import functional as F
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, ModuleError, ProtocolError, ReductionError
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.client.addresses import keys_from_environment
from psengine.parameter_server.client.identity import ending_with_the_job, taking_reservation
from psengine.parameter_server.client.operation import Push, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.table_parts import JOB_SUFFIXES, Lookup, TableParts, tables_in
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.bodies import convert
from psengine.protocol.bounds import INT64_MAX, Positive, Printable, Unsigned, one_of
from psengine.protocol.layout import MAX_TABLE_DIM, TABLE_OPTIMIZERS, ChunkKind, ChunkSpec, Single, TableSpec
from psengine.protocol.messages import MAX_WORKERS
from psengine.strategies.base import Strategy
from psengine.strategies.servers.discovery import Rendezvous, leave, meet

RULES = ("async", "average")
logger = logging.getLogger(__name__)
# What was read in one step, for forwards with the same ids, as activation checkpointing has them.
KEPT_LOOKUPS = 16


class TableOptions(
    Struct, forbid_unknown_fields=True, kw_only=True, rename={"rows": "num_embeddings", "dim": "embedding_dim"}
):
    """What users choose, see ``ServerEmbedding``; the first fields are named as in ``TableSpec``."""

    rows: Positive
    dim: Annotated[int, Meta(ge=1, le=MAX_TABLE_DIM)]
    optimizer: Annotated[str, one_of(*TABLE_OPTIMIZERS)]
    eps: Single
    seed: Unsigned
    std: Single
    name: Printable | None
    padding_idx: int | None
    max_rows: Positive | None
    lr: Single
    rule: Annotated[str, one_of(*RULES)]
    max_staleness: Unsigned | None

    def __post_init__(self) -> None:
        """Check that the padding is a row, and that elements can be counted."""
        if self.padding_idx is not None and not -self.rows <= self.padding_idx < self.rows:
            raise ValueError(f"`padding_idx` (expected {-self.rows} to {self.rows - 1}, got {self.padding_idx})")
        if self.rows * self.dim > INT64_MAX:
            raise ValueError(f"has too many elements (expected at most {INT64_MAX}, got {self.rows * self.dim})")


class ServerEmbedding(torch.nn.Module):
    """``torch.nn.Embedding`` whose rows live on parameter servers; a worker holds those of its batch.

    Servers step its rows, with what ``psengine.DistributedOptimizer(...).step()`` pushes; ``clip_grad_norm_`` does not
    see their gradients. The model has to be wrapped in ``psengine.DistributedDataParallel``, under any strategy but
    virtual workers. A parameter of one element, ``stand_in``, takes the rows' place in ``parameters()``:
    ``requires_grad_``, ``zero_grad`` and ``half``, of the table or of a module around it, act as on
    ``torch.nn.Embedding``, but that servers keep float32 where forwards return another dtype.

    Args:
        num_embeddings: rows; ids are 0 to ``num_embeddings`` - 1. A row takes memory from its first push on.
        embedding_dim: elements of a row, float32.
        name: of the table at the servers; None: the path of the module in the wrapped model.
        padding_idx: a row of zeros without gradient, as in ``torch.nn.Embedding``.
        optimizer: "sgd" (without momentum), "adagrad" (torch.optim.Adagrad's, for sparse gradients) or
            "rowwise_adagrad" (one accumulator for each row: the sum of its gradients' mean squares).
        lr: learning rate; ``lr`` may be set at any time, and travels with each push.
        eps: of Adagrad.
        seed: of the first values: row r is a function of ``seed``, ``name`` and r.
        std: their standard deviation; 0 begins with zeros.
        max_rows: where servers have so many rows, those that were pushed longest ago go, and begin anew. None: servers
            keep all rows, and refuse pushes of new ones when their memory is full.
        rule: "async" steps each worker's rows when they arrive, "average" those of all workers together, as native DDP.
        max_staleness: of "async": how many steps a worker may be ahead of the slowest; None: any number.
        dtype: float32, or None.

    Raises:
        ConfigurationError: an argument has another value.
    """

    # Set while a wrapped model has this table.
    table: Table | None = None
    _loaded_version: int | None = None  # of the rows of the checkpoint that was loaded last

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        name: str | None = None,
        padding_idx: int | None = None,
        optimizer: str = "sgd",
        lr: float,
        eps: float = 1e-10,
        seed: int = 0,
        std: float = 1.0,
        max_rows: int | None = None,
        rule: str = "async",
        max_staleness: int | None = 8,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in locals().items() if name not in ("self", "dtype", "__class__")}
        self.options: TableOptions = self._checked(given, TableOptions, "")
        if dtype not in (None, torch.float32):
            raise ConfigurationError(f"rows on servers are float32 (expected dtype=torch.float32, got {dtype})")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.stand_in = torch.nn.Parameter(torch.zeros((), dtype=torch.float32))

    @property
    def lr(self) -> float:
        """The learning rate of the next push."""
        return self.options.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.options.lr = self._checked(lr, Single, ".lr")

    def _checked(self, value: Any, wanted: Any, what: str) -> Any:
        try:
            return convert(value, wanted, type(self).__name__ + what)
        except ProtocolError as error:
            raise ConfigurationError(f"{error}. Fix: give such a value") from None

    def extra_repr(self) -> str:
        """Its options."""
        return ", ".join(f"{name}={value!r}" for name, value in to_builtins(self.options).items())

    @override
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids``: ``[*ids.shape, dim]``, on their device.

        Raises:
            RowIdError: the table has no such row.
            ModuleError: the model is not wrapped, or has left.
        """
        rows, index, padding = self.look_up(ids)
        return F.embedding(index, rows, padding, sparse=True)

    # ---- rows --------------------------------------------------------------------------------------------------

    def bound(self) -> Table:
        """The table at its servers.

        Raises:
            ModuleError: the model is not wrapped, or has left.
        """
        if self.table is None:
            raise ModuleError(
                f"the rows of {self} are at servers that this module does not know (expected a model wrapped in"
                " psengine.DistributedDataParallel that has not left, got none). Fix: wrap the model first, and use the"
                " table before model.leave(); or read its rows with psengine.connect(role='reader').rows(name, ids)."
            )
        return self.table

    def prefetch(self, ids: torch.Tensor) -> None:
        """Begin to read the rows of the next forward, which has to ask for equal ``ids``.

        Under "async" they are read at once, so they may lack one more step; under "average" when the step under way is
        over.

        Raises:
            ConfigurationError: ``max_staleness=0`` allows no row that is older.
        """
        self.bound().prefetch(ids)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids`` as the servers have them now: float32 ``[*ids.shape, dim]``, on their device."""
        return self.bound().parts.rows(ids)

    def load(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows; the optimizer's state of these begins anew. On one worker, between two steps.

        Args:
            ids: int64 or int32 [n], each once.
            rows: float32 [n, dim].

        Raises:
            ConfigurationError: an id is there twice, or the shapes do not fit.
        """
        self.bound().load(ids, rows)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write all rows that were pushed or loaded to a safetensors file: ``ids`` (int64, ascending) and ``rows``.

        On one worker, between two steps. Takes memory for the ids, not for the rows.
        """
        self.bound().export(path)

    def look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """The rows of a forward, each once, with their gradients' way; the place of each id's; that of the padding."""
        rows, lookup = self.bound().look_up(ids, self)
        return rows, lookup.index.view(ids.shape), lookup.padding

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """For ``state_dict``: which table it is, and the version of its rows, which stay at the servers."""
        name, version = self.options.name, self._loaded_version
        if self.table is not None:
            name, version = self.table.parts.spec.name, self.table.version
        shape = {"num_embeddings": self.num_embeddings, "embedding_dim": self.embedding_dim}
        return {"name": name, **shape, "version": version}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Compare the saved table with this one; rows are loaded by ``load``. Warns where they are of another version.

        Raises:
            ConfigurationError: it is another one.
        """
        self._loaded_version = state["version"]
        own = self.get_extra_state() | {"version": state["version"]}
        if own["name"] is None:  # not wrapped yet
            own["name"] = state["name"]
        if own != state:
            raise ConfigurationError(f"the checkpoint names another table (expected {own}, got {state})")
        if self.table is not None:
            self.table.check_version(state["version"])

    @override
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
        if prefix + "weight" in state_dict:
            # Also where it is not ``strict``.
            lists[-1].append(
                f"{prefix}weight: rows live on servers (expected the state of a {type(self).__name__}, got that of a"
                f" torch.nn.Embedding). Fix: wrap the model, then .load(ids, rows) on one worker"
            )


class ServerEmbeddingBag(ServerEmbedding):
    """``torch.nn.EmbeddingBag`` with its rows on parameter servers.

    Args:
        num_embeddings, embedding_dim: see ``ServerEmbedding``.
        mode: "sum", "mean" or "max" of the rows of a bag.
        include_last_offset: as in ``torch.nn.EmbeddingBag``.
        **options: see ``ServerEmbedding``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        if mode not in ("sum", "mean", "max"):
            raise ConfigurationError(f"ServerEmbeddingBag.mode (expected 'sum', 'mean' or 'max', got {mode!r})")
        self.mode, self.include_last_offset = mode, include_last_offset

    @override
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Arguments and result are those of ``torch.nn.EmbeddingBag``; errors those of ``ServerEmbedding``."""
        rows, index, padding = self.look_up(input)
        return F.embedding_bag(
            index,
            rows,
            offsets,
            mode=self.mode,
            sparse=self.mode != "max",  # which torch has for dense gradients only
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


class Table:
    """A table at its servers; see the module's text.

    Args:
        layer: the module; its learning rate counts at each push.
        parts: the table at its servers.

    Attributes:
        averages: workers' rows are averaged.
        is_pushed: a distributed optimizer pushes what backwards leave.
        version: of the parts at the servers, added up, as this worker has last heard.
    """

    def __init__(self, layer: ServerEmbedding, parts: TableParts) -> None:
        self.layer = layer
        self.parts = parts
        self.averages = layer.options.rule == "average"
        self.is_pushed = False
        self.version = 0
        # A leaf of the table's shape, without memory: its gradient is what backwards left.
        one = torch.empty(1, dtype=torch.float32, device="cpu")
        self._leaf = one.expand(parts.spec.rows, parts.spec.dim).requires_grad_()
        self._lookups: deque[Lookup] = deque(maxlen=KEPT_LOOKUPS)
        self._prefetched: set[Lookup] = set()  # of these, those for forwards to come
        self._ahead: int | None = None
        self._pushes: list[Push] = []
        self._refused = 0

    def __deepcopy__(self, memo: Any) -> Table:
        """Copies of a module read the same table."""
        return self

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # The module of another process is at no servers.
        return type(None), ()

    # ---- forward and backward ----------------------------------------------------------------------------------

    def look_up(self, ids: torch.Tensor, layer: ServerEmbedding) -> tuple[torch.Tensor, Lookup]:
        """Rows, whose gradients are added to what backwards left, and where those of ``ids`` are among them.

        In training they are those of an equal forward of the step, or of ``prefetch``.

        Args:
            ids: see ``TableParts.look_up``.
            layer: the module that asks, perhaps a copy of the table's own.

        Raises:
            ReductionError: backwards have left some, and nobody pushes them.
        """
        if self._leaf.grad is not None and not self.is_pushed and torch.is_grad_enabled():
            raise ReductionError(
                f"table {self.parts.spec.name!r} has gradients that nobody pushes to its servers (expected optimizer ="
                " psengine.DistributedOptimizer(optimizer, model), whose step() pushes them, got a plain optimizer)"
            )
        flat = self.parts.flat(ids)
        known = [one for one in self._lookups if layer.training and one.asked.device == flat.device]
        lookup = next((one for one in known if torch.equal(one.asked, flat)), None)
        if lookup is None:
            lookup = self.parts.look_up(flat)
            if layer.training:
                self._lookups.append(lookup)
        self._prefetched.discard(lookup)
        rows, stand_in = lookup.wait(), layer.stand_in
        if not stand_in.requires_grad:
            return rows.to(stand_in.dtype), lookup
        return _watch(stand_in, self._leaf, rows, lookup.ids, self if layer is self.layer else None), lookup

    def prefetch(self, ids: torch.Tensor) -> None:
        """See ``ServerEmbedding.prefetch``."""
        if not self.averages and self.layer.options.max_staleness == 0:
            raise ConfigurationError(
                f"table {self.parts.spec.name!r}: rows that are read before a step ends may lack it (expected a"
                " max_staleness of 1 or more, or None, got 0). Fix: raise it, or leave out prefetch"
            )
        lookup = self.parts.look_up(ids)
        if not self.averages:
            self._ahead = 1
            lookup.begin()
        self._lookups.append(lookup)
        self._prefetched.add(lookup)

    # ---- a step ------------------------------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """Whether backwards left something, and no ``zero_grad`` has come since, which may set it to zeros."""
        mark = self.layer.stand_in.grad
        return mark is not None and bool(mark.signbit())

    def drop(self) -> None:
        """What backwards left does not count."""
        self._leaf.grad = self.layer.stand_in.grad = None

    def begin_push(self, ids: torch.Tensor, rows: torch.Tensor, *, workers: int, overflow: bool) -> None:
        """Push what ``take`` returned.

        Args:
            ids: of the gradients.
            rows: the gradients.
            workers: how many average.
            overflow: a scaled gradient of this worker is not finite, here or in another table that steps with this one.
        """
        if overflow:
            ids, rows = ids[:0], rows[:0]
        self._pushes = self.parts.push(
            ids,
            rows,
            lr=self.layer.lr,
            divisor=workers,
            ahead=self._ahead,
            abstains=not self.averages,
            overflow=overflow or None,
        )

    def take(self, scale: float | None, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What backwards left: (ids, gradients of rows), with native DDP's arithmetic; ids ascending, each once.

        Args:
            scale: of the gradients, a GradScaler's; None: they are not scaled.
            workers: how many average.
        """
        gradient = self._leaf.grad if self.has_gradient() else None
        self.drop()
        if gradient is None:
            ids = torch.empty(0, dtype=torch.int64, device="cpu")
            return ids, torch.empty(0, self.parts.spec.dim, dtype=torch.float32, device="cpu")
        # Not in place: the values may be those of other gradients too.
        values = gradient._values()
        values = values if scale is None else values * (1.0 / scale)
        values = values if workers == 1 else values / workers
        summed = _sparse(gradient._indices()[0], values, gradient.shape).coalesce()
        return summed.indices()[0], summed.values()

    def end_push(self) -> bool:
        """Wait for the servers; then rows that were prefetched are those of the forwards to come.

        Returns whether servers left the step out for an overflow, this worker's or another's.
        """
        pushes, self._pushes = self._pushes, []
        with self.parts.session.telemetry.blocked():
            wait_all(pushes)
        self.version = sum(push.wait().version for push in pushes)
        bodies = [push.wait().body for push in pushes]
        for body in bodies:
            if body.get("refused", "abstained") not in ("abstained", "overflow"):
                self._report_refusal(body["refused"], body.get("row"))
        self._lookups = deque((one.begin() for one in self._lookups if one in self._prefetched), KEPT_LOOKUPS)
        self._prefetched.clear()
        return any(body.get("refused") == "overflow" for body in bodies)

    def _report_refusal(self, reason: str, row: int | None) -> None:
        self._refused += 1
        # At powers of two: often enough to be seen, rarely enough to be read.
        if self._refused & (self._refused - 1) == 0:
            logger.warning(
                "the servers refused the rows that worker %d pushed to table %r (%s%s). %d refused so far",
                self.parts.session.rank,
                self.parts.spec.name,
                reason,
                "" if row is None else f" in row {row}",
                self._refused,
            )

    def check_version(self, saved: int | None) -> None:
        """Warn where the rows have another version than those beside which a dense part was ``saved``."""
        self.version = self.parts.version()
        if saved is not None and saved != self.version:
            logger.warning(
                "table %r: the dense part that was loaded belongs to rows of another version (expected version %d, got"
                " %d at the servers). Fix: start the servers from their snapshot of that time, or load() the rows that"
                " were exported beside the checkpoint, after which this warning means nothing",
                self.parts.spec.name,
                saved,
                self.version,
            )

    # ---- for people --------------------------------------------------------------------------------------------

    def load(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """See ``ServerEmbedding.load``."""
        self.parts.store(ids, rows)
        self.version = self.parts.version()
        self._lookups.clear()  # they were read before
        self._prefetched.clear()

    def export(self, path: str | os.PathLike[str]) -> None:
        """See ``ServerEmbedding.export``."""
        ids, dim = self.parts.existing(), self.parts.spec.dim
        ends = [ids.nbytes, ids.nbytes + 4 * dim * len(ids)]
        header = {
            "ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [0, ends[0]]},
            "rows": {"dtype": "F32", "shape": [len(ids), dim], "data_offsets": ends},
        }
        # The format of safetensors, whose own writer would need all rows at once.
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        part = Path(f"{path}.part")
        try:
            with part.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.write(ids.numpy().data)
                for some in ids.split(self.parts.most):
                    file.write(self.parts.rows(some).numpy().data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


class _Watched(torch.autograd.Function):
    """The rows of a forward; their gradient becomes one of the whole table's, sparse, like that of an embedding."""

    @staticmethod
    @override
    def forward(
        ctx: Any, stand_in: torch.Tensor, leaf: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, table: Table | None
    ) -> torch.Tensor:
        ctx.stand_in, ctx.shape, ctx.ids, ctx.table = stand_in, leaf.shape, ids, table
        return rows.view_as(rows).to(stand_in.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.table is None:
            raise ReductionError(
                "a copy of a table reads its rows, and cannot train them (expected the module of the wrapped model, got"
                " a copy.deepcopy of it). Fix: copy.requires_grad_(False), or torch.no_grad()"
            )
        if torch.is_grad_enabled():
            raise ReductionError(
                "rows on servers have no second derivative (expected loss.backward() without create_graph, got"
                " create_graph=True)"
            )
        if gradient.is_sparse:
            ids, values = ctx.ids[gradient._indices()[0]], gradient._values()
        else:
            ids, values = ctx.ids, gradient[: len(ctx.ids)]  # all rows but the padding's
        if not ctx.table.has_gradient():
            ctx.table.drop()
        # Negative zeros: they change no norm, stay negative when they are scaled and added, and zero_() shows.
        mark = torch.full_like(ctx.stand_in, -0.0)
        return mark, _sparse(ids.cpu(), values.cpu().float(), ctx.shape), None, None, None


_watch: Any = _Watched.apply


def _sparse(ids: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=False)


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
    """All tables of a wrapped model; see the module's text. Without tables its methods do nothing.

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
