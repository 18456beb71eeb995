"""A shard: some of the chunks of every job, and the answers to every message about them. No sockets, no clock.

bytes ─ codec ─► handle(sender, message, now) ─► [Outgoing] ─ codec ─► bytes
every TICK_S:                        tick(now) ─► [Outgoing], for leases that ran out

Where ``now`` leaps, nobody called: the process was stopped, or short of processor or memory, or a task between messages
took long. What workers said meanwhile is unread still, so that such a leap is nobody's silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.overview import rule_text
from psengine.parameter_server.server.core.capture import Capture, Goals, Meeting
from psengine.parameter_server.server.core.clocks import Clocks
from psengine.parameter_server.server.core.events import EventLog
from psengine.parameter_server.server.core.gate import Standing, check_legal
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.job_places import check_place, find_replaceable, is_full
from psengine.parameter_server.server.core.job_status import status_of
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.core.readers import Readers, traffic_bytes
from psengine.parameter_server.server.core.status_report import StatusReport
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.server.rules.loans import Loans
from psengine.parameter_server.server.snapshots.store import JobState
from psengine.parameter_server.status_model import ShardStatus
from psengine.protocol.bodies import MAX_TEXT_CHARS
from psengine.protocol.codec import payload_tensor
from psengine.protocol.layout import ChunkSpec, job_number
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# How often ``tick`` is to be called, and what a leap of the time counts for: were it nothing, a server that is always
# short of processor would never find a worker dead.
TICK_S = 0.1
# Shorter leaps are everyday, such as the copy of a large model for a snapshot: people are not told of them.
NOTABLE_PAUSE_S = 2.0
# Refusals that people should hear of; the others are how a worker learns that it has to come back, or wait.
_NOTABLE_REFUSALS = {
    ErrorCode.RULE_MISMATCH: "refused",
    ErrorCode.LAYOUT_MISMATCH: "refused",
    ErrorCode.DUPLICATE_RANK: "refused",
    ErrorCode.BAD_VALUE: "refused",
    ErrorCode.MEMORY: "memory",
}
# Every shard sees them; of the others each shard would tell the same.
_EVENTS_OF_ANY_SHARD = frozenset({"refused", "late", "lost", "memory", "stood_still", "torn"})
# All other messages of members may change what a snapshot keeps: even PULL and REPEAT, by backing up weights.
_LEAVE_SNAPSHOT_ALONE = frozenset({MessageType.HEARTBEAT, MessageType.LIST, MessageType.STATUS, MessageType.ECHO})


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What a shard needs to know.

    Attributes:
        lease_s: silence after which a worker is evicted.
        heartbeat_s: how often workers should send HEARTBEAT.
        max_memory_bytes: what this shard may hold.
        credit_bytes: payload bytes a worker may have in flight to this shard.
        software: version of psengine, for WELCOME.
    """

    lease_s: float = 5.0
    heartbeat_s: float = 1.0
    max_memory_bytes: int = 8 << 30
    credit_bytes: int = 256 << 20
    software: str = ""


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a message came from: its connection's routing id, and its public key ("" without CURVE).

    ``peer`` is whom to hold to account: a key, a user or an address; "" where that is not known.
    """

    route: bytes
    user_id: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send.

    Attributes:
        route: the connection it goes to.
        message: its payload may change once ``handle`` or ``tick`` is called again, unless there are ``loans``.
        loans: to be told when the payload is sent without a copy; None has it copied.
    """

    route: bytes
    message: Message
    loans: Loans | None = None


class Shard:
    """See the module's text.

    Args:
        index: of this shard in its server process, 0 first.
        epoch: random number of the server process's life.
        settings: see there.
        clocks: see there.

    Attributes:
        shard_addresses: of all shards of the process, told to clients; set before the first message.
        want_snapshot: called with the route and the message of a member's SNAPSHOT; whoever sets it answers.
        events: what happened, for people; of workers' coming and going only the first shard tells.
    """

    def __init__(self, index: int, epoch: int, settings: ShardSettings, clocks: Clocks) -> None:
        self.index = index
        self.epoch = epoch
        self.settings = settings
        self.shard_addresses: list[str] = []
        self._clocks = clocks
        self.events = EventLog(clocks)
        self.want_snapshot: Callable[[bytes, Message], None] = _keep_no_snapshots
        self.is_draining = False
        self._now_s = 0.0
        self._jobs: dict[int, Job] = {}
        self._durable_generation: int | None = None
        self._durable_version: dict[int, int] = {}
        self._captured_version: dict[int, int] = {}
        # Grows with every change of what a snapshot keeps; what ``_state`` was when the durable one was captured.
        self._changes = 0
        self._captured_state: tuple[int, int] | None = None
        self._durable_state: tuple[int, int] | None = None
        self._report = StatusReport(lambda: self.status(self._now_s), clocks.measure_s)
        self._readers = Readers(self._jobs, self._message, self._status_report, self._heartbeat_body)
        self._handlers: dict[MessageType, Callable[[Job, Member, Message], list[Reply]]] = {
            MessageType.PUSH: lambda job, member, message: job.exchanges.push(message, member, self._now_s),
            **dict.fromkeys((MessageType.PROBE, MessageType.REPEAT), self._probe),
            MessageType.RESULT: lambda job, member, message: job.exchanges.supply_result(message, member),
            MessageType.REGISTER: self._register,
            MessageType.SEAL: lambda job, member, message: [*_ok(member, message), *job.seal(message, member)],
            MessageType.CONFIGURE: self._configure,
            MessageType.LIST: self._list,
            MessageType.PULL: self._pull,
            MessageType.STORE: self._store,
            MessageType.HEARTBEAT: self._heartbeat,
            MessageType.JOIN: lambda job, member, message: job.weights.join(member, message.sequence),
            MessageType.ADMIT: lambda job, member, message: [
                *_ok(member, message),
                *job.weights.admit(message, member),
            ],
            MessageType.STATUS: self._status,
            MessageType.LEAVE: lambda job, member, message: job.weights.leave(message, member),
            MessageType.PROGRESS: lambda job, member, message: job.weights.hear_progress(message, member, self._now_s),
            MessageType.ECHO: lambda job, member, message: [
                Reply(MessageType.ECHOED, member.rank, message.sequence, payload=payload_tensor(message))
            ],
        }

    # ---- messages ----------------------------------------------------------------------------------------------

    def handle(self, sender: Sender, message: Message, now_s: float) -> list[Outgoing]:
        """Take in one message; what it leads to, for whomever. A refused message changes nothing."""
        self._look_at_time(now_s)
        try:
            if message.type is MessageType.HELLO:
                return self._hello(sender, message, now_s)
            standing, place = self._standing(sender, message, now_s)
            # The one gate: what its table does not name is refused, whoever sends it, and nothing has been done yet.
            check_legal(standing, message)
            if message.type is MessageType.SNAPSHOT:
                self.want_snapshot(sender.route, message)
                return []
            if place is None:
                return [Outgoing(sender.route, self._readers.answer(message))]
            job, member = place
            job.statistics.bytes_in += traffic_bytes(message)
            self._changes += message.type not in _LEAVE_SNAPSHOT_ALONE
            if message.type is MessageType.BYE:
                # Answered first: afterwards there is no member to send to.
                goodbye = self._outgoing(job, _ok(member, message))
                return [*goodbye, *self._outgoing(job, job.goodbye(member.rank, now_s))]
            return self._outgoing(job, self._handlers[message.type](job, member, message))
        except ProtocolError as error:
            if error.code in _NOTABLE_REFUSALS:
                self._note_refusal(message, error)
            return [Outgoing(sender.route, self._error(message, error))]

    def _standing(self, sender: Sender, message: Message, now_s: float) -> tuple[Standing, tuple[Job, Member] | None]:
        """Who says this; a worker with its job.

        Raises:
            ProtocolError: it says that it is a worker, and is none.
        """
        if message.worker == NOBODY:
            return Standing.READER, None
        job, member = self._authenticate(sender, message, now_s)
        # What a worker pushes that has lost its place is left to the job, which has it come back through JOIN.
        believes_in_it = message.type in (MessageType.PUSH, MessageType.PROBE, MessageType.REPEAT)
        is_member = (member.phase.is_live and job.is_sealed) or believes_in_it
        return (Standing.MEMBER if is_member else Standing.GREETED), (job, member)

    def _look_at_time(self, now_s: float) -> None:
        """It is ``now_s``; see the module's text."""
        passed_s, self._now_s = now_s - self._now_s, now_s
        # A lease outlasts several heartbeats: a pause shorter than one harms nobody.
        if passed_s <= max(self.settings.heartbeat_s, 2 * TICK_S):
            return
        for job in self._jobs.values():
            job.stood_still(passed_s - TICK_S)
        if passed_s < NOTABLE_PAUSE_S or not self.member_count:
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
        job = self._jobs.get(message.job)
        worker = message.body.get("rank") if message.type is MessageType.HELLO else message.worker
        self.note(
            _NOTABLE_REFUSALS[error.code],
            f"{message.type.name} was refused: {error}",
            job=job.name if job is not None else "",
            worker=None if worker == NOBODY else worker,
            is_stranger=job is None or worker not in job.membership.members,
        )

    def worker_routes(self, sender: Sender, message: Message) -> tuple[bytes, ...]:
        """The connections of the worker that ``sender`` spoke for by this message, which was handled; () for none."""
        job = self._jobs.get(message.job)
        member = None if job is None else job.membership.members.get(message.worker)
        if member is None or member.incarnation != message.incarnation:
            return ()
        routes = member.route, member.data_route
        return routes if sender.route in routes else ()

    def tick(self, now_s: float) -> list[Outgoing]:
        """Evict workers whose lease ran out; answers that may leave because of it."""
        self._look_at_time(now_s)
        outgoing: list[Outgoing] = []
        for job in self._jobs.values():
            expired = job.tick(now_s)
            if expired:
                self._changes += 1
                outgoing.extend(self._outgoing(job, job.evict(expired, now_s)))
        return outgoing

    def evict(self, job_name: str, rank: int, now_s: float) -> list[Outgoing] | None:
        """End a worker's lease before its time; answers that may leave because of it, None where there is none."""
        self._look_at_time(now_s)
        job = self._find(job_name)
        if job is None or rank not in job.membership.members:
            return None
        self._changes += 1
        return self._outgoing(job, job.evict([rank], now_s))

    def _hello(self, sender: Sender, message: Message, now_s: float) -> list[Outgoing]:
        body = message.body
        if job_number(body["job"]) != message.job:
            raise ProtocolError(f"the header's job is not the number of {body['job']!r}")
        if self.is_draining:
            raise ProtocolError("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        if body["role"] == "reader":
            return [Outgoing(sender.route, self._welcome_reader(message))]
        job = self._jobs.get(message.job) or self._new_job(body, sender.peer)
        if job.name != body["job"]:
            raise ProtocolError(f"jobs {job.name!r} and {body['job']!r} have the same number; rename one")
        if job.rule.body != body["rule"]:
            raise ProtocolError(
                f"job {job.name!r} runs under another rule (expected strategy {rule_text(job.rule.body)!r}, got"
                f" {rule_text(body['rule'])!r}). Every worker of a job needs the same strategy and options; give"
                " another run another job (PSENGINE_JOB).",
                ErrorCode.RULE_MISMATCH,
            )
        self._changes += 1
        state, member, replies = job.greet(message, sender.user_id, sender.route, now_s)
        self._jobs[job.number] = job  # a new one, now that its first worker was let in
        welcome = self._welcome(job, message, state)
        if member is not None:
            welcome.worker, welcome.incarnation = member.rank, member.incarnation
        return [Outgoing(sender.route, welcome), *self._outgoing(job, replies)]

    def _new_job(self, body: dict[str, Any], peer: str) -> Job:
        jobs = self._jobs.values()
        if is_full(jobs, peer):
            self._drop_finished_jobs()
        if is_full(jobs, peer):
            replaceable = find_replaceable(jobs, peer, self._now_s - 2 * self.settings.heartbeat_s)
            if replaceable is not None:
                self._drop(replaceable)
        check_place(jobs, peer, body["job"])
        return self._make_job(body["job"], body["rule"], begun_by=peer)

    def _make_job(self, name: str, rule: dict[str, Any], begun_by: str = "") -> Job:
        return Job(name, rule, self.settings.lease_s, self._clocks, self._take_memory, self.note, begun_by)

    def _drop_finished_jobs(self) -> None:
        """Forget jobs without workers whose values are nobody's."""
        for job in list(self._jobs.values()):
            if self._is_finished(job):
                self._drop(job)

    def _is_finished(self, job: Job) -> bool:
        """Whether nobody misses it."""
        return not job.weights.is_missed(self._now_s)

    def _drop(self, job: Job) -> None:
        del self._jobs[job.number]
        self._changes += 1
        # Of another job of that name nothing is durable yet.
        self._durable_version.pop(job.number, None)
        self._captured_version.pop(job.number, None)

    def worker_count(self, job_name: str) -> int | None:
        """Workers of a job; None where there is no such job."""
        job = self._find(job_name)
        return None if job is None else len(job.membership.members)

    def forget(self, job_name: str) -> None:
        """Drop a job, if there is such a one, with its values; a worker that it has after all learns to come anew."""
        job = self._find(job_name)
        if job is not None:
            logger.warning("job %r is forgotten by shard %d, at version %d", job.name, self.index, _version(job))
            self._drop(job)

    def _find(self, job_name: str) -> Job | None:
        return next((job for job in self._jobs.values() if job.name == job_name), None)

    def _welcome(self, job: Job | None, message: Message, state: str) -> Message:
        return self._message(
            MessageType.WELCOME,
            message,
            body={
                "state": state,
                "shards": self.shard_addresses,
                "shard_index": self.index,
                "lease_s": self.settings.lease_s,
                "heartbeat_s": self.settings.heartbeat_s,
                "credit_bytes": self.settings.credit_bytes,
                "members": list(job.membership.live_ranks) if job is not None else [],
                "fingerprint": job.fingerprint if job is not None else None,
                "chunks": len(job.chunks) if job is not None else 0,
                "started": job is not None and job.has_started,
                "durable_version": self._durable_version.get(message.job),
                "rule": job.rule.body if job is not None else None,
                "software": self.settings.software,
            },
        )

    def _welcome_reader(self, message: Message) -> Message:
        job = self._jobs.get(message.job)
        if job is not None and job.name != message.body["job"]:
            raise ProtocolError(f"jobs {job.name!r} and {message.body['job']!r} have the same number; rename one")
        return self._welcome(job, message, "ready" if job is not None and job.is_sealed else "wait")

    def _authenticate(self, sender: Sender, message: Message, now_s: float) -> tuple[Job, Member]:
        job = self._jobs.get(message.job)
        if job is None or (message.epoch and message.epoch != self.epoch):
            raise ProtocolError("this server has restarted since; say HELLO again", ErrorCode.NOT_MEMBER)
        whose = message.worker, message.incarnation, sender.user_id, sender.route
        member = job.membership.find(*whose, now_s, message.type)
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

    def _register(self, job: Job, member: Member, message: Message) -> list[Reply]:
        job.check_initialiser(member, f"REGISTER of chunk {message.key}")
        job.chunks.register(message)
        return _ok(member, message)

    def _configure(self, job: Job, member: Member, message: Message) -> list[Reply]:
        slots = job.chunks.configure(message)
        return [Reply(MessageType.OK, member.rank, message.sequence, body={"slots": slots})]

    def _probe(self, job: Job, member: Member, message: Message) -> list[Reply]:
        return job.exchanges.probe(message, member)

    def _admit(self, job: Job, member: Member, message: Message) -> list[Reply]:
        return [*_ok(member, message), *job.weights.admit(message, member)]

    def _list(self, job: Job, member: Member, message: Message) -> list[Reply]:
        page = job.chunks.page(message.body["after"])
        return [Reply(MessageType.CHUNKS, member.rank, message.sequence, body=page)]

    def _pull(self, job: Job, member: Member, message: Message) -> list[Reply]:
        type, version, payload, body = job.chunks.read(message)
        if not message.body:
            job.chunks.find(message.key).outcome.note_base(member.rank)
        return [Reply(type, member.rank, message.sequence, version, payload, body, message.key)]

    def _store(self, job: Job, member: Member, message: Message) -> list[Reply]:
        job.chunks.store(message)
        if message.body:
            return _ok(member, message)
        # What was stored is what this worker computes its next gradient from.
        version = job.chunks.find(message.key).outcome.note_base(member.rank)
        return [Reply(MessageType.OK, member.rank, message.sequence, version, key=message.key)]

    def _heartbeat(self, job: Job, member: Member, message: Message) -> list[Reply]:
        member.telemetry.hear(message.body, self._now_s)
        body = self._heartbeat_body(job, message)
        return [Reply(MessageType.HEARTBEAT_ACK, member.rank, message.sequence, body=body)]

    def _heartbeat_body(self, job: Job, message: Message) -> dict[str, Any]:
        return {
            "members": list(job.membership.live_ranks),
            "durable_version": self._durable_version.get(message.job),
        }

    def _status(self, job: Job, member: Member, message: Message) -> list[Reply]:
        report = self._status_report(message)
        return [Reply(MessageType.STATUS_REPORT, member.rank, message.sequence, payload=report.payload)]

    def _status_report(self, message: Message) -> Message:
        return self._message(MessageType.STATUS_REPORT, message, payload=self._report.payload())

    # ---- answers -----------------------------------------------------------------------------------------------

    def _outgoing(self, job: Job, replies: Iterable[Reply]) -> list[Outgoing]:
        outgoing: list[Outgoing] = []
        for reply in replies:
            member = job.membership.members.get(reply.rank)
            if member is None or not (route := member.route_of(reply.type)):
                continue  # it will ask again when it is back
            payload = reply.payload
            if reply.type is MessageType.UPDATED:
                member.telemetry.release(reply.key, reply.sequence, self._now_s)
            message = Message(
                reply.type,
                job=job.number,
                epoch=self.epoch,
                worker=reply.rank,
                incarnation=member.incarnation,
                key=reply.key,
                sequence=reply.sequence,
                version=reply.version,
                dtype=None if payload is None else payload.dtype,
                numel=0 if payload is None else payload.numel(),
                body=reply.body,
                payload=payload,
            )
            job.statistics.bytes_out += traffic_bytes(message)
            outgoing.append(Outgoing(route, message, reply.loans))
            if reply.type is MessageType.ERROR and reply.body["code"] == ErrorCode.FENCED:
                outgoing.extend(self._outgoing(job, job.fence(reply.rank, reply.body["text"], self._now_s)))
        return outgoing

    def _message(
        self,
        type: MessageType,
        request: Message,
        *,
        version: int = 0,
        payload: torch.Tensor | None = None,
        body: dict[str, Any] | None = None,
    ) -> Message:
        """An answer to ``request``, to whoever sent it."""
        return Message(
            type,
            job=request.job,
            epoch=self.epoch,
            worker=request.worker,
            incarnation=request.incarnation,
            key=request.key,
            sequence=request.sequence,
            version=version,
            dtype=None if payload is None else payload.dtype,
            numel=0 if payload is None else payload.numel(),
            body=body or {},
            payload=payload,
        )

    def _error(self, request: Message, error: ProtocolError) -> Message:
        return self._message(MessageType.ERROR, request, body={"code": error.code, "text": str(error)[:MAX_TEXT_CHARS]})

    def _take_memory(self, size_bytes: int, what: str) -> None:
        used_bytes = self.memory_bytes()
        if used_bytes + size_bytes > self.settings.max_memory_bytes:
            self._drop_finished_jobs()
            used_bytes = self.memory_bytes()
        if used_bytes + size_bytes > self.settings.max_memory_bytes:
            raise ProtocolError(
                f"{what} needs {size_bytes} bytes (expected at most"
                f" {max(0, self.settings.max_memory_bytes - used_bytes)} free of max_memory_bytes ="
                f" {self.settings.max_memory_bytes} on this shard). Raise --max-memory-bytes, or add servers.",
                ErrorCode.MEMORY,
            )

    def memory_bytes(self) -> int:
        """What all jobs hold."""
        return sum(job.chunks.size_bytes() for job in self._jobs.values())

    # ---- for the daemon ----------------------------------------------------------------------------------------

    @property
    def member_count(self) -> int:
        """Workers of all jobs."""
        return sum(len(job.membership.members) for job in self._jobs.values())

    @property
    def training_count(self) -> int:
        """The same, without those that wait for a job's first values."""
        return sum(len(job.membership.members) for job in self._jobs.values() if job.is_sealed)

    def status(self, now_s: float) -> ShardStatus:
        """The shard as it is now."""
        return ShardStatus(
            index=self.index,
            epoch=self.epoch,
            durable_generation=self._durable_generation,
            memory_bytes=self.memory_bytes(),
            max_memory_bytes=self.settings.max_memory_bytes,
            software=self.settings.software,
            # Whoever asks has another clock than the one that dates what departed.
            unix_s=round(self._clocks.wall_s(), 3),
            jobs={job.name: status_of(job, now_s, self.settings.heartbeat_s) for job in self._jobs.values()},
        )

    def capture(self) -> list[JobState]:
        """Copies of everything a snapshot keeps, as it is now."""
        capture = self._begin_capture(None)
        capture.end()
        return capture.states.result()

    def meet_and_capture(self, meeting: Meeting) -> Capture:
        """Copies that are cut between workers' steps; complete once ``states`` is set. Waits for the other shards."""
        return self._begin_capture(meeting.meet({job.number: job.cuts.begun for job in self._kept_jobs()}))

    def _begin_capture(self, goals: Goals | None) -> Capture:
        self._captured_version, self._captured_state = self._versions(), self._state()
        capture = Capture()
        awaits_steps = goals is not None and not self.is_draining
        for job in self._kept_jobs():
            steps = (goals or {}).get(job.number, {})
            awaited = job.membership.live_ranks if awaits_steps else ()
            capture.add(job.copy(steps, awaited, capture.look))
        capture.look()
        return capture

    def _kept_jobs(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.is_sealed and not self._is_finished(job)]

    def _state(self) -> tuple[int, int]:
        """Equal as long as ``capture`` would return the same; jobs also end without a message."""
        return self._changes, len(self._kept_jobs())

    def has_changed(self) -> bool:
        """Whether ``capture`` may return something else than what is durable."""
        return self._state() != self._durable_state

    def _versions(self) -> dict[int, int]:
        """By job that a snapshot keeps: the version all its chunks have reached."""
        return {job.number: _version(job) for job in self._kept_jobs()}

    def note_durable(self, generation: int | None) -> None:
        """What ``capture`` returned last is on disk; None: what was on disk is there no more."""
        self._durable_generation = generation
        self._durable_version = {} if generation is None else dict(self._captured_version)
        self._durable_state = None if generation is None else self._captured_state

    def restore(self, jobs: Sequence[JobState], now_s: float) -> None:
        """Take over a snapshot's state, before the first message."""
        self._now_s = now_s  # until it is looked at next nobody can be heard
        for state in jobs:
            job = self._make_job(state.name, state.meta["rule"])
            job.restore_meta(state.meta, now_s)
            for chunk in state.chunks:
                spec = ChunkSpec.from_body(chunk.meta["spec"])
                values = chunk.tensors.get("values")
                rule = job.chunks.make_rule(spec, None if values is None else torch.empty_like(values))
                rule.restore(chunk.meta, chunk.tensors)
                job.chunks.rules[chunk.key] = rule
            self._jobs[job.number] = job
        self._captured_version, self._captured_state = self._versions(), self._state()


def _keep_no_snapshots(route: bytes, message: Message) -> None:
    raise ProtocolError("this server keeps no snapshots; start it with --snapshot-dir", ErrorCode.SNAPSHOT_FAILED)


def _version(job: Job) -> int:
    """What all chunks of a job have reached."""
    return min((rule.version for rule in job.chunks.rules.values()), default=0)


def _ok(member: Member, message: Message) -> list[Reply]:
    return [Reply(MessageType.OK, member.rank, message.sequence, key=message.key)]
