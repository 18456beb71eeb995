"""Where a job and its workers stand at the coordinator: two tables, which ``docs/design.md`` shows too. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar


class JobState(Enum):
    """The states of a job."""

    NEW = "new"  # nobody has been asked to bring values, or the last run is over
    REGISTERING = "registering"  # one worker brings them
    OPEN = "open"  # they are here
    RESUMING = "resuming"  # it was under way: for a lease the members of its last view may come back


class WorkerState(Enum):
    """The states of a worker."""

    WAITING = "waiting"  # it said HELLO
    JOINING = "joining"  # it asked for the state of another
    MEMBER = "member"  # it is in the view, or in the one that comes next
    GONE = "gone"  # left, evicted, or replaced; its process may come back


# begun: a worker is told to bring values. registered: it has. interrupted: the coordinator restarted, or all who hold
# the weights are out. resumed: who is back goes on. over: the last worker has left, or a server lost weights.
JOB: dict[JobState, dict[str, JobState]] = {
    JobState.NEW: {"begun": JobState.REGISTERING, "interrupted": JobState.RESUMING},
    JobState.REGISTERING: {
        "begun": JobState.REGISTERING,
        "registered": JobState.OPEN,
        "interrupted": JobState.RESUMING,
    },
    JobState.OPEN: {"interrupted": JobState.RESUMING, "over": JobState.NEW},
    JobState.RESUMING: {"begun": JobState.REGISTERING, "resumed": JobState.OPEN, "over": JobState.NEW},
}
# came: it says HELLO. asked: it asks for state. admitted: the next view has it, or it is expected back in the last one.
# went: it left, was evicted, or was replaced. anew: its job begins anew.
WORKER: dict[WorkerState, dict[str, WorkerState]] = {
    WorkerState.WAITING: {
        "asked": WorkerState.JOINING,
        "admitted": WorkerState.MEMBER,
        "went": WorkerState.GONE,
    },
    WorkerState.JOINING: {
        "asked": WorkerState.JOINING,
        "admitted": WorkerState.MEMBER,
        "went": WorkerState.GONE,
        "anew": WorkerState.WAITING,
    },
    WorkerState.MEMBER: {"asked": WorkerState.JOINING, "went": WorkerState.GONE},  # asked: it lacks a piece
    WorkerState.GONE: {"came": WorkerState.WAITING, "admitted": WorkerState.MEMBER},
}
_State = TypeVar("_State", JobState, WorkerState)


def after(table: Mapping[_State, Mapping[str, _State]], state: _State, event: str) -> _State:
    """The state that ``event`` leads to."""
    assert event in table[state], f"{event} cannot happen in {state}"
    return table[state][event]


def drawn(table: Mapping[Any, Mapping[str, Enum]]) -> str:
    """The table as Markdown: a row for each state, a column for each event; empty cells cannot happen."""
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    lines = [["", *events], ["---"] * (len(events) + 1)]
    for state, row in table.items():
        lines.append([f"**{state.value}**", *(row[event].value if event in row else "" for event in events)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
