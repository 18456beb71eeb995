"""A part of a table, whose rows workers pull and push by their ids; under "apply" and under "merge".

    rank 0   PUSH {3, 8} ─┐    apply: each steps its rows when it comes
    rank 1   PUSH {3, 9} ─┴──► merge: rows 3, 8 and 9 step once, row 3 with the sum; added by rank

A row exists from its first push or STORE; until then it is computed from the table's seed and name, and its id. When
answers may leave is decided as for other chunks. They bring nothing: a worker pulls the rows of its next batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.kernels.row_table import RowTable, first_not_finite, part_of, refusal, sum_by_row
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.snapshots.files import ROWS, ChunkState
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ID_BYTES, ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, ErrorCode, Message, MessageType
from psengine.protocol.rows import check_ids, pack_rows, unpack_rows

# Of rows that are saved, as ``RowTable.changed_since`` has them.
_TENSORS = ("ids", "values", "states", "stamps")


@dataclass(frozen=True)
class _Saved:
    """Where the rows of a version are.

    Attributes:
        generations: the first has all rows of its time, the others those that changed.
        version: of the chunk.
        changed: rows of the others, together.
    """

    generations: tuple[int, ...]
    version: int
    changed: int


class Rows(Apply):
    """Under "apply". The version counts pushes and STOREs; a row's stamp is the version that its last one made."""

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> None:
        assert spec.table is not None
        if values is not None:
            raise ProtocolError(f"{spec.describe()}: expected no initial values, got some; STORE writes rows")
        if why := refusal():
            raise ProtocolError(f"{spec.describe()}: {why}", ErrorCode.RULE_MISMATCH)
        super().__init__(spec, torch.empty(0), context)
        self.of = of = spec.table
        self.table = RowTable(of.dim, optimizer=of.optimizer, eps=of.eps, seed=of.seed, number=of.number, std=of.std)
        self.evicted_rows = 0
        self._saved: _Saved | None = None
        self._captured: _Saved | None = None  # what becomes it, if the generation was written

    # ---- what workers push -------------------------------------------------------------------------------------

    @override
    def received(self, message: Message, contribution: Contribution) -> Contribution:
        ids, rows = unpack_rows(message, self.of.dim)
        if message.place is not None:
            ids = ids.clone()  # its worker could change them after they were checked
        given = {name: message.body[name] for name in ("lr", "divisor", "overflow") if name in message.body}
        return contribution._replace(ids=ids, values=rows, new_rows=self._find_room(ids), **given)

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        if self._max_staleness is not None and contribution.ahead > self._max_staleness:
            raise ProtocolError(
                f"{self.spec.describe()}: rows that are prefetched are one step staler (expected max_staleness of"
                f" {contribution.ahead} or more, got {self._max_staleness})",
                ErrorCode.BAD_VALUE,
            )
        return super().push(contribution)

    def _waiting(self) -> Sequence[Contribution]:
        """Those that are to be used together with the next one."""
        return ()

    def _find_room(self, ids: torch.Tensor) -> int:
        """How many of these rows are new, ids ascending; ProtocolError where they cannot be kept. Nothing changes."""
        self._check_ids(ids, are_sorted=True)
        most, waiting, new_rows = self.of.part_rows, self._waiting(), self.table.count_absent(ids)
        together = [ids, *(one.ids for one in waiting if one.ids is not None)]
        if most and sum(map(len, together)) > most and (count := len(torch.cat(together).unique())) > most:
            raise ProtocolError(
                f"{self.spec.describe()}: a step has more rows than the part may keep (expected at most {most} of"
                f" max_rows={self.of.max_rows}, got {count}). Fix: a larger max_rows=, or smaller batches.",
                ErrorCode.MEMORY,
            )
        rows = self.table.rows + new_rows + sum(one.new_rows for one in waiting)
        more_bytes = self.table.bytes_with(min(rows, most) if most else rows) - self.table.size_bytes
        text = f"{new_rows} new rows of {self.spec.describe()}, which has {self.table.rows} rows in"
        bound = f"max_rows={most} of the part" if most else "no max_rows= to bound it"
        self.context.take_memory(more_bytes, f"{text} {self.table.size_bytes} bytes, and {bound}: growing it")
        return new_rows

    def _check_ids(self, ids: torch.Tensor, *, are_sorted: bool) -> None:
        check_ids(ids, self.of, are_sorted=are_sorted)
        if self.of.parts > 1 and bool((part_of(ids, self.of.parts, self.of.seed) != self.of.part).any()):
            raise ProtocolError(f"{self.spec.describe()}: ids are of another part", ErrorCode.BAD_VALUE)

    @override
    def _is_finite(self, contribution: Contribution) -> bool:
        assert contribution.values is not None
        assert contribution.ids is not None
        bad = first_not_finite(contribution.values)
        if bad >= 0:
            self.workers[contribution.rank].bad_row = int(contribution.ids[bad])
        return bad < 0

    @override
    def use(self, given: Sequence[Contribution]) -> None:
        """Gradients were divided by the number of workers then; others may have come to be merged."""
        pairs = []
        for one in given:
            assert one.ids is not None
            assert one.values is not None
            scale = one.divisor / len(given)
            pairs.append((one.ids, one.values if scale == 1.0 else one.values * scale))
        ids, gradients = sum_by_row(pairs)
        self._make_room(ids)
        self.table.step(ids, gradients, given[0].lr * self._learning_rate_scale(given), self.version + 1)
        self._count(given)

    def _make_room(self, ids: torch.Tensor) -> None:
        """Evict the rows that were pushed longest ago, where these are too many with them."""
        most = self.of.part_rows
        if not most or (too_many := self.table.rows + self.table.count_absent(ids) - most) <= 0:
            return
        self.evicted_rows += len(self.table.evict(too_many, ids))

    @override
    def _answer(self, rank: int, step: int, *, repeated: bool = False) -> Reply:
        known = self.workers[rank]
        body: dict[str, Any] = {} if known.refused is None else {"refused": known.refused}
        if known.refused == "non_finite":
            body["row"] = known.bad_row
        return Reply(MessageType.UPDATED, rank, step, self.version, None, body, self.spec.key)

    # ---- what anybody reads, and workers write -----------------------------------------------------------------

    def read_rows(self, message: Message) -> tuple[int, torch.Tensor, dict[str, Any]]:
        """(version, payload, body) of the rows that a PULL names by their ids, or scans."""
        if "scan" in message.body:
            most = min(
                message.body.get("most", MAX_PAYLOAD_BYTES), MAX_PAYLOAD_BYTES // (ID_BYTES + self.spec.size_bytes)
            )
            ids, rows, place = self.table.scan(message.body["scan"], most)
            following = {} if place is None else {"next": place}
            return self.version, pack_rows(ids, rows), {"rows": len(ids), **following}
        if message.dtype is not torch.int64 or message.numel * self.spec.size_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"{self.spec.describe()}: PULL has ids (expected at most {MAX_PAYLOAD_BYTES // self.spec.size_bytes} of"
                f" torch.int64, got {message.numel} of {message.dtype})"
            )
        ids = payload_tensor(message)
        self._check_ids(ids, are_sorted=False)
        values = torch.empty(len(ids), self.of.dim)
        self.table.gather(ids, values)
        return self.version, values.view(-1), {}

    def store_rows(self, message: Message) -> None:
        """STORE: overwrite rows; ProtocolError where there is no room."""
        ids, rows = unpack_rows(message, self.of.dim)
        self._find_room(ids)
        self._make_room(ids)
        self.version += 1
        self.table.store(ids, rows, self.version)

    @override
    def size_bytes(self) -> int:
        return super().size_bytes() + self.table.size_bytes

    # ---- what lasts --------------------------------------------------------------------------------------------

    @override
    def capture(self, generation: int = 0, kept: Collection[int] = ()) -> ChunkState:
        state = super().capture(generation, kept)
        del state.tensors["values"]
        earlier, tensors = self._changes(generation, kept)
        state.meta |= {"earlier": earlier, "rows_bytes": self.table.bytes_with(self.table.rows)}
        state.tensors |= {ROWS + name: tensor for name, tensor in zip(_TENSORS, tensors, strict=False)}
        return state

    def _changes(self, generation: int, kept: Collection[int]) -> tuple[tuple[int, ...], Sequence[torch.Tensor]]:
        """Generations whose rows are to be read first, and ``_TENSORS``, if something follows on them.

        All rows, and none before, once the changes would add up to half of them.
        """
        if self._captured is not None and self._captured.generations[-1] in kept:
            self._saved = self._captured
        saved = self._saved
        if generation and saved is not None and set(saved.generations) <= set(kept):
            changes = self.table.changed_since(saved.version)
            count = len(changes[0])
            if 2 * (saved.changed + count) <= self.table.rows:
                generations = (*saved.generations, generation) if count else saved.generations
                self._captured = _Saved(generations, self.version, saved.changed + count)
                return saved.generations, changes if count else ()
        if generation:
            self._captured = _Saved((generation,), self.version, 0)
        return (), self.table.changed_since(-1)

    @override
    def restore(self, state: ChunkState) -> None:
        super().restore(state)
        own = [ROWS] if ROWS + "ids" in state.tensors else []
        for place in [*(f"{generation}/{ROWS}" for generation in state.meta["earlier"]), *own]:
            ids, *rows = (state.tensors.pop(place + name) for name in _TENSORS)
            # A full table stays full, so the rows that went meanwhile are those that have no room now.
            self._make_room(ids.sort().values)
            self.table.restore(ids, *rows)
        self.evicted_rows = 0


class MergedRows(Merge, Rows):
    """Under "merge". Gradients that are not finite are used, as native DDP uses them, unless they were scaled."""

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        due = {pair for pairs in self.due.values() for pair in pairs}
        for one in self.here.values() if contribution.values is not None else ():
            # Those of a merge that is decided, which this is no part of, may be of another step of a schedule.
            if (one.rank, one.step) not in due and one.rank != contribution.rank and one.lr != contribution.lr:
                raise ProtocolError(
                    f"{self.spec.describe()}: workers that average step with one learning rate (expected {one.lr} as"
                    f" of worker {one.rank}, got {contribution.lr} of worker {contribution.rank}). Fix: set the table's"
                    " lr on all workers alike, for instance by a scheduler that all of them step.",
                    ErrorCode.BAD_VALUE,
                )
        return super().push(contribution)

    @override
    def use(self, given: Sequence[Contribution]) -> None:
        """All contributions count or none: with one that overflowed, native DDP's scaler leaves out the whole step.

        It is a merge all the same, and counts as one.
        """
        if not any(one.overflow for one in given):
            Rows.use(self, given)
            return
        self.version += 1
        for one in given:
            self.workers[one.rank].refused = "overflow"
            self.context.discarded(one, self.spec, "overflow")

    @override
    def _waiting(self) -> Sequence[Contribution]:
        return list(self.here.values())

    @override
    def _is_finite(self, contribution: Contribution) -> bool:
        return True
