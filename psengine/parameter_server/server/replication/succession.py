"""Which of two servers leads: what one of them may do, given what the elector has recorded. Pure; told the time.

::

                      nothing is recorded, or the leader's lease
                      has ended and this server may go on from it
         looking ──────────────────────────────────────────────┐
      knows no leader                                          ▼        another leader, or term, is recorded
            │ ▲        the leader is lost, its lease has ended     leading ─────────────────────────────────► fenced
            ▼ │        and this server is recorded beside it     ▲                          its process begins anew
        following ─────────────────────────────────────────────┘

    =========  ===================================================  ==================================================
    step       in this order                                        so that
    =========  ===================================================  ==================================================
    add        answers wait for the follower, which has all before  whoever is recorded has all that is acknowledged
               ► it is recorded
    drop       the follower is recorded no more                     nobody takes over who lacks an acknowledged update
               ► answers wait for it no more
    take over  the follower keeps no more records                   nothing is acknowledged in a term after its end
               ► term + 1 is recorded, if the record is as it was
    unclear    it is read what is recorded ► if that is unchanged,  a change that is performed late finds another
               it is changed, by its number at least                number, and fails
    =========  ===================================================  ==================================================

Who may take over, once no lease stands: who is recorded beside the leader; and the leader's own next life, with its
log, or without one where nobody is recorded beside it. Where nothing is recorded, whoever comes first leads, unless its
log is of a pair: then the record was lost, and the other one may have more. An operator decides, by starting the one
with the newest state once without an elector.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from psengine.parameter_server.server.log.log import later_epoch
from psengine.parameter_server.server.replication.election import (
    Answer,
    AskToEnd,
    ElectorError,
    Leadership,
    Member,
    Question,
    Read,
    Renew,
    Replace,
)

# How often the record is read where nobody leads, or the elector did not answer.
POLL_S = 0.25
_LOST = (
    "Fix: restore it; or end both servers, and start the one with the newest state once without --election and --follow"
)


class Role(str, Enum):
    """What a server is; see the module's text."""

    LOOKING = "looking"
    FOLLOWING = "following"
    LEADING = "leading"
    FENCED = "fenced"


class Succession:
    """The part of one server. The elector is asked one thing at a time::

        question = succession.next(now_s)
        if question is not None:
            succession.heard(question, ask(elector, question), now_s)

    Args:
        own: this life, with its shards' addresses; ``previous`` where it has read a log.
        lease_s: silence after which a leader that keeps its lease is to be ended.
        follow: the address of the server to follow while the elector names none.
        was_paired: its log was written by a server of a pair.

    Attributes:
        own: this life. A copy of another server's state is a life too, under whose epoch the server leads then.
        role: see ``Role``.
        term: this server's, if it leads; else that of the leader that it heard last, 0 without one.
        leader: whom to follow, or to ask; None where this server knows none, or leads.
        recorded: what was read or written last.
        may_be_fenced: another server is recorded to lead; or a change was refused, and it is to be read who leads.
        needs_follower: while this server leads, whether the record names, or might name, a follower: without its word
            nothing is acknowledged, also where its stream has ended, and no other follower is taken.
        why: what it waits for, for people; "" where nothing is missing.
    """

    def __init__(self, own: Member, *, lease_s: float, follow: str = "", was_paired: bool = False) -> None:
        self.own = own
        self.role = Role.LOOKING
        self.term = 0
        self.leader: Member | None = None
        self.recorded: Leadership | None = None
        self.why = ""
        self.may_be_fenced = False
        self._lease_s = lease_s
        self._guess = Member(0, (follow,)) if follow else None
        self._was_paired = was_paired
        # The question that is out; the one that follows a Read; when to ask again.
        self._asked: Question | None = None
        self._wish: Question | None = None
        self._due_s = -math.inf
        # Whether ``recorded`` was recorded last, as far as this server knows; and what it asked to record in its place,
        # without an answer: that may be there, or still come, as long as ``recorded`` is.
        self._is_known = False
        self._stale: Question | None = None  # its answer is too old to know it
        self._open: list[Leadership] = []
        # As leader: who is in sync, and whether the lease is this server's.
        self._follower: Member | None = None
        self._has_lease = False
        # As follower: whether a leader's stream goes on, when a leader was last heard, and whether the state is a copy.
        self._is_heard = False
        self._heard_s = math.inf
        self._is_copy = False

    # ---- told by the leader's streams --------------------------------------------------------------------------

    @property
    def needs_follower(self) -> bool:
        may_be = [one for one in (self.recorded, *self._open) if one is not None]
        return self.role is Role.LEADING and (self._follower is not None or any(len(one.members) > 1 for one in may_be))

    def follower_caught_up(self, follower: Member, now_s: float) -> None:
        """At every shard answers wait for this follower, and it has what was answered before: it may be recorded."""
        assert not self.needs_follower, "the former follower may still be recorded"
        self._follower, self._due_s = follower, now_s

    def follower_lost(self, now_s: float) -> None:
        """Its stream has ended, at some shard. Answers wait until ``needs_follower`` is false."""
        self._follower, self._due_s = None, now_s

    # ---- told by the follower's streams ------------------------------------------------------------------------

    def begin_copy(self, own: Member, term: int) -> bool:
        """Whether what is held here may be thrown away, for a copy (``own``) of what a leader of this term holds.

        False: this server leads, or may have to, as it is recorded in sync or asked to be the leader; or it does not
        know now, and is to ask again; or it knows a higher term.
        """
        may_lead = self.role in (Role.LEADING, Role.FENCED) or any(self._is_me(one.members[0]) for one in self._open)
        if may_lead or not self._is_known or self._may_take_over():
            return False
        if self.recorded is not None and term < self.recorded.term:
            return False
        self.own, self.term, self._wish = own, term, None
        self._is_copy = True
        return True

    def leader_heard(self, term: int, heard_s: float) -> None:
        """The leader lives, and its records are kept."""
        self.term, self._is_heard, self._heard_s = term, True, heard_s

    def leader_lost(self, now_s: float) -> None:
        """The stream has ended at some shard, or was silent for a lease, and nothing is kept of it any more."""
        if self._is_heard:  # else nothing has been kept since what is recorded was read
            self._is_heard, self._due_s = False, now_s
            self._is_known, self._stale = False, self._asked

    # ---- the elector -------------------------------------------------------------------------------------------

    def next(self, now_s: float) -> Question | None:
        """What to ask the elector now; None while it is asked something, or nothing is due."""
        if self._asked is not None or self.role is Role.FENCED or now_s < self._due_s:
            return None
        is_certain = self.role is Role.LEADING and self._is_known
        self._asked, self._wish = self._wish or (self._as_leader() if is_certain else Read()), None
        if isinstance(self._asked, Replace):
            self._open.append(self._asked.new)
        return self._asked

    def heard(self, question: Question, answer: Answer, now_s: float) -> None:
        """What the elector answered to the question that ``next`` gave."""
        assert question is self._asked
        self._asked, self._due_s = None, now_s + POLL_S
        if isinstance(answer, ElectorError):
            self.why = str(answer)
            self._is_known &= isinstance(question, Renew)
        elif isinstance(question, Read):
            assert isinstance(answer, tuple)
            self._read(*answer, now_s)
            self.may_be_fenced = self.role is Role.FENCED
            self._is_known &= question is not self._stale
        elif isinstance(question, Replace) and answer:
            self._has_lease, self._due_s = self._has_lease or question.takes_over, now_s
            self._learn(question.new)
        elif isinstance(question, Replace):
            self._is_known, self.may_be_fenced = False, True
        elif isinstance(question, Renew):
            self.why, self._has_lease = "", bool(answer)
            self._due_s = now_s + self._lease_s / 3 if answer else now_s

    def _read(self, recorded: Leadership | None, is_held: bool, now_s: float) -> None:
        if recorded is None and self.recorded is not None:
            self.why = f"the elector's record is gone. {_LOST}"
            return
        self._learn(recorded)
        if self.role is Role.LEADING:
            self._has_lease, self._due_s = is_held, now_s  # whoever takes the lease is recorded to lead
        elif self.role is not Role.FENCED:
            self._look()
            self._wish = self._as_candidate(is_held=is_held, now_s=now_s)
            if self._wish is not None:
                self._due_s = now_s

    def _learn(self, recorded: Leadership | None) -> None:
        """Lead, go on, or end: given what is recorded."""
        if recorded != self.recorded:
            self._open.clear()  # these expect what was recorded before
        self.recorded, self._is_known = recorded, True
        if recorded is None:
            return
        if self.role is not Role.LEADING:
            if self._is_me(recorded.members[0]):
                self.role, self.term, self.leader, self.why = Role.LEADING, recorded.term, None, ""
                self._has_lease = True
        elif recorded.term != self.term or not self._is_me(recorded.members[0]):
            self.role = Role.FENCED

    # ---- what to ask -------------------------------------------------------------------------------------------

    def _as_leader(self) -> Question:
        """Record who is in sync; where that is recorded for certain, keep the lease."""
        assert self.recorded is not None
        wanted = (self.own,) if self._follower is None else (self.own, self._follower)
        if self.recorded.members == wanted and self._has_lease and not self._open:
            return Renew()
        new = Leadership(self.term, wanted, self.recorded.number + 1)
        return Replace(self.recorded, new, takes_over=not self._has_lease)

    def _look(self) -> None:
        """Whom to follow, and what is missing to lead."""
        recorded = self.recorded
        others = [] if recorded is None else [one for one in recorded.members if not self._is_former(one)]
        guess = self._guess if recorded is None else None
        self.leader = guess or (others[0] if others else None)
        self.role = Role.LOOKING if self.leader is None else Role.FOLLOWING
        named = [guess] if guess else [] if recorded is None else recorded.members
        where = ", ".join(one.addresses[0] for one in named)
        self.why = "" if self._is_heard else f"waits for a leader (expected of {where})"
        if recorded is None and guess is None and not self._may_take_over():
            self.why = f"the elector has no record, and what is here is of a pair. {_LOST}"

    def _as_candidate(self, *, is_held: bool, now_s: float) -> Question | None:
        """Take over, or make that possible; None while this server must not."""
        recorded = self.recorded
        term, number = (0, 0) if recorded is None else (recorded.term, recorded.number)
        if self._is_heard or not self._may_take_over():
            return None
        if is_held:
            self.why = "the leader's lease has not ended"
            is_silent = now_s >= self._heard_s + self._lease_s
            return AskToEnd(recorded) if is_silent and recorded is not None else None
        if recorded is not None and not self._is_copy:  # the former leader's epoch may be by a clock that is ahead
            former = [one.epoch for one in recorded.members]
            self.own = msgspec.structs.replace(self.own, epoch=later_epoch(self.own.epoch, *former))
        new = Leadership(max(term, self.term) + 1, (self.own,), number + 1)
        return Replace(recorded, new, takes_over=True)

    def _may_take_over(self) -> bool:
        """Whether this server leads once no lease stands: the end of the module's text."""
        recorded = self.recorded
        if recorded is None:
            return self._guess is None and not self._is_copy and not self._was_paired
        leader, *others = recorded.members
        if self._is_copy:
            return any(self._is_me(one) for one in others)
        if self.own.previous:
            return self.own.previous in (leader.epoch, leader.previous)
        return not others and self._is_former(leader)

    def _is_me(self, one: Member) -> bool:
        return one.epoch == self.own.epoch

    def _is_former(self, one: Member) -> bool:
        """Whether it is a former life of this server; without a log its first shard's address tells."""
        return one.addresses[0] == self.own.addresses[0] or 0 < one.epoch == self.own.previous
