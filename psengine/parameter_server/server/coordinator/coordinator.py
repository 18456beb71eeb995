"""One job's coordinator: who takes part (views), who gives state to whom, and what is decided once a step. Pure.

    worker ──HELLO──► WAITING ─┬─ first: initialise ─► COMMIT registered ─┐
                               ├─ servers hold the weights ───────────────┼─► VIEW
                               └─ join ─► COMMIT join ─► JOINING          │
    donor  ◄── STATE_WANTED ───────────────────┘                          │
           ─── COMMIT donated ─► PREPARE ─► all: COMMIT prepared ─────────┘

Where workers hold the weights a view changes in two parts: PREPARE has every member stop completing steps and say which
one was its last; VIEW then says from which step on shards forget what they have. ``states.py`` has the tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from psengine.errors import ProtocolError
from psengine.parameter_server.overview import owns_weights, rule_text
from psengine.parameter_server.server.coordinator.decisions import Decisions, decisions_of
from psengine.parameter_server.server.coordinator.states import (
    JOB,
    JobEvent,
    JobState,
    WorkerEvent,
    WorkerState,
    after,
)
from psengine.parameter_server.server.coordinator.workers import (
    Leaving,
    Worker,
    Workers,
    belongs_to_another_key,
    is_held,
    replaced,
)
from psengine.parameter_server.server.events import JobRecord
from psengine.parameter_server.server.interfaces import Clocks, Outgoing, Sender, ShardSettings
from psengine.parameter_server.status_model import CoordinatedJob, CoordinatedWorker, State
from psengine.protocol.layout import job_number
from psengine.protocol.messages import DURABILITY_TIERS, ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View, ViewMember, message_of, view_of

logger = logging.getLogger(__name__)
# Of runs that have ended, and of shards' former lives, the newest are remembered.
MAX_REMEMBERED = 64


@dataclass(frozen=True)
class Surroundings:
    """What all coordinators of a server are given; ``draw_key`` makes a job's key."""

    epoch: int
    settings: ShardSettings
    clocks: Clocks
    note: Callable[..., None]
    draw_key: Callable[[], bytes]


class Coordinator:
    """See the module's text.

    Attributes:
        state: where the job stands.
        workers: all that are known.
        view: the newest that was published, by this coordinator or a former one.
        is_changed: ``to_meta`` gives something else than before; for the caller to reset.
    """

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        self.name = name
        self.number = job_number(name)
        self.state = JobState.NEW
        self.workers = Workers()
        self.rule: dict[str, Any] | None = None
        self.view: View | None = None
        self.is_changed = False
        self._around = surroundings
        self._lease_s = surroundings.settings.lease_s
        self._record = JobRecord(name, surroundings.note, surroundings.clocks.wall_s)
        self._outgoing: list[Outgoing] = []
        self._now_s = 0.0
        self._world_size = 1
        self._servers: list[str] = []
        self._runs: list[str] = []  # of those who took part in this life of the job
        self._ended_runs: list[str] = []
        self._came: set[int] = set()  # ranks that were members in this life
        self._evicted = 0
        self._lost = ""  # why the job is lost
        self._has_older_state = False  # and may be found again
        # Registration.
        self._key = b""
        self._registration = 0
        self._registrar: tuple[int, int] | None = None
        self._epochs: list[int] = []  # of the shards
        self._former_epochs: list[int] = []
        self._losses: dict[int, int] = {}  # by servers' lives, how many updates of each chunk they lost
        self._chunks: list[int] = []  # of each shard; [] where they are not known
        # The change of view that is under way.
        self._least_number = 0  # every view's number is above
        self._is_wanted = False
        self._has_restarted_shard = False
        self._preparing: int | None = None
        self._prepared: set[int] = set()
        self._departing: list[tuple[Worker, Leaving]] = []  # who leaves with it
        self._empty: Message | None = None  # the view that ends the job's life before this one
        self._donor: tuple[int, int] | None = None
        self._asked: tuple[int, int, int] | None = None  # the donor's rank, the joiner's, and under which view
        self._donation: tuple[int, int] | None = None  # the donor's rank, and the step after which its state is
        self._resume_s = 0.0  # until then the members of the last view may come back
        # Decisions.
        self._decisions = Decisions()
        self._releases: list[Release] = []  # those that some shard may not have
        self._release_count = 0

    @property
    def averages(self) -> bool:
        """Whether the workers hold the weights."""
        return self.rule is not None and not owns_weights(self.rule)

    # ---- messages ----------------------------------------------------------------------------------------------

    def handle(self, message: Message, sender: Sender, now_s: float) -> list[Outgoing]:
        """A worker's message.

        Raises:
            ProtocolError: it is refused; ``code`` says how to answer.
        """
        self._now_s = now_s
        if message.type is MessageType.HELLO:
            self._hello(message, sender)
        elif message.type is MessageType.LEAVE:
            self._hear_leave(message, sender)
        else:
            worker = self._sender(message, sender)
            if message.type is MessageType.COMMIT:
                _COMMITS[message.body["what"]](self, worker, message)
            else:
                self._hear_heartbeat(worker, message)
            self._settle()
            body = self._waits_for(worker) if message.type is MessageType.HEARTBEAT else {}
            self._answer(sender.route, message, body)
        self._settle()
        return self._taken()

    def _sender(self, message: Message, sender: Sender) -> Worker:
        if message.epoch and message.epoch != self._around.epoch:
            raise ProtocolError("this server has restarted since; say HELLO again", ErrorCode.NOT_MEMBER)
        worker = self.workers.find(message, sender, self.name)
        worker.last_heard_s, worker.route = self._now_s, sender.route
        return worker

    def _send(self, worker: Worker, message: Message) -> None:
        if worker.route:
            view = message.view or (self.view.number if self.view is not None else 0)
            rank, incarnation = worker.identity
            sent = replace(message, epoch=self._around.epoch, worker=rank, incarnation=incarnation, view=view)
            self._outgoing.append(Outgoing(worker.route, sent))

    def _answer(self, route: bytes, request: Message, body: dict[str, Any] | None = None) -> None:
        """OK, or the ERROR that ``body`` describes."""
        kind = MessageType.ERROR if body and "code" in body else MessageType.OK
        to = {name: getattr(request, name) for name in ("job", "worker", "incarnation", "sequence")}
        self._outgoing.append(Outgoing(route, Message(kind, epoch=self._around.epoch, body=body or {}, **to)))

    def _taken(self) -> list[Outgoing]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    # ---- HELLO -------------------------------------------------------------------------------------------------

    def _hello(self, message: Message, sender: Sender) -> None:
        body = message.body
        self._check_run(body)
        self._check_servers(body["servers"])
        self._check_rule(body.get("rule"))
        rank = self.workers.rank_for(message, sender.user_id)
        holder = self.workers.by_rank.get(rank)
        if holder is not None and not holder.is_process(message, sender.user_id) and self._is_taken(holder, message):
            if holder.user_id != sender.user_id:
                raise belongs_to_another_key(self.name, rank)
            self.workers.claim(rank, sender, message, self._now_s)
            return
        self._greet(rank, message, sender)

    def _is_taken(self, holder: Worker, message: Message) -> bool:
        """Whether the rank of a process that comes is held by another, which may be alive."""
        if holder.incarnation > message.incarnation > 0:
            raise replaced(self.name, holder.rank)
        # A larger incarnation is of a process that came later, when there was another coordinator.
        return holder.state is not WorkerState.GONE and message.incarnation <= holder.incarnation

    def _greet(self, rank: int, message: Message, sender: Sender) -> None:
        """A process has its rank: it is told what to do next."""
        body = message.body
        self._hear_view(rank, message, sender)
        worker = self.workers.by_rank.get(rank)
        if worker is None or not worker.is_process(message, sender.user_id):
            if worker is not None:
                self._put_out(worker, "fenced", "a newer process has its rank")
            worker = self.workers.new(rank, message, sender.user_id, self._around.clocks.wall_s())
        elif worker in self._survivors() and self.view is not None:
            self._expect(self.view.members)
        if worker.state is WorkerState.GONE:
            worker.advance(WorkerEvent.CAME)
        worker.route, worker.last_heard_s, worker.nonce = sender.route, self._now_s, body["nonce"]
        worker.host, worker.pid, worker.run, worker.hello = body["host"], body["pid"], body["run"], message.sequence
        worker.is_departing, worker.why_gone = False, ""
        # A joiner that does not know the view which has it says how far it was before.
        if not self.averages or ("view" in body and view_of(body).number >= worker.admitted):
            worker.completed = max(worker.completed, body.get("completed", 0))
        self._hear_cut(worker, body)
        rule = body.get("rule")
        if rule is not None:
            worker.has_rule = True
            self._world_size = max(self._world_size, body["world_size"])
            if self.rule is None:
                self.rule, self._decisions = dict(rule), decisions_of(rule)
        self._servers = self._servers or list(body["servers"])
        if worker.run and worker.run not in self._runs:
            self._runs = [*self._runs, worker.run][-MAX_REMEMBERED:]
        self.is_changed = True
        self._choose_registrar(worker)
        self._welcome(worker)
        if worker.state is WorkerState.MEMBER and self.state is JobState.OPEN:
            self._show_view(worker)
            if self._preparing is not None and rank not in self._prepared:
                self._send_prepare(worker)

    def _check_run(self, body: Mapping[str, Any]) -> None:
        if body["run"] and body["run"] in self._ended_runs:
            raise ProtocolError(
                f"job {self.name!r} has ended: all its workers have left. This process came after that, and has nothing"
                " to do. To train again, start another run, or give it another job (PSENGINE_JOB).",
                ErrorCode.ENDED,
            )
        is_of_it = "view" in body or (body["run"] and body["run"] in self._runs)
        if self.state is JobState.LOST and (is_of_it or self._has_older_state):
            raise ProtocolError(self._lost, ErrorCode.STATE_LOST)
        if self.state in (JobState.LOST, JobState.ENDED):
            self._begin_anew()

    def _check_servers(self, servers: list[str]) -> None:
        # Names of one server may differ from one worker to another, so only the order can be compared.
        known = self._servers
        if known and known != servers and (len(known) != len(servers) or set(known) == set(servers)):
            raise ProtocolError(
                f"all workers of job {self.name!r} name the same servers in the same order (expected {known}, got"
                f" {servers})",
                ErrorCode.BAD_VALUE,
            )

    def _check_rule(self, rule: Mapping[str, Any] | None) -> None:
        if rule is None:
            return
        wanted, offered = rule.get("durability", "memory"), self._around.settings.durability
        if DURABILITY_TIERS.index(wanted) > DURABILITY_TIERS.index(offered):
            raise ProtocolError(
                f"job {self.name!r} asks for durability={wanted} (expected a server that offers at least that, got"
                f" {offered}). Fix: start its servers with --durability {wanted} --snapshot-dir DIRECTORY, or ask for"
                " less in the strategy.",
                ErrorCode.RULE_MISMATCH,
            )
        if self.rule is not None and self.rule != rule:
            raise ProtocolError(
                f"job {self.name!r} runs under another rule (expected strategy {rule_text(self.rule)!r}, got"
                f" {rule_text(rule)!r}). Every worker of a job needs the same strategy and options; give another run"
                " another job (PSENGINE_JOB).",
                ErrorCode.RULE_MISMATCH,
            )

    def _hear_view(self, rank: int, message: Message, sender: Sender) -> None:
        """A process says which view it was in last: this coordinator may not know it."""
        body = message.body
        if "view" not in body:
            return
        view, key, rule = view_of(body), body["key"], body.get("rule", self.rule)
        member = view.member(rank)
        if rule is None or member is None:
            return
        if (member.incarnation, member.user_id) != (message.incarnation, sender.user_id):
            return
        # A job that newcomers have begun, and whose others are still to come, may be an older one.
        is_unknown = self.state in (JobState.NEW, JobState.REGISTERING)
        is_unknown = is_unknown or (self.state is JobState.OPEN and self.view is None)
        if key != self._key:
            self._least_number = max(self._least_number, view.number)
            if owns_weights(rule):
                raise ProtocolError(
                    f"job {self.name!r} is lost: its lead server has restarted without the weights that this worker"
                    f" trained (durability {self._around.settings.durability}). Start all anew from a checkpoint.",
                    ErrorCode.STATE_LOST,
                )
            if not is_unknown:
                return
        if is_unknown:
            logger.warning("job %r is under way already; its workers have one lease to come back", self.name)
            self._advance(JobEvent.TOLD)
            self._key, self._registration, self._registrar = key, self._next_registration(), None
            self.rule, self._decisions = dict(rule), decisions_of(rule)
            self._world_size = max(self._world_size, view.world_size)
            self._resume_s, self._epochs = self._now_s + self._lease_s, list(view.shards)
        known = {one.number for one in self._releases}
        self._releases += [one for one in view.releases if one.number not in known]
        self._releases.sort(key=lambda one: one.number)
        if self.view is not None and view.number <= self.view.number:
            return
        if self.state is not JobState.RESUMING:
            self._least_number, self._is_wanted = max(self._least_number, view.number), True
            return
        # What shards told of their lives meanwhile is newer.
        for shard, epoch in enumerate(view.shards):
            if epoch not in self._former_epochs and shard < len(self._epochs):
                self._epochs[shard] = epoch
        self.view = view
        self._expect(view.members)
        named = {(one.rank, one.incarnation) for one in view.members}
        for worker in self.workers.members:
            if worker.identity not in named:
                self._put_out(worker, "evicted", "a view that a former coordinator published is without it")

    def _expect(self, members: tuple[ViewMember, ...]) -> None:
        """The members of a view may come back within a lease from now on."""
        for member in members:
            worker = self.workers.by_rank.get(member.rank)
            if worker is None or worker.incarnation < member.incarnation:
                worker = Worker(member.rank, member.incarnation, None, member.user_id, WorkerState.GONE)
                worker.completed = member.first_step - 1
                self.workers.add(worker)
            if worker.incarnation > member.incarnation or worker.state is WorkerState.MEMBER:
                continue
            if worker.state is WorkerState.GONE:
                if worker.why_gone in ("left", "fenced"):
                    continue
                worker.route, worker.last_heard_s = b"", self._now_s
            worker.advance(WorkerEvent.EXPECTED)
            worker.first_step, worker.has_rule, worker.why_gone = member.first_step, True, ""
            self._came.add(worker.rank)

    def _survivors(self) -> list[Worker]:
        """Of a job whose members are all out: those of the last view who may come back with their state."""
        if self.state is not JobState.RESUMING or self.view is None or not self.averages:
            return []
        known = ((self.workers.by_rank.get(one.rank), one.incarnation) for one in self.view.members)
        return [one for one, incarnation in known if one is not None and _may_return(one, incarnation)]

    def _welcome(self, worker: Worker) -> None:
        settings = self._around.settings
        body: dict[str, Any] = {
            "state": self._welcome_state(worker),
            "lease_s": settings.lease_s,
            "heartbeat_s": settings.heartbeat_s,
            "software": settings.software,
            "world_size": self._world_size,
            "rule": self.rule,
        }
        if self._key:
            body |= {"registration": self._registration, "key": self._key}
        if body["state"] == "initialise" and self._empty is not None:
            self._send(worker, self._empty)
        self._send(worker, Message(MessageType.WELCOME, self.number, sequence=worker.hello, body=body))

    def _welcome_state(self, worker: Worker) -> str:
        if not worker.has_rule:
            return "reserved"
        if self.state is JobState.REGISTERING and worker.identity == self._registrar:
            return "initialise"
        if self.state is not JobState.OPEN:
            return "wait"
        if self.averages:
            if self.view is None:
                return "wait"
            return "ready" if worker.state is WorkerState.MEMBER and not worker.is_reading else "join"
        return "wait" if worker.unreachable and worker.state is not WorkerState.MEMBER else "ready"

    # ---- registration ------------------------------------------------------------------------------------------

    def _choose_registrar(self, greeted: Worker | None = None) -> None:
        """Where nobody brings the job's first values, tell a worker to; ``greeted`` is told by its WELCOME."""
        waiting = [one for one in self.workers.of(WorkerState.WAITING, WorkerState.JOINING) if one.route]
        waiting = [one for one in waiting if one.has_rule]
        if self.state is JobState.REGISTERING:
            if any(one.identity == self._registrar for one in waiting):
                return
        elif self.state is JobState.RESUMING:
            is_time = self._now_s >= self._resume_s or not self._survivors()
            if not self.averages or self.workers.members or not is_time:
                return
        elif self.state is not JobState.NEW:
            return
        # With several workers rank 0 gives the values; where its process died, whoever is there.
        if not waiting or (waiting[0].rank and self._world_size > 1 and self.state is not JobState.REGISTERING):
            return
        if self.state is JobState.RESUMING:
            logger.warning("job %r begins anew: all its workers are gone", self.name)
        worker = waiting[0]
        self._close_view()
        self._reset()
        self._advance(JobEvent.BEGUN)
        self._registrar, self._registration = worker.identity, self._next_registration()
        self._key = self._around.draw_key()
        assert self.rule is not None
        self._decisions = decisions_of(self.rule)
        if self._around.settings.warns_of_loss and not self.averages:
            logger.warning(
                "NOTHING IS DURABLE (durability memory): when this process ends, crashes or restarts, the model of job"
                " %r is LOST. Fix: start it with --snapshot-dir DIRECTORY, and --durability log where no acknowledged"
                " update may be lost",
                self.name,
            )
        for one in waiting:
            one.advance(WorkerEvent.ANEW)
            if one is not greeted:
                self._welcome(one)

    def _close_view(self) -> None:
        """The members of a job that begins anew may only be paused: a view without them has shards forget them."""
        if self.view is not None and self.view.members:
            view = View(self._next_number(), self._around.epoch, (), tuple(self._epochs), world_size=self._world_size)
            self._empty, self._least_number = message_of(view, self._key, self.number), view.number
            self._empty.view = view.number

    def _next_registration(self) -> int:
        """Shards keep the highest, also that of a coordinator whose numbers are forgotten."""
        return max(self._registration + 1, int(self._around.clocks.wall_s() * 1000))

    def _reset(self) -> None:
        """Nothing of the job's life so far counts."""
        self._least_number = self._next_number() - 1
        self.view, self._key, self._registrar, self._epochs, self._chunks = None, b"", None, [], []
        self._releases, self._asked = [], None
        self._came.clear()
        self._runs = list(dict.fromkeys(one.run for one in self.workers.present if one.run))
        self._end_change()
        self.is_changed = True

    def _begin_anew(self) -> None:
        """Another run of a job that has ended, or was lost."""
        self._advance(JobEvent.ANEW)
        self._reset()
        self._world_size, self._servers, self._lost = 1, [], ""
        if not any(one.has_rule for one in self.workers.present):
            self.rule = None

    def _hear_registered(self, worker: Worker, message: Message) -> None:
        body = message.body
        if (worker.identity, body["registration"]) != (self._registrar, self._registration):
            raise self._stale("registered a model under an older registration")
        if self.state is JobState.REGISTERING:
            chunks = body["chunks"]
            self._epochs, self._chunks = list(body["epochs"]), list(chunks) if isinstance(chunks, list) else []
            self._empty = None
            self._advance(JobEvent.REGISTERED)

    def _stale(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"a worker of job {self.name!r} {what}; the job has changed since, so it has to begin this again",
            ErrorCode.STALE,
        )

    def _advance(self, event: JobEvent) -> None:
        self.state = after(JOB, self.state, event)
        self.is_changed = True

    # ---- what members say --------------------------------------------------------------------------------------

    def _hear_heartbeat(self, worker: Worker, message: Message) -> None:
        body = message.body
        worker.telemetry.hear(body, self._now_s)
        self._hear_cut(worker, body)
        if message.view >= worker.admitted:
            worker.is_blocked = body.get("blocked", False)
            self._hear_completed(worker, body.get("completed", 0))
        if self._asked is not None and self._asked[0] == worker.rank:
            self._asked = None  # it is said again

    def _hear_completed(self, worker: Worker, step: int) -> None:
        worker.completed = max(worker.completed, step)
        if worker.completed >= worker.first_step:
            worker.is_reading = False

    def _hear_cut(self, worker: Worker, body: Mapping[str, Any]) -> None:
        if "unreachable" in body:
            worker.unreachable = frozenset(body["unreachable"])
        if not worker.unreachable:
            worker.cut_s = None
        elif worker.cut_s is None:
            worker.cut_s = self._now_s

    def _hear_prepared(self, worker: Worker, message: Message) -> None:
        if worker.state is WorkerState.MEMBER and message.body["view"] == self._preparing:
            self._prepared.add(worker.rank)
            self._hear_completed(worker, message.body["completed"])

    def _hear_step(self, worker: Worker, message: Message) -> None:
        step = message.body["step"]
        if worker.state is not WorkerState.MEMBER or message.view < worker.admitted or self.view is None:
            return
        # Shards forgot what was pushed under an older view; it is pushed and committed again.
        if self.averages and message.view < self.view.number and step >= self.view.from_step:
            return
        worker.is_reading = False
        self._decisions.commit(worker, step, abstained=message.body["abstained"], now_s=self._now_s)

    def _hear_join(self, worker: Worker, message: Message) -> None:
        if not self.averages:
            return
        if worker.state is WorkerState.MEMBER:
            if message.view < max(worker.admitted, 1):
                return  # a repetition: the view that has it is on its way
            self._record.note("joined", worker, " lacks state, and joins again")
            self._is_wanted = True
        worker.is_reading = False
        worker.advance(WorkerEvent.ASKED)

    def _hear_donated(self, worker: Worker, message: Message) -> None:
        body = message.body
        joiner = self.workers.by_rank.get(body["rank"])
        if joiner is None or joiner.incarnation != body["incarnation"] or joiner.state is not WorkerState.JOINING:
            return  # it is gone, or this was heard before
        is_now = self.view is not None and message.view == self.view.number and list(body["epochs"]) == self._epochs
        if worker.state is not WorkerState.MEMBER or not is_now:
            raise self._stale("deposited its state under an older view")
        self._hear_completed(worker, body["step"])
        self._donation = worker.rank, body["step"]

    def _hear_life(self, worker: Worker, message: Message) -> None:
        """A shard has another epoch than the view says, or holds a view of another coordinator's."""
        body, shard, number = message.body, message.body["shard"], message.body["view"]
        if shard >= len(self._epochs) or self.state not in (JobState.OPEN, JobState.RESUMING):
            return
        if body["epoch"] != self._epochs[shard]:
            if body["epoch"] in self._former_epochs:
                return  # said late
            self._former_epochs = [*self._former_epochs, self._epochs[shard]][-MAX_REMEMBERED:]
            self._epochs[shard] = body["epoch"]
            self._is_wanted = self._has_restarted_shard = self.is_changed = True
            self._asked = self._donation = None  # what was deposited there is lost
            self._least_number = max(self._least_number, number)
            if not self.averages and self._chunks and body["chunks"] < self._chunks[shard]:
                self._lose(
                    f"shard {shard} has restarted and has {body['chunks']} of its {self._chunks[shard]} chunks, which"
                    " no worker can give again. Fix: start all anew from a checkpoint; servers that start with"
                    " --snapshot-dir DIRECTORY, and --durability log where no acknowledged update may be lost, keep"
                    " them"
                )
                return
        elif self.view is not None and number >= self.view.number:
            self._least_number, self._is_wanted = max(self._least_number, number), True
        self._hear_loss(body["epoch"], shard, body["version"], body.get("lost", 0))

    def _hear_loss(self, epoch: int, shard: int, version: int, lost: int) -> None:
        """A shard has gone back to an older state: workers know how many updates it lacks; an event once a life."""
        known = self._losses.get(epoch, 0)
        if lost <= known:
            return
        self._losses[epoch] = lost
        if not known:
            self._record.lost(lost, shard)
        if self._around.settings.durability == "log" and self.state is not JobState.LOST:
            self._has_older_state = True
            self._lose(
                f"shard {shard} came back with an older state, version {version}, and workers knew of version"
                f" {version + lost}: its log lacks updates that were acknowledged. Fix: start the job's servers with"
                " the --snapshot-dir of before, then the workers; or drop the job by psengine admin forget"
            )

    def _lose(self, why: str) -> None:
        self._lost = f"job {self.name!r} is lost: {why}."
        logger.error("%s", self._lost)
        self._advance(JobEvent.LOST)
        for worker in self.workers.present:
            self._dismiss(worker, ErrorCode.STATE_LOST, self._lost)

    def _dismiss(self, worker: Worker, code: str, text: str) -> None:
        """It has nothing to do here any more, and is told so unasked."""
        self._send(worker, Message(MessageType.ERROR, self.number, body={"code": code, "text": text}))
        worker.advance(WorkerEvent.WENT)
        worker.why_gone = "left"

    def _hear_leave(self, message: Message, sender: Sender) -> None:
        worker = self.workers.by_rank.get(message.worker)
        if worker is not None and worker.incarnation == message.incarnation and worker.why_gone == "left":
            if not worker.is_departing:
                self._answer(sender.route, message)  # the OK was lost
            return
        worker = self._sender(message, sender)
        if worker.state is WorkerState.MEMBER:
            worker.completed = max(worker.completed, message.body["completed"])
            failed = message.body.get("failed", False)
            worker.leaving = Leaving(message.body["completed"], message.sequence, failed)
        else:
            self._put_out(worker, "left", "it is done")
            self._answer(sender.route, message)

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Outgoing]:
        """Look at the clock: leases, claims, grace windows."""
        self._now_s = now_s
        for claim, is_alive in self.workers.judged(2 * self._around.settings.heartbeat_s, now_s):
            holder = self.workers.by_rank.get(claim.rank)
            try:
                if is_alive and holder is not None:
                    raise is_held(self.name, holder)
                self._check_run(claim.message.body)
                self._greet(claim.rank, claim.message, claim.sender)
            except ProtocolError as error:
                self._answer(claim.sender.route, claim.message, {"code": error.code, "text": str(error)})
        for worker in self.workers.expired(self._lease_s, now_s):
            silent_s = now_s - worker.last_heard_s
            self._put_out(worker, "evicted", f"silent for {silent_s:.1f} s, longer than its lease")
        self._put_out_cut_off()
        self._settle()
        return self._taken()

    def _put_out_cut_off(self) -> None:
        """Put out members that cannot reach a shard for a lease, where others reach it and wait.

        A lease passes between the first report and the verdict: others may be about to find out the same.
        """
        members = self.workers.members
        may_wait = self.averages or type(self._decisions) is not Decisions
        if self.state is not JobState.OPEN or not may_wait or not any(one.unreachable for one in members):
            return
        by_nobody = frozenset.intersection(*(one.unreachable for one in members))
        kept = [one for one in members if not one.unreachable - by_nobody]
        if not any(one.is_blocked for one in kept):
            return
        for worker in members:
            shards = worker.unreachable - by_nobody
            if shards and worker.cut_s is not None and self._now_s - worker.cut_s > self._lease_s:
                names = ", ".join(map(str, sorted(shards)))
                self._put_out(worker, "evicted", f"it cannot reach shards {names}, which others reach, who wait for it")

    def evict(self, rank: int, now_s: float) -> list[Outgoing] | None:
        """An operator ends a worker's lease; None where there is no such worker."""
        self._now_s = now_s
        worker = self.workers.by_rank.get(rank)
        if worker is None or worker.state is WorkerState.GONE:
            return None
        self._put_out(worker, "evicted", "an operator ended its lease")
        self._settle()
        return self._taken()

    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` until now nobody listened here."""
        self.workers.stood_still(pause_s)
        self._resume_s += pause_s

    def _put_out(self, worker: Worker, reason: str, why: str) -> None:
        """A worker is gone: it left, or was evicted, or fenced by another process that has its rank."""
        if worker.state is WorkerState.GONE:
            return
        if worker.state is WorkerState.MEMBER:
            self._is_wanted = True
            self._evicted += reason != "left"
        elif worker.identity == self._registrar:
            self._registrar = None  # if it comes back it begins again
        worker.advance(WorkerEvent.WENT)
        worker.why_gone, worker.leaving, worker.is_reading = reason, None, False
        self._prepared.discard(worker.rank)
        self._record.went(worker, reason, why, worker.completed)
        if reason != "left":
            self._record.out(worker, why, self._now_s)
        self.is_changed = True

    # ---- what follows ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what can be done now."""
        self._choose_registrar()
        self._let_leave()
        members = self.workers.members
        if self.state is JobState.RESUMING and all(one.route for one in members) and (members or not self.averages):
            self._advance(JobEvent.RESUMED)
            self._decisions.learn(self._releases, members)
            self._is_wanted = bool(members)
            self._tell_joiners()
        if self.state is not JobState.OPEN:
            return
        self._change_view()
        has_begun = self.averages and self.view is not None and bool(self.view.members)
        if has_begun and not self.workers.members and not self._departing:
            self._advance(JobEvent.ABANDONED)
            self._resume_s = self._now_s + self._lease_s
            self._end_change()
            self._choose_registrar()
            return
        self._ask_donor()
        self._decide()

    def _let_leave(self) -> None:
        """Members that want to leave may, once all others have the averages that they have."""
        members = self.workers.members
        if self.state is not JobState.OPEN:
            return
        for worker in [
            one for one in members if one.leaving is not None and (not self.averages or _is_spare(one, members))
        ]:
            assert worker.leaving is not None
            self._departing.append((worker, worker.leaving))
            why = "its training broke off" if worker.leaving.failed else "it is done"
            worker.is_departing = True
            self._put_out(worker, "left", why)

    def _newcomers(self) -> list[tuple[Worker, int]]:
        """Who comes in with the next view, and its first step."""
        waiting = [one for one in self.workers.of(WorkerState.WAITING, WorkerState.JOINING) if one.route]
        waiting = [one for one in waiting if one.has_rule and not one.unreachable]
        if not self.averages:
            return [(one, self._decisions.first_step(one)) for one in waiting]
        if self.view is None:
            return [(one, 1) for one in waiting] if len(waiting) >= self._world_size else []
        if self._donation is None:
            return []
        donor, step = self._donation
        if not any((one.rank, one.completed) == (donor, step) for one in self.workers.members):
            self._donation = self._asked = None
            return []
        return [(one, step + 1) for one in waiting if one.state is WorkerState.JOINING]

    def _next_number(self) -> int:
        return max(self._least_number, self.view.number if self.view is not None else 0) + 1

    def _change_view(self) -> None:
        newcomers, members = self._newcomers(), self.workers.members
        # Once members are frozen a view has to come, also where its cause is gone.
        if not newcomers and not self._is_wanted and self._preparing is None:
            return
        if self.averages:
            if self._preparing is None and members:
                self._preparing = self._next_number()
                for worker in members:
                    self._send_prepare(worker)
            if any(one.rank not in self._prepared for one in members):
                return
            if not members and not newcomers and not self._departing:
                return
        self._publish(newcomers)

    def _send_prepare(self, worker: Worker) -> None:
        assert self._preparing is not None
        self._send(worker, Message(MessageType.PREPARE, self.number, view=self._preparing))

    def _publish(self, newcomers: list[tuple[Worker, int]]) -> None:
        number, is_first = max(self._preparing or 0, self._next_number()), self.view is None
        newest = max((one.completed for one in self.workers.members), default=0)
        for worker in self.workers.members if self.averages and self._has_restarted_shard else ():
            if worker.completed < newest - 1:
                self._put_out(worker, "evicted", "it lacks averages that a restarted server cannot give again")
        for worker, first_step in newcomers:
            worker.advance(WorkerEvent.ADMITTED)
            worker.first_step, worker.admitted, worker.is_blocked = first_step, number, False
            if self.averages:
                worker.completed, worker.is_reading = first_step - 1, not is_first
                newest = max(newest, worker.completed)
            self._came.add(worker.rank)
            self._record.note("joined", worker, " takes part")
        members, from_step = self.workers.members, newest + 1 if self.averages else 1
        # Who reads its state from the servers has no averages to give.
        givers = [one.rank for one in members if one.completed == newest and not one.is_reading]
        is_lacking = self.averages and any(one.completed < newest for one in members)
        self._releases = self._decisions.outstanding(self._releases, members)
        if self.averages:
            self._releases = [one for one in self._releases if one.step < from_step]
        self.view = View(
            number,
            self._around.epoch,
            tuple(one.to_view() for one in members),
            tuple(self._epochs),
            from_step=from_step,
            world_size=self._world_size,
            donor=givers[0] if givers and is_lacking else None,
            oldest=min((one.completed for one in members), default=newest),
            releases=tuple(self._releases),
        )
        self._decisions.adopt(members, from_step, max(0, self._world_size - len(self._came)))
        departing = self._departing
        self._end_change()
        self._release_count = 0
        self.is_changed = True
        logger.info("job %r: view %d has workers %s", self.name, number, [one.rank for one in members])
        for worker in (*members, *(one for one, _ in departing)):
            self._show_view(worker)
        if is_first:
            self._tell_joiners()
        for worker, leaving in departing:
            worker.is_departing = False
            self._send(worker, Message(MessageType.OK, self.number, sequence=leaving.request))
        if departing and not members:
            self._end(has_failed=any(leaving.failed for _, leaving in departing))

    def _tell_joiners(self) -> None:
        """Workers that waited for an averaging job which goes on without them have to join it."""
        for worker in self.workers.of(WorkerState.WAITING, WorkerState.JOINING) if self.averages else ():
            if worker.has_rule:
                self._welcome(worker)

    def _end_change(self) -> None:
        self._preparing, self._prepared, self._departing = None, set(), []
        self._is_wanted = self._has_restarted_shard = False
        self._donation = self._asked = None

    def _show_view(self, worker: Worker) -> None:
        """The view, and what was decided under it."""
        if self.view is None or self.view.epoch != self._around.epoch:
            return
        self._send(worker, message_of(self.view, self._key, self.number))
        for release in self._releases:
            if release.number >> 32 == self.view.number:
                self._send(worker, message_of(release, self._key, self.number))

    def _end(self, *, has_failed: bool) -> None:
        """The last worker has left; where its training broke off it may be started again."""
        if has_failed and self.averages:
            self._advance(JobEvent.ABANDONED)
            self._resume_s = self._now_s
            self._choose_registrar()
        if has_failed or (not self.averages and len(self._came) < self._world_size):
            return  # others are to come yet
        self._ended_runs = [*self._ended_runs, *self._runs][-MAX_REMEMBERED:]
        self._runs = []
        self._came.clear()
        if not self.averages:
            return
        logger.info("job %r has ended", self.name)
        self._advance(JobEvent.ENDED)
        for worker in self.workers.present:
            if worker.run in self._ended_runs:
                self._dismiss(worker, ErrorCode.ENDED, f"job {self.name!r} has ended: its last worker has left")
        if self.workers.present:
            self._begin_anew()
            self._choose_registrar()

    def _ask_donor(self) -> None:
        """Have a member deposit its state for those who join, one deposit at a time."""
        joiners = [one for one in self.workers.of(WorkerState.JOINING) if one.route and not one.unreachable]
        members = self.workers.members
        is_busy = self._preparing is not None or self._donation is not None or any(one.is_reading for one in members)
        if not joiners or not members or is_busy or self.view is None:
            return
        # The same donor as long as it lives: two might deposit states of different steps at once.
        known = [one for one in members if one.identity == self._donor and one.leaving is None]
        donor = known[0] if known else min(members, key=lambda one: (one.leaving is not None, one.rank))
        self._donor = donor.identity
        asked = donor.rank, joiners[0].rank, self.view.number
        if self._asked == asked:
            return
        self._asked = asked
        body = {"rank": joiners[0].rank, "incarnation": joiners[0].incarnation}
        self._send(donor, Message(MessageType.STATE_WANTED, self.number, body=body))

    def _decide(self) -> None:
        if self.view is None or self.view.epoch != self._around.epoch or self._preparing is not None:
            return
        for draft in self._decisions.due(self._now_s):
            self._release_count += 1
            # Numbers grow from view to view, also past those of a coordinator whose numbers are forgotten.
            release = Release(self.view.number << 32 | self._release_count, *draft)
            members = self.workers.members
            self._releases = [*self._decisions.outstanding(self._releases, members), release]
            self.is_changed |= self._decisions.is_durable
            for worker in members:
                self._send(worker, message_of(release, self._key, self.number))

    # ---- for people, and the disk ------------------------------------------------------------------------------

    def _waits_for(self, worker: Worker) -> dict[str, Any]:
        """For the answer to a heartbeat: what the worker waits for here, and for whom."""
        why, ranks = "", []
        if self.state in (JobState.NEW, JobState.REGISTERING):
            why, ranks = "register", [self._registrar[0] if self._registrar is not None else 0]
        elif self.state is JobState.RESUMING:
            why, ranks = "resume", [one.rank for one in self.workers.members if not one.route]
        elif self.averages and self.view is None:
            present = {one.rank for one in self.workers.present if one.has_rule}
            why, ranks = "begin", [rank for rank in range(self._world_size) if rank not in present]
        elif self._preparing is not None:
            why, ranks = "prepare", [one.rank for one in self.workers.members if one.rank not in self._prepared]
        elif worker.state is WorkerState.JOINING:
            why, ranks = "join", [] if self._asked is None else [self._asked[0]]
        elif worker.state is WorkerState.MEMBER and worker.is_blocked:
            why, ranks = "release", self._decisions.waiting_for()
            if type(self._decisions) is not Decisions and len(self._came) < self._world_size and not self.averages:
                ranks = [*ranks, *(rank for rank in range(self._world_size) if rank not in self._came)]
        ranks = [rank for rank in ranks if rank != worker.rank]
        return {"why": why, "waiting_for": ranks} if ranks else {}

    def is_awaited(self, message: Message, user_id: str) -> bool:
        """Whether a HELLO comes from a process of this job, or for the rank of one."""
        workers = self.workers.by_rank.values()
        known = any(one.is_process(message, user_id) for one in workers)
        return known or "view" in message.body or message.body.get("rank") in {one.rank for one in self.workers.present}

    @property
    def remembered_count(self) -> int:
        """Workers that are here, or were put out less than a lease ago and may come back."""
        gone = [one for one in self.workers.of(WorkerState.GONE) if one.why_gone == "evicted"]
        recent = [one for one in gone if self._now_s - one.last_heard_s <= 2 * self._lease_s]
        return len(self.workers.present) + len(recent)

    def status(self, now_s: float) -> CoordinatedJob:
        """The job as it is now."""
        silent_s = 2 * self._around.settings.heartbeat_s

        def state_of(worker: Worker) -> State:
            if worker.state is not WorkerState.MEMBER:
                return "joining"
            return "silent" if now_s - worker.last_heard_s > silent_s else "live"

        return CoordinatedJob(
            rule=self.rule or {},
            phase=self.state.value,
            started=any(one.completed for one in self.workers.members),
            expected_workers=self._world_size,
            evicted=self._evicted,
            lost_updates=sum(self._losses.values()),
            departed=tuple(self._record.departed),
            workers=tuple(
                CoordinatedWorker(
                    rank=one.rank,
                    incarnation=one.incarnation,
                    state=state_of(one),
                    host=one.host,
                    pid=one.pid,
                    silent_s=round(now_s - one.last_heard_s, 3),
                    waiting_for=tuple(self._waits_for(one).get("waiting_for", ())),
                    telemetry=one.telemetry.times,
                )
                for one in self.workers.present
            ),
        )

    def to_meta(self) -> dict[str, Any]:
        """What a restart has to find, JSON-able."""
        return {
            **{name: getattr(self, f"_{name}") for name in _DURABLE},
            **self.workers.to_meta(),
            "name": self.name,
            "state": (JobState.OPEN if self._has_older_state else self.state).value,
            "rule": self.rule,
            "key": self._key.hex(),
            "came": sorted(self._came),
            "view": None if self.view is None else msgspec.to_builtins(self.view),
            "releases": msgspec.to_builtins(self._releases) if self._decisions.is_durable else [],
            "decisions": self._decisions.to_meta(),
        }

    def restore(self, meta: Mapping[str, Any], now_s: float) -> None:
        """Inverse of ``to_meta``, in a new object: workers have a lease to come back."""
        for name in _DURABLE:
            setattr(self, f"_{name}", meta[name])
        self.workers.restore(meta)
        self.state, self.rule, self._key = JobState(meta["state"]), meta["rule"], bytes.fromhex(meta["key"])
        self._came = set(meta["came"])
        if self.rule is not None:
            self._decisions = decisions_of(self.rule)
            self._decisions.restore(meta["decisions"])
        if meta["view"] is not None:
            self.view = msgspec.convert(meta["view"], View)
        self._releases = msgspec.convert(meta["releases"], list[Release])
        if self.state is JobState.REGISTERING:
            self.state = JobState.NEW
        elif self.state is JobState.OPEN and self.view is not None and (self.averages or self.workers.members):
            self._advance(JobEvent.RESTARTED)
        self._resume_s = now_s + self._lease_s
        for worker in self.workers.by_rank.values():
            worker.last_heard_s = now_s


_DURABLE = (
    "world_size", "servers", "runs", "ended_runs", "evicted", "lost",
    "registration", "epochs", "chunks", "least_number",
)  # fmt: skip
_COMMITS: dict[str, Callable[[Coordinator, Worker, Message], None]] = {
    "registered": Coordinator._hear_registered,
    "prepared": Coordinator._hear_prepared,
    "step": Coordinator._hear_step,
    "join": Coordinator._hear_join,
    "donated": Coordinator._hear_donated,
    "life": Coordinator._hear_life,
}


def _may_return(worker: Worker, incarnation: int) -> bool:
    """Whether this is the worker of a view that was put out for its silence."""
    is_it = worker.incarnation == incarnation
    return is_it and worker.state is WorkerState.GONE and worker.why_gone == "evicted"


def _is_spare(leaver: Worker, members: list[Worker]) -> bool:
    """Whether all others have every average that a worker has which wants to leave."""
    assert leaver.leaving is not None
    step, _, failed = leaver.leaving
    return failed or all(one.completed >= step for one in members if one is not leaver)
