"""A table at the servers: its rows lie in parts, one at each shard, by a keyed hash of their ids.

ids, as asked ─ unique ─► ids, ascending ─ part_of ─► ids by part ─► one PULL or PUSH for each part
                   └─ inverse ─► the place of each id's row ◄──────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from psengine.errors import ArgumentTypeError, ConfigurationError, ProtocolError, RowIdError, ServerRefusedError
from psengine.kernels.row_table import first_not_finite, part_of
from psengine.parameter_server.client.operation import Push, Request, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ID_BYTES, ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, ErrorCode
from psengine.protocol.rows import unpack_rows

# What follows the name of a model's job in those of its tables' jobs: the second is of a model whose tables have two
# rules. So a worker whose tables all have another rule is refused by it.
JOB_SUFFIXES = (".tables", ".tables.1")


@dataclass(eq=False)
class Lookup:
    """Rows that are asked for; see ``TableParts.look_up``.

    Its tensors are plain ones without a graph, also where a forward under ``torch.inference_mode`` makes it, because a
    forward in another mode may use it.

    Attributes:
        parts: the table.
        asked: int64, 1-D, as they were asked for; a copy.
        ids: each once but that of the padding, in the order of the rows.
        counts: how many of them are in each part.
        index: for each id that was asked for the place of its row.
        padding: the place of the row of zeros, which is the last; None where the table has none.
        rows: float32 [n, dim], to be read after ``wait``; None before ``begin``.
        requests: those that bring the rows; empty once they are here.
    """

    parts: TableParts
    asked: torch.Tensor
    ids: torch.Tensor
    counts: list[int]
    index: torch.Tensor
    padding: int | None
    rows: torch.Tensor | None = None
    requests: Sequence[Request] = ()

    @torch.inference_mode(False)
    def begin(self) -> Lookup:
        """Ask the servers; once."""
        if self.rows is None:
            count = len(self.ids)
            shape = count + (self.padding is not None), self.parts.spec.dim
            self.rows = torch.empty(shape, dtype=torch.float32, device="cpu")
            self.rows[count:] = 0
            self.requests = self.parts.pull(self.ids, self.counts, self.rows[:count])
        return self

    @torch.inference_mode(False)
    def wait(self) -> torch.Tensor:
        """Return the rows, on the device of the ids; the errors are those of ``Request.wait``."""
        self.begin()
        assert self.rows is not None
        wait_all(self.requests)
        self.requests = ()
        self.ids, self.rows = self.ids.to(self.asked.device), self.rows.to(self.asked.device)
        return self.rows


class TableParts:
    """See the module's text.

    Args:
        session: a worker's, or a reader's.
        chunks: the parts of one table, by part.

    Attributes:
        most: rows that a payload takes.
    """

    def __init__(self, session: WorkerSession, chunks: Sequence[ChunkSpec]) -> None:
        assert chunks[0].table is not None, "a job of tables has no other chunks"
        self.session = session
        self.spec = chunks[0].table
        self.most = MAX_PAYLOAD_BYTES // (ID_BYTES + chunks[0].size_bytes)
        self._keys = [chunk.key for chunk in chunks]

    # ---- reading -----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def look_up(self, ids: torch.Tensor) -> Lookup:
        """What ``begin`` asks the servers for.

        Args:
            ids: int64 or int32, of any shape, on any device, any number of times each.

        Raises:
            ArgumentTypeError: they have another dtype.
            RowIdError: the table has no such row; names one.
        """
        asked = self.flat(ids).clone()
        unique, inverse = torch.unique(asked, return_inverse=True)
        unique = unique.cpu()
        self._check_range(unique)
        kept = (unique != self.spec.padding).nonzero().flatten()
        order, counts = self._by_part(unique[kept])
        order = kept[order]
        places = torch.full_like(unique, len(order))
        places[order] = torch.arange(len(order), device="cpu")
        padding = len(order) if self.spec.padding >= 0 else None
        return Lookup(self, asked, unique[order], counts, places.to(asked.device)[inverse], padding)

    def pull(self, ids: torch.Tensor, counts: list[int], rows: torch.Tensor) -> list[Request]:
        """Begin to read the rows of ``ids``, of which so many are in each part, into ``rows``."""
        return [
            self.session.pull(key, [some.view(-1)], ids=asked)
            for key, part_ids, part in zip(self._keys, ids.split(counts), rows.split(counts), strict=True)
            for asked, some in zip(part_ids.split(self.most), part.split(self.most), strict=True)
            if len(asked)
        ]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids`` as they are now, float32 [*ids.shape, dim], on their device; see ``look_up``."""
        lookup = self.look_up(ids)
        return lookup.wait().index_select(0, lookup.index).view(*ids.shape, self.spec.dim)

    def version(self) -> int:
        """How many steps and STOREs have changed the parts so far, added up."""
        requests = [self.session.pull(key, scan=0, most=1) for key in self._keys]
        return sum(request.wait().version for request in requests)

    def existing(self) -> torch.Tensor:
        """The ids of all rows that exist, ascending."""
        ids: torch.Tensor = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *self._scan()]).unique()
        return ids

    def _scan(self) -> Iterator[torch.Tensor]:
        for key in self._keys:
            start: int | None = 0
            while start is not None:
                answer = self.session.pull(key, scan=start, most=self.most).wait()
                yield unpack_rows(answer, self.spec.dim)[0].clone()
                following = answer.body.get("next")
                if following is not None and following <= start:
                    text = f"a scan goes on behind its place (expected more than {start}, got {following})"
                    raise ProtocolError(f"table {self.spec.name!r}: {text}")
                start = following

    # ---- writing -----------------------------------------------------------------------------------------------

    def push(
        self, ids: torch.Tensor, rows: torch.Tensor, *, ahead: int | None, abstains: bool, **of_rows: Any
    ) -> list[Push]:
        """Begin to step rows.

        Args:
            ids: int64 [n], ascending, each once.
            rows: float32 [n, dim], the gradients.
            ahead: 1 where they may be of rows that were read before the last step ended.
            abstains: whether a part without rows gets no contribution, because no worker waits for another's.
            **of_rows: "lr", "divisor" and "overflow" as in PUSH; None is left out.
        """
        return [
            self.session.push(key, None, (), ahead=ahead)
            if abstains and not count
            else self.session.push(key, payload, (), rows=count, ahead=ahead, **of_rows)
            for key, payload, count in self._payloads(ids, rows)
        ]

    def store(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows; see ``ServerEmbedding.load``."""
        flat, dim = self.flat(ids).cpu(), self.spec.dim
        if ids.dim() != 1 or rows.shape != (len(ids), dim) or rows.dtype is not torch.float32:
            raise ConfigurationError(
                f"table {self.spec.name!r}: expected ids [n] and rows of float32 [n, {dim}] (got {list(ids.shape)} and"
                f" {list(rows.shape)} of {rows.dtype})"
            )
        order = torch.argsort(flat)
        flat, rows = flat[order], rows.detach().cpu()[order]
        self._check_range(flat)
        if (twice := flat[1:][flat[1:] == flat[:-1]]).numel():
            raise ConfigurationError(f"table {self.spec.name!r}: expected each id once (got {int(twice[0])} twice)")
        if (bad := first_not_finite(rows)) >= 0:
            raise ConfigurationError(
                f"table {self.spec.name!r}: rows must be finite (expected finite elements, got {rows[bad].tolist()} for"
                f" row {int(flat[bad])}). Fix: leave that row out, and it begins anew; or torch.nan_to_num(rows)"
            )
        for some_ids, some_rows in zip(flat.split(self.most), rows.split(self.most), strict=True):
            parts = self._payloads(some_ids, some_rows)
            wait_all([self.session.store(key, payload, rows=count) for key, payload, count in parts if count])

    def _payloads(self, ids: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Each part's key, its payload as ``protocol.rows.pack_rows`` makes it, in one pass, and its number of rows."""
        order, counts = self._by_part(ids)
        for key, chosen, count in zip(self._keys, order.split(counts), counts, strict=True):
            size_bytes = count * (ID_BYTES + 4 * self.spec.dim)
            payload = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            head, tail = payload[: count * ID_BYTES], payload[count * ID_BYTES :]
            torch.index_select(ids, 0, chosen, out=head.view(torch.int64))
            torch.index_select(rows, 0, chosen, out=tail.view(torch.float32).view(count, self.spec.dim))
            yield key, payload, count

    def _by_part(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """The order by part, ascending in each, and how many are in each part."""
        parts = part_of(ids, len(self._keys), self.spec.seed)
        return torch.argsort(parts, stable=True), torch.bincount(parts, minlength=len(self._keys)).tolist()

    # ---- ids ---------------------------------------------------------------------------------------------------

    def flat(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` as int64, 1-D; ArgumentTypeError where they have another dtype."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            got = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ArgumentTypeError(f"table {self.spec.name!r}: expected ids as a tensor of int64 or int32 (got {got})")
        return ids.reshape(-1).long()

    def _check_range(self, ids: torch.Tensor) -> None:
        """Raise RowIdError unless these ids, ascending, are the table's."""
        for bad in [*ids[:1].tolist(), *ids[-1:].tolist()]:
            if not 0 <= bad < self.spec.rows:
                expected = f"expected ids from 0 to {self.spec.rows - 1}"
                raise RowIdError(f"table {self.spec.name!r} has no row {bad} ({expected})")


def tables_in(session: WorkerSession, layout: Sequence[ChunkSpec]) -> dict[str, TableParts]:
    """The tables of a job with this layout, by name."""
    parts: dict[str, list[ChunkSpec]] = {}
    for chunk in layout:
        if chunk.table is not None:
            parts.setdefault(chunk.table.name, []).append(chunk)
    return {name: TableParts(session, chunks) for name, chunks in parts.items()}


def read_tables(options: SessionOptions) -> dict[str, TableParts]:
    """Connect a reader to the tables of a model, by name; ``options`` are those of its own job."""
    found: dict[str, TableParts] = {}
    with ExitStack() as sessions:
        for suffix in JOB_SUFFIXES:
            session = WorkerSession(replace(options, job=options.job + suffix, rule=None, run="", rank=None))
            sessions.enter_context(session)
            try:
                found |= tables_in(session, session.layout())
            except ServerRefusedError as error:
                session.close()
                if error.code != ErrorCode.NOT_READY:
                    raise
        sessions.pop_all()
    return found
