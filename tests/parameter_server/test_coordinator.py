"""The coordinator alone: workers are written by hand, and so is the clock."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.shard_world import APPLY, AVERAGE, MERGE

from psengine.errors import ProtocolError
from psengine.parameter_server.server.coordinator.coordinator import Interfaces
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.coordinator.elastic import MEETS_OF_A_MEMBER
from psengine.parameter_server.server.coordinator.states import JobState
from psengine.parameter_server.server.interfaces import Sender, ShardSettings
from psengine.protocol import bodies
from psengine.protocol.frames import decode, encode
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType
from psengine.protocol.views import check_digest, message_of, release_of, sign, view_of

ELASTIC = {"name": "elastic", "virtual_workers": 3, "facts": {"seed": "0"}}
LEASE_S, HEARTBEAT_S, TICK_S = 5.0, 1.0, 0.1


class Bench:
    """A server's coordinators, the clock, and everything that they sent."""

    def __init__(self, rule, world_size=2):
        self.rule, self.world_size = rule, world_size
        self.now_s, self.epoch = 100.0, 7
        self.workers = []
        self.ended, self.gone = set(), set()  # connections, and processes
        self._under_way, self._is_delivering = [], False
        self.restart(with_disk=False, has_former=False)

    def restart(self, *, with_disk, has_former=True):
        """The server's process dies, and another begins."""
        meta = json.loads(json.dumps(self.coordinators.to_meta())) if with_disk else {}
        self.epoch += 1
        self.now_s += 0.5
        settings = ShardSettings(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
        keys = iter(bytes([self.epoch, number]) * 16 for number in range(100))
        self.coordinators = Coordinators(
            Interfaces(
                self.epoch,
                settings,
                lambda: 1e6 + self.now_s,
                lambda *_, **__: None,
                lambda: next(keys),
                is_connected=lambda route: route not in self.ended,
                is_gone=self.gone.__contains__,
                started_s=self.now_s if has_former else -math.inf,
            )
        )
        if meta:
            self.coordinators.restore(meta, self.now_s)

    def worker(self, rank=None, **fields):
        """A new process."""
        self.workers.append(Hand(self, rank, 1000 + len(self.workers), **fields))
        return self.workers[-1]

    def deliver(self, outgoing):
        self._under_way += outgoing or ()
        while self._under_way and not self._is_delivering:
            one = self._under_way.pop(0)
            decode(encode(one.message))  # each is a legal message
            # What a worker says at once comes after what the others were sent before.
            self._is_delivering = True
            for worker in self.workers:
                if worker.route == one.route:
                    worker.receive(one.message)
            self._is_delivering = False

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
        if self.rule is not ELASTIC:
            team[0].register()
        assert self.ranks == list(range(count))
        return team


def crew(rule, count=2):
    """A bench, and the workers of a job that has begun."""
    bench = Bench(rule, count)
    return bench, *bench.team(count)


class Hand:
    """A worker's process: it says what the test has it say, adopts views, and answers PREPARE if it ``obeys``."""

    def __init__(self, bench, rank, nonce, run="run", user_id="", incarnation=0):
        self.bench, self.rank, self.nonce, self.run, self.user_id = bench, rank, nonce, run, user_id
        self.incarnation, self.obeys, self.view = incarnation, True, None
        self.completed = self.connection = self.requests = 0
        self.shows = True  # its view, to a coordinator that lacks it
        self.has_state = True  # in an elastic job
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
        sender = Sender(self.route, self.user_id, self.nonce)
        self.bench.deliver(self.bench.coordinators.handle(message, sender, self.bench.now_s))
        return self.inbox[before:]

    def hello(self, **fields):
        """The state that WELCOME says; "" where no answer came yet."""
        body = {
            "job": "job", "run": self.run, "nonce": self.nonce, "host": "here", "pid": 1, "rank": self.rank,
            "world_size": self.bench.world_size, "rule": self.bench.rule,
        }  # fmt: skip
        key = self.welcome.get("key")
        if key is not None:
            body["key"] = key
        if self.view is not None and self.has_state:
            digest = sign(key, job_number("job"), self.view)
            body |= {"view": self.view.number, "digest": digest, "completed": self.completed}
            if releases := [*self.view.releases, *self.releases]:
                body["release"] = max(one.number for one in releases)
        body = {name: value for name, value in (body | fields).items() if value is not None}
        self.welcome = {**self.welcome, "state": ""}
        try:
            self.say(MessageType.HELLO, body)
        except ProtocolError as error:
            if error.code != ErrorCode.VIEW_WANTED or not self.shows:
                raise
            for shown in (self.view, *self.releases):
                message = message_of(shown, key, job_number("job"))
                self.say(message.type, message.body)
            self.say(MessageType.HELLO, body)
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

    def commit(self, what, **fields):
        return [one.type for one in self.say(MessageType.COMMIT, {"what": what, **fields})]

    def register(self, **fields):
        body = {"registration": self.welcome["registration"], "epochs": [7, 9], "chunks": [3, 2]}
        body["servers"] = ["tcp://a:1", "tcp://b:1"]
        self.commit("registered", **body | fields)

    def step(self, step):
        return self.commit("step", step=step, abstained=False, completed=0)

    def life(self, shard, epoch, **fields):
        self.commit("life", shard=shard, epoch=epoch, **{"chunks": 0, "version": 0, "view": 0} | fields)

    def leave(self, **fields):
        return [one.type for one in self.say(MessageType.LEAVE, {"completed": self.completed, **fields})]

    def last(self, type):
        return [one for one in self.inbox if one.type is type][-1]

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
        elastic = {} if self.has_state else {"has_state": False}
        self.commit("prepared", view=number, completed=self.completed, **elastic)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        call()
    return caught.value.code


# ---- beginning ---------------------------------------------------------------------------------------------------


def test_workers_without_a_rank_get_the_lowest_free_one_and_keep_it():
    bench = Bench(APPLY)
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


def test_what_was_registered_after_the_leads_snapshot_is_found_by_a_shards_view():
    bench = Bench(APPLY, 1)
    first = bench.worker(0)
    first.hello()
    bench.restart(with_disk=True)
    bench.wait(LEASE_S + 2 * TICK_S)
    second, third = bench.worker(0), bench.worker(0)
    assert (second.hello(), second.welcome["key"]) == ("initialise", first.welcome["key"])
    bench.wait(LEASE_S + 2 * TICK_S)  # it dies before it has looked
    assert (third.hello(), third.welcome["key"]) == ("initialise", first.welcome["key"])
    third.register(view=5)
    assert (third.welcome["state"], bench.view.number, bench.job.is_trained) == ("ready", 6, True)


def test_where_shards_have_chunks_and_no_view_another_key_is_drawn():
    bench = Bench(APPLY, 1)
    worker = bench.worker(0)
    worker.hello()
    former = worker.welcome
    assert refusal(lambda: worker.register(view=0)) == ErrorCode.STALE
    bench.wait(TICK_S)
    assert worker.welcome["registration"] > former["registration"]
    assert worker.welcome["key"] != former["key"]


# ---- ranks -------------------------------------------------------------------------------------------------------


def test_what_a_newcomer_claims_changes_nothing():
    bench, *_ = crew(AVERAGE)
    number = bench.job.last_number
    newcomer = bench.worker(7, incarnation=2**61)
    newcomer.hello()
    assert newcomer.incarnation < 2**61
    newcomer.life(1, 11, view=2**29)
    bench.wait(3.0, newcomer)
    assert bench.job.last_number == number


def test_numbers_of_a_job_that_nobody_knows_leave_room():
    bench, first, second = crew(AVERAGE)
    bench.restart(with_disk=False)
    view = first.view
    first.view = msgspec.structs.replace(view, number=2**29 + 1)
    assert refusal(first.reconnect) == ErrorCode.BAD_VALUE
    first.view = second.view = msgspec.structs.replace(view, number=2**29)
    assert (first.reconnect(), second.reconnect()) == ("wait", "ready")
    assert (bench.view.number, bench.ranks) == (2**29 + 1, [0, 1])


def test_one_worker_at_a_time_shows_its_view_to_a_coordinator_that_lacks_it():
    bench, *team = crew(AVERAGE, 3)
    bench.restart(with_disk=False)

    for worker in team:
        worker.shows = False
    codes = [ErrorCode.VIEW_WANTED, ErrorCode.NOT_READY, ErrorCode.NOT_READY]
    assert [refusal(one.reconnect) for one in team] == codes
    bench.ended.add(team[0].route)  # it died
    assert [refusal(one.reconnect) for one in team[1:]] == codes[:2]
    bench.wait(HEARTBEAT_S + TICK_S)  # or stands still
    assert refusal(team[2].reconnect) == ErrorCode.VIEW_WANTED
    forged = message_of(team[2].view, b"x" * 32, job_number("job"))
    assert refusal(lambda: team[2].say(MessageType.VIEW, forged.body)) == ErrorCode.BAD_MESSAGE
    for worker in team:
        worker.shows = True
    bench.wait(HEARTBEAT_S + TICK_S)
    assert [one.reconnect() for one in team] == ["wait", "wait", "ready"]
    assert bench.ranks == [0, 1, 2]


def test_numbers_that_leave_no_room_are_refused():
    bench, *team = crew(AVERAGE)
    largest = 2**63 - 1
    stranger = bench.worker(5, incarnation=2**64 - 1)
    stranger.welcome = {"key": bench.job.key}
    for said in (
        lambda: team[0].life(1, 11, view=largest),
        lambda: team[0].prepare(largest),
        lambda: team[0].step(largest),
        lambda: team[0].leave(completed=largest),
        stranger.hello,
        lambda: team[0].hello(view=2**30),
    ):
        assert refusal(said) == ErrorCode.BAD_MESSAGE
    assert team[0].heartbeat(completed=largest) == {"code": ErrorCode.BAD_MESSAGE}
    bench.wait(3.0, *team)
    assert bench.ranks == [0, 1]


def test_a_rank_belongs_to_the_key_of_its_process():
    bench = Bench(APPLY, 1)
    first = bench.worker(0, user_id="A" * 40)
    first.hello()
    first.register()
    for incarnation in (0, first.incarnation + 1):  # also as a later process
        other = bench.worker(0, user_id="B" * 40, incarnation=incarnation)
        assert refusal(other.hello) == ErrorCode.DUPLICATE_RANK
    first.user_id = "B" * 40
    assert first.heartbeat() == {"code": ErrorCode.FENCED}


# ---- leases ------------------------------------------------------------------------------------------------------


CUT_OFF, REACHES = {"unreachable": [1], "blocked": True}, {"unreachable": [], "blocked": True}
IDLE = {"unreachable": [], "blocked": False}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (AVERAGE, [(20, CUT_OFF, CUT_OFF), (20, IDLE, CUT_OFF)]),  # nobody reaches it; then nobody waits at it
        (AVERAGE, [(20, CUT_OFF, CUT_OFF), (4, REACHES, CUT_OFF)]),  # it has restarted, and one reaches it sooner
        (APPLY, [(20, REACHES, CUT_OFF)]),  # gradients are applied as they come
    ],
)
def test_nobody_is_put_out_for_a_shard_that_holds_nobody_up_or_has_not_for_a_lease(rule, said):
    bench, first, second = crew(rule)
    for seconds, of_first, of_second in said:
        for _ in range(seconds):
            first.heartbeat(**of_first)
            second.heartbeat(**of_second)
            bench.wait(1.0)
    assert bench.ranks == [0, 1]


def test_no_state_overwrites_the_values_that_a_slow_worker_begins_with():
    bench, first, slow = crew(AVERAGE)
    first.step(1)
    joiner = bench.worker(2)
    joiner.hello()
    joiner.commit("join")
    assert not any(one.type is MessageType.STATE_WANTED for one in first.inbox)
    slow.step(1)
    assert first.last(MessageType.STATE_WANTED).body["rank"] == 2


def test_prepare_reaches_the_donor_before_its_ok():
    """After the OK it would complete another step."""
    bench, donor, other = crew(AVERAGE)
    for worker in (donor, other):
        worker.completed = 8
        worker.heartbeat()
    joiner = bench.worker(2)
    joiner.hello()
    joiner.commit("join")
    wanted = donor.last(MessageType.STATE_WANTED).body
    heard = donor.commit("donated", step=8, epochs=list(bench.view.shards), **wanted)
    assert heard[:2] == [MessageType.PREPARE, MessageType.OK]
    assert bench.ranks == [0, 1, 2]


# ---- servers that restart ----------------------------------------------------------------------------------------


def test_a_restarted_shard_gets_a_view_that_names_its_life_once():
    bench, first, second = crew(AVERAGE)
    first.completed, second.completed = 6, 5
    first.life(1, 11)
    number = bench.view.number
    assert (bench.view.shards, bench.view.donor, bench.view.from_step) == ((7, 11), 0, 7)
    second.life(1, 11)
    late = {"what": "life", "shard": 1, "epoch": 9, "chunks": 0, "version": 0, "view": 0}
    second.say(MessageType.COMMIT, late, view=number - 1)
    assert (bench.view.number, bench.view.shards) == (number, (7, 11))


def test_new_processes_begin_an_abandoned_averaging_job_anew():
    bench, first, second = crew(AVERAGE)
    second.obeys = False
    number = bench.view.number
    new = [bench.worker(0), bench.worker(1)]
    assert [refusal(one.hello) for one in new] == [ErrorCode.NOT_READY] * 2  # the old ones may be alive
    bench.wait(3.0)
    assert [one.hello() for one in new] == ["wait", "wait"]  # no member was heard since they came
    assert new[0].welcome["state"] == "initialise"  # unasked
    # Shards have to forget the old members before they let anybody register.
    empty = new[0].last(MessageType.VIEW)
    assert (view_of(empty.body).members, view_of(empty.body).number) == ((), number + 1)
    check_digest(empty, first.welcome["key"], view_of(empty.body))
    new[0].register()
    assert (bench.ranks, bench.view.number) == ([0, 1], number + 2)
    assert refusal(first.reconnect) == ErrorCode.FENCED


def test_what_a_worker_said_before_it_heard_that_it_has_left_is_answered():
    bench, first, _ = crew(APPLY | {"max_staleness": 2})
    first.leave()
    assert first.step(1) == [MessageType.OK]
    assert first.heartbeat() == {}
    assert bench.ranks == [1]


def test_a_server_that_comes_back_without_weights_loses_the_job():
    bench, first, second = crew(APPLY)
    first.life(1, 11, chunks=2)
    assert bench.ranks == [0, 1]
    first.life(1, 12, chunks=1)
    assert second.last(MessageType.ERROR).body["code"] == ErrorCode.STATE_LOST
    assert refusal(second.reconnect) == ErrorCode.STATE_LOST
    assert "shard 1 has restarted" in bench.status.lost
    assert bench.worker(0, run="another").hello() == "initialise"


def test_a_view_of_other_servers_is_not_gone_on_from():
    bench, first, _ = crew(AVERAGE)
    bench.restart(with_disk=True)
    assert first.view is not None
    first.view = msgspec.structs.replace(first.view, number=first.view.number + 1, shards=(7,), chunks=(3,))
    assert first.reconnect() == "wait"


# ---- leaving -----------------------------------------------------------------------------------------------------


def test_a_run_of_servers_weights_has_not_ended_while_an_evicted_worker_may_come_back():
    bench, first, second = crew(APPLY | {"max_staleness": 2})
    bench.wait(LEASE_S + 1, first)
    assert bench.ranks == [0]
    first.leave()
    assert second.reconnect() == "ready"
    for step in range(second.view.member(1).first_step, 6):
        second.step(step)
    assert second.releases[-1].step == 5  # nobody waits for the one that has left


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


def test_nobody_without_a_runs_name_takes_up_a_job_that_has_ended():
    bench = Bench(AVERAGE)
    first, away = (bench.worker(rank, run="") for rank in range(2))
    first.hello(), away.hello()
    first.register()
    bench.wait(LEASE_S + 1, first)
    first.leave()
    bench.restart(with_disk=True)
    assert refusal(away.reconnect) == ErrorCode.ENDED
    assert bench.worker(1, run="").hello() == "wait"  # a new process may train again


def test_a_job_whose_last_worker_failed_has_not_ended():
    bench, first, second = crew(AVERAGE)
    first.completed = 3
    assert first.leave(failed=True)[-1] is MessageType.OK  # at once
    second.leave(failed=True)
    assert bench.worker(0).hello() == "initialise"


def test_a_job_whose_workers_all_died_has_neither_their_rule_nor_their_number():
    bench, *_ = crew(AVERAGE, 4)
    bench.wait(LEASE_S + 1)
    bench.rule, bench.world_size = AVERAGE | {"compress": "int8"}, 2
    assert bench.team(2)[1].view == bench.view


def test_a_run_ends_where_servers_hold_the_weights_and_another_goes_on_with_them():
    bench, first, second = crew(APPLY)
    assert first.leave() == [MessageType.VIEW, MessageType.OK]
    assert bench.worker(0).hello() == "ready"
    bench.workers[-1].leave()
    second.leave()
    assert refusal(lambda: bench.worker(0).hello()) == ErrorCode.ENDED
    assert bench.worker(0, run="another").hello(continues=True) == "ready"


@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("rule", [APPLY, MERGE])
def test_nobody_goes_on_from_another_runs_values_unasked(rule, with_disk):
    bench, *_ = crew(rule)
    other = bench.worker(2, run="another launcher's")
    assert other.hello() == "ready"  # it joins members
    if with_disk:
        bench.restart(with_disk=True)
    else:
        bench.wait(LEASE_S + 1)
    stranger = bench.worker(3, run="a later one")
    assert stranger.hello() == ("wait" if with_disk else "")  # until the members' time to come back is over
    if with_disk:
        bench.wait(LEASE_S + 1, stranger)
    error = stranger.last(MessageType.ERROR)
    assert (error.sequence, error.body["code"]) == (1, ErrorCode.OTHER_RUN)
    assert "trained by run and another launcher's" in error.body["text"]
    if not with_disk:  # it turns away whoever comes while they are silent
        assert [one.rank for one in bench.status.workers] == [0, 1, 2]
        for rank in range(3):
            bench.coordinators.evict("job", rank, bench.now_s)
    nameless = bench.worker(1, run="")
    assert nameless.hello() == "ready"
    assert "PSENGINE_CONTINUE=1" in nameless.welcome["warning"]
    later = bench.worker(0, run="a later one")
    later.hello()
    assert "warning" not in later.welcome
    assert bench.ranks == [0, 1]


def test_values_that_nobody_trained_keep_nobody_from_beginning_anew():
    bench, first, second = crew(APPLY)
    first.leave(untouched=True, failed=True)
    second.leave(untouched=True, failed=True)
    bench.rule = MERGE
    assert bench.worker(0, run="another").hello() == "initialise"


def test_a_run_of_which_some_never_came_has_not_ended():
    bench = Bench(APPLY)
    first = bench.worker(0)
    first.hello()
    first.register()
    first.leave()
    assert bench.worker(1).hello() == "ready"


# ---- decisions ---------------------------------------------------------------------------------------------------


def test_a_bound_waits_also_for_workers_that_never_came():
    bench = Bench(APPLY | {"max_staleness": 2})
    first, second = bench.worker(0), bench.worker(1)
    first.hello()
    first.register()
    first.step(1)
    assert first.releases == []
    second.hello()
    second.step(1)
    assert [one.step for one in first.releases] == [1]


def test_a_merge_waits_for_its_quorum_and_the_grace_window():
    bench, first, second, third = crew(MERGE | {"grace": 1.0}, 3)
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


# ---- jobs whose workers exchange among themselves ----------------------------------------------------------------


def states(bench):
    return [(one.completed, one.checkpoint) for one in bench.view.states]


def test_an_elastic_job_begins_when_all_are_here_or_a_lease_after_the_first():
    bench = Bench(ELASTIC, 2)
    first, second = bench.worker(), bench.worker()
    assert first.hello(checkpoint=4) == "wait"
    assert bench.view is None
    assert second.hello() == "ready"
    assert (bench.ranks, states(bench)) == ([0, 1], [(None, 4), (None, 0)])
    assert first.view == second.view == bench.view
    alone = Bench(ELASTIC, 2)
    only = alone.worker()
    only.hello()
    alone.wait(LEASE_S - 1, only)
    assert alone.view is None
    alone.wait(1.5, only)
    assert alone.ranks == [0]


def test_without_a_checkpoint_the_initial_values_are_those_of_worker_0():
    bench = Bench(ELASTIC, 2)
    team = [bench.worker(rank) for rank in (1, 2, 3)]
    for worker in team:
        worker.hello()
    bench.wait(2 * LEASE_S, *team)
    assert bench.view is None
    bench.worker(0).hello()
    assert bench.ranks == [0, 1, 2]
    # It dies before another one has them.
    for returns in (True, False):
        bench, first, second = crew(ELASTIC, 2)
        second.has_state = False
        bench.gone.add(first.nonce)
        bench.wait(2 * LEASE_S, second)
        assert bench.view == first.view
        if returns:
            bench.worker(0).hello()
        else:
            bench.wait(12 * LEASE_S, second)
        assert bench.view != first.view
        assert bench.ranks == ([0, 1] if returns else [1])
    # It never comes.
    bench = Bench(ELASTIC, 2)
    only = bench.worker(1)
    only.hello()
    bench.wait(12 * LEASE_S + 1, only)
    assert bench.ranks == [1]
    bench = Bench(ELASTIC, 1)
    bench.worker(1).hello(checkpoint=4)
    assert bench.ranks == [1]


def test_a_spare_whose_members_all_die_waits_as_for_a_first_view():
    bench = Bench(ELASTIC, 3)
    team = [bench.worker(rank) for rank in (0, 1, 3)]
    for worker in team:
        worker.hello()
    spare = bench.worker(4)
    spare.hello()
    bench.wait(13 * LEASE_S, *team, spare)
    bench.gone.update(worker.nonce for worker in team)
    bench.wait(2 * LEASE_S, spare)
    assert (bench.view, spare.view) == (None, None)
    bench.worker(0).hello(checkpoint=4)
    assert (bench.ranks, states(bench)) == ([0, 4], [(None, 4), (None, 0)])


def test_who_differs_is_refused_with_the_name_and_both_values():
    bench, *_ = crew(ELASTIC, 2)
    for other in ({**ELASTIC, "facts": {"seed": "1"}}, {**ELASTIC, "facts": {}}, {**ELASTIC, "virtual_workers": 4}):
        with pytest.raises(ProtocolError) as caught:
            bench.worker(2).hello(rule=other)
        name, values = ("virtual_workers", (3, 4)) if "seed" in other["facts"] and other["facts"]["seed"] == "0" else (
            "seed", ("0", other["facts"].get("seed"))
        )  # fmt: skip
        assert caught.value.code == ErrorCode.RULE_MISMATCH
        assert f"{name!r} (expected {values[0]}, got {values[1]})" in str(caught.value)


def test_facts_of_workers_that_are_gone_bind_nobody():
    bench, first, second = crew(ELASTIC, 2)
    bench.gone.update((first.nonce, second.nonce))
    bench.wait(2 * TICK_S)
    for seed in "12":  # also where nobody began
        only = bench.worker(0)
        assert only.hello(rule={**ELASTIC, "facts": {"seed": seed}}) == "wait"
        bench.gone.add(only.nonce)
        bench.wait(2 * TICK_S)


def test_who_makes_no_new_connection_is_out_after_a_heartbeat():
    bench, first, second = crew(ELASTIC, 2)
    bench.ended.add(second.route)
    bench.wait(HEARTBEAT_S / 2)
    second.reconnect()
    bench.wait(2 * HEARTBEAT_S, first, second)
    assert bench.ranks == [0, 1]
    bench.ended.add(second.route)
    bench.wait(HEARTBEAT_S + 2 * TICK_S, first)
    assert bench.ranks == [0]


def test_a_member_tells_of_a_group_that_failed_and_whom_it_saw_die():
    bench, *team = crew(ELASTIC, 3)
    number = bench.view.number
    team[0].commit("failed", view=number, lost=[2])
    assert (bench.ranks, bench.view.number) == ([0, 1], number + 1)
    team[1].commit("failed", view=number, lost=[0])  # of a view that is over
    assert bench.view.number == number + 1
    team[1].commit("failed", view=number + 1, lost=[])
    assert (bench.ranks, bench.view.number) == ([0, 1], number + 2)


@pytest.mark.parametrize("with_disk", [True, False])
def test_a_coordinator_that_restarts_learns_the_view_from_its_members(with_disk):
    bench, first, second = crew(ELASTIC, 2)
    first.completed, second.completed = 5, 5
    number = bench.view.number
    bench.restart(with_disk=with_disk)
    newcomer = bench.worker(2)
    assert newcomer.hello() == first.reconnect() == "wait"
    second.reconnect()
    assert (bench.ranks, states(bench)) == ([0, 1, 2], [(5, 0), (5, 0), (None, 0)])
    assert bench.view.number > number


def test_a_newcomer_who_is_first_at_a_restarted_coordinator_waits_for_those_who_are_under_way():
    bench, first, second = crew(ELASTIC, 2)
    bench.world_size = 1  # as the newcomer knows it
    bench.restart(with_disk=False)
    newcomer = bench.worker(2)
    newcomer.hello()
    bench.wait(LEASE_S - 1, newcomer)
    assert bench.view is None
    first.reconnect()
    second.reconnect()
    assert bench.ranks == [0, 1, 2]
    # Spare workers do not take the place of one with a state who is slower than they are.
    bench.restart(with_disk=False)
    bench.world_size = 4
    for spare in (bench.worker(rank) for rank in range(3, 6)):
        spare.hello(checkpoint=1)
    assert bench.view is None
    first.reconnect()
    assert bench.view.states[0].completed is not None


def test_a_member_without_a_state_comes_anew_where_others_have_begun_without_it():
    bench, first, second = crew(ELASTIC, 2)
    first.commit("failed", view=bench.view.number, lost=[])
    second.has_state, last = False, bench.view.number
    bench.restart(with_disk=False)
    for rank in (0, 2, 3):
        bench.worker(rank).hello()
    assert (bench.ranks, bench.view.number) == ([0, 2, 3], 1)
    assert second.reconnect() == "wait"
    bench.deliver(bench.coordinators.evict("job", 3, bench.now_s))
    assert bench.ranks == [0, 1, 2]
    assert bench.view.number > last  # it takes no other


def test_a_newcomer_whose_view_the_members_of_a_restarted_coordinator_have_not_seen_takes_part():
    bench, *team = crew(ELASTIC, 2)
    meta, seen = bench.coordinators.to_meta(), [one.view for one in team]
    newcomer = bench.worker(2)
    newcomer.hello()
    newcomer.has_state = False
    assert newcomer.view.member(2)
    bench.restart(with_disk=False)
    bench.coordinators.restore(json.loads(json.dumps(meta)), bench.now_s)
    for worker, view in zip(team, seen, strict=True):
        worker.view = view
        worker.reconnect()
    team[0].commit("failed", view=bench.view.number, lost=[])
    assert bench.ranks == [0, 1]
    newcomer.reconnect()
    assert (bench.ranks, newcomer.view) == ([0, 1, 2], bench.view)
    newcomer.has_state = True
    # It is in no view from here on, neither before nor after a restart.
    put_out = newcomer.view
    bench.deliver(bench.coordinators.evict("job", 2, bench.now_s))
    for _ in range(2):
        newcomer.view = put_out
        assert refusal(newcomer.reconnect) == ErrorCode.FENCED
        bench.restart(with_disk=True)
        team[0].reconnect()
        team[1].reconnect()
    assert bench.ranks == [0, 1]


def test_a_job_has_ended_also_for_the_run_of_a_worker_that_died():
    bench, *team = crew(ELASTIC, 2)
    other = bench.worker(2, run="another launcher's")
    other.hello()
    bench.gone.add(other.nonce)
    bench.wait(2 * TICK_S)
    assert bench.ranks == [0, 1]
    for worker in team:
        worker.leave()
    assert refusal(bench.worker(2, run="another launcher's").hello) == ErrorCode.ENDED
    assert bench.worker(0, run="a later one").hello() == "wait"


def test_a_training_is_not_over_because_somebody_breaks_off_who_waits():
    bench, _, second, third = crew(ELASTIC, 3)
    bench.worker(3).hello()
    bench.gone.add(third.nonce)
    bench.wait(2 * TICK_S)
    waiting = bench.worker(2)
    assert waiting.hello() == "wait"
    waiting.leave(failed=True)
    bench.gone.add(second.nonce)
    bench.wait(2 * TICK_S)
    bench.worker(2).hello()
    assert bench.ranks == [0, 2, 3]


def test_who_comes_when_a_training_is_over_begins_the_next():
    bench, first, second = crew(ELASTIC, 2)
    first.leave()
    later = bench.worker(0, run="run#1")
    assert later.hello() == "wait"
    second.leave()
    assert refusal(bench.worker(2).hello) == ErrorCode.ENDED
    bench.worker(1, run="run#1").hello()
    bench.wait(2 * TICK_S, later)
    assert (bench.ranks, later.view) == ([0, 1], bench.view)


def test_a_rank_that_was_reserved_is_taken_over_by_an_elastic_worker():
    bench = Bench(ELASTIC, 1)
    worker = bench.worker()
    assert worker.hello(rule=None, world_size=None) == "reserved"
    assert worker.hello() == "ready"
    assert bench.ranks == [0]


def test_members_and_they_alone_meet_under_the_present_view():
    bench, first, second = crew(ELASTIC, 2)
    spare, number = bench.worker(2), bench.view.number
    spare.obeys = False
    bench.now_s += 0.1

    def meet(worker, key, value=b"address", view=number):
        worker.say(MessageType.MEET, {"key": key, "value": value}, view=view)

    def met(worker):
        return [(one.view, one.body["key"]) for one in worker.inbox if one.type is MessageType.MEET]

    meet(first, "0")
    meet(first, "0")  # said again on a new connection
    meet(second, "of another view", view=number + 1)
    assert met(first) == met(second) == [(number, "0")]
    assert refusal(lambda: meet(second, "0", b"another")) == ErrorCode.BAD_MESSAGE
    second.inbox.clear()
    second.reconnect()
    assert met(second) == [(number, "0")], "a new connection lacks nothing"
    for key in range(1, 2 * MEETS_OF_A_MEMBER):
        meet(first, str(key))
    assert refusal(lambda: meet(first, "one more")) == ErrorCode.BAD_MESSAGE
    first.obeys = False
    spare.hello()  # a view with it is prepared
    meet(second, "1")
    meet(spare, "from no member")
    assert len(met(second)) == 2 * MEETS_OF_A_MEMBER
    assert met(spare) == []
    first.prepare(number + 1)
    assert bench.ranks == [0, 1, 2]
    second.reconnect()
    assert {view for view, _ in met(second)} == {number}, "what a view's members said ends with it"


def test_what_other_jobs_say_is_refused_in_an_elastic_one_and_the_reverse():
    _, first, _ = crew(ELASTIC, 2)
    assert refusal(lambda: first.commit("join")) == ErrorCode.BAD_MESSAGE
    _, member, _ = crew(AVERAGE)
    assert refusal(lambda: member.commit("failed", view=1, lost=[])) == ErrorCode.BAD_MESSAGE
