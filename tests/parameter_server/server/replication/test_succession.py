"""Who leads: single steps, and two servers in random order over an elector that answers late, wrongly, or not."""

import random

import pytest

from psengine.errors import ProtocolError
from psengine.parameter_server.server.replication.election import (
    AskToEnd,
    ElectorError,
    Leadership,
    Member,
    Read,
    Replace,
    ask,
    decode_leadership,
)
from psengine.parameter_server.server.replication.succession import PROMOTED_TERMS, Role, Succession

A, B = Member(1, ("tcp://a:1", "tcp://a:2")), Member(2, ("tcp://b:1",))


class Record:
    """What electors share."""

    def __init__(self):
        self.value = None
        self.holder = None
        self.late = []  # transactions that are performed some time

    def perform(self, who, old, new, takes_over):
        if self.value != old or (takes_over and self.holder is not None):
            return False
        self.value = decode_leadership(new.encode(), "the record")
        self.holder = who if takes_over else self.holder
        return True


class MemoryElector:
    """One server's; ``fate`` says what happens to the next transaction."""

    def __init__(self, record):
        self.record = record
        self.fate = "answers"

    def read(self):
        if self.fate != "answers":
            raise ElectorError("no answer")
        return self.record.value, self.record.holder is not None

    def replace(self, old, new, *, takes_over):
        if self.fate == "lost":
            raise ElectorError("no answer")
        if self.fate == "late":
            self.record.late.append((self, old, new, takes_over))
            raise ElectorError("no answer")
        is_done = self.record.perform(self, old, new, takes_over)
        if self.fate == "silent":
            raise ElectorError("no answer")
        return is_done

    def renew(self):
        if self.fate != "answers":
            raise ElectorError("no answer")
        return self.record.holder is self

    def ask_to_end(self, leadership):
        """Nobody can."""


def step(succession, elector, now_s):
    """Ask one question; which."""
    if (question := succession.next(now_s)) is not None:
        succession.heard(question, ask(elector, question), now_s)
    return question


def settle(succession, elector, now_s):
    """Ask until nothing is due; the questions."""
    asked = []
    while (question := step(succession, elector, now_s)) is not None:
        asked.append(question)
    return asked


def pair():
    """A leads term 1, and B, a complete copy, is recorded beside it."""
    record = Record()
    first, second = Succession(A, lease_s=1.0), Succession(B, lease_s=1.0)
    electors = MemoryElector(record), MemoryElector(record)
    settle(first, electors[0], 0.0)
    settle(second, electors[1], 0.0)
    assert second.begin_copy(B, first.term)
    second.leader_heard(first.term, 0.0)
    second.copy_complete(0.0)
    first.follower_caught_up(B, 0.0)
    settle(first, electors[0], 0.0)
    assert record.value == Leadership(1, (A, B), 2)
    return record, first, second, electors


def test_the_first_leads_the_second_follows_and_only_a_lease_that_ended_has_it_take_over():
    record, first, second, electors = pair()
    assert (first.role, first.term, second.role, second.leader.addresses) == ("leading", 1, "following", A.addresses)
    second.leader_lost(5.0)
    settle(second, electors[1], 5.0)
    assert second.role is Role.FOLLOWING
    assert not second.begin_copy(Member(3, B.addresses), 1)
    assert AskToEnd(record.value) in [step(second, electors[1], 6.0) for _ in range(3)]
    record.holder = None
    settle(second, electors[1], 7.0)
    assert (second.role, second.term, second.needs_follower) == ("leading", 2, False)
    assert record.value == Leadership(2, (B,), 3)
    settle(first, electors[0], 7.0)
    settle(first, electors[0], 8.0)
    assert first.role is Role.FENCED


def test_a_follower_that_is_dropped_may_copy_anew_and_never_leads_with_its_old_copy():
    record, first, second, electors = pair()
    second.leader_lost(1.0)
    first.follower_lost(1.0)
    assert first.needs_follower
    settle(first, electors[0], 1.0)
    assert not first.needs_follower
    assert record.value.members == (A,)
    record.holder = None
    settle(second, electors[1], 1.0)
    assert second.role is Role.FOLLOWING
    assert second.begin_copy(Member(3, B.addresses), 1)


def test_what_was_read_before_the_leader_was_lost_does_not_say_that_a_copy_may_go():
    _record, _first, second, _electors = pair()
    question = second.next(1.0)
    answer = Leadership(1, (A,)), True  # on its way while the follower is recorded
    second.leader_lost(1.0)
    second.heard(question, answer, 1.1)
    assert not second.begin_copy(Member(3, B.addresses), 1)


def test_a_change_that_comes_late_finds_another_record():
    """The addition has no answer, the follower is lost, the record is read and unchanged: that proves nothing."""
    record = Record()
    first, elector = Succession(A, lease_s=1.0), MemoryElector(record)
    settle(first, elector, 0.0)
    elector.fate = "late"
    first.follower_caught_up(B, 0.0)
    assert first.needs_follower
    step(first, elector, 0.0)
    first.follower_lost(0.1)
    elector.fate = "answers"
    assert isinstance(step(first, elector, 0.3), Read)
    assert first.needs_follower
    assert isinstance(step(first, elector, 0.3), Replace)
    assert not first.needs_follower
    assert record.value.members == (A,)
    assert not record.perform(*record.late.pop())


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
    record = Record()
    record.value = recorded
    again = Succession(Member(9, A.addresses, previous), lease_s=1.0)
    settle(again, MemoryElector(record), 0.0)
    assert (again.role is Role.LEADING, again.term) == (leads, 4 if leads else 0)
    assert leads or again.why


def test_an_operator_promotes_a_whole_copy_whose_leader_is_not_heard():
    record = Record()  # its own: it knows of nobody
    second = Succession(B, lease_s=1.0, follow="tcp://a:1", is_operated=True)
    elector = MemoryElector(record)
    settle(second, elector, 0.0)
    assert second.leader.addresses == ("tcp://a:1",)
    assert second.begin_copy(B, 4)
    with pytest.raises(ProtocolError, match="only a part"):
        second.promote(0.0, accept_loss=True)
    second.leader_heard(4, 0.0)
    second.copy_complete(0.0)
    settle(second, elector, 0.0)
    with pytest.raises(ProtocolError, match="tcp://a:1 lives"):
        second.promote(0.0, accept_loss=True)
    second.leader_lost(1.0)
    settle(second, elector, 9.0)
    assert not second.begin_copy(Member(8, B.addresses), 3)  # a leader that does not know that it is none
    with pytest.raises(ProtocolError, match="--accept-loss"):
        second.promote(9.0, accept_loss=False)
    second.promote(9.0, accept_loss=True)
    step(second, elector, 9.0)
    elector.fate = "late"
    step(second, elector, 9.0)
    elector.fate = "answers"
    step(second, elector, 10.0)
    assert not second.begin_copy(Member(8, B.addresses), 4)  # it may lead at any moment
    settle(second, elector, 10.0)
    assert (second.role, second.term) == ("leading", 4 + PROMOTED_TERMS)

    # The former leader from its disk: it looks for the other, and waits for an operator.
    own = Record()
    own.value = Leadership(4, (A, B))
    first = Succession(Member(5, A.addresses, A.epoch), lease_s=1.0, is_operated=True)
    settle(first, MemoryElector(own), 9.0)
    assert (first.role, first.leader) == (Role.FOLLOWING, B)


def test_a_record_that_is_gone_or_none_changes_nobody():
    record, first, _second, electors = pair()
    record.value = None
    first.follower_lost(1.0)
    for now_s in (1.0, 2.0):
        settle(first, electors[0], now_s)
    assert first.role is Role.LEADING
    assert first.needs_follower
    assert "gone" in first.why
    with pytest.raises(ElectorError, match="the file F does not say who leads"):
        decode_leadership(b'{"term":0,"members":[]}', "the file F")


class Server:
    """A process with its disk: what it holds, who leads, its stream."""

    def __init__(self, world, address):
        self.world, self.address = world, address
        self.held, self.epoch, self.disk = [], 0, ([], 0)
        self.begin()

    def begin(self):
        """A life with what the disk has."""
        self.held, previous = list(self.disk[0]), self.disk[1]
        own = Member(self.world.new_epoch(), (self.address,), previous if self.world.keeps_log else 0)
        self.succession, self.elector = Succession(own, lease_s=1.0), MemoryElector(self.world.record)
        self.is_needed = False  # it was recorded in sync when it lost its leader
        self.unanswered, self.peer, self.is_sink, self.has_begun = [], None, False, False

    def leads(self):
        return self.succession.role is Role.LEADING

    def write(self):
        if self.world.keeps_log:
            self.disk = (list(self.held), self.succession.own.epoch)


class World:
    """Two servers; every choice is the seed's."""

    def __init__(self, seed):
        self.random, self.record, self.epochs = random.Random(seed), Record(), 0
        self.keeps_log, self.now_s, self.updates = self.random.random() < 0.5, 0.0, 0
        self.acknowledged, self.leaders = set(), {}
        self.servers = [Server(self, "tcp://a:1"), Server(self, "tcp://b:1")]

    def is_recorded(self, epoch, *late):
        """Also once these changes are performed."""
        return all(one and epoch in [member.epoch for member in one.members] for one in (self.record.value, *late))

    def new_epoch(self):
        self.epochs += 1
        return self.epochs

    def run(self, count):
        events = [self.ask] * 8 + [self.update] * 4 + [self.connect] * 2
        events += [self.break_leader, self.break_follower, self.crash, self.end_lease, self.perform_late]
        for _ in range(count):
            self.now_s += self.random.choice([0.0, 0.1, 0.5])
            server, other = self.random.sample(self.servers, 2)
            self.random.choice(events)(server, other)
            for one in self.servers:
                self.check(one)

    def heal(self):
        """Without further faults somebody leads, and the other one is recorded in sync."""
        self.record.holder, self.record.late = None, []
        for _ in range(40):
            self.now_s += 1.0
            for server, other in (self.servers, self.servers[::-1]):
                server.elector.fate = "answers"
                if other.peer is not server:
                    self.break_leader(server, other)
                if not server.is_sink:
                    self.break_follower(other, server)
                settle(server.succession, server.elector, self.now_s)
                self.check(server)
                self.connect(server, other)
        assert any(one.leads() for one in self.servers)
        assert len(self.record.value.members) == 2

    def check(self, one):
        succession = one.succession
        if one.leads() and not one.has_begun:
            one.has_begun, one.peer = True, None
            one.write()
            # It serves from here on: it has all, and nobody else has led this term.
            assert self.acknowledged <= set(one.held), "an acknowledged update is lost"
            assert self.leaders.setdefault(succession.term, succession.own.epoch) == succession.own.epoch, "two leaders"
        if one.leads() and not one.is_sink and not succession.needs_follower:
            self.acknowledge(one)
        if succession.role is Role.FENCED:
            one.disk = one.disk if self.keeps_log else ([], 0)
            one.begin()

    def acknowledge(self, one):
        highest = self.record.value.term
        assert not one.unanswered or one.succession.term == highest, "acknowledged after a higher term"
        self.acknowledged.update(one.unanswered)
        one.unanswered.clear()

    def ask(self, server, other):
        server.elector.fate = self.random.choice(["answers"] * 6 + ["lost", "late", "silent"])
        step(server.succession, server.elector, self.now_s)

    def update(self, server, other):
        if server.leads():
            self.updates += 1
            server.held.append(self.updates)
            server.unanswered.append(self.updates)
            server.write()
            if server.is_sink and other.peer is server:  # the follower keeps it, and says so
                other.held.append(self.updates)
                other.write()
                self.acknowledge(server)

    def connect(self, server, other):
        """A follower throws its copy away, and only then asks a leader, which may refuse it."""
        copy, epoch = Member(self.new_epoch(), (server.address,)), server.succession.own.epoch
        if not other.leads() or server.peer or not server.succession.begin_copy(copy, other.succession.term):
            return
        assert not (server.is_needed and self.is_recorded(epoch)), "a copy that is needed is thrown away"
        server.held, server.is_needed = [], False
        server.write()
        if not other.is_sink and not other.succession.needs_follower:
            server.held, server.peer, other.is_sink = list(other.held), other, True
            server.write()
            server.succession.leader_heard(other.succession.term, self.now_s)
            server.succession.copy_complete(self.now_s)
            other.succession.follower_caught_up(copy, self.now_s)
            self.acknowledge(other)

    def break_leader(self, server, other):
        """The leader notices first, or alone."""
        if server.is_sink:
            server.is_sink = False
            server.succession.follower_lost(self.now_s)

    def break_follower(self, server, other):
        if server.peer is not None:
            server.peer = None
            server.is_needed = self.is_recorded(server.succession.own.epoch)
            server.succession.leader_lost(self.now_s)

    def crash(self, server, other):
        """At any time with a log; without one, only where the other one is recorded in sync, and stays so."""
        late = [new for _, old, new, _ in self.record.late if old == self.record.value]
        if self.keeps_log or self.is_recorded(other.succession.own.epoch, *late):
            if self.record.holder is server.elector:
                self.record.holder = None
            server.begin()

    def end_lease(self, server, other):
        self.record.holder = None

    def perform_late(self, server, other):
        if self.record.late:
            self.record.perform(*self.record.late.pop(self.random.randrange(len(self.record.late))))


def test_two_servers_in_any_order_lose_nothing_never_lead_together_and_go_on():
    terms = 0
    for seed in range(400):
        world = World(seed)
        world.run(250)
        world.heal()
        terms += len(world.leaders)
    assert terms > 1000
