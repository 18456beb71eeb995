"""The life of a job, and of its workers, at one shard: named phases, and the table of what leads from one to the next.

docs/design.md draws them. Where the servers hold the weights, TOLD and ORPHANED never happen to a job. A worker that
nobody has heard of is ABSENT; one that was evicted comes back in the phase that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class _State(Enum):
    """Every message looks members up in the tables; ``Enum`` hashes their names by a function in Python."""

    __hash__ = object.__hash__


class JobPhase(_State):
    """The phases of a job at one shard."""

    NEW = "new"  # nobody has brought values yet
    REBUILDING = "rebuilding"  # it ran before this server did: its workers are to bring the values again
    ORPHANED = "orphaned"  # its workers are gone, and the weights with them: the next worker brings values
    OPEN = "open"  # its values are here, and no exchange has ended
    RUNNING = "running"  # an exchange has ended
    RESUMING = "resuming"  # it ran before this server did: for a lease it awaits all ranks that its workers name
    RESTORED_OPEN = "restored open"  # as OPEN, from a snapshot, and no worker has said how far it was
    RESTORED_RUNNING = "restored running"  # as RUNNING, from a snapshot, and no worker has said how far it was

    @property
    def is_sealed(self) -> bool:
        """Whether the job's values are here, all of them."""
        return self not in _UNSEALED

    @property
    def has_started(self) -> bool:
        """Whether an exchange has ended, here or before this server started."""
        return self in _STARTED


_UNSEALED = frozenset({JobPhase.NEW, JobPhase.REBUILDING, JobPhase.ORPHANED})
_STARTED = frozenset({JobPhase.REBUILDING, JobPhase.RUNNING, JobPhase.RESUMING, JobPhase.RESTORED_RUNNING})


class JobEvent(_State):
    """Events of a job."""

    SEALED = "sealed"  # all its chunks are here
    STARTED = "started"  # it is learnt that an exchange has ended elsewhere
    ENDED = "ended"  # an exchange has ended here
    TOLD = "told"  # a worker, with weights of its own, names others: the job is under way
    ORPHANED = "orphaned"  # a worker without weights comes, and nobody who has any is left
    REOPENED = "reopened"  # a new process of the first worker gives values once more, and no other has been let in


JOB: dict[JobPhase, dict[JobEvent, JobPhase]] = {
    JobPhase.NEW: {JobEvent.SEALED: JobPhase.OPEN, JobEvent.TOLD: JobPhase.REBUILDING},
    JobPhase.REBUILDING: {
        JobEvent.SEALED: JobPhase.RESUMING,
        JobEvent.ENDED: JobPhase.REBUILDING,  # of a chunk that is here, before all are
    },
    JobPhase.ORPHANED: {JobEvent.SEALED: JobPhase.OPEN},
    JobPhase.OPEN: {
        JobEvent.STARTED: JobPhase.RUNNING,
        JobEvent.ENDED: JobPhase.RUNNING,
        JobEvent.REOPENED: JobPhase.NEW,
    },
    JobPhase.RUNNING: {JobEvent.ENDED: JobPhase.RUNNING, JobEvent.ORPHANED: JobPhase.ORPHANED},
    JobPhase.RESUMING: {JobEvent.ENDED: JobPhase.RUNNING, JobEvent.ORPHANED: JobPhase.ORPHANED},
    JobPhase.RESTORED_OPEN: {
        JobEvent.STARTED: JobPhase.RESTORED_RUNNING,
        JobEvent.ENDED: JobPhase.RESTORED_RUNNING,
        JobEvent.TOLD: JobPhase.RESUMING,
        JobEvent.REOPENED: JobPhase.NEW,
    },
    JobPhase.RESTORED_RUNNING: {
        JobEvent.ENDED: JobPhase.RESTORED_RUNNING,
        JobEvent.TOLD: JobPhase.RESUMING,
        JobEvent.ORPHANED: JobPhase.ORPHANED,
    },
}


class MemberPhase(_State):
    """The phases of a worker of a job at one shard."""

    ABSENT = "absent"  # not here, and it has never been live
    EXPECTED = "expected"  # others name it: exchanges wait for it, and it has said nothing
    NEWCOMER = "newcomer"  # here, and has never been live: it has no state
    LIVE = "live"  # exchanges wait for it
    BEHIND = "behind"  # has been live, and may lack exchanges
    SURVIVOR = "survivor"  # has been live in a former life of the job, or of this server

    @property
    def is_live(self) -> bool:
        """Whether exchanges wait for it."""
        return self in (MemberPhase.LIVE, MemberPhase.EXPECTED)

    @property
    def was_live(self) -> bool:
        """Whether it has been live: what it has of the job's state is worth something."""
        return self not in (MemberPhase.ABSENT, MemberPhase.NEWCOMER)


class MemberEvent(_State):
    """Events of a worker."""

    CAME = "came"  # a process says HELLO that has never been live
    KNEW_OTHERS = "knew others"  # the same of one that says it was live, of which nobody here knows
    TOLD = "told"  # another worker names it
    HEARD = "heard"  # it says HELLO, or says it again
    ADMITTED = "admitted"  # exchanges wait for it from here on
    DEMOTED = "demoted"  # they do no longer: it has asked for state
    LEFT = "left"  # it is gone, by itself or evicted
    ORPHANED = "orphaned"  # its job begins anew


def _any_time(phase: MemberPhase) -> dict[MemberEvent, MemberPhase]:
    """A worker says HELLO again, is replaced by a new process, or goes, in any phase."""
    return {
        MemberEvent.CAME: MemberPhase.NEWCOMER,
        MemberEvent.KNEW_OTHERS: MemberPhase.NEWCOMER,  # its rank went to a process that was live after it
        MemberEvent.HEARD: phase,
        MemberEvent.LEFT: phase,
    }


MEMBER: dict[MemberPhase, dict[MemberEvent, MemberPhase]] = {
    MemberPhase.ABSENT: {
        MemberEvent.CAME: MemberPhase.NEWCOMER,
        MemberEvent.KNEW_OTHERS: MemberPhase.SURVIVOR,
        MemberEvent.TOLD: MemberPhase.EXPECTED,
    },
    MemberPhase.EXPECTED: {
        MemberEvent.CAME: MemberPhase.NEWCOMER,
        MemberEvent.HEARD: MemberPhase.LIVE,
        MemberEvent.LEFT: MemberPhase.ABSENT,
    },
    MemberPhase.NEWCOMER: {
        **_any_time(MemberPhase.NEWCOMER),
        MemberEvent.KNEW_OTHERS: MemberPhase.SURVIVOR,
        MemberEvent.TOLD: MemberPhase.LIVE,  # a snapshot has it as about to enter: it has entered since
        MemberEvent.ADMITTED: MemberPhase.LIVE,
        MemberEvent.ORPHANED: MemberPhase.NEWCOMER,
    },
    MemberPhase.LIVE: {
        **_any_time(MemberPhase.LIVE),
        MemberEvent.ADMITTED: MemberPhase.LIVE,
        MemberEvent.DEMOTED: MemberPhase.BEHIND,
        MemberEvent.LEFT: MemberPhase.BEHIND,
    },
    MemberPhase.BEHIND: {
        **_any_time(MemberPhase.BEHIND),
        MemberEvent.TOLD: MemberPhase.LIVE,
        MemberEvent.ADMITTED: MemberPhase.LIVE,
        MemberEvent.ORPHANED: MemberPhase.SURVIVOR,
    },
    MemberPhase.SURVIVOR: {
        **_any_time(MemberPhase.SURVIVOR),
        MemberEvent.ADMITTED: MemberPhase.LIVE,
        MemberEvent.ORPHANED: MemberPhase.SURVIVOR,
    },
}

_Phase = TypeVar("_Phase", JobPhase, MemberPhase)
_Event = TypeVar("_Event", JobEvent, MemberEvent)


def after(table: Mapping[_Phase, Mapping[_Event, _Phase]], phase: _Phase, event: _Event) -> _Phase:
    """The phase that ``event`` leads to."""
    assert event in table[phase], f"{event} cannot happen in {phase}"
    return table[phase][event]
