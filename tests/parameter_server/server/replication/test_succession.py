"""Who leads, step by step; ``simulation/`` has whole jobs over electors that answer late, wrongly, or not."""

import pytest

from psengine.errors import ProtocolError
from psengine.parameter_server.server.log.log import EPOCHS_APART
from psengine.parameter_server.server.replication.election import ElectorError, Leadership, Member, ask
from psengine.parameter_server.server.replication.pair import Pair
from psengine.parameter_server.server.replication.succession import Role, Succession

A, B = Member(1, ("tcp://a:1", "tcp://a:2")), Member(2, ("tcp://b:1",))
ANEW = Member(8, B.addresses)


class Record:
    """An elector, the same for all; ``fate`` of changes: done, late (without an answer), or silent (done so)."""

    def __init__(self, value=None):
        self.value, self.is_held, self.fate, self.late = value, False, "done", []

    def read(self):
        return self.value, self.is_held

    def replace(self, old, new, *, takes_over):
        if self.fate == "late":
            self.late.append((old, new, takes_over))
            raise ElectorError("no answer")
        is_done = self.value == old and not (takes_over and self.is_held)
        if is_done:
            self.value, self.is_held = new, self.is_held or takes_over
        if self.fate == "silent":
            raise ElectorError("no answer")
        return is_done

    def renew(self):
        return self.is_held

    def ask_to_end(self, leadership):
        """Nobody can."""


def settle(succession, record, *times_s):
    """Ask until nothing is due; the questions' names."""
    asked = []
    for now_s in times_s:
        while (question := succession.next(now_s)) is not None:
            succession.heard(question, ask(record, question), now_s)
            asked.append(type(question).__name__)
    return asked


def pair():
    """A leads term 1, and B, a complete copy, is recorded beside it."""
    record, first, second = Record(), Succession(A, lease_s=1.0), Succession(B, lease_s=1.0)
    for one in (first, second):
        settle(one, record, 0.0)
    assert second.begin_copy(B, first.term)
    second.leader_heard(first.term, 0.0)
    first.follower_caught_up(B, 0.0)
    assert first.needs_follower
    settle(first, record, 0.0)
    assert record.value == Leadership(1, (A, B), 2)
    return record, first, second


def test_the_first_leads_the_second_follows_and_only_a_lease_that_ended_has_it_take_over():
    record, first, second = pair()
    assert (first.role, first.term, second.role, second.leader.addresses) == ("leading", 1, "following", A.addresses)
    second.leader_lost(5.0)
    assert "Replace" not in settle(second, record, 5.0, 6.0)
    assert "AskToEnd" in settle(second, record, 7.0)
    assert not second.begin_copy(ANEW, 1)  # it may have to lead
    record.is_held = False
    settle(second, record, 8.0)
    assert (second.role, second.term, second.needs_follower) == ("leading", 2, False)
    assert record.value == Leadership(2, (B,), 3)
    first.follower_lost(8.0)
    settle(first, record, 8.0, 9.0)
    assert first.role is Role.FENCED


@pytest.mark.parametrize("leads_on", [False, True])
def test_a_leader_whose_change_is_refused_is_silent_until_it_has_read_who_leads(leads_on):
    record, first, second = pair()
    told = dict.fromkeys(("prepare", "lead", "begin_anew", "note"), lambda *_: True)
    server = Pair(first, None, (), lease_s=1.0, **told)
    server.tick(0.0)
    server.check_leads()
    if leads_on:
        record.value = Leadership(1, (A, B), 3)  # a change of its own was performed late
    else:
        record.is_held = False
        second.leader_lost(5.0)
        settle(second, record, 5.0)
    first.follower_lost(5.0)
    question = first.next(5.0)
    first.heard(question, ask(record, question), 5.0)
    with pytest.raises(ProtocolError, match="does not lead"):
        server.check_leads()
    settle(first, record, 6.0)
    assert (first.role is Role.FENCED, server.leads) == (not leads_on, leads_on)


def test_a_follower_that_is_dropped_may_copy_anew_and_never_leads_with_its_old_copy():
    record, first, second = pair()
    second.leader_lost(1.0)
    first.follower_lost(1.0)
    assert first.needs_follower
    settle(first, record, 1.0)
    assert (first.needs_follower, record.value.members) == (False, (A,))
    record.is_held = False
    settle(second, record, 1.0)
    assert (second.role, second.begin_copy(ANEW, 1)) == ("following", True)


def test_what_was_read_before_the_leader_was_lost_does_not_say_that_a_copy_may_go():
    _record, _first, second = pair()
    question = second.next(1.0)
    second.leader_lost(1.0)
    second.heard(question, (Leadership(1, (A,)), True), 1.1)  # of the time before it was recorded
    assert not second.begin_copy(ANEW, 1)


def test_an_unclear_change_is_read_and_changed_again_before_answers_wait_for_nobody():
    record, first = Record(), Succession(A, lease_s=1.0)
    settle(first, record, 0.0)
    record.fate = "late"
    first.follower_caught_up(B, 0.0)
    assert settle(first, record, 0.0) == ["Replace"]
    first.follower_lost(0.1)
    record.fate = "done"
    question = first.next(0.3)
    first.heard(question, ask(record, question), 0.3)  # unchanged: the addition may still come
    assert first.needs_follower
    settle(first, record, 0.3)
    assert (first.needs_follower, record.value.members) == (False, (A,))
    old, new, takes_over = record.late.pop()
    assert not record.replace(old, new, takes_over=takes_over)

    record.is_held, record.fate = False, "silent"  # its own lease, taken again without an answer, is its own
    settle(first, record, 1.0)
    record.fate = "done"
    assert settle(first, record, 2.0)[-1] == "Renew"


@pytest.mark.parametrize(
    ("recorded", "previous", "leads"),
    [
        (Leadership(3, (Member(7, A.addresses, 5), B)), 7, True),  # its log goes on from the recorded life
        (Leadership(3, (Member(7, A.addresses, 5), B)), 5, True),  # that life ended before it wrote a log
        (Leadership(3, (Member(7, A.addresses),)), 4, False),  # another directory
        (Leadership(3, (Member(7, A.addresses),)), 0, True),  # without a log, alone: what was there is lost
        (Leadership(3, (Member(7, A.addresses), B)), 0, False),  # the other one has it
        (Leadership(3, (B,)), 7, False),
    ],
)
def test_the_next_life_of_a_leader_leads_if_nobody_has_more(recorded, previous, leads):
    again = Succession(Member(9, A.addresses, previous), lease_s=1.0)
    settle(again, Record(recorded), 0.0)
    assert (again.role is Role.LEADING, again.term) == (leads, 4 if leads else 0)
    assert leads or again.why
    assert not leads or again.own.epoch == 7 + EPOCHS_APART + 9  # whatever this server's clock shows


def test_a_record_that_is_gone_changes_nobody():
    record, first, _second = pair()
    record.value = None
    first.follower_lost(1.0)
    settle(first, record, 1.0, 2.0)
    assert (first.role, first.needs_follower, "gone" in first.why) == ("leading", True, True)
    for own in (A, B):
        again = Succession(Member(9, own.addresses, own.epoch), lease_s=1.0, was_paired=True)
        settle(again, record, 3.0)
        assert (record.value, "start the one with the newest state once without" in again.why) == (None, True)


def test_a_leader_that_takes_its_lease_again_has_it():
    record, first, _ = pair()
    record.is_held = False
    assert settle(first, record, 1.0) == ["Renew", "Replace", "Renew"]
    assert record.value.number == 3
