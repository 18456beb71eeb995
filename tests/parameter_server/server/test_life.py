"""The tables of ``life.py``: nothing happens to a job or a worker that is not in them, and all that is in them does."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.replicas import Play
from support.shard_world import APPLY, AVERAGE, Worker, World, hello_of, push_all, spec, world_of

from psengine.parameter_server.server.core import life
from psengine.parameter_server.server.core.life import JobPhase, MemberPhase
from psengine.parameter_server.server.core.membership import CLAIM_PATIENCE_S, Membership
from psengine.protocol.layout import job_number
from psengine.protocol.messages import MessageType

LEASE_S = 5.0


class Recorder(dict):
    """One row of a table, which notes what is looked up in it."""

    def __init__(self, phase, row, taken):
        super().__init__(row)
        self._phase, self._taken = phase, taken

    def __getitem__(self, event):
        self._taken.add((self._phase, event))
        return super().__getitem__(event)


@pytest.fixture
def taken(monkeypatch):
    """The transitions taken so far."""
    taken = set()
    for table in (life.JOB, life.MEMBER):
        for phase, row in table.items():
            monkeypatch.setitem(table, phase, Recorder(phase, row, taken))
    return taken


def transitions(table):
    return {(phase, event) for phase, row in table.items() for event in row}


def phase_of(world):
    return world.shard.jobs.by_number[job_number("demo")].phase


# ---- jobs ----------------------------------------------------------------------------------------------------------


def exchange(sequence, *workers):
    push_all(workers, sequence, torch.ones(4))


def begun(size=2, exchanges=1):
    world, workers = world_of(size, [spec()])
    for sequence in range(1, exchanges + 1):
        exchange(sequence, *workers)
    world.advance(1, *workers)
    return world, workers


def bring_values(worker):
    worker.register(spec())
    worker.seal([spec()])
    worker.take()


def a_job_runs_loses_all_its_workers_and_begins_anew():
    world, workers = begun(exchanges=2)
    assert phase_of(world) is JobPhase.RUNNING
    for worker in workers:
        worker.ask(MessageType.BYE)
    fresh = Worker(world, 0)
    assert fresh.hello() == "initialise"
    assert phase_of(world) is JobPhase.ORPHANED
    bring_values(fresh)
    assert phase_of(world) is JobPhase.OPEN


def a_worker_of_a_former_life_brings_the_values_and_goes_on():
    world, workers = begun(1)
    world.advance(LEASE_S + 1)
    world.advance(LEASE_S + 1)  # so long gone that nobody waits for it
    newcomer = Worker(world, 1)
    assert newcomer.hello() == "wait"
    assert phase_of(world) is JobPhase.ORPHANED
    assert workers[0].hello() == "initialise"
    bring_values(workers[0])
    assert phase_of(world) is JobPhase.RUNNING


def a_server_without_a_snapshot_gets_its_job_back_from_the_workers():
    for ends_by in ("exchange", "goodbye"):
        world, workers = begun()
        world.start(8)
        for worker in workers:
            worker.hello()
            worker.take()
        assert phase_of(world) is JobPhase.REBUILDING
        workers[0].register(spec())
        exchange(2, *workers)  # before the chunks are sealed
        assert phase_of(world) is JobPhase.REBUILDING
        workers[0].seal([spec()])
        assert phase_of(world) is JobPhase.RESUMING
        if ends_by == "exchange":
            exchange(3, *workers)
            assert phase_of(world) is JobPhase.RUNNING
        else:
            for worker in workers:
                worker.ask(MessageType.BYE)
            assert Worker(world, 0).hello() == "initialise"
            assert phase_of(world) is JobPhase.ORPHANED


def a_snapshot_from_before_the_first_exchange_comes_back():
    for what in ("exchange", "elsewhere", "members"):
        world, workers = begun(exchanges=0)
        world.start(8, world.shard.durable.capture())
        assert phase_of(world) is JobPhase.RESTORED_OPEN
        for worker in workers:
            worker.members = [0, 1] if what == "members" else []
            assert worker.hello() == "ready"
        if what == "exchange":
            exchange(1, *workers)
        elif what == "elsewhere":
            workers[1].send(MessageType.JOIN)
        assert phase_of(world) is (JobPhase.RESUMING if what == "members" else JobPhase.RESTORED_RUNNING)


def a_snapshot_of_a_running_job_comes_back():
    for what in ("exchange", "members", "nobody"):
        world, workers = begun()
        world.start(8, world.shard.durable.capture())
        assert phase_of(world) is JobPhase.RESTORED_RUNNING
        if what == "nobody":
            world.advance(2 * LEASE_S + 2)
            world.advance(LEASE_S)
            assert Worker(world, 0).hello() == "initialise"
            assert phase_of(world) is JobPhase.ORPHANED
            continue
        for worker in workers:
            worker.members = [0, 1] if what == "members" else []
            assert worker.hello() == "ready"
        exchange(2, *workers)
        assert phase_of(world) is (JobPhase.RUNNING if what == "members" else JobPhase.RESTORED_RUNNING)


def another_shard_says_that_an_exchange_has_ended():
    world, workers = begun(exchanges=0)
    assert phase_of(world) is JobPhase.OPEN
    workers[1].send(MessageType.JOIN)
    assert phase_of(world) is JobPhase.RUNNING


def the_first_worker_dies_before_it_has_sealed_every_shard():
    for restarts in (False, True):
        world, _ = begun(1, exchanges=0)
        if restarts:
            world.start(8, world.shard.durable.capture())
        world.advance(LEASE_S + 1)
        fresh = Worker(world, 0)
        assert fresh.hello() == "ready"  # for this shard
        fresh.register(spec())
        assert phase_of(world) is JobPhase.NEW
        assert Worker(world, 1).hello() == "wait"
        fresh.seal([spec()])
        assert phase_of(world) is JobPhase.OPEN


PLOTS = [
    a_job_runs_loses_all_its_workers_and_begins_anew,
    a_worker_of_a_former_life_brings_the_values_and_goes_on,
    a_server_without_a_snapshot_gets_its_job_back_from_the_workers,
    a_snapshot_from_before_the_first_exchange_comes_back,
    a_snapshot_of_a_running_job_comes_back,
    another_shard_says_that_an_exchange_has_ended,
    the_first_worker_dies_before_it_has_sealed_every_shard,
]


def test_every_transition_of_a_job_is_reached(taken):
    for plot in PLOTS:
        plot()
    assert {one for one in taken if isinstance(one[0], JobPhase)} == transitions(life.JOB)


# ---- workers -------------------------------------------------------------------------------------------------------


class Room:
    """A membership, and processes that say HELLO to it."""

    def __init__(self, meta=None):
        self.now_s = 100.0
        self.membership = Membership(LEASE_S, lambda: 1)
        if meta is not None:
            self.membership.restore(meta, self.now_s)

    def greet(self, rank, nonce, *, claims=False, **options):
        """HELLO, again and again where the rank may be held by a process that is alive."""
        for _ in range(20 if claims else 1):
            greeting = self.membership.greet(hello_of(rank, nonce, **options), "", b"r", 0, self.now_s)
            if not isinstance(greeting, str):
                return greeting.member
            self.now_s += CLAIM_PATIENCE_S / 4
        raise AssertionError(greeting)

    def remove(self, rank):
        self.membership.remove(rank, progress=0, now_s=self.now_s)


def newcomer():
    room = Room()
    room.greet(0, 1)
    return room


def live():
    room = newcomer()
    room.membership.admit(0)
    return room


def behind():
    room = live()
    room.membership.demote(0)
    return room


def survivor():
    room = behind()
    room.membership.begin_anew()
    return room


def expected():
    room = Room()
    room.membership.expect([0], room.now_s)
    return room


def restored(make):
    return Room(make().membership.to_meta())


def test_every_transition_of_a_worker_is_reached(taken):
    made = {
        MemberPhase.NEWCOMER: newcomer,
        MemberPhase.LIVE: live,
        MemberPhase.BEHIND: behind,
        MemberPhase.SURVIVOR: survivor,
        MemberPhase.EXPECTED: expected,
    }
    for phase, make in made.items():
        assert make().membership.members[0].phase is phase
        assert make().greet(0, 2, claims=True).phase is MemberPhase.NEWCOMER
        returned = make().greet(0, 2, claims=True, knows_members=True).phase
        if phase is MemberPhase.EXPECTED:
            assert returned is MemberPhase.LIVE
        else:  # state of a life that this server knows nothing of
            assert (returned is MemberPhase.SURVIVOR) == (phase is MemberPhase.NEWCOMER)
        again = make().greet(0, 1, knows_members=True).phase
        assert again is (MemberPhase.LIVE if phase is MemberPhase.EXPECTED else phase)
        room = make()
        room.remove(0)
        back = room.greet(0, 1, knows_members=phase is MemberPhase.EXPECTED).phase
        assert back is {MemberPhase.LIVE: MemberPhase.BEHIND, MemberPhase.EXPECTED: MemberPhase.SURVIVOR}.get(
            phase, phase
        )
        if phase is not MemberPhase.EXPECTED:
            room = make()
            room.membership.admit(0)
            assert room.membership.live_ranks == (0,)
    for make, phase in ((newcomer, MemberPhase.NEWCOMER), (survivor, MemberPhase.SURVIVOR)):
        room = make()
        room.membership.begin_anew()
        assert room.membership.members[0].phase is phase
    for make in (newcomer, behind):
        room = restored(make)
        assert room.membership.live_ranks == ()
        room.membership.expect([0], room.now_s)
        assert room.membership.members[0].phase is MemberPhase.LIVE
    assert {one for one in taken if isinstance(one[0], MemberPhase)} == transitions(life.MEMBER)


def test_nobody_admits_a_worker_that_is_only_expected():
    world, workers = begun()
    world.start(8)
    assert workers[0].hello() == "initialise"
    bring_values(workers[0])
    members = world.shard.jobs.find("demo").membership.members
    assert members[1].phase is MemberPhase.EXPECTED
    workers[0].ask(MessageType.ADMIT, body={"rank": 1, "incarnation": 0})
    assert members[1].phase is MemberPhase.EXPECTED


# ---- the model -----------------------------------------------------------------------------------------------------


class LongPlay(Play):
    """Replicas at a server that also comes back from snapshots, and loses all workers at once."""

    def do(self, what, rank, count):
        if what == "restore":
            states = self.world.shard.durable.capture()
            self.epoch += 1
            self.world.sent.clear()
            self.world.start(self.epoch, states)
        elif what == "empty":
            for replica in self.replicas:
                replica.is_alive = False
            self.pass_time(2 * LEASE_S + 1)
            for other in range(self.size):
                super().do("replace", other, count)
        else:
            super().do(what, rank, count)


STEPS = ("act", "act", "act", "receive", "receive", "lose", "silence", "die", "replace", "crash", "restore", "empty")


def scripts(*steps):
    return st.lists(st.tuples(st.sampled_from(steps), st.integers(0, 2), st.integers(1, 3)), min_size=10, max_size=60)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(script=scripts(*STEPS), size=st.integers(1, 3), quorum=st.sampled_from([None, None, 1, 2]))
def test_whatever_replicas_and_servers_do_is_in_the_tables(script, size, quorum):
    """``life.after`` raises for what is not; nobody waits for ever, and in the end all replicas are equal."""
    play = LongPlay(size, AVERAGE | {"quorum": quorum})
    for step in script:
        play.do(*step)
    play.check()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(script=scripts("act", "act", "receive", "receive", "lose", "crash"), size=st.integers(1, 3))
def test_lost_answers_and_restarts_cost_nobody_its_place(script, size):
    play = Play(size)
    play.settle(2)
    for step in script:
        play.do(*step)
    play.check()
    assert not any(replica.abstains for replica in play.replicas)


class Chaos:
    """Workers that say whatever comes to their mind, in any order, for ranks that may be others'."""

    def __init__(self, rule):
        self.world = World(codec=False)
        self.workers = [Worker(self.world, number % 3, rule=rule, world_size=3) for number in range(4)]

    def do(self, what, number, other):
        worker, world = self.workers[number], self.world
        say = {
            "bring": lambda: (worker.send(MessageType.REGISTER, key=0, body=spec().to_body(), payload=torch.zeros(4)),
                              worker.seal([spec()])),
            "hello": lambda: worker.hello(members=list(range(other)), incarnation=worker.incarnation * (other % 2)),
            "new process": lambda: setattr(worker, "nonce", other),
            "push": lambda: worker.push(0, 1 + other, None if other == 3 else torch.ones(4)),
            "admit": lambda: worker.send(
                MessageType.ADMIT, body={"rank": other, "incarnation": self.workers[other].incarnation}
            ),
            "result": lambda: worker.send(MessageType.RESULT, key=0, sequence=other, payload=torch.ones(4)),
            "progress": lambda: worker.send(MessageType.PROGRESS, body={"chunks": [[0, 3, other, 0]], "more": False}),
            "repeat": lambda: worker.repeat(0, 1 + other),
            "silence": lambda: world.advance(3 * other),
            "crash": lambda: world.start(8 + other),
            "restore": lambda: world.start(8 + other, world.shard.durable.capture()),
        }  # fmt: skip
        if what in say:
            say[what]()
        else:
            worker.send(MessageType[what.upper()], key=0)


SAYINGS = ("hello", "hello", "bring", "push", "push", "push", "join", "admit", "leave", "result", "progress", "repeat")
SAYINGS += ("bye", "new process", "silence", "crash", "restore", "pull", "probe")


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(
        st.tuples(st.sampled_from(SAYINGS), st.integers(0, 3), st.integers(0, 3)), min_size=20, max_size=80
    ),
    rule=st.sampled_from([AVERAGE, AVERAGE | {"quorum": 1}, APPLY, APPLY | {"max_staleness": 1}]),
)
def test_nothing_that_is_said_leaves_the_tables(script, rule):
    """What makes no sense is refused: ``Shard.handle`` raises for nothing."""
    chaos = Chaos(rule)
    for step in script:
        chaos.do(*step)


@pytest.mark.parametrize("table", [life.JOB, life.MEMBER])
def test_what_a_table_does_not_have_cannot_happen(table):
    phases, events = list(table), {event for row in table.values() for event in row}
    for phase, event in itertools.product(phases, events):
        if event not in table[phase]:
            with pytest.raises(AssertionError, match="cannot happen"):
                life.after(table, phase, event)
