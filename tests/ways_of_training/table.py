"""The table: which row is expected to do what in which column."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ways_of_training.run import Run

Program = Callable[[Run], None]

# Columns by their oracle. Several workers are compared with native DDP, one asynchronous one with plain training.
# The columns of sync have wrapper options, which native DDP has too where it is their oracle.
SYNC: dict[str, dict[str, Any]] = {
    "c10d": {},
    "shared_memory": {},
    "views": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "default_buckets": {"bucket_cap_mb": None},
}
WITH_TWO_WORKERS = (*SYNC, "sync_server")
# gloo's ring adds in an order that depends on an element's place in its bucket, and a third is no power of two.
WITH_THREE_WORKERS = ("three_workers",)
WITH_ONE_WORKER = ("one_worker",)
COLUMNS = (*WITH_TWO_WORKERS, *WITH_THREE_WORKERS, *WITH_ONE_WORKER)
TITLES = {
    "native": "native DDP",
    "plain": "plain training",
    "c10d": "sync over c10d",
    "shared_memory": "sync in shared memory",
    "views": "sync, bucket views",
    "batched": "sync, batched copy",
    "default_buckets": "sync, default buckets",
    "three_workers": "sync, three workers",
    "sync_server": "sync-server",
    "one_worker": "async, one worker",
}


def oracle_of(column: str) -> str:
    return "plain" if column in WITH_ONE_WORKER else "native"


@dataclass(frozen=True)
class Expected:
    """What a row does in a column; without any argument: every bit is the oracle's.

    Attributes:
        refused: a text that the error must contain, on every rank.
        apart_from: the beginning of names that are not compared.
        left_out: the row is not run.
        reason: of any of these.
    """

    refused: str | None = None
    apart_from: tuple[str, ...] = ()
    left_out: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if self.refused is not None:
            return f"refused: {self.refused}" + (f" ({self.reason})" if self.reason else "")
        if self.left_out:
            return f"left out: {self.reason}"
        if self.apart_from:
            return f"same bits, apart from {' and '.join(self.apart_from)}: {self.reason}"
        return "same bits"


SAME_BITS = Expected()


def refused(text: str, reason: str = "") -> Expected:
    """An error that contains ``text`` on every rank."""
    return Expected(refused=text, reason=reason)


def apart_from(*names: str, reason: str) -> Expected:
    """Same bits, but for what has a name that begins so."""
    return Expected(apart_from=names, reason=reason)


def left_out(reason: str) -> Expected:
    """Not run, where there is nothing to compare."""
    return Expected(left_out=True, reason=reason)


@dataclass(frozen=True)
class Row:
    """One way to train."""

    program: Program
    expected: dict[str, Expected]
    is_slow: bool
    oldest_torch: tuple[int, int]

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def subject(self) -> str:
        return self.program.__module__.rpartition(".")[2]

    @property
    def title(self) -> str:
        return (inspect.getdoc(self.program) or self.name.replace("_", " ")).splitlines()[0]

    def expects(self, column: str) -> Expected:
        return self.expected.get(column, SAME_BITS)


ROWS: dict[str, Row] = {}


def row(
    program: Program | None = None, *, slow: bool = False, since_torch: tuple[int, int] = (2, 11), **expected: Expected
) -> Any:
    """Enter a program in the table.

    Args:
        slow: run by ``make test-slow`` only.
        since_torch: the oldest version whose native DDP can train so.
        expected: by column, where it is not "same bits"; ``sync`` stands for its columns, ``everywhere`` for all;
            ``native`` and ``plain`` may refuse too.
    """

    def enter(program: Program) -> Program:
        columns = dict(expected)
        if "everywhere" in columns:
            columns = {**dict.fromkeys(COLUMNS, columns.pop("everywhere")), **columns}
        if "sync" in columns:
            columns = {**dict.fromkeys((*SYNC, *WITH_THREE_WORKERS), columns.pop("sync")), **columns}
        unknown = columns.keys() - TITLES.keys()
        assert not unknown, f"{program.__name__}: no column is called {unknown}"
        assert program.__name__ not in ROWS, f"two rows are called {program.__name__}"
        ROWS[program.__name__] = Row(program, columns, slow, since_torch)
        return program

    return enter if program is None else enter(program)


def _describe(entry: Row, column: str) -> str:
    expected = entry.expects(column)
    if expected == SAME_BITS and entry.expects(oracle_of(column)).refused is not None:
        return "trains"
    return str(expected)


def as_markdown(rows: dict[str, Row]) -> str:
    """The table, and below it the number of its rows."""
    columns = COLUMNS
    lines = [
        "| subject | row | " + " | ".join(TITLES[column] for column in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for entry in rows.values():
        notes = " (slow)" if entry.is_slow else ""
        oracles = [f"; {TITLES[o]}: {entry.expects(o)}" for o in ("native", "plain") if o in entry.expected]
        cells = [_describe(entry, column).replace("|", "\\|") for column in columns]
        lines.append(f"| {entry.subject} | {entry.title}{notes}{''.join(oracles)} | " + " | ".join(cells) + " |")
    same = sum(entry.expects(column) == SAME_BITS for entry in rows.values() for column in columns)
    lines += ["", f"{len(rows)} rows; {same} of {len(rows) * len(columns)} cells have the same bits."]
    return "\n".join(lines)
