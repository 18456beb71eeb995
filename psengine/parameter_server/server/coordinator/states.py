"""Where a job and its workers stand at the coordinator: two tables, which ``docs/design.md`` shows too. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar


class JobState(Enum):
    """The states of a job."""

    NEW = "new"  # nobody has been asked to bring values
    REGISTERING = "registering"  # one worker brings them
    OPEN = "open"  # they are here
    RESUMING = "resuming"  # it was under way: for a lease the members of its last view may come back
    ENDED = "ended"  # the last worker of an averaging job has left
    LOST = "lost"  # a server lost weights that it alone held


class JobEvent(Enum):
    """Events of a job."""

    BEGUN = "begun"  # a worker is told to bring values
    REGISTERED = "registered"  # it has
    TOLD = "told"  # a worker comes with a view that is not known here
    RESTARTED = "restarted"  # the coordinator was, and has members on its disk
    ABANDONED = "abandoned"  # the workers held the weights, and all are out
    RESUMED = "resumed"  # who is back goes on
    ENDED = "ended"  # the last worker has left
    LOST = "lost"  # a server lost weights
    ANEW = "anew"  # another run begins


class WorkerState(Enum):
    """The states of a worker."""

    WAITING = "waiting"  # it said HELLO
    JOINING = "joining"  # it asked for the state of another
    MEMBER = "member"  # it is in the view, or in the one that comes next
    GONE = "gone"  # left, evicted, or replaced; its process may come back


class WorkerEvent(Enum):
    """Events of a worker."""

    CAME = "came"  # it says HELLO
    ASKED = "asked"  # it asks for state
    ADMITTED = "admitted"  # it takes part from here on
    EXPECTED = "expected"  # the view of a job that resumes names it
    WENT = "went"  # it left, was evicted, or was replaced
    ANEW = "anew"  # its job begins anew


JOB: dict[JobState, dict[JobEvent, JobState]] = {
    JobState.NEW: {JobEvent.BEGUN: JobState.REGISTERING, JobEvent.TOLD: JobState.RESUMING},
    JobState.REGISTERING: {
        JobEvent.BEGUN: JobState.REGISTERING,
        JobEvent.REGISTERED: JobState.OPEN,
        JobEvent.TOLD: JobState.RESUMING,
    },
    JobState.OPEN: {
        JobEvent.TOLD: JobState.RESUMING,
        JobEvent.RESTARTED: JobState.RESUMING,
        JobEvent.ABANDONED: JobState.RESUMING,
        JobEvent.ENDED: JobState.ENDED,
        JobEvent.LOST: JobState.LOST,
    },
    JobState.RESUMING: {
        JobEvent.RESUMED: JobState.OPEN,
        JobEvent.BEGUN: JobState.REGISTERING,
        JobEvent.LOST: JobState.LOST,
    },
    JobState.ENDED: {JobEvent.ANEW: JobState.NEW},
    JobState.LOST: {JobEvent.ANEW: JobState.NEW},
}

WORKER: dict[WorkerState, dict[WorkerEvent, WorkerState]] = {
    WorkerState.WAITING: {
        WorkerEvent.CAME: WorkerState.WAITING,
        WorkerEvent.ASKED: WorkerState.JOINING,
        WorkerEvent.ADMITTED: WorkerState.MEMBER,
        WorkerEvent.EXPECTED: WorkerState.MEMBER,
        WorkerEvent.WENT: WorkerState.GONE,
        WorkerEvent.ANEW: WorkerState.WAITING,
    },
    WorkerState.JOINING: {
        WorkerEvent.CAME: WorkerState.JOINING,
        WorkerEvent.ASKED: WorkerState.JOINING,
        WorkerEvent.ADMITTED: WorkerState.MEMBER,
        WorkerEvent.EXPECTED: WorkerState.MEMBER,
        WorkerEvent.WENT: WorkerState.GONE,
        WorkerEvent.ANEW: WorkerState.WAITING,
    },
    WorkerState.MEMBER: {
        WorkerEvent.CAME: WorkerState.MEMBER,
        WorkerEvent.ASKED: WorkerState.JOINING,  # it could not read all that was deposited for it
        WorkerEvent.WENT: WorkerState.GONE,
    },
    WorkerState.GONE: {WorkerEvent.CAME: WorkerState.WAITING, WorkerEvent.EXPECTED: WorkerState.MEMBER},
}

_State = TypeVar("_State", JobState, WorkerState)
_Event = TypeVar("_Event", JobEvent, WorkerEvent)


def after(table: Mapping[_State, Mapping[_Event, _State]], state: _State, event: _Event) -> _State:
    """The state that ``event`` leads to."""
    assert event in table[state], f"{event} cannot happen in {state}"
    return table[state][event]


def drawn(table: Mapping[Any, Mapping[Any, Enum]]) -> str:
    """The table as Markdown: a row for each state, a column for each event; empty cells cannot happen."""
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    lines = [["", *(event.value for event in events)], ["---"] * (len(events) + 1)]
    for state, row in table.items():
        lines.append([f"**{state.value}**", *(row[event].value if event in row else "" for event in events)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
