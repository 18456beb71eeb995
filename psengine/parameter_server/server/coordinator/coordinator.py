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
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count
from typing import Any

import msgspec

from psengine.errors import RAISE_LEASE, ProtocolError
from psengine.parameter_server.server.coordinator.claims import SHOWN, Claims, Shown
from psengine.parameter_server.server.coordinator.decisions import Decisions, decisions_of
from psengine.parameter_server.server.coordinator.states import JOB, JobMemory, JobState, WorkerState, after
from psengine.parameter_server.server.coordinator.workers import CLAIM_GRACE_S, Worker, Workers
from psengine.parameter_server.server.interfaces import Outgoing, Sender, ShardSettings
from psengine.protocol.bounds import INT64_MAX, MAX_VIEW_NUMBER
from psengine.protocol.layout import job_number
from psengine.protocol.messages import DURABILITY_TIERS, HELLO_AGAIN_S, ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View, ViewMember, message_of
from psengine.status_port.overview import owns_weights, rule_text
from psengine.status_port.status_model import CoordinatedJob, CoordinatedWorker, Departed, State

logger = logging.getLogger(__name__)
# Of runs that are over, and of claims to a rank, so many are remembered.
MAX_REMEMBERED = 64
MAX_DEPARTED = 20  # in a status


@dataclass(frozen=True)
class Interfaces:
    """What all coordinators of a server are given."""

    epoch: int  # of this life of the server
    settings: ShardSettings
    wall_s: Callable[[], float]  # seconds since 1970, for dates
    note: Callable[..., None]  # told of what happens, for people: see ``EventLog.note``
    draw_key: Callable[[], bytes]  # makes a job's key
    is_connected: Callable[[bytes], bool] = lambda route: True  # whether a connection stands
    is_gone: Callable[[int], bool] = lambda process_id: False  # whether a process of this host has ended
    started_s: float = -math.inf  # when this life of the server began, by the clock of messages

    @cached_property
    def numbers(self) -> Iterator[int]:
        """Numbers that no former life has given: epochs are far apart, whatever the clocks of their servers show."""
        return count(self.epoch + 1)


class Coordinator(JobMemory):
    """See the module's text.

    Attributes:
        hears: what workers may say beside HELLO.
        workers: all that are known.
        claims: what processes say of views.
        is_changed: ``to_meta`` gives something else than before; for the caller to reset.
    """

    hears = frozenset({"heartbeat", "leave", "prepared", "registered", "step", "join", "donated", "life"})

    def __init__(self, name: str, interfaces: Interfaces) -> None:
        super().__init__(name)
        self.number = job_number(name)
        self.workers = Workers()
        self.claims = Claims(self, interfaces.settings, interfaces.is_connected)
        self.is_changed = False
        self._interfaces = interfaces
        self._lease_s = interfaces.settings.lease_s
        self._outgoing: list[Outgoing] = []
        self._now_s = 0.0
        # When somebody was heard last, and since when somebody is heard again after all were silent.
        self._heard_s = self._leases_begin_s = -math.inf
        self._member_heard_s = -math.inf  # when a member was
        self._decisions = Decisions(self)
        # Registration.
        self._registrar: Worker | None = None
        self._had_registrar = False
        # The key is a former life's, and until then whoever has it may come and say that it has values. -inf: the key
        # is this life's.
        self._may_return_s = -math.inf
        self._empty: Message | None = None  # the view that ends the job's life before this one
        self._losses: dict[int, int] = {}  # by servers' lives, how many updates of each chunk they lost
        self._halted = ""  # why nobody goes on until the servers find what they lost
        self._lost = ""  # why its weights are lost, for people, until there are others
        # The change of view that is under way.
        self._preparing: int | None = None
        self._donor: Worker | None = None
        self._joiner: Worker | None = None  # for whom the donor is asked
        self._donation: tuple[Worker, int] | None = None  # whose state was deposited, and after which step

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
        self._hear()
        if message.type is MessageType.HELLO:
            self._hello(message, sender)
            return self._settled()
        if message.type in SHOWN:
            self._hear_shown(message, self.claims.hear(message))
            return self._settled()
        worker = self.workers.find(message, sender, self.name)
        worker.last_heard_s = now_s
        if worker.state is WorkerState.MEMBER:
            self._member_heard_s = now_s
        what = message.body.get("what", message.type.name.lower())
        if what not in self.hears:
            raise ProtocolError(f"{message.type.name} {what!r} is not said in job {self.name!r}")
        is_later = getattr(self, f"_hear_{what}")(worker, message)
        outgoing = self._settled()
        if not is_later:
            body = self._waits_for(worker) if message.type is MessageType.HEARTBEAT else {}
            answer = replace(message, type=MessageType.OK, epoch=self._interfaces.epoch, view=0, body=body)
            outgoing.append(Outgoing(sender.route, answer))
        return outgoing

    def tick(self, now_s: float) -> list[Outgoing]:
        """Look at the clock: leases, claims, grace windows."""
        self._now_s = now_s
        self._put_out_silent()
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

    def _settled(self) -> list[Outgoing]:
        """Do what can be done now, and tell all who have to know; what is sent."""
        self._resume()
        if self.state is JobState.OPEN:
            self._let_leave()
            self._turn_away()
            self._change_view()
        if self.state is JobState.OPEN:
            self._ask_donor()
            if self.view is not None and self._preparing is None:
                self.is_changed |= self._decisions.decide(self._now_s)
        self._choose_registrar()
        for worker in self.workers.present:
            self._tell(worker)
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _tell(self, worker: Worker) -> None:
        """Send a worker what it should know and was not told on its connection.

        Decisions are numbered in the order in which they are taken: PREPARE(n) and VIEW(n) around those of view n - 1.
        """
        welcome = (self._welcome_state(worker), self.registration)
        # All hear also unasked of another registration, with its key; who waits, that it has to join; and who was told
        # to wait for a view, that it has yet to read the state with which that view has it.
        is_news = welcome[1] != worker.welcomed[1] or (welcome[0] == "join" and worker in self.workers.waiting)
        is_news |= welcome[0] == "joined" and worker.welcomed[0] == "wait"
        is_news |= bool(worker.warning)
        if worker.route and worker.welcomed != welcome and (not worker.welcomed[0] or is_news):
            worker.welcomed = welcome
            self._welcome(worker, welcome[0])
        if self.state is not JobState.OPEN or (worker.state is not WorkerState.MEMBER and worker.leaving is None):
            return
        if self.view is not None and self.view.epoch == self._interfaces.epoch:
            self._tell_once(worker, self.view.number << 32, self.view)
            for release in self.releases:
                self._tell_once(worker, release.number, release)
        if self._preparing is not None:
            self._tell_once(worker, (self._preparing << 32) - 1, None)

    def _tell_once(self, worker: Worker, number: int, said: View | Release | None) -> None:
        if number > worker.told:
            worker.told = number
            prepare = Message(MessageType.PREPARE, self.number, view=self._preparing or 0)
            self._send(worker, prepare if said is None else message_of(said, self.key, self.number))

    def _welcome_state(self, worker: Worker) -> str:
        if not worker.has_rule:
            return "reserved"
        is_member, is_joining = worker.state is WorkerState.MEMBER, worker.state is WorkerState.JOINING
        if self.state is JobState.NEW and worker is self._registrar:
            return "initialise"
        if self.state is not JobState.OPEN or (self.averages and self.view is None):
            return "wait"
        if self.averages and not is_member:  # once a member was heard since it came: all may be dead
            return "join" if is_joining or self._member_heard_s >= worker.came_s else "wait"
        if self.averages:  # others deposit no state before a newcomer has read what it was admitted with
            return "ready" if worker.has_read or worker.has_begun or worker.first_step == 1 else "joined"
        return "wait" if worker.unreachable and not is_member else "ready"

    def _welcome(self, worker: Worker, state: str) -> None:
        body = {"state": state, "lease_s": self._lease_s, "heartbeat_s": self._interfaces.settings.heartbeat_s}
        if self.key and worker.has_rule:
            body |= {"registration": self.registration, "key": self.key}
        if worker.warning:
            body["warning"], worker.warning = worker.warning, ""
        if state == "initialise" and self._empty is not None:
            self._send(worker, self._empty)
        self._send(worker, Message(MessageType.WELCOME, self.number, sequence=worker.hello, body=body))

    def _send(self, worker: Worker, message: Message) -> None:
        if worker.route:
            view = message.view or (self.view.number if self.view is not None else 0)
            rank, incarnation = worker.rank, worker.incarnation
            sent = replace(message, epoch=self._interfaces.epoch, worker=rank, incarnation=incarnation, view=view)
            self._outgoing.append(Outgoing(worker.route, sent))

    def _waits_for(self, worker: Worker) -> dict[str, Any]:
        """For the answer to a heartbeat: what the worker waits for here, and for whom."""
        why, ranks = "", []
        if self.state is JobState.NEW:
            why, ranks = "to register the model", [0 if self._registrar is None else self._registrar.rank]
        elif self.state is JobState.RESUMING:
            why, ranks = "to come back", [one.rank for one in self.workers.members if not one.route]
        elif self.averages and self.view is None:
            present = {one.rank for one in self.workers.present if one.has_rule}
            why, ranks = "to come", [rank for rank in range(self.world_size) if rank not in present]
        elif self._preparing is not None:
            why, ranks = "to agree on who takes part", self._unprepared()
        elif worker.state is WorkerState.JOINING:
            why, ranks = "to give their state", [self._donor.rank] if self._donor and self._joiner else []
        elif worker.is_blocked and type(self._decisions) is not Decisions:
            why, ranks = "to come", self.missing
        ranks = [rank for rank in ranks if rank != worker.rank]
        return {"why": why, "waiting_for": ranks} if ranks else {}

    # ---- HELLO -------------------------------------------------------------------------------------------------

    def _hello(self, message: Message, sender: Sender) -> None:
        is_untrained = self.state is JobState.OPEN and not (self.averages or self.is_trained)
        is_another = "rule" in message.body and message.body["run"] not in self.runs
        if is_untrained and is_another and not any(one.has_rule for one in self.workers.present):
            self._begin_anew()  # with this worker's initial values
        if self.averages and message.body.get("rule", self.rule) != self.rule and not self.here_count:
            for worker in self.workers.present:
                self._put_out(worker, "evicted", "silent for longer than its lease, and another job has its name")
            self._resume()
            self._change_view()
        self._check(message.body)
        try:
            message, view = self.claims.judge(message, sender, self._now_s)
        except ProtocolError as error:
            if error.code == ErrorCode.STATE_LOST and not self.is_known:
                self._lost = str(error)
            raise
        rank = self.workers.rank_for(message, sender.user_id)
        holder, is_later = self.workers.by_rank.get(rank), False
        if holder is not None and not holder.is_process(message, sender.user_id):
            if holder.incarnation > message.incarnation > 0:
                self._refuse_rank(rank, f"went to a newer process while this one was silent ({RAISE_LEASE})")
            # A larger incarnation is of a process that came later, when there was another coordinator: in its view.
            is_later = message.incarnation > holder.incarnation and view is not None
            if holder.state is not WorkerState.GONE and not is_later:
                self._judge(holder, message, sender)
        if self.averages and "view" in message.body and not is_later and holder not in self.workers.members:
            raise self._went_on(rank, holder)
        self._greet(rank, message, sender)

    def _judge(self, holder: Worker, message: Message, sender: Sender) -> None:
        """Raise ProtocolError unless the process that has a rank, which another wants, is dead."""
        if holder.user_id != sender.user_id:
            self._refuse_rank(holder.rank, "belongs to another key")
        if len(holder.claims) >= MAX_REMEMBERED:
            holder.claims.clear()
        since_s = holder.claims.setdefault(message.body["nonce"], self._now_s)
        if not holder.route:  # it has a lease to come back
            holder.claims.clear()
        elif holder.last_heard_s > since_s + CLAIM_GRACE_S:
            where = f"process {holder.pid} on {holder.host}"
            self._refuse_rank(holder.rank, f"is held by {where}, which is alive: check RANK, or PSENGINE_WORKER")
        elif self._now_s >= since_s + 2 * self._interfaces.settings.heartbeat_s + CLAIM_GRACE_S:
            return
        raise ProtocolError(f"rank {holder.rank} of job {self.name!r} is held; ask again", ErrorCode.NOT_READY)

    def _refuse_rank(self, rank: int, why: str) -> None:
        raise ProtocolError(
            f"rank {rank} of job {self.name!r} {why} (expected one process for each rank; another run needs another"
            " job, PSENGINE_JOB)",
            ErrorCode.DUPLICATE_RANK,
        )

    def _check(self, body: Mapping[str, Any]) -> None:
        """Raise ProtocolError where such a process cannot take part."""
        life = body["key"].hex() if "view" in body else ""
        code, text = self.refused.get(body["run"]) or self.refused.get(life, (ErrorCode.STATE_LOST, self._halted))
        if text:
            raise ProtocolError(text, code)
        rule = body.get("rule")
        if rule is None:
            return
        self._interfaces.settings.check_tier(self.name, rule)
        if self.rule is not None and self.rule != rule:
            raise ProtocolError(
                f"job {self.name!r} runs under another rule (expected strategy {rule_text(self.rule)!r}, got"
                f" {rule_text(rule)!r}). Give another run another job (PSENGINE_JOB).",
                ErrorCode.RULE_MISMATCH,
            )

    def _greet(self, rank: int, message: Message, sender: Sender) -> None:
        """A process has its rank."""
        body, rule = message.body, message.body.get("rule")
        worker = self.workers.by_rank.get(rank)
        if worker is None or not worker.is_process(message, sender.user_id):
            if worker is not None:
                self._put_out(worker, "fenced", "a newer process has its rank")
            worker = self.workers.new(rank, message, sender.user_id, next(self._interfaces.numbers))
        if worker.state is WorkerState.GONE:
            worker.advance("came")
            worker.leaving, worker.why_gone = None, ""
        worker.route, worker.nonce = sender.route, body["nonce"]
        worker.last_heard_s = worker.came_s = self._now_s
        worker.host, worker.pid, worker.run, worker.hello = body["host"], body["pid"], body["run"], message.sequence
        worker.continues = body.get("continues", False)
        worker.process_id = sender.process
        worker.welcomed, worker.told = ("", 0), 0
        # A joiner that does not know the view which has it says how far it was before.
        worker.has_read = body.get("view", -1) >= worker.admitted  # a newcomer claims its view with its first push
        if not self.averages or worker.has_read:
            worker.completed = max(worker.completed, body.get("completed", 0))
        self._hear_cut(worker, body)
        if rule is not None:
            worker.has_rule = True
            worker.world_size = body["world_size"]
            self._learn_size()
            if self.rule is None:
                self._set_rule(rule)
        self.is_changed = True

    def _learn_size(self) -> None:
        """Runs of which nobody is present do not count."""
        sizes = [one.world_size for one in self.workers.present if one.has_rule]
        self.world_size = max(sizes, default=self.world_size)

    def _went_on(self, rank: int, worker: Worker | None) -> ProtocolError:
        """A process has the state of a view, and the others have taken steps without it."""
        why = "its last view is not theirs"
        if worker is not None and worker.why_gone:
            why = f"{worker.gone_because}; it is heard again after {self._now_s - worker.last_heard_s:.1f} s"
        return ProtocolError(
            f"the others of job {self.name!r} went on without worker {rank}: {why} (expected to be heard in each lease"
            f" of {self._lease_s:g} s). Fix: start it again, as psengine run --independent does: it takes over their"
            f" state. Where such pauses are normal, {RAISE_LEASE}.",
            ErrorCode.FENCED,
        )

    # ---- a view that a former coordinator published -----------------------------------------------------------------

    def _hear_shown(self, message: Message, shown: Shown) -> None:
        known = {one.number: one for one in (*shown.releases, *self.releases)}
        self.releases = [known[one] for one in sorted(known)]
        if message.type is MessageType.VIEW and shown.view is not None:
            self._go_on_from(shown.view, shown)

    def _go_on_from(self, view: View, shown: Shown) -> None:
        self.last_number = max(self.last_number, view.number)
        if self._preparing is not None and self._preparing <= view.number:
            self._preparing = self._next_number()  # whoever has this view ignores a PREPARE of it
        if not self.is_known:
            logger.warning("job %r is under way already; its workers have one lease to come back", self.name)
            self._advance("interrupted")
            self.key, self.registration, self._registrar = shown.key, self._next_registration(), None
            self._set_rule(shown.rule)
            self.world_size = max(self.world_size, view.world_size)
            self.epochs, self.chunks, self.servers = list(view.shards), list(view.chunks), list(view.servers)
        number = 0 if self.view is None else self.view.number
        if view.number < number or len(view.shards) != len(self.epochs) or view == self.view:
            return
        if self.state is not JobState.RESUMING or view.number == number:
            self._want_view()
            return
        # What shards told of their lives meanwhile is newer.
        self.epochs = [max(pair) for pair in zip(self.epochs, view.shards, strict=True)]
        self.view = view
        self._expect(view.members)
        named = {(one.rank, one.incarnation) for one in view.members}
        for worker in self.workers.members:
            if (worker.rank, worker.incarnation) not in named:
                self._put_out(worker, "evicted", "a view that a former coordinator published is without it")

    def _set_rule(self, rule: Mapping[str, Any]) -> None:
        self.rule = dict(rule)
        self._decisions = decisions_of(self)

    def _expect(self, members: tuple[ViewMember, ...]) -> None:
        """The members of a view may come back within a lease from now on."""
        for member in members:
            worker = self.workers.by_rank.get(member.rank)
            if worker is None or worker.incarnation < member.incarnation:
                worker = Worker(member.rank, member.incarnation, None, member.user_id, WorkerState.GONE)
                worker.completed = member.first_step - 1
                self.workers.by_rank[member.rank] = worker
            is_over = worker.incarnation > member.incarnation or worker.why_gone in ("left", "fenced")
            if worker.state in (WorkerState.MEMBER, WorkerState.JOINING) or is_over:
                continue  # who has asked to join has given up its state
            if worker.state is WorkerState.GONE:
                worker.route, worker.last_heard_s = b"", self._now_s
            worker.advance("admitted")
            worker.first_step, worker.has_rule, worker.why_gone = member.first_step, True, ""
            worker.world_size = self.world_size
            self.came[worker.rank] = False

    def _resume(self) -> None:
        """Go on once each member of the last view is back or out."""
        members = self.workers.members
        if self.state is JobState.RESUMING and self.averages and not members:
            self._begin_anew()
        elif self.state is JobState.RESUMING and all(one.route for one in members):
            self._advance("resumed")
            self._decisions.learn()
            self._decisions.lose(keeps_log=self._interfaces.settings.keeps_updates)
            if members:
                self._want_view()

    # ---- a job's life ------------------------------------------------------------------------------------------

    def _choose_registrar(self) -> None:
        """Where nobody brings the job's first values, a worker has to."""
        waiting = [one for one in self.workers.waiting if not one.unreachable] or self.workers.waiting
        if self.state is not JobState.NEW or self._registrar in waiting or self._now_s < self._may_return_s:
            return
        # With several workers rank 0 gives the values; where its process died, whoever is there.
        if not waiting or (waiting[0].rank and self.world_size > 1 and not self._had_registrar):
            return
        self._advance("begun")
        self._registrar, self.registration = waiting[0], self._next_registration()
        self._had_registrar = True
        if self._may_return_s == -math.inf:  # else a restored key is tried first, under which shards may have a view
            self.key, self.runs = self._interfaces.draw_key(), [self._registrar.run]
        if self._interfaces.settings.warns_of_loss and not self.averages:
            logger.warning(
                "NOTHING IS DURABLE (durability memory): when this process ends, the model of job %r is LOST. Fix:"
                " --snapshot-dir DIRECTORY, and --durability log where no acknowledged update may be lost",
                self.name,
            )
        for one in self.workers.of(WorkerState.JOINING):
            one.advance("anew")

    def _reset(self) -> None:
        """Nothing of the job's life so far counts."""
        self._empty = None
        if self.view is not None and self.view.members:
            # They may only be paused: a view without them has shards forget them, and one without chunks the values.
            self.last_number = self._next_number()
            view = View(self.last_number, self._interfaces.epoch, (), tuple(self.epochs), world_size=self.world_size)
            self._empty = replace(message_of(view, self.key, self.number), view=view.number)
        self.view, self.key, self._registrar, self.decided = None, b"", None, 0
        self._had_registrar, self._may_return_s = False, -math.inf
        for one in (self.epochs, self.chunks, self.servers, self.releases, self.came, self.merged, self.runs):
            one.clear()
        self.is_trained = False
        if not any(one.has_rule for one in self.workers.present):
            self.rule, self.world_size = None, 1
        self._decisions = decisions_of(self)
        self._end_change()

    def _next_registration(self) -> int:
        """Shards keep the highest, also that of a coordinator whose numbers are forgotten."""
        return max(self.registration + 1, next(self._interfaces.numbers))

    def _advance(self, event: str) -> None:
        self.state = after(JOB, self.state, event)
        self.is_changed = True

    def _end(self, *, has_failed: bool) -> None:
        """The last worker has left; where its training broke off it may be started again."""
        # Who was evicted may be a process that stands still, or is started again: it has not done its part.
        are_others = bool(self.workers.waiting or self.missing) or not all(self.came.values())
        if has_failed or (not self.averages and are_others):
            if self.averages:
                self._begin_anew()
            return  # others are to come yet
        self._finish(
            ErrorCode.ENDED,
            f"job {self.name!r} has ended: all its workers have left, so this process has nothing to do. To train"
            " again, start another run, or give it another job (PSENGINE_JOB).",
        )

    def _begin_anew(self) -> None:
        """All are out who held the weights: who comes first brings others, or a view to go on from."""
        logger.warning("job %r begins anew: no worker is left that has its values", self.name)
        self._advance("over")
        self._reset()

    def _finish(self, code: str, text: str) -> None:
        """A run is over. Unless the servers have its weights, the next one begins anew."""
        logger.log(logging.INFO if code == ErrorCode.ENDED else logging.ERROR, "%s", text)
        self._lost = "" if code == ErrorCode.ENDED else text
        for worker in self.workers.by_rank.values():
            # Where the servers hold the weights, who was evicted may still do its part.
            if worker.run and not worker.is_of_next and (self.averages or worker.why_gone != "evicted"):
                self.refused.setdefault(worker.run, (code, text))
        if self.averages:  # nobody who was away comes back alone with what it has, also where runs have no names
            self.refused[self.key.hex()] = code, text
        self.refused = dict(list(self.refused.items())[-MAX_REMEMBERED:])
        self.came.clear()
        if code == ErrorCode.ENDED and not self.averages:
            self.world_size = 1  # the next run says how many it has
            return
        present = self.workers.present
        self._dismiss([one for one in present if one.run in self.refused or code != ErrorCode.ENDED], code, text)
        self._advance("over")
        self._reset()

    def _dismiss(self, workers: list[Worker], code: str, text: str) -> None:
        """They have nothing to do here any more, and are told so unasked."""
        for worker in workers:
            self._send(worker, Message(MessageType.ERROR, self.number, body={"code": code, "text": text}))
            self._put_out(worker, "left", "its run is over")

    # ---- what workers say --------------------------------------------------------------------------------------

    def _hear_registered(self, worker: Worker, message: Message) -> None:
        body, view = message.body, message.body.get("view")
        is_present = (worker, body["registration"]) == (self._registrar, self.registration)
        # Under a restored key shards may have more of an attempt before, whose registrar may still be at it.
        is_usable = bool(view) or (view is None and self._may_return_s == -math.inf)
        if is_present:
            self._may_return_s = -math.inf
        if not (is_present and is_usable):
            if worker is self._registrar and self.registration <= body["registration"] < INT64_MAX:
                # A shard has a later one, of another lead's, or something of this one.
                self.registration, self._registrar = body["registration"], None
            raise self._stale("registered a model under an older registration")
        if self.state is JobState.NEW:
            self.epochs, self.chunks, self._empty = list(body["epochs"]), list(body["chunks"]), None
            self.servers = list(body["servers"])
            self._advance("registered")
            self._lost = ""
            if view is None:
                self.runs.clear()
            else:  # a former life published it, and the run of then has trained
                self.is_trained, self.registration = True, self._next_registration()
                self.last_number = max(self.last_number, min(view, MAX_VIEW_NUMBER // 2))

    def _stale(self, what: str) -> ProtocolError:
        return ProtocolError(f"a worker of job {self.name!r} {what}; it has to begin this again", ErrorCode.STALE)

    def _hear_heartbeat(self, worker: Worker, message: Message) -> None:
        worker.telemetry.hear(message.body, self._now_s)
        self._hear_cut(worker, message.body)
        if message.view >= worker.admitted:
            worker.is_blocked = message.body.get("blocked", False)
            worker.is_elsewhere = message.body.get("elsewhere", False)
            worker.completed = max(worker.completed, message.body.get("completed", 0))
        if worker is self._donor:
            self._joiner = None  # it is asked again

    def _hear_cut(self, worker: Worker, body: Mapping[str, Any]) -> None:
        if not worker.unreachable:
            worker.cut_s = self._now_s
        worker.unreachable = frozenset(body.get("unreachable", worker.unreachable))

    def _hear_prepared(self, worker: Worker, message: Message) -> None:
        if worker.state is WorkerState.MEMBER and message.body["view"] == self._preparing:
            worker.prepared = message.body["view"]
            worker.completed = max(worker.completed, message.body["completed"])

    def _hear_step(self, worker: Worker, message: Message) -> None:
        step = message.body["step"]
        if worker not in self._decisions.members or message.view < worker.admitted or self.view is None:
            return
        # Shards forgot what was pushed under an older view; it is pushed and committed again.
        if self.averages and message.view < self.view.number and step >= self.view.from_step:
            return
        worker.completed = max(worker.completed, message.body["completed"])  # so few decisions stay that some may lack
        self._decisions.commit(worker, step, abstained=message.body["abstained"], now_s=self._now_s)

    def _hear_join(self, worker: Worker, message: Message) -> None:
        if not self.averages or worker.state is WorkerState.GONE:
            return
        # It takes none that is not newer than its last, which may be a former coordinator's.
        self.last_number = max(self.last_number, min(message.view, MAX_VIEW_NUMBER // 2))
        if worker.state is WorkerState.MEMBER:
            if message.view < max(worker.admitted, 1):
                return  # a repetition: the view that has it is on its way
            self._note("joined", worker, "lacks state, and joins again")
            self._want_view()
        worker.advance("asked")

    def _hear_donated(self, worker: Worker, message: Message) -> None:
        body = message.body
        joiner = self.workers.by_rank.get(body["rank"])
        if joiner is None or joiner.incarnation != body["incarnation"] or joiner.state is not WorkerState.JOINING:
            return  # it is gone, or this was heard before
        is_now = self.view is not None and message.view == self.view.number and list(body["epochs"]) == self.epochs
        if worker.state is not WorkerState.MEMBER or not is_now:
            raise self._stale("deposited its state under an older view")
        worker.completed = max(worker.completed, body["step"])
        if "refused" in body:
            error = {"code": ErrorCode.MEMORY, "text": body["refused"]}
            self._send(joiner, Message(MessageType.ERROR, self.number, body=error))
            self._put_out(joiner, "evicted", "servers have no room for the state that it lacks")
            return
        self._donation = worker, body["step"]

    def _hear_life(self, worker: Worker, message: Message) -> None:
        """A shard has another epoch than the view says, or holds a view of another coordinator's."""
        body, shard, number = message.body, message.body["shard"], message.body["view"]
        if worker.state is not WorkerState.MEMBER:
            return  # it says so again under the view that has it
        epoch, lost = body["epoch"], body.get("lost", 0)
        self.last_number = max(self.last_number, number)
        if shard >= len(self.epochs) or self.state not in (JobState.OPEN, JobState.RESUMING):
            return
        if epoch != self.epochs[shard]:
            is_late = self.view is None or message.view < self.view.number
            if epoch < self.epochs[shard] and is_late:
                return  # a life before; where a clock was set back, it is said again under this view
            self.epochs[shard] = epoch
            self.is_changed, self._donation = True, None  # what was deposited there is lost
            self._decisions.lose(keeps_log=self._interfaces.settings.keeps_updates and not lost)
            self._want_view()
            if not self.averages and self.chunks and body["chunks"] < self.chunks[shard]:
                self._finish(
                    ErrorCode.STATE_LOST,
                    f"job {self.name!r} is lost: shard {shard} has restarted with {body['chunks']} of its"
                    f" {self.chunks[shard]} chunks. Fix: start all anew from a checkpoint; servers that start with"
                    " --snapshot-dir DIRECTORY, and --durability log (psengine run: --server-option durability=log)"
                    " where no update may be lost, keep them.",
                )
                return
        elif self.view is not None and number >= self.view.number:
            self._want_view()
        if lost > self._losses.get(epoch, 0):
            self._losses[epoch] = lost
            text = f"{lost} updates of each chunk of shard {shard} are lost: workers had them acknowledged, and the"
            self._interfaces.note("lost", f"{text} snapshot that its server started from is older", job=self.name)
            if "log" in DURABILITY_TIERS[self._interfaces.settings.durability]:
                self._halted = (
                    f"job {self.name!r} is lost: shard {shard} came back with an older state, version"
                    f" {body['version']}, and workers knew of version {body['version'] + lost}. Fix: start its servers"
                    " with the --snapshot-dir of before, then the workers; or drop the job by psengine admin forget."
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
        worker.leaving = message
        return True

    # ---- who is put out ----------------------------------------------------------------------------------------

    def _put_out(self, worker: Worker, reason: str, why: str) -> None:
        """A worker is gone: it left, or was evicted, or fenced by another process that has its rank."""
        if worker.state is WorkerState.GONE:
            return
        if worker.state is WorkerState.MEMBER:
            self._want_view()
            self.evicted += reason != "left"
            self.is_trained |= worker.leaving is None or not worker.leaving.body.get("untouched", False)
        elif worker is self._registrar:
            self._registrar = None  # if it comes back it begins again
        self._note_end(worker, reason)
        worker.advance("went")
        worker.why_gone, worker.gone_because, worker.prepared = reason, why, 0
        worker.gone_unix_s = round(self._interfaces.wall_s(), 3)
        self._learn_size()
        self._note(reason, worker, f"{'left' if reason == 'left' else f'was {reason}'}: {why}")
        self.is_changed = True

    def _note_end(self, worker: Worker, reason: str) -> None:
        """Remember whether a worker that is put out has done its part."""
        if worker.rank in self.came:
            self.came[worker.rank] = reason == "left"

    def _note(self, kind: str, worker: Worker, text: str) -> None:
        """An event of a worker, for people."""
        text = f"worker {worker.rank} (process {worker.pid} on {worker.host}) {text}"
        self._interfaces.note(kind, text, job=self.name, worker=worker.rank)

    def _hear(self) -> None:
        """Somebody says something of this job, be it only that it wants to join, or the rank of another.

        Where nobody was heard for half a lease, the server may have been cut off from all: leases begin anew. Who waits
        for the rank of a dead process is heard more often than that.
        """
        if max(self._lease_s / 2, 2 * HELLO_AGAIN_S) < self._now_s - self._heard_s < math.inf:
            self._leases_begin_s = self._now_s
        self._heard_s = self._now_s

    def _others_outlast(self, since_s: float) -> bool:
        """Whether somebody was heard more than a lease after that moment: who is silent since then is so alone."""
        return self._heard_s - max(since_s, self._leases_begin_s) > self._lease_s

    def _is_here(self, worker: Worker) -> bool:
        return self._now_s - worker.last_heard_s <= self._lease_s

    def _put_out_silent(self) -> None:
        for worker in self.workers.present:
            silent_s, is_member = self._now_s - worker.last_heard_s, worker.state is WorkerState.MEMBER
            if silent_s > self._lease_s and (not is_member or self._others_outlast(worker.last_heard_s)):
                self._put_out(worker, "evicted", f"silent for {silent_s:.1f} s, longer than its lease")

    def _put_out_cut_off(self) -> None:
        """Put out members that cannot reach a shard for a lease, where others reach it and wait.

        A lease passes before the verdict, from when another reaches it: a server that restarts is not reached by all at
        once. Where gradients are applied as they come, nobody waits for anybody.
        """
        members = self.workers.members
        may_wait = self.averages or type(self._decisions) is not Decisions
        if not may_wait or not any(one.unreachable for one in members):
            return
        by_nobody = frozenset.intersection(*(one.unreachable for one in members))
        are_waited_for = any(one.is_blocked or one.leaving for one in members if not one.unreachable - by_nobody)
        for worker in members:
            shards = worker.unreachable - by_nobody
            if not shards or self.state is not JobState.OPEN:
                worker.cut_s = self._now_s
            elif are_waited_for and self._now_s - worker.cut_s > self._lease_s:
                names = ", ".join(map(str, sorted(shards)))
                self._put_out(worker, "evicted", f"it cannot reach shards {names}, which others reach, who wait for it")

    def _let_leave(self) -> None:
        """Members that want to leave may, once all others have the averages that they have."""
        members = self.workers.members
        for worker in members:
            if worker.leaving is not None and (not self.averages or may_leave(worker, members)):
                self._put_out(worker, "left", "its training broke off" if worker.has_failed else "it is done")

    def _turn_away(self) -> None:
        """Where no member is left, nobody goes on from what another run has trained without saying so."""
        waiting, members = self.workers.waiting, self.workers.members
        if self.averages or not (self.is_trained or members) or any(map(self._is_here, members)):
            return
        if any(one.continues or (one.run and one.run in self.runs) for one in waiting):
            return  # the others join it
        for worker in waiting:
            whose = " and ".join(filter(None, self.runs[-3:])) or "an earlier run"
            text = f"the values of job {self.name!r} were trained by {whose}, of which no worker is here"
            anew = f"another job (PSENGINE_JOB), or psengine admin forget --job {self.name}, to begin anew"
            if not worker.run or "" in self.runs:  # a process that was started again, or another run?
                worker.warning = (
                    f"{text}; this worker goes on from them. Where that is meant, say so by psengine run"
                    " --continue, or PSENGINE_CONTINUE=1, or name the run (PSENGINE_RUN_NAME) alike each time; else"
                    f" choose {anew}."
                )
                return
            text = (
                f"{text} (expected a process of that run, got one of {worker.run}). Fix: psengine run --continue, or"
                f" PSENGINE_CONTINUE=1, to go on from them; {anew}."
            )
            body = {"code": ErrorCode.OTHER_RUN, "text": text}
            self._send(worker, Message(MessageType.ERROR, self.number, sequence=worker.hello, body=body))
            self._interfaces.note("refused", f"HELLO was refused: {text}", job=self.name)
            del self.workers.by_rank[worker.rank]

    # ---- views -------------------------------------------------------------------------------------------------

    def _change_view(self) -> None:
        """Where there is a cause: freeze the members who hold the weights; once they are, publish a view."""
        newcomers, members, departing = self._newcomers(), self.workers.members, self.workers.departing
        if self.averages and not (newcomers or members or departing):
            if self.view is not None and self.view.members:
                self._end(has_failed=True)
            return
        if newcomers:
            self._want_view()
        # Once members are frozen a view has to come, also where its cause is gone.
        if self._preparing is not None and not self._unprepared():
            self._publish(newcomers)

    def _want_view(self) -> None:
        if self._preparing is None:
            self._preparing = self._next_number()

    def _newcomers(self) -> list[tuple[Worker, int]]:
        """Who comes in with the next view, and its first step."""
        waiting = [one for one in self.workers.waiting if not one.unreachable]
        if not self.averages:
            return [(one, self._decisions.first_step(one)) for one in waiting]
        if self.view is None:
            return [(one, 1) for one in waiting] if len(waiting) >= self.world_size else []
        if self._donation is None or self._donation not in [(one, one.completed) for one in self.workers.members]:
            self._donation = None
            return []
        return [(one, self._donation[1] + 1) for one in waiting if one.state is WorkerState.JOINING]

    def _next_number(self) -> int:
        return self.last_number + 1

    def _unprepared(self) -> list[int]:
        return [one.rank for one in self.workers.members if self.averages and one.prepared != self._preparing]

    def _publish(self, newcomers: list[tuple[Worker, int]]) -> None:
        number = self._next_number()
        newest = max((one.completed for one in self.workers.members), default=0)
        has_restarted_shard = self.view is not None and list(self.view.shards) != self.epochs
        for worker in self.workers.members if self.averages and has_restarted_shard else ():
            if worker.completed < newest - 1:
                self._put_out(worker, "evicted", "it lacks averages that a restarted server cannot give again")
        for worker, first_step in newcomers:
            worker.advance("admitted")
            worker.first_step, worker.admitted, worker.committed = first_step, number, 0
            worker.is_blocked = worker.has_read = False
            if self.averages:
                worker.completed = first_step - 1
                newest = max(newest, worker.completed)
            self.came[worker.rank] = False
            self._note("joined", worker, "takes part")
        members, from_step = self.workers.members, newest + 1 if self.averages else 1
        self.runs = list(dict.fromkeys([*self.runs, *(one.run for one in members)]))[-MAX_REMEMBERED:]
        # Who reads its state from the servers has no averages to give.
        givers = [one.rank for one in members if one.completed == newest and one.has_begun]
        is_lacking = self.averages and any(one.completed < newest for one in members)
        self._decisions.adopt(members)
        self.view = View(
            number,
            self._interfaces.epoch,
            tuple(one.to_view() for one in members),
            tuple(self.epochs),
            from_step=from_step,
            world_size=self.world_size,
            donor=givers[0] if givers and is_lacking else None,
            releases=tuple(self.releases),
            chunks=tuple(self.chunks),
            servers=tuple(self.servers),
        )
        self._complete_view(members)
        self.last_number, self.is_changed = number, True
        self._end_change()
        logger.info("job %r: view %d has workers %s", self.name, number, [one.rank for one in members])
        departing = self.workers.departing
        has_failed = any(one.has_failed for one in departing)
        for worker in departing:
            assert worker.leaving is not None
            self._tell(worker)
            self._send(worker, Message(MessageType.OK, self.number, sequence=worker.leaving.sequence))
            worker.leaving = None
        if departing and not members:
            self._end(has_failed=has_failed)

    def _complete_view(self, members: list[Worker]) -> None:
        """Add what the members of such a job have to know."""

    def _end_change(self) -> None:
        self._preparing = self._donation = self._joiner = None

    def _ask_donor(self) -> None:
        """Have a member deposit its state for those who join, one deposit at a time."""
        joiners = [one for one in self.workers.waiting if one.state is WorkerState.JOINING and not one.unreachable]
        members, asked = self.workers.members, self._joiner
        is_busy = self._preparing is not None or self._donation is not None
        # Some may still be reading the values with which they began.
        is_busy |= any(not one.has_begun and one.leaving is None for one in members)
        self._joiner = None if is_busy or not joiners or not members else joiners[0]
        if self._joiner is None:
            return
        # The same donor as long as it lives: two might deposit states of different steps at once.
        if self._donor not in members or self._donor.leaving is not None:
            self._donor, asked = min(members, key=lambda one: (one.leaving is not None, one.rank)), None
        if self._joiner is not asked:
            body = {"rank": self._joiner.rank, "incarnation": self._joiner.incarnation}
            self._send(self._donor, Message(MessageType.STATE_WANTED, self.number, body=body))

    # ---- for people, and the disk ------------------------------------------------------------------------------

    def is_awaited(self, message: Message, user_id: str) -> bool:
        """Whether a HELLO comes from a process of this job, or for the rank of one."""
        known = any(one.is_process(message, user_id) for one in self.workers.by_rank.values())
        is_back = bool(self.key) and message.body.get("key") == self.key
        return known or is_back or message.body.get("rank") in {one.rank for one in self.workers.present}

    @property
    def remembered_count(self) -> int:
        """Workers that are here, or whose lease ended less than a lease ago: they may come back."""
        gone = [one for one in self.workers.of(WorkerState.GONE) if one.why_gone == "evicted"]
        return sum(self._now_s - one.last_heard_s <= 2 * self._lease_s for one in (*self.workers.present, *gone))

    @property
    def here_count(self) -> int:
        """Workers that were heard within a lease."""
        return sum(map(self._is_here, self.workers.present))

    def status(self, now_s: float) -> CoordinatedJob:
        """The job as it is now."""
        gone = sorted(self.workers.of(WorkerState.GONE), key=lambda one: one.gone_unix_s)
        return CoordinatedJob(
            rule=self.rule or {},
            lost=self._halted or self._lost,
            expected_workers=self.world_size,
            evicted=self.evicted,
            lost_updates=sum(self._losses.values()),
            departed=tuple(
                Departed(rank=one.rank, host=one.host, reason=one.why_gone, unix_s=one.gone_unix_s, step=one.completed)
                for one in gone[-MAX_DEPARTED:]
            ),
            workers=tuple(self._worker_status(one, now_s - one.last_heard_s) for one in self.workers.present),
        )

    def _worker_status(self, worker: Worker, silent_s: float) -> CoordinatedWorker:
        state: State = "silent" if silent_s > 2 * self._interfaces.settings.heartbeat_s else "live"
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
        return {one.name: msgspec.to_builtins(getattr(self, one.name), str_keys=True) for one in fields(JobMemory)}

    def take_over(self, former: Coordinator) -> None:
        """Go on with a job that has no rule, and so no view: of its workers only ranks are reserved."""
        vars(self).update({one.name: getattr(former, one.name) for one in fields(JobMemory)})
        self.workers, self._now_s, self.is_changed = former.workers, former._now_s, True

    def restore(self, meta: Mapping[str, Any], now_s: float) -> None:
        """Inverse of ``to_meta``, in a new object: the members of the view have a lease to come back."""
        vars(self).update(vars(msgspec.convert(meta, JobMemory, str_keys=True)))
        self._now_s, self._decisions = now_s, decisions_of(self)
        if self.state is JobState.NEW:
            # After what was restored the values may have come to the servers, and workers be under way with the key.
            if self.averages:
                self.key = b""
            elif self.key:
                self._may_return_s = now_s + self._lease_s
        elif self.state is JobState.OPEN and self.view is not None and (self.averages or self.view.members):
            self._advance("interrupted")
        if self.state is JobState.RESUMING and self.view is not None:
            self._expect(self.view.members)


def may_leave(leaver: Worker, members: list[Worker]) -> bool:
    """Whether all others have every average that a worker has which wants to leave."""
    return leaver.has_failed or all(one.completed >= leaver.completed for one in members)
