"""One table of a model at its servers: what forwards read, what backwards leave, and how a step takes it there.

prefetch ── pull ┄┄┄┄┄┄┄┄┐
forward ─── pull ─ wait ─ rows ─► ... ─► backward: gradients of rows, added up as torch adds those of a parameter
step ────── gradients: unscale ─ divide ─ coalesce ─► push ─ wait ─► pulls of what was prefetched
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from psengine.errors import ConfigurationError, ReductionError
from psengine.parameter_server.client.operation import Push, wait_all
from psengine.parameter_server.client.table_parts import Lookup, TableParts

if TYPE_CHECKING:
    from psengine.tables.embedding import ServerEmbedding

logger = logging.getLogger(__name__)

# What was read in one step, for forwards with the same ids, as activation checkpointing has them.
KEPT_LOOKUPS = 16


class Table:
    """See the module's text.

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
