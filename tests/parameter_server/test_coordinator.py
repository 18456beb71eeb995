"""The coordinator alone: workers are written by hand, and so is the clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psengine.errors import ProtocolError
from psengine.parameter_server.server.coordinator.coordinator import Interfaces
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.coordinator.states import JOB, WORKER, JobState
from psengine.parameter_server.server.interfaces import Sender, ShardSettings
from psengine.protocol import bodies
from psengine.protocol.frames import decode, encode
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType
from psengine.protocol.views import View, ViewMember, check_digest, release_of, view_of

AVERAGE = {"name": "average", "quorum": None}
QUORUM = {"name": "average", "quorum": 2}
MERGE = {"name": "merge", "quorum": 2, "grace": 1.0}
ASYNC = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}
BOUND = {**ASYNC, "max_staleness": 2}
LEASE_S, HEARTBEAT_S, TICK_S = 5.0, 1.0, 0.1


class Bench:
    """A server's coordinators, the clock, and everything that they sent."""

    def __init__(self, rule, world_size=2, durability="memory"):
        self.rule, self.world_size, self.durability = rule, world_size, durability
        self.now_s, self.epoch = 100.0, 7
        self.notes, self.workers = [], []
        self.restart(with_disk=False)

    def restart(self, *, with_disk):
        """The server's process dies, and another begins."""
        meta = json.loads(json.dumps(self.coordinators.to_meta())) if with_disk else {}
        self.epoch += 1
        self.now_s += 0.5
        settings = ShardSettings(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, durability=self.durability)
        keys = iter(bytes([self.epoch, number]) * 16 for number in range(100))
        self.coordinators = Coordinators(
            Interfaces(self.epoch, settings, lambda: 1e6 + self.now_s, self._note, lambda: next(keys))
        )
        if meta:
            self.coordinators.restore(meta, self.now_s)

    def _note(self, kind, text, **_):
        self.notes.append(kind)

    def worker(self, rank=None, **fields):
        """A new process."""
        self.workers.append(Hand(self, rank, 1000 + len(self.workers), **fields))
        return self.workers[-1]

    def deliver(self, outgoing):
        for one in outgoing or ():
            decode(encode(one.message))  # each is a legal message
            for worker in self.workers:
                if worker.route == one.route:
                    worker.receive(one.message)

    def evict(self, rank):
        self.deliver(self.coordinators.evict("job", rank, self.now_s))

    def wait(self, seconds, *alive):
        """Time passes; these send heartbeats."""
        end_s, next_s = self.now_s + seconds, self.now_s
        while self.now_s < end_s - 1e-9:
            self.now_s += TICK_S
            self.deliver(self.coordinators.tick(self.now_s))
            if self.now_s >= next_s:
                next_s += HEARTBEAT_S
                for worker in alive:
                    worker.heartbeat()

    @property
    def job(self):
        return self.coordinators.by_number[job_number("job")]

    @property
    def view(self):
        return self.job.view

    @property
    def ranks(self):
        return [one.rank for one in self.view.members]

    @property
    def status(self):
        return self.coordinators.status(self.now_s)["job"]

    def team(self, count):
        """Workers 0 to ``count`` - 1, in the first view."""
        team = [self.worker(rank) for rank in range(count)]
        for worker in team:
            worker.hello()
        team[0].register()
        assert self.ranks == list(range(count))
        return team


def crew(rule, count=2, **options):
    """A bench, and the workers of a job that has begun."""
    bench = Bench(rule, count, **options)
    return bench, *bench.team(count)


class Hand:
    """A worker's process: it says what the test has it say, and adopts views.

    Attributes:
        obeys: whether it answers PREPARE at once.
    """

    def __init__(self, bench, rank, nonce, run="run", user_id="", incarnation=0):
        self.bench, self.rank, self.nonce, self.run, self.user_id = bench, rank, nonce, run, user_id
        self.incarnation, self.obeys, self.view = incarnation, True, None
        self.completed = self.connection = self.requests = 0
        self.welcome: dict[str, Any] = {}
        self.inbox: list[Message] = []
        self.releases = []

    @property
    def route(self):
        return f"{self.nonce}/{self.connection}".encode()

    def say(self, type, body, **header):
        """What comes back."""
        self.requests += 1
        bodies.unpack(type, msgspec.msgpack.encode(body))
        fields = {
            "epoch": self.bench.epoch if type is not MessageType.HELLO else 0,
            "worker": NOBODY if self.rank is None else self.rank,
            "incarnation": self.incarnation,
            "view": 0 if self.view is None else self.view.number,
            "sequence": self.requests,
        }
        message = Message(type, job_number("job"), body=body, **fields | header)
        before = len(self.inbox)
        sender = Sender(self.route, self.user_id)
        self.bench.deliver(self.bench.coordinators.handle(message, sender, self.bench.now_s))
        return self.inbox[before:]

    def hello(self, **fields):
        """The state that WELCOME says; "" where no answer came yet."""
        body = {
            "job": "job", "run": self.run, "nonce": self.nonce, "host": "here", "pid": 1, "rank": self.rank,
            "world_size": self.bench.world_size, "rule": self.bench.rule,
        }  # fmt: skip
        if self.view is not None:
            view = msgspec.to_builtins(self.view)
            body |= {"view": view, "key": self.welcome["key"], "completed": self.completed}
        self.welcome = {**self.welcome, "state": ""}
        self.say(MessageType.HELLO, {name: value for name, value in (body | fields).items() if value is not None})
        return self.welcome["state"]

    def reconnect(self, **fields):
        """The connection broke, and what was on it is lost."""
        self.connection += 1
        return self.hello(**fields)

    def heartbeat(self, **fields):
        try:
            heard = self.say(MessageType.HEARTBEAT, {"completed": self.completed, **fields})
        except ProtocolError as error:
            return {"code": error.code}
        return next(message.body for message in heard if message.type is MessageType.OK)

    def commit(self, what, *, header=(), **fields):
        return [one.type for one in self.say(MessageType.COMMIT, {"what": what, **fields}, **dict(header))]

    def register(self, **fields):
        body = {"registration": self.welcome["registration"], "epochs": [7, 9], "chunks": [3, 2]}
        self.commit("registered", **body | fields)

    def step(self, step, *, abstained=False):
        return self.commit("step", step=step, abstained=abstained)

    def life(self, shard, epoch, **fields):
        self.commit("life", shard=shard, epoch=epoch, **{"chunks": 0, "version": 0, "view": 0} | fields)

    def leave(self, **fields):
        return [one.type for one in self.say(MessageType.LEAVE, {"completed": self.completed, **fields})]

    def donate(self):
        wanted = self.last(MessageType.STATE_WANTED).body
        return self.commit("donated", step=self.completed, epochs=list(self.bench.view.shards), **wanted)

    def last(self, type):
        return [one for one in self.inbox if one.type is type][-1]

    def count(self, type):
        return sum(one.type is type for one in self.inbox)

    def receive(self, message):
        self.inbox.append(message)
        if message.type is MessageType.WELCOME:
            self.rank, self.incarnation, self.welcome = message.worker, message.incarnation, message.body
        elif message.type is MessageType.VIEW:
            view = view_of(message.body)
            if self.view is None or (view.number, view.epoch) != (self.view.number, self.view.epoch):
                if view.members:
                    check_digest(message, self.welcome["key"], view)
                self.view = view
        elif message.type is MessageType.RELEASE:
            self.releases.append(release_of(message.body))
            check_digest(message, self.welcome["key"], self.releases[-1])
        elif message.type is MessageType.PREPARE and self.obeys:
            self.prepare(message.view)

    def prepare(self, number):
        self.commit("prepared", view=number, completed=self.completed)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        call()
    return caught.value.code


def join(joiner, donor):
    assert joiner.hello() == "join"
    joiner.commit("join")
    donor.donate()
    joiner.completed = donor.completed


def step_together(*workers, step):
    """They complete a step."""
    for worker in workers:
        worker.completed = step
        worker.heartbeat()


# ---- beginning ---------------------------------------------------------------------------------------------------


def test_a_job_begins_when_its_first_worker_has_registered_and_all_are_here():
    bench = Bench(AVERAGE)
    first, second = bench.worker(0), bench.worker(1)
    assert first.hello() == "initialise"
    said = dict(first.welcome), first.incarnation
    assert first.reconnect() == "initialise"  # the same answer again
    assert (first.welcome, first.incarnation) == said
    first.register()
    assert bench.view is None
    assert first.heartbeat() == {"why": "to come", "waiting_for": [1]}
    assert bench.coordinators.training_count() == 0
    second.hello()
    assert (bench.ranks, bench.view.shards, bench.view.from_step) == ([0, 1], (7, 9), 1)
    assert bench.view.members[0].incarnation == first.incarnation
    assert second.view == first.view == bench.view
    assert bench.coordinators.training_count() == 2


def test_workers_without_a_rank_get_the_lowest_free_one_and_keep_it():
    bench = Bench(ASYNC)
    first, second = bench.worker(), bench.worker()
    first.hello(rule=None, world_size=None)
    second.hello(rule=None, world_size=None)
    assert (first.rank, second.rank, first.welcome["state"]) == (0, 1, "reserved")
    second.rank = None
    second.hello(rule=None, world_size=None)
    assert second.rank == 1
    assert first.hello() == "initialise"  # the same nonce takes the reservation over
    first.register()
    other = bench.worker()
    assert other.hello(rule=None, world_size=None) == "reserved"
    assert "key" not in other.welcome


def test_a_registrar_that_dies_is_followed_by_its_successor_or_the_next():
    bench = Bench(AVERAGE)
    first, second = bench.worker(0), bench.worker(1)
    assert second.hello() == "wait"  # rank 0 gives the values
    first.hello()
    registration, key = first.welcome["registration"], first.welcome["key"]
    bench.wait(LEASE_S + 1, second)
    assert second.welcome["state"] == "initialise"  # unasked
    assert second.welcome["registration"] > registration
    assert second.welcome["key"] != key
    assert refusal(first.register) == ErrorCode.FENCED


def test_registering_under_an_older_registration_is_stale():
    bench = Bench(ASYNC, 1)
    first = bench.worker(0)
    first.hello()
    assert refusal(lambda: first.register(registration=1)) == ErrorCode.STALE
    first.register()
    first.register()  # its OK was lost
    assert bench.ranks == [0]


def test_another_rule_is_refused():
    bench, *_ = crew(AVERAGE)
    assert refusal(lambda: bench.worker(2).hello(rule=QUORUM)) == ErrorCode.RULE_MISMATCH
    assert refusal(lambda: bench.worker(2).hello(rule={**AVERAGE, "durability": "log"})) == ErrorCode.RULE_MISMATCH


# ---- ranks -------------------------------------------------------------------------------------------------------


def test_a_claim_to_the_rank_of_a_living_process_is_refused():
    bench, *team = crew(AVERAGE)
    other = bench.worker(1)
    assert refusal(other.hello) == ErrorCode.NOT_READY
    bench.wait(3.0, *team)
    assert refusal(other.hello) == ErrorCode.DUPLICATE_RANK
    assert bench.ranks == [0, 1]


def test_a_claim_to_the_rank_of_a_dead_process_replaces_it():
    bench, first, dead = crew(AVERAGE)
    other = bench.worker(1)
    assert refusal(other.hello) == ErrorCode.NOT_READY
    bench.wait(3.0, first)
    assert other.hello() == "join"
    assert other.incarnation > dead.incarnation
    assert bench.ranks == [0]
    assert refusal(dead.reconnect) == ErrorCode.DUPLICATE_RANK
    assert refusal(dead.leave) == ErrorCode.FENCED


def test_nobody_speaks_for_another_worker_whose_incarnation_he_knows():
    bench, *team = crew(AVERAGE)
    stranger = bench.worker(0, incarnation=team[0].incarnation)
    stranger.view = bench.view
    assert refusal(stranger.leave) == ErrorCode.NOT_MEMBER
    assert refusal(lambda: stranger.life(1, 2**63)) == ErrorCode.NOT_MEMBER
    stranger.incarnation += 1  # as of a process that came later, which has no view of this job to show
    stranger.welcome = {"key": b"x" * 32}
    stranger.view = View(9, 9, (ViewMember(0, stranger.incarnation, "", 1),), (7, 9))
    assert refusal(stranger.hello) == ErrorCode.NOT_READY
    bench.wait(3.0, *team)
    assert refusal(stranger.hello) == ErrorCode.DUPLICATE_RANK
    assert bench.ranks == [0, 1]


def test_numbers_that_leave_no_room_are_refused():
    bench, *team = crew(AVERAGE)
    largest = 2**63 - 1
    view = msgspec.to_builtins(View(largest, 9, (), (7, 9)))
    for said in (
        lambda: team[0].life(1, 11, view=largest),
        lambda: team[0].prepare(largest),
        lambda: team[0].step(largest),
        lambda: team[0].leave(completed=largest),
        lambda: bench.worker(5, incarnation=2**64 - 1).hello(),
        lambda: bench.worker(5).hello(view=view, key=b"x" * 32, completed=0),
    ):
        assert refusal(said) == ErrorCode.BAD_MESSAGE
    assert team[0].heartbeat(completed=largest) == {"code": ErrorCode.BAD_MESSAGE}
    bench.wait(3.0, *team)
    assert bench.ranks == [0, 1]


def test_a_rank_belongs_to_the_key_of_its_process():
    bench = Bench(ASYNC, 1)
    first = bench.worker(0, user_id="A" * 40)
    first.hello()
    first.register()
    for incarnation in (0, first.incarnation + 1):  # also as a later process
        other = bench.worker(0, user_id="B" * 40, incarnation=incarnation)
        assert refusal(other.hello) == ErrorCode.DUPLICATE_RANK
    first.user_id = "B" * 40
    assert first.heartbeat() == {"code": ErrorCode.FENCED}


# ---- leases ------------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_evicted_and_comes_back_with_its_incarnation():
    bench, first, second = crew(ASYNC)
    bench.wait(LEASE_S + 1, first)
    assert bench.ranks == [0]
    assert second.heartbeat() == {"code": ErrorCode.FENCED}
    incarnation = second.incarnation
    assert second.hello() == "ready"
    assert (bench.ranks, second.incarnation) == ([0, 1], incarnation)


def test_no_lease_runs_while_the_process_stands_still():
    bench, *_ = crew(ASYNC)
    bench.now_s += 60.0
    bench.coordinators.stood_still(60.0)
    bench.wait(1.0)
    assert bench.ranks == [0, 1]
    assert bench.notes[-1] == "stood_still"


def test_an_operator_evicts_and_forgets():
    bench, first, second = crew(ASYNC)
    assert bench.coordinators.evict("job", 5, bench.now_s) is None
    bench.evict(1)
    assert (bench.ranks, first.view) == ([0], bench.view)
    assert bench.coordinators.forget("job") == 1
    first.leave()
    assert bench.coordinators.forget("job") == 0
    assert bench.coordinators.forget("job") is None
    assert bench.coordinators.take_changed() == {str(job_number("job")): None}
    assert second.heartbeat() == {"code": ErrorCode.NOT_MEMBER}


def test_who_cannot_reach_a_shard_that_others_reach_is_put_out_until_it_does():
    bench, first, second, third = crew(AVERAGE, 3)
    step_together(first, second, third, step=1)
    for _ in range(7):
        third.heartbeat(unreachable=[1])
        second.heartbeat(unreachable=[1], blocked=True)
        first.heartbeat(blocked=True)
        bench.wait(1.0)
    assert bench.ranks == [0]
    assert third.hello(unreachable=[1]) == "join"
    third.commit("join")
    assert first.count(MessageType.STATE_WANTED) == 0
    third.heartbeat(unreachable=[])
    first.donate()
    assert bench.ranks == [0, 2]


CUT_OFF, REACHES = {"unreachable": [1], "blocked": True}, {"unreachable": [], "blocked": True}
IDLE = {"unreachable": [], "blocked": False}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (AVERAGE, [(CUT_OFF, CUT_OFF), (IDLE, CUT_OFF)]),  # nobody reaches it; then nobody waits at it
        (ASYNC, [(REACHES, CUT_OFF)]),  # gradients are applied as they come
    ],
)
def test_nobody_is_put_out_for_a_shard_that_holds_nobody_up(rule, said):
    bench, first, second = crew(rule)
    for of_first, of_second in said:
        for _ in range(20):
            first.heartbeat(**of_first)
            second.heartbeat(**of_second)
            bench.wait(1.0)
    assert bench.ranks == [0, 1]


def test_who_reaches_a_restarted_shard_later_than_another_has_a_lease_for_it():
    bench, first, second = crew(AVERAGE)
    for _ in range(20):
        first.heartbeat(**CUT_OFF)
        second.heartbeat(**CUT_OFF)
        bench.wait(1.0)
    for _ in range(5):
        first.heartbeat(**REACHES)
        bench.wait(1.0 - 0.01)
        second.heartbeat(**CUT_OFF)
    assert bench.ranks == [0, 1]


# ---- changes of view ---------------------------------------------------------------------------------------------


def test_a_change_prepares_all_and_begins_after_the_last_step_that_anybody_has():
    bench, first, second, third = crew(AVERAGE, 3)
    first.completed, second.completed, third.completed = 5, 4, 5
    bench.wait(LEASE_S + 1, first, second)
    assert (bench.ranks, bench.view.from_step, bench.view.oldest, bench.view.donor) == ([0, 1], 6, 4, 0)
    assert first.count(MessageType.PREPARE) == second.count(MessageType.PREPARE) == 1


def test_several_causes_during_a_change_end_in_one_view():
    bench, first, second, _, _ = crew(AVERAGE, 4)
    number = bench.view.number
    second.obeys = False
    bench.evict(2)
    bench.evict(3)
    first.life(1, 11, chunks=2)
    second.prepare(second.last(MessageType.PREPARE).view)
    assert (bench.ranks, bench.view.shards, bench.view.number) == ([0, 1], (7, 11), number + 1)


# ---- joining -----------------------------------------------------------------------------------------------------


def test_a_joiner_takes_part_after_its_donors_step_and_is_served_again_if_it_lacks_a_piece():
    bench, first, second = crew(AVERAGE)
    step_together(first, second, step=8)
    joiner = bench.worker(2)
    join(joiner, first)
    assert bench.ranks == [0, 1, 2]
    assert (bench.view.member(2).first_step, bench.view.from_step) == (9, 9)
    joiner.commit("join")
    assert bench.ranks == [0, 1]
    first.donate()
    assert bench.ranks == [0, 1, 2]
    assert second.view == bench.view


def test_prepare_reaches_the_donor_before_its_ok():
    bench, first, second = crew(AVERAGE)
    step_together(first, second, step=8)
    first.obeys = second.obeys = False
    joiner = bench.worker(2)
    joiner.hello()
    joiner.commit("join")
    assert first.donate() == [MessageType.PREPARE, MessageType.OK]


def test_nobody_is_served_while_another_may_still_read_its_state():
    bench, first, second = crew(AVERAGE)
    step_together(first, second, step=8)
    join(bench.worker(2), first)
    wanted = first.count(MessageType.STATE_WANTED)
    last = bench.worker(3)
    last.hello()
    last.commit("join")
    first.heartbeat()
    assert first.count(MessageType.STATE_WANTED) == wanted
    bench.workers[2].completed += 1
    bench.workers[2].heartbeat()
    first.donate()
    assert bench.ranks == [0, 1, 2, 3]
    assert second.view == bench.view


def test_no_state_overwrites_the_values_that_a_slow_worker_begins_with():
    bench, first, slow = crew({**QUORUM, "quorum": 1})
    first.step(1)
    joiner = bench.worker(2)
    joiner.hello()
    joiner.commit("join")
    assert first.count(MessageType.STATE_WANTED) == 0
    slow.step(1)
    assert first.count(MessageType.STATE_WANTED) == 1


# ---- servers that restart ----------------------------------------------------------------------------------------


def test_a_restarted_shard_gets_a_view_that_names_its_life_once():
    bench, first, second = crew(AVERAGE)
    first.completed, second.completed = 6, 5
    first.life(1, 11)
    number = bench.view.number
    assert (bench.view.shards, bench.view.donor, bench.view.from_step) == ((7, 11), 0, 7)
    second.life(1, 11)
    second.life(1, 9, header={"view": number - 1})  # said late
    assert (bench.view.number, bench.view.shards) == (number, (7, 11))


def test_who_lacks_more_than_the_last_step_is_put_out_when_a_shard_restarts():
    bench, first, second, third = crew(QUORUM, 3)
    first.completed, second.completed, third.completed = 6, 5, 3
    first.life(1, 11)
    assert bench.ranks == [0, 1]
    assert third.heartbeat() == {"code": ErrorCode.FENCED}


def test_a_shard_with_a_view_of_another_coordinator_gets_a_higher_one():
    bench, first, second = crew(ASYNC)
    first.life(1, 9, chunks=2, view=40)
    second.life(1, 9, chunks=2, view=40)
    assert bench.view.number == 41


def test_a_server_that_comes_back_without_weights_loses_the_job():
    bench, first, second = crew(ASYNC)
    first.life(1, 11, chunks=2)
    assert bench.ranks == [0, 1]
    first.life(1, 12, chunks=1)
    assert second.last(MessageType.ERROR).body["code"] == ErrorCode.STATE_LOST
    assert refusal(second.reconnect) == ErrorCode.STATE_LOST
    assert "shard 1 has restarted" in bench.status.lost
    assert bench.worker(0, run="another").hello() == "initialise"


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_restarted_coordinator_waits_for_its_members_and_goes_on(with_disk):
    bench, first, second = crew(AVERAGE)
    first.completed, second.completed = 6, 5
    key, number = first.welcome["key"], bench.view.number
    bench.restart(with_disk=with_disk)
    assert first.heartbeat() == {"code": ErrorCode.NOT_MEMBER}
    assert first.reconnect() == "wait"
    assert first.heartbeat() == {"why": "to come back", "waiting_for": [1]}
    assert second.reconnect() == "ready"
    assert (bench.ranks, bench.view.number, bench.view.from_step) == ([0, 1], number + 1, 7)
    assert first.welcome["key"] == key
    assert bench.view.member(0).incarnation == first.incarnation


def test_a_view_of_other_servers_is_not_gone_on_from():
    bench, first, _ = crew(AVERAGE)
    bench.restart(with_disk=True)
    assert first.view is not None
    first.view = msgspec.structs.replace(first.view, number=first.view.number + 1, shards=(7,), chunks=(3,))
    assert first.reconnect() == "wait"


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_resuming_job_goes_on_after_a_lease_without_who_is_dead(with_disk):
    bench, first, _ = crew(AVERAGE)
    bench.restart(with_disk=with_disk)
    first.reconnect()
    newcomer = bench.worker(2)
    assert newcomer.hello() == "wait"
    bench.wait(LEASE_S + 1, first, newcomer)
    assert bench.ranks == [0]
    assert newcomer.welcome["state"] == "join"  # unasked


def test_weights_that_only_the_lead_held_are_lost_with_it():
    bench, first, _ = crew(ASYNC)
    bench.restart(with_disk=False)
    assert refusal(first.reconnect) == ErrorCode.STATE_LOST
    assert "its lead server has restarted" in bench.status.lost
    bench.team(1)
    assert bench.status.lost == ""


def test_what_a_server_lost_is_noted_once_a_life():
    bench, *team = crew(ASYNC)
    for worker in team:
        worker.life(1, 11, chunks=2, version=5, lost=3, header={"view": 0})
    assert bench.notes.count("lost") == 1


def test_nobody_goes_on_where_a_log_lacks_what_was_acknowledged():
    bench, first, second = crew(ASYNC, durability="log")
    first.life(1, 11, chunks=2, version=5, lost=3)
    assert second.last(MessageType.ERROR).body["code"] == ErrorCode.STATE_LOST
    assert refusal(second.reconnect) == ErrorCode.STATE_LOST
    assert refusal(lambda: bench.worker(0, run="another").hello()) == ErrorCode.STATE_LOST
    assert "came back with an older state" in bench.status.lost
    bench.restart(with_disk=True)  # and the servers have found their logs
    assert bench.worker(0).hello() == "ready"


def test_what_changed_is_all_that_a_restart_needs():
    bench = Bench(ASYNC)
    metas = []

    def take():
        meta = bench.coordinators.take_changed()
        metas.extend([json.loads(json.dumps(meta))] if meta is not None else [])

    bench.team(2)
    take()
    bench.worker(2).hello()
    take()
    bench.workers[0].heartbeat()
    take()
    whole = json.loads(json.dumps(bench.coordinators.to_meta()))
    assert len(metas) == 2
    bench.restart(with_disk=False)
    for meta in metas:
        bench.coordinators.restore(meta, bench.now_s)
    restored = json.loads(json.dumps(bench.coordinators.to_meta()))
    number = str(job_number("job"))
    assert restored[number].pop("state") == "resuming"
    assert whole[number].pop("state") == "open"
    assert restored == whole


# ---- all are gone ------------------------------------------------------------------------------------------------


def test_members_that_were_all_silent_come_back_and_resume():
    bench, first, second = crew(AVERAGE)
    first.completed = second.completed = 9
    bench.wait(3 * LEASE_S)
    assert bench.job.state is JobState.NEW
    assert first.reconnect() == "wait"
    assert second.reconnect() == "ready"
    assert (bench.ranks, bench.view.from_step) == ([0, 1], 10)


def test_who_comes_waits_for_silent_members_no_longer_than_their_lease():
    bench, _, second = crew(AVERAGE)
    second.obeys = False
    new = bench.worker(0)
    assert refusal(new.hello) == ErrorCode.NOT_READY
    bench.wait(3.0)
    assert new.hello() == "join"
    new.commit("join")
    bench.wait(LEASE_S - 3.0 + 2 * TICK_S, new)
    assert new.welcome["state"] == "initialise"


def test_new_processes_begin_an_abandoned_averaging_job_anew():
    bench, first, second = crew(AVERAGE)
    second.obeys = False
    number = bench.view.number
    new = [bench.worker(0), bench.worker(1)]
    assert [refusal(one.hello) for one in new] == [ErrorCode.NOT_READY] * 2  # the old ones may be alive
    bench.wait(3.0)
    assert [one.hello() for one in new] == ["join", "wait"]
    assert new[0].welcome["state"] == "initialise"  # unasked
    # Shards have to forget the old members before they let anybody register.
    empty = new[0].last(MessageType.VIEW)
    assert (view_of(empty.body).members, view_of(empty.body).number) == ((), number + 1)
    check_digest(empty, first.welcome["key"], view_of(empty.body))
    new[0].register()
    assert (bench.ranks, bench.view.number) == ([0, 1], number + 2)
    assert refusal(first.reconnect) == ErrorCode.DUPLICATE_RANK


# ---- leaving -----------------------------------------------------------------------------------------------------


def test_a_run_of_servers_weights_has_not_ended_while_an_evicted_worker_may_come_back():
    bench, first, second = crew(BOUND)
    bench.wait(LEASE_S + 1, first)
    assert bench.ranks == [0]
    first.leave()
    assert second.reconnect() == "ready"
    for step in range(second.view.member(1).first_step, 6):
        second.step(step)
    assert second.releases[-1].step == 5  # nobody waits for the one that has left


def test_who_leaves_an_averaging_job_waits_until_all_have_its_averages():
    bench, first, second = crew(AVERAGE)
    first.completed, second.completed = 10, 9
    assert first.leave() == []
    assert first.reconnect() == "ready"
    assert first.leave() == []
    second.completed = 10
    second.heartbeat()
    assert first.inbox[-2:] == [first.last(MessageType.VIEW), first.last(MessageType.OK)]
    assert (bench.ranks, first.view, second.view) == ([1], bench.view, bench.view)
    assert first.leave() == [MessageType.OK]  # its OK was lost


def test_what_a_worker_said_before_it_heard_that_it_has_left_is_answered():
    bench, first, _ = crew(BOUND)
    first.leave()
    assert first.step(1) == [MessageType.OK]
    assert first.heartbeat() == {}
    assert bench.ranks == [1]


def test_a_job_whose_last_worker_left_has_ended_for_its_run():
    bench, first, second = crew(AVERAGE)
    waiting = bench.worker(2)
    waiting.hello()
    first.leave()
    second.leave()
    assert (bench.job.state, second.view.members) == (JobState.NEW, ())
    assert waiting.last(MessageType.ERROR).body["code"] == ErrorCode.ENDED
    assert refusal(lambda: bench.worker(0).hello()) == ErrorCode.ENDED
    bench.restart(with_disk=True)
    assert refusal(lambda: bench.worker(0).hello(rule=None, world_size=None)) == ErrorCode.ENDED
    assert bench.worker(0, run="another").hello() == "initialise"
    assert refusal(lambda: bench.worker(1).hello()) == ErrorCode.ENDED


def test_a_job_whose_last_worker_failed_has_not_ended():
    bench, first, second = crew(AVERAGE)
    first.completed = 3
    assert first.leave(failed=True)[-1] is MessageType.OK  # at once
    second.leave(failed=True)
    assert bench.worker(0).hello() == "initialise"


def test_a_run_ends_where_servers_hold_the_weights_and_another_goes_on_with_them():
    bench, first, second = crew(ASYNC)
    assert first.leave() == [MessageType.VIEW, MessageType.OK]
    assert bench.worker(0).hello() == "ready"
    bench.workers[-1].leave()
    second.leave()
    assert refusal(lambda: bench.worker(0).hello()) == ErrorCode.ENDED
    assert bench.worker(0, run="another").hello() == "ready"


def test_a_run_of_which_some_never_came_has_not_ended():
    bench = Bench(ASYNC)
    first = bench.worker(0)
    first.hello()
    first.register()
    first.leave()
    assert bench.worker(1).hello() == "ready"


def test_a_draining_server_lets_in_only_who_comes_back():
    bench, first, _ = crew(ASYNC)
    assert bench.coordinators.close() == 2
    assert refusal(lambda: bench.worker(2).hello()) == ErrorCode.SHUTTING_DOWN
    assert first.reconnect() == "ready"
    assert (bench.coordinators.training_count(), bench.coordinators.remembered_count()) == (2, 2)


# ---- decisions ---------------------------------------------------------------------------------------------------


def test_the_floor_is_the_step_that_all_have_committed_and_waits_for_all():
    bench = Bench(BOUND)
    first = bench.worker(0)
    first.hello()
    first.register()
    first.step(1)
    assert first.releases == []  # worker 1 never came
    second = bench.worker(1)
    second.hello()
    for step in (1, 2, 3):
        first.step(step)
    second.step(1)
    second.step(2)
    second.step(2)
    assert [one.step for one in first.releases] == [1, 2]
    assert [one.number for one in first.releases] == sorted({one.number for one in first.releases})
    third = bench.worker(2)
    third.hello()
    assert bench.view.member(2).first_step == 3
    assert [one.step for one in bench.view.releases] == [2]
    bench.wait(LEASE_S + 1, first)
    assert first.releases[-1].step == 3  # nobody waits for the dead


def test_a_quorum_names_the_contributors_of_a_step_once():
    _, first, second, third = crew(QUORUM, 3)
    third.step(1)
    third.step(1)
    assert first.releases == []
    second.step(1, abstained=True)
    assert first.releases == []
    first.step(1)
    assert [(one.step, one.contributors) for one in first.releases] == [(1, ((0, 1), (2, 1)))]
    assert third.releases == first.releases


def test_a_quorum_decides_again_what_a_view_took_back_whoever_remembers_it():
    bench, first, second = crew({**QUORUM, "quorum": 1})
    first.step(1)
    bench.wait(LEASE_S + 1, first)
    assert (bench.ranks, bench.view.from_step) == ([0], 1)
    assert second.view is not None
    former = msgspec.structs.replace(second.view, releases=tuple(first.releases))
    assert second.reconnect(view=msgspec.to_builtins(former)) == "join"
    first.step(1)
    assert [(one.number >> 32, one.step) for one in first.releases] == [(1, 1), (2, 1)]


def test_a_quorum_does_not_run_away_from_the_slowest():
    _, first, second, third = crew(QUORUM, 3)
    for step in range(1, 11):
        first.step(step)
        second.step(step)
    assert [one.step for one in first.releases] == list(range(1, 9))
    third.step(1)
    assert first.releases[-1].step == 9


def test_a_merge_waits_for_its_quorum_and_the_grace_window():
    bench, first, second, third = crew(MERGE, 3)
    team = first, second, third
    first.step(1)
    assert first.releases == []
    second.step(1)
    third.step(1)
    bench.wait(4.0, *team)
    first.step(2)
    second.step(2)
    assert [one.contributors for one in first.releases] == [((0, 1), (1, 1)), ((0, 2), (2, 1))]
    bench.wait(4.0, *team)
    third.step(2)
    assert len(first.releases) == 2  # worker 0 comes each 4 seconds
    first.step(3)
    assert first.releases[-1].contributors == ((0, 3), (1, 2), (2, 2))
    second.step(3)
    third.step(3)
    assert len(first.releases) == 3
    bench.wait(10.0, *team)
    assert first.releases[-1].contributors == ((1, 3), (2, 3))


# ---- for people --------------------------------------------------------------------------------------------------


def test_status_says_who_takes_part():
    bench, first, _ = crew(AVERAGE)
    bench.worker(2).hello()
    bench.wait(3.0, first)
    status = bench.status
    assert [one.state for one in status.workers] == ["live", "silent", "joining"]
    assert (status.lost, status.expected_workers) == ("", 2)
    bench.wait(LEASE_S + 1, first)
    status = bench.status
    assert sorted(one.rank for one in status.departed) == [1, 2]
    assert status.evicted == 1


def drawn(table: dict[Any, dict[str, Any]]) -> str:
    """The table as Markdown: a row for each state, a column for each event; empty cells cannot happen."""
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    lines = [["", *events], ["---"] * (len(events) + 1)]
    for state, row in table.items():
        lines.append([f"**{state.value}**", *(row[event].value if event in row else "" for event in events)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_tables_are_those_of_the_docs():
    design = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    assert drawn(JOB) in design
    assert drawn(WORKER) in design
