"""One job's coordinator: who takes part (views), who gives state to whom, and what is decided once a step. Pure.

    worker ──HELLO──► WAITING ─┬─ first: initialise ─► COMMIT registered ─┐
                               ├─ servers hold the weights ───────────────┼─► VIEW
                               └─ join ─► COMMIT join ─► JOINING          │
    donor  ◄── STATE_WANTED ───────────────────┘                          │
           ─── COMMIT donated ─► PREPARE ─► all: COMMIT prepared ─────────┘

A message changes what is known. ``_settled`` then does what follows, and ``_tell`` sends each worker what it should
know and was not told. Where workers hold the weights, members stop completing steps (PREPARE) and say which was their
last, before a view says from which step on shards forget what they have. ``states.py`` has the tables.
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
from psengine.parameter_server.server.coordinator.states import JOB, JobState, WorkerState, after
from psengine.parameter_server.server.coordinator.workers import Leaving, Told, Worker, Workers
from psengine.parameter_server.server.interfaces import Clocks, Outgoing, Sender, ShardSettings
from psengine.parameter_server.status_model import CoordinatedJob, CoordinatedWorker, Departed, State
from psengine.protocol.layout import job_number
from psengine.protocol.messages import DURABILITY_TIERS, MAX_COUNTED, ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View, ViewMember, message_of, view_of

logger = logging.getLogger(__name__)
# Of runs that are over, and of shards' former lives, the newest are remembered.
MAX_REMEMBERED = 64
MAX_DEPARTED = 20  # in a status
# Numbers that a worker may say; what is counted on from them still fits where it is sent and kept.
_LARGEST = {"view": 2**30, "completed": MAX_COUNTED, "step": MAX_COUNTED}
MAX_INCARNATION = 2**62


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
        self._outgoing: list[Outgoing] = []
        self._now_s = 0.0
        self._world_size = 1
        self._servers: list[str] = []
        self._runs: list[str] = []  # of those who took part in this life of the job
        self._refused: dict[str, list[str]] = {}  # runs that are over, and how their processes are refused
        self._came: set[int] = set()  # ranks that were members in this life
        self._evicted = 0
        # Registration.
        self._key = b""
        self._registration = 0
        self._registrar: tuple[int, int] | None = None
        self._epochs: list[int] = []  # of the shards
        self._losses: dict[int, int] = {}  # by servers' lives, how many updates of each chunk they lost
        self._halted = ""  # why nobody goes on until the servers find what they lost
        self._lost = ""  # why its weights are lost, for people, until there are others
        self._chunks: list[int] = []  # of each shard
        self._empty: Message | None = None  # the view that ends the job's life before this one
        # The change of view that is under way: its causes, then its number.
        self._is_wanted = False
        self._has_restarted_shard = False
        self._preparing: int | None = None
        self._least_number = 0  # every view's number is above
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

    # ---- what comes, and what is answered ----------------------------------------------------------------------

    def handle(self, message: Message, sender: Sender, now_s: float) -> list[Outgoing]:
        """A worker's message.

        Raises:
            ProtocolError: it is refused; ``code`` says how to answer.
        """
        self._now_s = now_s
        _check_numbers(message)
        if message.type is MessageType.HELLO:
            self._hello(message, sender)
            return self._settled()
        if message.epoch and message.epoch != self._around.epoch:
            raise ProtocolError("this server has restarted since; say HELLO again", ErrorCode.NOT_MEMBER)
        worker = self.workers.find(message, sender, self.name)
        worker.last_heard_s, worker.route = now_s, sender.route
        is_later = getattr(self, f"_hear_{message.body.get('what', message.type.name.lower())}")(worker, message)
        outgoing = self._settled()
        if not is_later:
            body = self._waits_for(worker) if message.type is MessageType.HEARTBEAT else {}
            outgoing.append(self._answer(sender.route, message, body))
        return outgoing

    def tick(self, now_s: float) -> list[Outgoing]:
        """Look at the clock: leases, claims, grace windows."""
        self._now_s = now_s
        for claim, is_alive in self.workers.judged(2 * self._around.settings.heartbeat_s, now_s):
            try:
                if is_alive:
                    self._refuse_rank(claim.rank, "is held by process {0.pid} on {0.host}, which is alive: check RANK")
                self._check(claim.message.body)
                self._greet(claim.rank, claim.message, claim.sender)
            except ProtocolError as error:
                body = {"code": error.code, "text": str(error)}
                self._outgoing.append(self._answer(claim.sender.route, claim.message, body))
        for worker in self.workers.expired(self._lease_s, now_s):
            silent_s = now_s - worker.last_heard_s
            self._put_out(worker, "evicted", f"silent for {silent_s:.1f} s, longer than its lease")
        self._put_out_cut_off()
        return self._settled()

    def evict(self, rank: int, now_s: float) -> list[Outgoing] | None:
        """An operator ends a worker's lease; None where there is no such worker."""
        self._now_s = now_s
        worker = self.workers.by_rank.get(rank)
        if worker is None or worker.state is WorkerState.GONE:
            return None
        self._put_out(worker, "evicted", "an operator ended its lease")
        return self._settled()

    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` until now nobody listened here."""
        self.workers.stood_still(pause_s)
        self._resume_s += pause_s

    def _settled(self) -> list[Outgoing]:
        """Do what can be done now, and tell all who have to know; what is sent."""
        self._resume()
        if self.state is JobState.OPEN:
            self._let_leave()
            self._change_view()
        if self.state is JobState.OPEN:
            self._ask_donor()
            self._decide()
        self._choose_registrar()
        for worker in self.workers.present:
            self._tell(worker)
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _tell(self, worker: Worker) -> None:
        """Send a worker what it should know and was not told on its connection."""
        told, welcome = worker.told, (self._welcome_state(worker), self._registration)
        # Who waits hears also unasked of another registrar, and that it has to join.
        is_news = welcome[0] == "join" or (welcome[0] in ("initialise", "wait") and welcome[1] != told.welcome[1])
        is_waiting = worker.state in (WorkerState.WAITING, WorkerState.JOINING)
        if worker.route and told.welcome != welcome and (not told.welcome[0] or (is_news and is_waiting)):
            told.welcome = welcome
            self._welcome(worker, welcome[0])
        if self.state is not JobState.OPEN or (worker.state is not WorkerState.MEMBER and worker.leaving is None):
            return
        view = self.view if self.view is not None and self.view.epoch == self._around.epoch else None
        if view is not None and told.view != view.number:
            told.view = view.number
            self._send(worker, message_of(view, self._key, self.number))
        for release in self._releases:
            if view is not None and release.number > max(told.release, view.number << 32):
                told.release = release.number
                self._send(worker, message_of(release, self._key, self.number))
        if self._preparing is not None and self._preparing not in (worker.prepared, told.prepare):
            told.prepare = self._preparing
            self._send(worker, Message(MessageType.PREPARE, self.number, view=self._preparing))
        if self._asked is not None and self._asked[0] == worker.rank and told.asked != self._asked:
            told.asked = self._asked
            joiner = self.workers.by_rank[self._asked[1]]
            body = {"rank": joiner.rank, "incarnation": joiner.incarnation}
            self._send(worker, Message(MessageType.STATE_WANTED, self.number, body=body))

    def _welcome_state(self, worker: Worker) -> str:
        if not worker.has_rule:
            return "reserved"
        is_member = worker.state is WorkerState.MEMBER
        if self.state is JobState.REGISTERING and worker.identity == self._registrar:
            return "initialise"
        if self.state is not JobState.OPEN or (self.averages and self.view is None):
            return "wait"
        if self.averages:
            return "ready" if is_member and not worker.is_reading else "join"
        return "wait" if worker.unreachable and not is_member else "ready"

    def _welcome(self, worker: Worker, state: str) -> None:
        settings = self._around.settings
        body = {
            "state": state,
            "lease_s": settings.lease_s,
            "heartbeat_s": settings.heartbeat_s,
        }
        if self._key and worker.has_rule:
            body |= {"registration": self._registration, "key": self._key}
        if state == "initialise" and self._empty is not None:
            self._send(worker, self._empty)
        self._send(worker, Message(MessageType.WELCOME, self.number, sequence=worker.hello, body=body))

    def _send(self, worker: Worker, message: Message) -> None:
        if worker.route:
            view = message.view or (self.view.number if self.view is not None else 0)
            rank, incarnation = worker.identity
            sent = replace(message, epoch=self._around.epoch, worker=rank, incarnation=incarnation, view=view)
            self._outgoing.append(Outgoing(worker.route, sent))

    def _answer(self, route: bytes, request: Message, body: dict[str, Any]) -> Outgoing:
        kind = MessageType.ERROR if "code" in body else MessageType.OK
        return Outgoing(route, replace(request, type=kind, epoch=self._around.epoch, view=0, body=body))

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
            why, ranks = "prepare", self._unprepared()
        elif worker.state is WorkerState.JOINING:
            why, ranks = "join", [] if self._asked is None else [self._asked[0]]
        elif worker.state is WorkerState.MEMBER and worker.is_blocked:
            why, ranks = "release", self._decisions.waiting_for()
        ranks = [rank for rank in ranks if rank != worker.rank]
        return {"why": why, "waiting_for": ranks} if ranks else {}

    # ---- HELLO -------------------------------------------------------------------------------------------------

    def _hello(self, message: Message, sender: Sender) -> None:
        self._check(message.body)
        rank = self.workers.rank_for(message, sender.user_id)
        holder = self.workers.by_rank.get(rank)
        if holder is not None and not holder.is_process(message, sender.user_id):
            if holder.incarnation > message.incarnation > 0:
                self._refuse_rank(rank, "went to a newer process while this one was silent (raise --lease-s)")
            # A larger incarnation is of a process that came later, when there was another coordinator: in its view.
            is_later = message.incarnation > holder.incarnation and self._is_in_its_view(rank, message, sender)
            if holder.state is not WorkerState.GONE and not is_later:
                if holder.user_id != sender.user_id:
                    self._refuse_rank(rank, "belongs to another key")
                self.workers.claim(rank, sender, message, self._now_s)
                return
        self._greet(rank, message, sender)

    def _is_in_its_view(self, rank: int, message: Message, sender: Sender) -> bool:
        """Whether a HELLO comes with a view of this job that has its process."""
        body = message.body
        member = view_of(body).member(rank) if "view" in body and body["key"] == self._key else None
        return member is not None and (member.incarnation, member.user_id) == (message.incarnation, sender.user_id)

    def _refuse_rank(self, rank: int, why: str) -> None:
        why = why.format(self.workers.by_rank[rank])
        raise ProtocolError(
            f"rank {rank} of job {self.name!r} {why} (expected one process for each rank; another run needs another"
            " job, PSENGINE_JOB)",
            ErrorCode.DUPLICATE_RANK,
        )

    def _check(self, body: Mapping[str, Any]) -> None:
        """Raise ProtocolError where such a process cannot take part."""
        code, text = self._refused.get(body["run"], (ErrorCode.STATE_LOST, self._halted))
        if text:
            raise ProtocolError(text, code)
        # Names of one server may differ from one worker to another, so only the order can be compared.
        known, servers = self._servers, body["servers"]
        if known and known != servers and (len(known) != len(servers) or set(known) == set(servers)):
            raise ProtocolError(
                f"all workers of job {self.name!r} name the same servers in the same order (expected {known}, got"
                f" {servers})",
                ErrorCode.BAD_VALUE,
            )
        rule = body.get("rule")
        if rule is None:
            return
        wanted, offered = rule.get("durability", "memory"), self._around.settings.durability
        if DURABILITY_TIERS.index(wanted) > DURABILITY_TIERS.index(offered):
            raise ProtocolError(
                f"job {self.name!r} asks for durability={wanted} (expected a server that offers at least that, got"
                f" {offered}). Fix: start its servers with --durability {wanted} --snapshot-dir DIRECTORY.",
                ErrorCode.RULE_MISMATCH,
            )
        if self.rule is not None and self.rule != rule:
            raise ProtocolError(
                f"job {self.name!r} runs under another rule (expected strategy {rule_text(self.rule)!r}, got"
                f" {rule_text(rule)!r}). Give another run another job (PSENGINE_JOB).",
                ErrorCode.RULE_MISMATCH,
            )

    def _greet(self, rank: int, message: Message, sender: Sender) -> None:
        """A process has its rank."""
        body, rule = message.body, message.body.get("rule")
        self._hear_view(rank, message, sender)
        worker = self.workers.by_rank.get(rank)
        if worker is None or not worker.is_process(message, sender.user_id):
            if worker is not None:
                self._put_out(worker, "fenced", "a newer process has its rank")
            worker = self.workers.new(rank, message, sender.user_id, self._around.clocks.wall_s())
        elif worker in self._survivors() and self.view is not None:
            self._expect(self.view.members)
        if worker.state is WorkerState.GONE:
            worker.advance("came")
            worker.leaving, worker.why_gone = None, ""
        worker.route, worker.last_heard_s, worker.nonce = sender.route, self._now_s, body["nonce"]
        worker.host, worker.pid, worker.run, worker.hello = body["host"], body["pid"], body["run"], message.sequence
        worker.told = Told()
        # A joiner that does not know the view which has it says how far it was before.
        if not self.averages or ("view" in body and view_of(body).number >= worker.admitted):
            self._hear_completed(worker, body.get("completed", 0))
        self._hear_cut(worker, body)
        if rule is not None:
            worker.has_rule = True
            self._world_size = max(self._world_size, body["world_size"])
            if self.rule is None:
                self.rule, self._decisions = dict(rule), decisions_of(rule)
        self._servers = self._servers or list(body["servers"])
        if worker.run and worker.run not in self._runs:
            self._runs = [*self._runs, worker.run][-MAX_REMEMBERED:]
        self.is_changed = True
        self._choose_registrar()
        self._tell(worker)

    def _hear_view(self, rank: int, message: Message, sender: Sender) -> None:
        """A process says which view it was in last: this coordinator may not know it."""
        body = message.body
        view, rule = view_of(body) if "view" in body else None, body.get("rule", self.rule)
        member = view.member(rank) if view is not None else None
        if view is None or rule is None or member is None:
            return
        if (member.incarnation, member.user_id) != (message.incarnation, sender.user_id):
            return
        # A job that newcomers have begun, and whose others are still to come, may be an older one.
        has_begun = self.state is JobState.RESUMING or (self.state is JobState.OPEN and self.view is not None)
        if body["key"] != self._key:
            self._least_number = max(self._least_number, view.number)
            if owns_weights(rule):
                self._lost = (
                    f"job {self.name!r} is lost: its lead server has restarted without the weights that this worker"
                    f" trained (durability {self._around.settings.durability}). Start all anew from a checkpoint."
                )
                raise ProtocolError(self._lost, ErrorCode.STATE_LOST)
            if has_begun:
                return
        if not has_begun:
            logger.warning("job %r is under way already; its workers have one lease to come back", self.name)
            self._advance("interrupted")
            self._key, self._registration, self._registrar = body["key"], self._next_registration(), None
            self.rule, self._decisions = dict(rule), decisions_of(rule)
            self._world_size = max(self._world_size, view.world_size)
            self._resume_s, self._epochs = self._now_s + self._lease_s, list(view.shards)
            self._chunks = list(view.chunks)
        known = {one.number: one for one in (*view.releases, *self._releases)}
        self._releases = [known[number] for number in sorted(known)]
        if self.view is not None and view.number <= self.view.number:
            return
        if self.state is not JobState.RESUMING:
            self._least_number, self._is_wanted = max(self._least_number, view.number), True
            return
        # What shards told of their lives meanwhile is newer.
        for shard, epoch in enumerate(view.shards):
            if shard < len(self._epochs):
                self._epochs[shard] = max(self._epochs[shard], epoch)
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
            is_over = worker.state is WorkerState.GONE and worker.why_gone in ("left", "fenced")
            if worker.incarnation > member.incarnation or worker.state is WorkerState.MEMBER or is_over:
                continue
            if worker.state is WorkerState.GONE:
                worker.route, worker.last_heard_s = b"", self._now_s
            worker.advance("admitted")
            worker.first_step, worker.has_rule, worker.why_gone = member.first_step, True, ""
            self._came.add(worker.rank)

    def _survivors(self) -> list[Worker]:
        """Of a job whose members are all out: those of the last view who may come back with their state."""
        if self.state is not JobState.RESUMING or self.view is None or not self.averages:
            return []
        named = {(one.rank, one.incarnation) for one in self.view.members}
        gone = self.workers.of(WorkerState.GONE)
        return [one for one in gone if one.identity in named and one.why_gone == "evicted"]

    def _resume(self) -> None:
        """Go on once each member of the last view is back or out."""
        members = self.workers.members
        if self.state is JobState.RESUMING and all(one.route for one in members) and (members or not self.averages):
            self._advance("resumed")
            self._decisions.learn(self._releases, members)
            self._is_wanted = bool(members)

    # ---- a job's life ------------------------------------------------------------------------------------------

    def _choose_registrar(self) -> None:
        """Where nobody brings the job's first values, a worker has to."""
        waiting, is_registering = self.workers.waiting, self.state is JobState.REGISTERING
        waiting = [one for one in waiting if not one.unreachable] or waiting
        if self.state is JobState.RESUMING:
            is_time = self._now_s >= self._resume_s or not self._survivors()
            is_due = self.averages and not self.workers.members and is_time
        else:
            has_registrar = is_registering and any(one.identity == self._registrar for one in waiting)
            is_due = self.state is not JobState.OPEN and not has_registrar
        # With several workers rank 0 gives the values; where its process died, whoever is there.
        if not is_due or not waiting or (waiting[0].rank and self._world_size > 1 and not is_registering):
            return
        assert self.rule is not None
        if self.state is JobState.RESUMING:
            logger.warning("job %r begins anew: all its workers are gone", self.name)
        self._reset()
        self._advance("begun")
        self._registrar, self._registration = waiting[0].identity, self._next_registration()
        self._key, self._decisions = self._around.draw_key(), decisions_of(self.rule)
        if self._around.settings.warns_of_loss and not self.averages:
            logger.warning(
                "NOTHING IS DURABLE (durability memory): when this process ends, crashes or restarts, the model of job"
                " %r is LOST. Fix: start it with --snapshot-dir DIRECTORY, and --durability log where no acknowledged"
                " update may be lost",
                self.name,
            )
        for one in self.workers.of(WorkerState.JOINING):
            one.advance("anew")

    def _reset(self) -> None:
        """Nothing of the job's life so far counts."""
        self._least_number = self._next_number() - 1
        if self.view is not None and self.view.members:
            # They may only be paused: a view without them has shards forget them.
            self._least_number += 1
            view = View(self._least_number, self._around.epoch, (), tuple(self._epochs), world_size=self._world_size)
            self._empty = replace(message_of(view, self._key, self.number), view=view.number)
        self.view, self._key, self._registrar, self._epochs, self._chunks, self._releases = None, b"", None, [], [], []
        self._came.clear()
        self._runs = list(dict.fromkeys(one.run for one in self.workers.present if one.run))
        self._end_change()

    def _next_registration(self) -> int:
        """Shards keep the highest, also that of a coordinator whose numbers are forgotten."""
        return max(self._registration + 1, int(self._around.clocks.wall_s() * 1000))

    def _advance(self, event: str) -> None:
        self.state = after(JOB, self.state, event)
        self.is_changed = True

    def _end(self, *, has_failed: bool) -> None:
        """The last worker has left; where its training broke off it may be started again."""
        # Who was evicted may be a process that stands still, or is started again: it has not done its part.
        evicted = any(one.why_gone == "evicted" for one in self.workers.by_rank.values() if one.rank in self._came)
        are_others = evicted or bool(self.workers.waiting) or len(self._came) < self._world_size
        if has_failed or (not self.averages and are_others):
            if self.averages:
                self._interrupt(self._now_s)
            return  # others are to come yet
        self._finish(
            ErrorCode.ENDED,
            f"job {self.name!r} has ended: all its workers have left, so this process has nothing to do. To train"
            " again, start another run, or give it another job (PSENGINE_JOB).",
        )

    def _interrupt(self, resume_s: float) -> None:
        """All are out who hold the weights; until ``resume_s`` they may come back."""
        self._advance("interrupted")
        self._resume_s = resume_s
        self._end_change()

    def _finish(self, code: str, text: str) -> None:
        """A run is over. Unless the servers have its weights, the next one begins anew."""
        logger.log(logging.INFO if code == ErrorCode.ENDED else logging.ERROR, "%s", text)
        self._lost = "" if code == ErrorCode.ENDED else text
        refused = {**self._refused, **{run: [code, text] for run in self._runs}}
        self._refused = dict(list(refused.items())[-MAX_REMEMBERED:])
        self._runs = []
        self._came.clear()
        if code == ErrorCode.ENDED and not self.averages:
            return
        present = self.workers.present
        self._dismiss([one for one in present if one.run in self._refused or code != ErrorCode.ENDED], code, text)
        self._advance("over")
        self._reset()
        if not any(one.has_rule for one in self.workers.present):
            self.rule, self._world_size, self._servers = None, 1, []

    def _dismiss(self, workers: list[Worker], code: str, text: str) -> None:
        """They have nothing to do here any more, and are told so unasked."""
        for worker in workers:
            self._send(worker, Message(MessageType.ERROR, self.number, body={"code": code, "text": text}))
            self._put_out(worker, "left", "its run is over")

    # ---- what workers say --------------------------------------------------------------------------------------

    def _hear_registered(self, worker: Worker, message: Message) -> None:
        body = message.body
        if (worker.identity, body["registration"]) != (self._registrar, self._registration):
            raise self._stale("registered a model under an older registration")
        if self.state is JobState.REGISTERING:
            self._epochs, self._chunks, self._empty = list(body["epochs"]), list(body["chunks"]), None
            self._advance("registered")
            self._lost = ""

    def _stale(self, what: str) -> ProtocolError:
        return ProtocolError(f"a worker of job {self.name!r} {what}; it has to begin this again", ErrorCode.STALE)

    def _hear_heartbeat(self, worker: Worker, message: Message) -> None:
        worker.telemetry.hear(message.body, self._now_s)
        self._hear_cut(worker, message.body)
        if message.view >= worker.admitted:
            worker.is_blocked = message.body.get("blocked", False)
            self._hear_completed(worker, message.body.get("completed", 0))
        worker.told.asked = None  # it is said again

    def _hear_completed(self, worker: Worker, step: int) -> None:
        worker.completed = max(worker.completed, step)
        if worker.completed >= worker.first_step:
            worker.is_reading, worker.has_begun = False, True

    def _hear_cut(self, worker: Worker, body: Mapping[str, Any]) -> None:
        if not worker.unreachable:
            worker.cut_s = self._now_s
        worker.unreachable = frozenset(body.get("unreachable", worker.unreachable))

    def _hear_prepared(self, worker: Worker, message: Message) -> None:
        if worker.state is WorkerState.MEMBER and message.body["view"] == self._preparing:
            worker.prepared = message.body["view"]
            self._hear_completed(worker, message.body["completed"])

    def _hear_step(self, worker: Worker, message: Message) -> None:
        step = message.body["step"]
        if worker.identity not in self._decisions.members or message.view < worker.admitted or self.view is None:
            return
        # Shards forgot what was pushed under an older view; it is pushed and committed again.
        if self.averages and message.view < self.view.number and step >= self.view.from_step:
            return
        worker.is_reading, worker.has_begun = False, True
        self._decisions.commit(worker, step, abstained=message.body["abstained"], now_s=self._now_s)

    def _hear_join(self, worker: Worker, message: Message) -> None:
        if not self.averages or worker.state is WorkerState.GONE:
            return
        if worker.state is WorkerState.MEMBER:
            if message.view < max(worker.admitted, 1):
                return  # a repetition: the view that has it is on its way
            self._note("joined", worker, "lacks state, and joins again")
            self._is_wanted = True
        worker.is_reading = False
        worker.advance("asked")

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
        epoch, lost = body["epoch"], body.get("lost", 0)
        if shard >= len(self._epochs) or self.state not in (JobState.OPEN, JobState.RESUMING):
            return
        if epoch != self._epochs[shard]:
            is_late = self.view is None or message.view < self.view.number
            if epoch < self._epochs[shard] and is_late:
                return  # a life before; where a clock was set back, it is said again under this view
            self._epochs[shard] = epoch
            self._is_wanted = self._has_restarted_shard = self.is_changed = True
            self._donation = None  # what was deposited there is lost
            self._least_number = max(self._least_number, number)
            if not self.averages and self._chunks and body["chunks"] < self._chunks[shard]:
                self._finish(
                    ErrorCode.STATE_LOST,
                    f"job {self.name!r} is lost: shard {shard} has restarted with {body['chunks']} of its"
                    f" {self._chunks[shard]} chunks. Fix: start all anew from a checkpoint; servers that start with"
                    " --snapshot-dir DIRECTORY, and --durability log where no update may be lost, keep them.",
                )
                return
        elif self.view is not None and number >= self.view.number:
            self._least_number, self._is_wanted = max(self._least_number, number), True
        known = self._losses.get(epoch, 0)
        if lost > known:
            self._losses[epoch] = lost
            if not known:
                text = f"{lost} updates of each chunk of shard {shard} are lost: workers had them acknowledged, and the"
                self._around.note("lost", f"{text} snapshot that its server started from is older", job=self.name)
            if self._around.settings.durability == "log":
                version = body["version"]
                self._halted = (
                    f"job {self.name!r} is lost: shard {shard} came back with an older state, version {version}, and"
                    f" workers knew of version {version + lost}. Fix: start its servers with the --snapshot-dir of"
                    " before, then the workers; or drop the job by psengine admin forget."
                )
                logger.error("%s", self._halted)
                self._dismiss(self.workers.present, ErrorCode.STATE_LOST, self._halted)

    def _hear_leave(self, worker: Worker, message: Message) -> bool:
        """Whether it is answered later."""
        if worker.state is WorkerState.GONE:
            return worker.leaving is not None  # else its OK was lost
        if worker.state is not WorkerState.MEMBER:
            self._put_out(worker, "left", "it is done")
            return False
        worker.completed = max(worker.completed, message.body["completed"])
        worker.leaving = Leaving(message.body["completed"], message.sequence, message.body.get("failed", False))
        return True

    # ---- who is put out ----------------------------------------------------------------------------------------

    def _put_out(self, worker: Worker, reason: str, why: str) -> None:
        """A worker is gone: it left, or was evicted, or fenced by another process that has its rank."""
        if worker.state is WorkerState.GONE:
            return
        if worker.state is WorkerState.MEMBER:
            self._is_wanted = True
            self._evicted += reason != "left"
        elif worker.identity == self._registrar:
            self._registrar = None  # if it comes back it begins again
        worker.advance("went")
        worker.why_gone, worker.is_reading, worker.prepared = reason, False, 0
        worker.gone_unix_s = round(self._around.clocks.wall_s(), 3)
        if reason != "left":
            worker.leaving = None
        self._note(reason, worker, f"{'left' if reason == 'left' else f'was {reason}'}: {why}")
        self.is_changed = True

    def _note(self, kind: str, worker: Worker, text: str) -> None:
        """An event of a worker, for people."""
        text = f"worker {worker.rank} (process {worker.pid} on {worker.host}) {text}"
        self._around.note(kind, text, job=self.name, worker=worker.rank)

    def _put_out_cut_off(self) -> None:
        """Put out members that cannot reach a shard for a lease, where others reach it and wait.

        A lease passes between the first report and the verdict: others may be about to find out the same.
        """
        members = self.workers.members
        may_wait = self.averages or type(self._decisions) is not Decisions
        if self.state is not JobState.OPEN or not may_wait or not any(one.unreachable for one in members):
            return
        by_nobody = frozenset.intersection(*(one.unreachable for one in members))
        if not any(one.is_blocked or one.leaving for one in members if not one.unreachable - by_nobody):
            return
        for worker in members:
            shards = worker.unreachable - by_nobody
            if shards and self._now_s - worker.cut_s > self._lease_s:
                names = ", ".join(map(str, sorted(shards)))
                self._put_out(worker, "evicted", f"it cannot reach shards {names}, which others reach, who wait for it")

    def _let_leave(self) -> None:
        """Members that want to leave may, once all others have the averages that they have."""
        members = self.workers.members
        leavers = [one for one in members if one.leaving is not None]
        for worker in [one for one in leavers if not self.averages or _is_spare(one, members)]:
            assert worker.leaving is not None
            self._put_out(worker, "left", "its training broke off" if worker.leaving.failed else "it is done")

    # ---- views -------------------------------------------------------------------------------------------------

    def _change_view(self) -> None:
        """Where there is a cause: freeze the members who hold the weights; once they are, publish a view."""
        newcomers, members, departing = self._newcomers(), self.workers.members, self.workers.departing
        if self.averages and not (newcomers or members or departing):
            if self.view is not None and self.view.members:
                self._interrupt(self._now_s + self._lease_s)
            return
        if self._preparing is None and (newcomers or self._is_wanted):
            self._preparing = self._next_number()
        # Once members are frozen a view has to come, also where its cause is gone.
        if self._preparing is not None and not self._unprepared():
            self._publish(newcomers)

    def _newcomers(self) -> list[tuple[Worker, int]]:
        """Who comes in with the next view, and its first step."""
        waiting = [one for one in self.workers.waiting if not one.unreachable]
        if not self.averages:
            return [(one, self._decisions.first_step(one)) for one in waiting]
        if self.view is None:
            return [(one, 1) for one in waiting] if len(waiting) >= self._world_size else []
        if self._donation not in [(one.rank, one.completed) for one in self.workers.members]:
            self._donation = None
        if self._donation is None:
            return []
        return [(one, self._donation[1] + 1) for one in waiting if one.state is WorkerState.JOINING]

    def _next_number(self) -> int:
        return max(self._least_number, self.view.number if self.view is not None else 0) + 1

    def _unprepared(self) -> list[int]:
        return [one.rank for one in self.workers.members if self.averages and one.prepared != self._preparing]

    def _publish(self, newcomers: list[tuple[Worker, int]]) -> None:
        number, is_first = max(self._preparing or 0, self._next_number()), self.view is None
        newest = max((one.completed for one in self.workers.members), default=0)
        for worker in self.workers.members if self.averages and self._has_restarted_shard else ():
            if worker.completed < newest - 1:
                self._put_out(worker, "evicted", "it lacks averages that a restarted server cannot give again")
        for worker, first_step in newcomers:
            worker.advance("admitted")
            worker.first_step, worker.admitted, worker.is_blocked, worker.committed = first_step, number, False, 0
            if self.averages:
                worker.completed, worker.is_reading = first_step - 1, not is_first
                worker.has_begun = worker.identity == self._registrar
                newest = max(newest, worker.completed)
            self._came.add(worker.rank)
            self._note("joined", worker, "takes part")
        members, from_step = self.workers.members, newest + 1 if self.averages else 1
        # Who reads its state from the servers has no averages to give.
        givers = [one.rank for one in members if one.completed == newest and not one.is_reading]
        is_lacking = self.averages and any(one.completed < newest for one in members)
        releases = self._decisions.outstanding(self._releases, members)
        self._releases = [one for one in releases if not self.averages or one.step < from_step]
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
            chunks=tuple(self._chunks),
        )
        missing = [rank for rank in range(self._world_size) if rank not in self._came]
        self._decisions.adopt(members, from_step, missing[: max(0, self._world_size - len(self._came))])
        self._release_count, self.is_changed = 0, True
        self._end_change()
        logger.info("job %r: view %d has workers %s", self.name, number, [one.rank for one in members])
        has_failed, departing = False, self.workers.departing
        for worker in departing:
            assert worker.leaving is not None
            has_failed |= worker.leaving.failed
            self._tell(worker)
            self._send(worker, Message(MessageType.OK, self.number, sequence=worker.leaving.request))
            worker.leaving = None
        if departing and not members:
            self._end(has_failed=has_failed)

    def _end_change(self) -> None:
        self._preparing = self._donation = self._asked = None
        self._is_wanted = False

    def _ask_donor(self) -> None:
        """Have a member deposit its state for those who join, one deposit at a time."""
        joiners = [one for one in self.workers.waiting if one.state is WorkerState.JOINING and not one.unreachable]
        members, self._asked = self.workers.members, None
        is_busy = self._preparing is not None or self._donation is not None
        # With a quorum others go on before a worker has read the values with which the job began.
        is_quorum = type(self._decisions) is not Decisions
        is_busy |= any(one.is_reading or (is_quorum and not one.has_begun and not one.leaving) for one in members)
        if not joiners or not members or is_busy or self.view is None:
            return
        # The same donor as long as it lives: two might deposit states of different steps at once.
        known = [one for one in members if one.identity == self._donor and one.leaving is None]
        donor = known[0] if known else min(members, key=lambda one: (one.leaving is not None, one.rank))
        self._donor, self._asked = donor.identity, (donor.rank, joiners[0].rank, self.view.number)

    def _decide(self) -> None:
        if self.view is None or self.view.epoch != self._around.epoch or self._preparing is not None:
            return
        if self._has_restarted_shard and self.averages:
            # What it lacks is in the workers, who keep their last average: none goes ahead until all have that.
            newest = self.view.from_step - 1
            if any(max(one.completed, one.committed - 1) < newest for one in self.workers.members):
                return
        self._has_restarted_shard = False
        for draft in self._decisions.due(self._now_s):
            self._release_count += 1
            # Numbers grow from view to view, also past those of a coordinator whose numbers are forgotten.
            release = Release(self.view.number << 32 | self._release_count, *draft)
            self._releases = [*self._decisions.outstanding(self._releases, self.workers.members), release]
            self.is_changed |= self._decisions.is_durable

    # ---- for people, and the disk ------------------------------------------------------------------------------

    def is_awaited(self, message: Message, user_id: str) -> bool:
        """Whether a HELLO comes from a process of this job, or for the rank of one."""
        known = any(one.is_process(message, user_id) for one in self.workers.by_rank.values())
        return known or "view" in message.body or message.body.get("rank") in {one.rank for one in self.workers.present}

    @property
    def remembered_count(self) -> int:
        """Workers that are here, or were put out less than a lease ago and may come back."""
        gone = [one for one in self.workers.of(WorkerState.GONE) if one.why_gone == "evicted"]
        return len(self.workers.present) + sum(self._now_s - one.last_heard_s <= 2 * self._lease_s for one in gone)

    def status(self, now_s: float) -> CoordinatedJob:
        """The job as it is now."""
        return CoordinatedJob(
            rule=self.rule or {},
            lost=self._halted or self._lost,
            expected_workers=self._world_size,
            evicted=self._evicted,
            lost_updates=sum(self._losses.values()),
            departed=self._departed(),
            workers=tuple(self._worker_status(one, now_s - one.last_heard_s) for one in self.workers.present),
        )

    def _departed(self) -> tuple[Departed, ...]:
        """Workers that are gone, the latest last."""
        gone = sorted(self.workers.of(WorkerState.GONE), key=lambda one: one.gone_unix_s)[-MAX_DEPARTED:]
        return tuple(
            Departed(rank=one.rank, host=one.host, reason=one.why_gone, unix_s=one.gone_unix_s, step=one.completed)
            for one in gone
        )

    def _worker_status(self, worker: Worker, silent_s: float) -> CoordinatedWorker:
        state: State = "silent" if silent_s > 2 * self._around.settings.heartbeat_s else "live"
        return CoordinatedWorker(
            rank=worker.rank,
            state=state if worker.state is WorkerState.MEMBER else "joining",
            host=worker.host,
            pid=worker.pid,
            silent_s=round(silent_s, 3),
            waiting_for=tuple(self._waits_for(worker).get("waiting_for", ())),
            **vars(worker.telemetry.times),
        )

    def to_meta(self) -> dict[str, Any]:
        """What a restart has to find, JSON-able."""
        meta = {name.strip("_"): getattr(self, name) for name in _DURABLE}
        meta["decisions"] = self._decisions.to_meta()
        return {"name": self.name, **msgspec.to_builtins(meta), **self.workers.to_meta()}

    def restore(self, meta: Mapping[str, Any], now_s: float) -> None:
        """Inverse of ``to_meta``, in a new object: workers have a lease to come back."""
        for name, kind in _DURABLE.items():
            setattr(self, name, msgspec.convert(meta[name.strip("_")], kind))
        self.workers.restore(meta)
        if self.rule is not None:
            self._decisions = decisions_of(self.rule)
            self._decisions.restore(meta["decisions"])
        if not self._decisions.is_durable:
            self._releases = []
        if self.state is JobState.REGISTERING:
            self.state = JobState.NEW
        elif self.state is JobState.OPEN and self.view is not None and (self.averages or self.workers.members):
            self._advance("interrupted")
        self._resume_s = now_s + self._lease_s
        for worker in self.workers.by_rank.values():
            worker.last_heard_s = now_s


_DURABLE: dict[str, Any] = {
    "state": JobState,
    "rule": dict[str, Any] | None,
    "view": View | None,
    "_world_size": int,
    "_servers": list[str],
    "_runs": list[str],
    "_refused": dict[str, list[str]],
    "_came": set[int],
    "_evicted": int,
    "_key": bytes,
    "_registration": int,
    "_epochs": list[int],
    "_chunks": list[int],
    "_least_number": int,
    "_releases": list[Release],
}


def _check_numbers(message: Message) -> None:
    """Raise ProtocolError where a worker says a number that would leave no room for those that follow."""
    said = message.body
    if message.type is MessageType.HELLO and "view" in said:
        said = {**said, "view": view_of(said).number}
    what = next((name for name, most in _LARGEST.items() if said.get(name, 0) > most), "")
    if message.incarnation > MAX_INCARNATION:
        what = "incarnation"
    if what:
        raise ProtocolError(f"no job comes to such a number (got {what} {said.get(what, message.incarnation)})")


def _is_spare(leaver: Worker, members: list[Worker]) -> bool:
    """Whether all others have every average that a worker has which wants to leave."""
    assert leaver.leaving is not None
    step, _, failed = leaver.leaving
    return failed or all(one.completed >= step for one in members if one is not leaver)
