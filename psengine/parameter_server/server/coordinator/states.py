"""Where a job and its workers stand: two tables, also in ``docs/design.md``; what outlasts a coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from psengine.protocol.views import Release, View


class JobState(Enum):
    """The states of a job."""

    NEW = "new"  # it has no values: a worker that is here brings them
    OPEN = "open"  # they are here
    RESUMING = "resuming"  # it was under way: for a lease the members of its last view may come back


class WorkerState(Enum):
    """The states of a worker."""

    WAITING = "waiting"  # it said HELLO
    JOINING = "joining"  # it asked for the state of another
    MEMBER = "member"  # it is in the view, or in the one that comes next
    GONE = "gone"  # left, evicted, or replaced; its process may come back


# begun: a worker is told to bring values. registered: it has. interrupted: the coordinator restarted, or a worker comes
# with a view that it does not know. resumed: who is back goes on. over: the last worker has left, all who hold the
# weights are out, or a server lost weights.
JOB: dict[JobState, dict[str, JobState]] = {
    JobState.NEW: {"begun": JobState.NEW, "interrupted": JobState.RESUMING, "registered": JobState.OPEN},
    JobState.OPEN: {"interrupted": JobState.RESUMING, "over": JobState.NEW},
    JobState.RESUMING: {"over": JobState.NEW, "resumed": JobState.OPEN},
}
# came: it says HELLO. asked: it asks for state. admitted: the next view has it, or it is expected back in the last one.
# went: it left, was evicted, or was replaced. anew: its job begins anew.
WORKER: dict[WorkerState, dict[str, WorkerState]] = {
    WorkerState.WAITING: {"asked": WorkerState.JOINING, "admitted": WorkerState.MEMBER, "went": WorkerState.GONE},
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


@dataclass(eq=False)
class JobMemory:
    """What a restarted coordinator has to know of its job; JSON-able.

    Attributes:
        state: where the job stands.
        view: the newest that was published, by this coordinator or a former one.
        last_number: the highest of a view that is known.
        came: ranks that were members in this life of the job, and whether they left.
        refused: runs that are over, and the keys of lives whose workers held the weights: code and text for their
            processes.
        runs: those of its members since the job was registered, "" where one has no name.
        is_trained: some of them may have changed its values.
        evicted: how often a member was put out.
        key, registration: what views are signed with, and which attempt to register chunks they are of.
        epochs, chunks: of each shard.
        servers: their names, in order.
        releases: those that some shard may not have, in order.
        decided: the number of the last merge.
        merged: by rank, the last step that a merge has, or that needs none.
    """

    name: str
    state: JobState = JobState.NEW
    rule: dict[str, Any] | None = None
    view: View | None = None
    last_number: int = 0
    world_size: int = 1
    came: dict[int, bool] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    is_trained: bool = False
    evicted: int = 0
    key: bytes = b""
    registration: int = 0
    epochs: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    servers: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    decided: int = 0
    merged: dict[int, int] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the job has a view. One that newcomers have begun, and whose others are to come, may be an older."""
        return self.state is JobState.RESUMING or (self.state is JobState.OPEN and self.view is not None)

    @property
    def missing(self) -> list[int]:
        """Ranks that the job is to have and that never came."""
        missing = [rank for rank in range(self.world_size) if rank not in self.came]
        return missing[: max(0, self.world_size - len(self.came))]
