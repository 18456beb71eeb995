"""The table: which row is expected to do what in which column."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ways_of_training.run import Run

Program = Callable[[Run], None]

# Columns by their oracle. Several workers are compared with native DDP, one asynchronous one with plain training.
# The columns of sync have wrapper options, which native DDP has too where it is their oracle; "backend" is native DDP.
SYNC: dict[str, dict[str, Any]] = {
    "c10d": {},
    "shared_memory": {},
    "views": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "default_buckets": {"bucket_cap_mb": None},
    "backend": {},
}
# gloo's ring adds in an order that depends on an element's place in its bucket, and a third is no power of two: hence
# three workers.
COLUMNS = (*SYNC, "sync_server", "three_workers", "one_worker")


def oracle_of(column: str) -> str:
    return "plain" if column == "one_worker" else "native"


def workers_of(column: str) -> int:
    return {"one_worker": 1, "three_workers": 3}.get(column, 2)


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


SAME = Expected()


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

    def expects(self, column: str) -> Expected:
        return self.expected.get(column, SAME)


ROWS: dict[str, Row] = {}


def row(
    program: Program | None = None, *, slow: bool = False, since_torch: tuple[int, int] = (2, 11), **expected: Expected
) -> Any:
    """Enter a program in the table.

    Args:
        slow: run by ``make test-slow`` only.
        since_torch: the oldest version whose native DDP can train so.
        expected: by column, where it is not "same bits"; ``everywhere`` stands for all; ``native`` and ``plain`` may
            refuse too.
    """

    def enter(program: Program) -> Program:
        columns = dict(expected)
        if "everywhere" in columns:
            columns = {**dict.fromkeys(COLUMNS, columns.pop("everywhere")), **columns}
        unknown = columns.keys() - {*COLUMNS, "native", "plain"}
        assert not unknown, f"{program.__name__}: no column is called {unknown}"
        assert program.__name__ not in ROWS, f"two rows are called {program.__name__}"
        ROWS[program.__name__] = Row(program, columns, slow, since_torch)
        return program

    return enter if program is None else enter(program)
