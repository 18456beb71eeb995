"""A shard: some of the chunks of every job, and the answers to every message about them. No sockets, no clock.

bytes ─ codec ─► handle(sender, message, now) ─► [Outgoing] ─ codec ─► bytes
every TICK_S:                        tick(now) ─► [Outgoing], for leases that ran out

Where ``now`` leaps, nobody called: the process was stopped, or short of processor or memory, or a task between messages
took long. Workers' messages of that time are still unread, so a leap does not count as any worker's silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.overview import owns_weights, rule_text
from psengine.parameter_server.server.core.answers import Answers, StatusReport, ok, traffic_bytes
from psengine.parameter_server.server.core.durable_state import DurableState
from psengine.parameter_server.server.events import EventLog
from psengine.parameter_server.server.interfaces import Clocks, Outgoing, Sender, ShardSettings
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.job_status import status_of
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.core.permissions import PeerState, check_legal
from psengine.parameter_server.server.core.shard_jobs import ShardJobs
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.parameter_server.status_model import ServerFacts, ShardStatus
from psengine.protocol.layout import job_number
from psengine.protocol.messages import DURABILITY_TIERS, NOBODY, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# How often ``tick`` is to be called. A leap of the time counts as one of these: if it counted as nothing, a server that
# is always short of processor would never find a worker dead.
TICK_S = 0.1
# Shorter leaps are ordinary, such as the copy of a large model for a snapshot, and not reported.
NOTABLE_PAUSE_S = 2.0
# Refusals that people should hear of; by the others a worker learns that it has to come back, or wait.
_NOTABLE_REFUSALS = frozenset(
    {
        ErrorCode.RULE_MISMATCH,
        ErrorCode.LAYOUT_MISMATCH,
        ErrorCode.DUPLICATE_RANK,
        ErrorCode.BAD_VALUE,
        ErrorCode.MEMORY,
    }
)
# Events that each shard has its own of; the others would be the same at each, and only the first shard notes them.
_EVENTS_OF_ANY_SHARD = frozenset({"refused", "late", "lost", "memory", "stood_still"})
# Of a worker that has lost its place they go to the job, which has the worker come back through JOIN.
_OF_A_LOST_PLACE = frozenset({MessageType.PUSH, MessageType.PROBE, MessageType.REPEAT})
# All other messages of members may change what a snapshot keeps: even PULL and REPEAT, by backing up weights.
_LEAVE_SNAPSHOT_ALONE = frozenset({MessageType.HEARTBEAT, MessageType.LIST, MessageType.STATUS, MessageType.ECHO})


class Shard:
    """See the module's text."""

    def __init__(self, index: int, epoch: int, settings: ShardSettings, clocks: Clocks) -> None:
        self.index = index  # in its server process, 0 first
        self.epoch = epoch  # random number of the server process's life
        self.settings = settings
        # Of all shards of the process, told to clients; set before the first message.
        self.shard_addresses: list[str] = []
        self._clocks = clocks
        self.events = EventLog(clocks)
        # Called with the route and the message of a member's SNAPSHOT; the callee answers.
        self.want_snapshot: Callable[[bytes, Message], None] = _keep_no_snapshots
        self.is_draining = False  # the server is about to end
        self.is_closed = False  # to workers that it does not know
        self.jobs = ShardJobs(settings, clocks, self.note)
        self.durable = DurableState(self.jobs)
        # What the first shard's reports say of the server process.
        self.server_facts: Callable[[], ServerFacts | None] = lambda: None
        report = StatusReport(
            lambda: replace(self.status(self.jobs.now_s), server=self.server_facts()), clocks.measure_s
        )
        self._answers = Answers(index, epoch, self.jobs, self.durable, report, lambda: self.shard_addresses)

    # ---- messages ----------------------------------------------------------------------------------------------

    def handle(self, sender: Sender, message: Message, now_s: float) -> list[Outgoing]:
        """Take in one message; the messages it leads to, to any peers. A refused message changes nothing."""
        self._look_at_time(now_s)
        try:
            if message.type is MessageType.HELLO:
                return self._hello(sender, message, now_s)
            standing, place = self._peer_state(sender, message, now_s)
            # The one gate: a message that its table does not name is refused before anything is done.
            check_legal(standing, message)
            if message.type is MessageType.SNAPSHOT:
                self.want_snapshot(sender.route, message)
                return []
            if place is None:
                return [Outgoing(sender.route, self._answers.of_reader(message))]
            job, member = place
            job.statistics.bytes_in += traffic_bytes(message)
            if message.type not in _LEAVE_SNAPSHOT_ALONE:
                self.durable.note_change()
            if message.type is MessageType.BYE:
                # Answered first: afterwards there is no member to send to.
                goodbye = self._answers.outgoing(job, [ok(member, message)], now_s)
                return [*goodbye, *self._answers.outgoing(job, job.goodbye(member.rank, now_s), now_s)]
            return self._answers.outgoing(job, self._answers.of_member(job, member, message), now_s)
        except ProtocolError as error:
            if error.code in _NOTABLE_REFUSALS:
                self._note_refusal(message, error)
            return [Outgoing(sender.route, self._answers.error(message, error))]

    def _peer_state(
        self, sender: Sender, message: Message, now_s: float
    ) -> tuple[PeerState, tuple[Job, Member] | None]:
        """The state of the peer that sent this; a worker with its job.

        Raises:
            ProtocolError: it says that it is a worker, and is none.
        """
        if message.worker == NOBODY:
            return PeerState.READER, None
        job, member = self._authenticate(sender, message, now_s)
        is_member = message.type in _OF_A_LOST_PLACE or (member.phase.is_live and job.is_sealed)
        return (PeerState.MEMBER if is_member else PeerState.GREETED), (job, member)

    def _look_at_time(self, now_s: float) -> None:
        passed_s, self.jobs.now_s = now_s - self.jobs.now_s, now_s
        # A lease outlasts several heartbeats: a pause shorter than one harms nobody.
        if passed_s <= max(self.settings.heartbeat_s, 2 * TICK_S):
            return
        for job in self.jobs.by_number.values():
            job.stood_still(passed_s - TICK_S)
        if passed_s < NOTABLE_PAUSE_S or not self.jobs.member_count:
            return
        text = (
            f"shard {self.index} stood still for {passed_s:.1f} s: its process was stopped, or short of processor or"
            " memory, or one task took as long; no worker's lease ran meanwhile"
        )
        logger.warning("%s", text)
        self.note("stood_still", text)

    def note(
        self, kind: str, text: str, *, job: str = "", worker: int | None = None, is_stranger: bool = False
    ) -> None:
        """Something happened that people may want to know; see ``EventLog.note``."""
        if self.index == 0 or kind in _EVENTS_OF_ANY_SHARD:
            self.events.note(kind, text, job=job, worker=worker, is_stranger=is_stranger)

    def _note_refusal(self, message: Message, error: ProtocolError) -> None:
        job = self.jobs.by_number.get(message.job)
        worker = message.body.get("rank") if message.type is MessageType.HELLO else message.worker
        self.note(
            "memory" if error.code == ErrorCode.MEMORY else "refused",
            f"{message.type.name} was refused: {error}",
            job=job.name if job is not None else "",
            worker=None if worker == NOBODY else worker,
            is_stranger=job is None or worker not in job.membership.members,
        )

    def tick(self, now_s: float) -> list[Outgoing]:
        """Evict workers whose lease ran out; answers that may leave because of it."""
        self._look_at_time(now_s)
        outgoing: list[Outgoing] = []
        for job in self.jobs.by_number.values():
            expired = job.tick(now_s)
            if expired:
                self.durable.note_change()
                outgoing.extend(self._answers.outgoing(job, job.evict(expired, now_s), now_s))
            held = job.tick_rules()
            if held:
                self.durable.note_change()
                outgoing.extend(self._answers.outgoing(job, held, now_s))
        return outgoing

    def evict(self, job_name: str, rank: int, now_s: float) -> list[Outgoing] | None:
        """End a worker's lease before its time; answers that may leave because of it, None where there is none."""
        self._look_at_time(now_s)
        job = self.jobs.find(job_name)
        if job is None or rank not in job.membership.members:
            return None
        self.durable.note_change()
        return self._answers.outgoing(job, job.evict([rank], now_s), now_s)

    def _hello(self, sender: Sender, message: Message, now_s: float) -> list[Outgoing]:
        body, job = message.body, self.jobs.by_number.get(message.job)
        if job_number(body["job"]) != message.job:
            raise ProtocolError(f"the header's job is not the number of {body['job']!r}")
        if job is not None and job.name != body["job"]:
            raise ProtocolError(f"jobs {job.name!r} and {body['job']!r} have the same number; rename one")
        if self.is_draining:
            raise ProtocolError("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        if body["role"] == "reader":
            state = "ready" if job is not None and job.is_sealed else "wait"
            return [Outgoing(sender.route, self._answers.welcome(job, message, state))]
        if self.is_closed and (job is None or not job.is_awaited(body.get("rank"), body["nonce"])):
            raise ProtocolError(
                "this server lets no more workers in: it was told to drain (psengine admin drain), and ends when the"
                " last of its workers has left",
                ErrorCode.SHUTTING_DOWN,
            )
        if job is None:
            job = self.jobs.begin(body["job"], body["rule"])
        _check_current(job)
        self._check_durability(job.name, body["rule"])
        if job.rule.body != body["rule"]:
            raise ProtocolError(
                f"job {job.name!r} runs under another rule (expected strategy {rule_text(job.rule.body)!r}, got"
                f" {rule_text(body['rule'])!r}). Every worker of a job needs the same strategy and options; give"
                " another run another job (PSENGINE_JOB).",
                ErrorCode.RULE_MISMATCH,
            )
        self.durable.note_change()
        state, member, replies = job.greet(message, sender.user_id, sender.route, now_s)
        if self.settings.warns_of_loss and self.index == 0 and job.number not in self.jobs.by_number:
            _warn_of_loss(job)
        self.jobs.add(job)  # a new one, now that its first worker was let in
        if member is not None:
            self.jobs.journal.members(job)
        welcome = self._answers.welcome(job, message, state)
        if member is not None:
            welcome.worker, welcome.incarnation = member.rank, member.incarnation
        return [Outgoing(sender.route, welcome), *self._answers.outgoing(job, replies, now_s)]

    def _check_durability(self, job: str, rule: Mapping[str, Any]) -> None:
        """Raise ProtocolError where the job wants more than this server keeps."""
        wanted, offered = rule.get("durability", "memory"), self.settings.durability
        if DURABILITY_TIERS.index(wanted) > DURABILITY_TIERS.index(offered):
            raise ProtocolError(
                f"job {job!r} asks for durability={wanted} (expected a server that offers at least that, got"
                f" {offered}). Fix: start its servers with --durability {wanted} --snapshot-dir DIRECTORY, or ask for"
                " less in the strategy.",
                ErrorCode.RULE_MISMATCH,
            )

    def _authenticate(self, sender: Sender, message: Message, now_s: float) -> tuple[Job, Member]:
        job = self.jobs.by_number.get(message.job)
        if job is None or (message.epoch and message.epoch != self.epoch):
            raise ProtocolError("this server has restarted since; say HELLO again", ErrorCode.NOT_MEMBER)
        _check_current(job)
        member = job.membership.find(message, sender.user_id, sender.route, now_s)
        if isinstance(member, str):
            if member == "stranger":
                raise ProtocolError(
                    f"worker {message.worker} of job {job.name!r} has not said HELLO to this server",
                    ErrorCode.NOT_MEMBER,
                )
            raise ProtocolError(
                f"worker {message.worker} of job {job.name!r} was fenced: silent for more than its lease of"
                f" {self.settings.lease_s:g} s, or replaced by a newer process, or the rank belongs to another key. It"
                " has to say HELLO again; where that happens often, raise --lease-s.",
                ErrorCode.FENCED,
            )
        return job, member

    # ---- for the daemon ----------------------------------------------------------------------------------------

    def worker_count(self, job_name: str) -> int | None:
        """Workers of a job; None where there is no such job."""
        job = self.jobs.find(job_name)
        return None if job is None else len(job.membership.members)

    def forget(self, job_name: str) -> None:
        """Drop a job, if there is such a one, with its values; a worker that it still has is told to come anew."""
        job = self.jobs.find(job_name)
        if job is not None:
            logger.warning("job %r is forgotten by shard %d, at version %d", job.name, self.index, job.version)
            self.jobs.drop(job)

    def close(self) -> int:
        """Let no more workers in, but those of its jobs that come back; how many workers there are."""
        self.is_closed = True
        return self.jobs.member_count

    def status(self, now_s: float) -> ShardStatus:
        """The shard as it is now."""
        return ShardStatus(
            index=self.index,
            epoch=self.epoch,
            durable_generation=self.durable.generation,
            durability=self.settings.durability,
            memory_bytes=self.jobs.memory_bytes(),
            max_memory_bytes=self.settings.max_memory_bytes,
            software=self.settings.software,
            # Departures are dated by this clock, which may differ from that of whoever asks.
            unix_s=round(self._clocks.wall_s(), 3),
            jobs={job.name: status_of(job, now_s, self.settings.heartbeat_s) for job in self.jobs.by_number.values()},
        )

    def restore(self, states: Sequence[JobState], now_s: float) -> None:
        """Take over a snapshot's state, before the first message."""
        self.jobs.now_s = now_s  # until it is looked at next nobody can be heard
        self.durable.restore(states)


def _warn_of_loss(job: Job) -> None:
    if owns_weights(job.rule.body):
        logger.warning(
            "NOTHING IS DURABLE (durability memory): when this process ends, crashes or restarts, the model of job %r"
            " is LOST. Fix: start it with --snapshot-dir DIRECTORY, and --durability log where no acknowledged update"
            " may be lost",
            job.name,
        )


def _keep_no_snapshots(route: bytes, message: Message) -> None:
    raise ProtocolError("this server keeps no snapshots; start it with --snapshot-dir", ErrorCode.SNAPSHOT_FAILED)


def _check_current(job: Job) -> None:
    """Raise ProtocolError where a worker knows a newer state of the job than this server."""
    if job.outdated:
        raise ProtocolError(job.outdated, ErrorCode.STATE_LOST)
