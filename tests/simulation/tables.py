"""Jobs of tables, under both rules, and their oracle: which rows each part has, and their bits, state and stamps.

A chunk is a part of a table here, and its values all that the part has: its version, and for each id of the table
(is there, stamp, row, optimizer's state). So what must hold of weights holds of rows. Those of SGD are exact, because
gradients are small multiples of 1/8; what Adagrad made of them is compared with a tolerance, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.table_parts import Lookup, tables_in
from psengine.protocol.layout import ChunkKind, ChunkSpec, TableSpec
from psengine.protocol.messages import Message
from simulation.applying import ApplyingJob, Version
from simulation.merging import MergingJob
from simulation.reference import State, Values, numbers
from simulation.violation import require

DIM, LR, EPS = 2, 0.5, 0.125
# Of a worker in a step, at most; so a part takes those of all ranks, and of processes that are gone.
IDS = 2
STATE_NUMEL = {"sgd": 0, "adagrad": DIM, "rowwise_adagrad": 1}
OVERFLOWS = 0.05


class Rows(NamedTuple):
    """What a part has, by id; a contribution has no stamps and no state."""

    is_there: Values
    stamps: Values
    rows: Values
    state: Values


def rows_of(values: Values, ids: int) -> Rows:
    """Views of a chunk's values, or of a contribution's."""
    table = values[1:].reshape(ids, -1)
    return Rows(table[:, 0], table[:, 1], table[:, 2 : 2 + DIM], table[:, 2 + DIM :])


class OfTables(ApplyingJob):
    """What jobs of both rules have in common."""

    def __init__(self, world) -> None:
        super().__init__(world)
        scenario = self.scenario
        parts = scenario.servers * scenario.shards
        self._ids = parts * (3 * scenario.ranks + 3)
        # A part has room for what all workers may bring together, and not for all its ids.
        self._room = IDS * (scenario.ranks + 1)
        described = {
            "rows": self._ids,
            "dim": DIM,
            "parts": parts,
            "seed": scenario.seed,
            "std": 0.0,
            "optimizer": scenario.tables,
            "eps": EPS,
            "max_rows": parts * self._room if scenario.evicts else 0,
            "padding": -1,
        }
        tables = [
            TableSpec(name=f"t{number}", part=part, **described)
            for number in range(1 + (scenario.chunks > 2 and parts < 3))
            for part in range(parts)
        ]
        self.specs = [
            ChunkSpec(key, ChunkKind.TABLE, torch.float32, DIM, (), table) for key, table in enumerate(tables)
        ]
        self.chunks = [type(self.chunks[0])() for _ in self.specs]
        self._tolerance = 0.0 if scenario.tables == "sgd" else 1e-5
        self._is_whole = False  # answers bring nothing
        self.rule["tables"] = True

    def _initial(self, key: int) -> Values:
        return np.zeros(1 + self._ids * (2 + DIM + STATE_NUMEL[self.scenario.tables]))

    # ---- a worker ----------------------------------------------------------------------------------------------

    def program(self, process) -> Flow[None]:
        """Read rows, and step them; perhaps those of the next step are asked for before this one is answered."""
        rank, steps = process.rank, self.scenario.steps_of(process.rank)
        yield from process.enter(self.specs, lambda spec: None)
        process.has_state = True
        tables = tables_in(process.session, self.specs)
        prefetches = self.scenario.rule == "apply" and self.scenario.max_staleness != 0 and self._rng.random() < 0.5
        lookups: list[Lookup] = []
        while self.steps_done[rank] < steps:
            lookups = lookups or self._look_up(process, tables.values())
            yield [request for lookup in lookups for request in lookup.requests]
            read, lookups = lookups, []
            for lookup in read:
                self._check_read(process, lookup)
            yield self.think_s()
            if prefetches and self.steps_done[rank] + 1 < steps:
                lookups = self._look_up(process, tables.values(), ahead=1)
            pushes = [push for lookup in read for push in self._push_rows(process, lookup, prefetches)]
            process.session.end_step()
            yield pushes
            for push in pushes:
                self._check_answer(process, push, torch.empty(0))
            self.steps_done[rank] += 1

    def _draw(self, process, *names: Any, ahead: int = 0) -> Values:
        step = self.steps_done[process.rank] + ahead
        return numbers(IDS * DIM + 2, self.scenario.seed, process.number, step, *names) + 0.5

    def _look_up(self, process, tables: Any, ahead: int = 0) -> list[Lookup]:
        lookups = []
        for parts in tables:
            draw = self._draw(process, parts.spec.name, ahead=ahead)
            # Without rows, too: then it takes part all the same.
            ids = [int(one * self._ids) for one in draw[: int(draw[-1] * (IDS + 1))]]
            lookups.append(parts.look_up(torch.tensor(ids, dtype=torch.int64)).begin())
        return lookups

    def _check_read(self, process, lookup: Lookup) -> None:
        """Rows that were read are those of a version that the part had."""
        requests, counts = lookup.requests, [count for count in lookup.counts if count]
        rows = lookup.wait().split(counts)
        for request, ids, some in zip(requests, lookup.ids.split(counts), rows, strict=True):
            answer, key = request.answer, request.message.key
            assert answer is not None
            chunk = self.chunks[key]
            if answer.epoch != chunk.epoch:
                continue  # of a life of the server that has ended
            process.check_term(answer)
            version = chunk.versions.get(answer.version)
            known = None if version is None else rows_of(version.values, self._ids).rows[ids.numpy()]
            where = "worker {} read other rows than version {} of chunk {} has: {}"
            is_there = known is not None and np.array_equal(known, some.numpy())
            require(is_there, where, process.rank, answer.version, key, ids)

    def read(self, process, key: int, values: torch.Tensor, answer: Message) -> None:
        """A reader got all rows of a part."""
        process.check_term(answer)
        chunk, count = self.chunks[key], answer.body["rows"]
        if answer.epoch != chunk.epoch:
            return
        version, data = chunk.versions.get(answer.version), values.numpy().tobytes()
        ids, rows = np.frombuffer(data, np.int64, count), np.frombuffer(data, np.float32, offset=8 * count)
        known = None if version is None else rows_of(version.values, self._ids)
        is_whole = known is not None and set(ids) == set(np.flatnonzero(known.is_there))
        is_whole = is_whole and np.array_equal(known.rows[ids].ravel(), rows)
        require(is_whole, "a reader got other rows than version {} of chunk {} has", answer.version, key)

    def _push_rows(self, process, lookup: Lookup, prefetches: bool) -> Sequence[Any]:
        scenario, parts = self.scenario, lookup.parts
        order = lookup.ids.argsort()
        draw = self._draw(process, parts.spec.name, "gradients")
        gradients = np.round(draw[: len(order) * DIM] * 16 - 8).reshape(-1, DIM) / 8
        merges = scenario.rule == "merge"
        of_step = self._draw(process)
        overflow = merges and bool(of_step[0] < OVERFLOWS)
        return parts.push(
            lookup.ids[order][: 0 if overflow else None],
            torch.from_numpy(gradients).float()[: 0 if overflow else None],
            lr=LR,
            divisor=(1, 2, 4)[int(3 * of_step[1])] if merges else 1,
            ahead=1 if prefetches else None,
            abstains=not merges,
            overflow=overflow or None,
        )

    # ---- the shards --------------------------------------------------------------------------------------------

    def _decoded(self, push: Message) -> Values:
        """The contribution, as a part's values."""
        count, data = push.body["rows"], np.asarray(push.payload, dtype=np.uint8).tobytes()
        ids = np.frombuffer(data, np.int64, count)
        values = np.zeros(1 + self._ids * (2 + DIM))
        given = rows_of(values, self._ids)
        given.is_there[ids] = 1
        given.rows[ids] = np.frombuffer(data, np.float32, offset=8 * count).reshape(count, DIM)
        return values

    def _step(self, before: Version, gradient: Values, staleness: int, backup: Values | None) -> State:
        return self._step_rows(before.values, rows_of(gradient, self._ids))

    def _step_rows(self, before: Values, given: Rows) -> State:
        """The part after a step, with room for its rows."""
        values = before.copy()
        values[0] += 1
        part, touched = rows_of(values, self._ids), given.is_there > 0
        if self.scenario.evicts:
            oldest = sorted(np.flatnonzero((part.is_there > 0) & ~touched), key=lambda one: (part.stamps[one], one))
            too_many = int(((part.is_there > 0) | touched).sum()) - self._room
            for array in part:
                array[oldest[: max(0, too_many)]] = 0
        part.is_there[touched], part.stamps[touched] = 1, values[0]
        gradients, optimizer = given.rows[touched].astype(np.float32), self.scenario.tables
        change = gradients.astype(np.float64)
        if optimizer != "sgd":  # in float64
            squares = change**2 if optimizer == "adagrad" else (change**2).mean(axis=1, keepdims=True)
            part.state[touched] += squares
            change = change / (np.sqrt(part.state[touched]) + EPS)
        part.rows[touched] = part.rows[touched].astype(np.float32) - (LR * change).astype(np.float32)
        return State(values)


class ApplyingTablesJob(OfTables):
    """Each push is a step of its own."""


class MergingTablesJob(OfTables, MergingJob):
    """A step is that of all workers, added in the order of ranks."""

    def __init__(self, world) -> None:
        super().__init__(world)
        self._divisors: dict[tuple[int, int], int] = {}
        self._overflows: set[tuple[int, int]] = set()

    def _note_push(self, process, push: Message) -> None:
        super()._note_push(process, push)
        update = process.number, push.sequence
        if push.payload is not None:
            self._divisors[update] = push.body["divisor"]
        if push.body.get("overflow"):
            self._overflows.add(update)

    def _merged(self, before: Values, updates: Sequence[tuple[int, int]], pushed: Sequence[Values]) -> Values:
        if self._overflows.intersection(updates):
            return np.concatenate([before[:1] + 1, before[1:]])
        total = np.zeros_like(pushed[0])
        for update, values in zip(updates, pushed, strict=True):
            scale = np.float32(self._divisors[update] / len(updates))
            one, so_far = rows_of(values, self._ids), rows_of(total, self._ids)
            so_far.is_there[:] = np.maximum(so_far.is_there, one.is_there)
            so_far.rows[:] = so_far.rows.astype(np.float32) + one.rows.astype(np.float32) * scale
        return self._step_rows(before, rows_of(total, self._ids)).values
