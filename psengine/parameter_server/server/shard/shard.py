"""A shard: some of the chunks of every job, and what each message does to them. No sockets, no clock.

bytes ─ codec ─► apply(message, sender) ─► [Outgoing] ─ codec ─► bytes
                      └─► append: the message, where it changed something; its replay is ``apply``

A shard decides nothing between workers: views and releases, which they forward, say whom it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from psengine.errors import RAISE_LEASE, ProtocolError
from psengine.parameter_server.server.interfaces import Outgoing, Sender, ShardSettings, too_many_jobs
from psengine.parameter_server.server.log.records import Record, RecordKind, content_of
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.protocol.bodies import MAX_TEXT_CHARS
from psengine.protocol.frames import decode, encode
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType
from psengine.protocol.views import check_digest, release_of, view_of
from psengine.status_port.status_model import ShardStatus

MAX_JOBS = 256
# Of records: their messages were let in once.
REPLAYED = Sender(b"", "a log")
# Refusals that people should hear of; by the others a worker learns that it has to come back, or wait.
_NOTABLE_REFUSALS = frozenset({ErrorCode.RULE_MISMATCH, ErrorCode.BAD_VALUE, ErrorCode.MEMORY})
# These name the life that they are for in their body, or none.
_FOR_ANY_LIFE = frozenset({MessageType.RESUME, MessageType.VIEW, MessageType.RELEASE})
# Of averaging jobs: workers hold the weights, and push again what a server lost.
_LOGGED_OF_AVERAGES = frozenset({MessageType.RESUME, MessageType.REGISTER, MessageType.VIEW})


class Role(IntEnum):
    """The sender of a message, as the shard sees it; each may send what those before it may."""

    READER = 0  # anybody: evaluators, workers that are in no view yet or no longer
    REGISTRAR = 1  # has the job's key, before a view names this life of the server
    MEMBER = 2  # a worker of the view, on the connection over which it said RESUME last


# What they change at a job; OK has the version that this returns.
_WRITES = {MessageType.REGISTER: Job.register, MessageType.CONFIGURE: Job.configure, MessageType.STORE: Job.store}
# Who may send which message, beside RESUME. VIEW and RELEASE are the coordinator's, whoever forwards them: their digest
# is checked.
LEAST_ROLE = {
    **dict.fromkeys((MessageType.VIEW, MessageType.RELEASE), Role.READER),
    **dict.fromkeys((MessageType.LIST, MessageType.PULL, MessageType.WAITS), Role.READER),
    **dict.fromkeys(_WRITES, Role.REGISTRAR),
    **dict.fromkeys((MessageType.PUSH, MessageType.RESULT), Role.MEMBER),
}


class Shard:
    """See the module's text.

    Args:
        index: in its server process, 0 first.
        epoch: of the process's life.
        settings: the daemon's.
        note: told of what people may want to know, see ``EventLog.note``.
        is_connected: whether a connection stands.

    Attributes:
        jobs: by number.
        append: takes a record of what has changed; None where nobody wants any.
        changes: grows with each change of what ``capture`` returns.
        is_draining: the server is about to end.
        make_job: a replay's jobs are watched.
    """

    def __init__(
        self,
        index: int,
        epoch: int,
        settings: ShardSettings,
        note: Callable[..., None],
        is_connected: Callable[[bytes], bool],
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self._claims: dict[int, Job] = {}  # that are to take their places, by number: see ``_begin``
        self.append: Callable[[Record], object] | None = None
        self.changes = 0
        self.is_draining = False
        self.make_job: Callable[..., Job] = Job
        self._note = note
        self._is_replaying = False  # what was let in once, where other settings may have been
        self._is_connected = is_connected
        self._take: dict[MessageType, Callable[[Job, Message, Sender], list[Outgoing]]]
        self._take = {kind: getattr(self, f"_{kind.name.lower()}") for kind in LEAST_ROLE if kind not in _WRITES}
        self._take |= dict.fromkeys(_WRITES, self._write)

    # ---- messages ----------------------------------------------------------------------------------------------

    def apply(self, message: Message, sender: Sender) -> list[Outgoing]:
        """Take in one message; the messages it leads to, to any peers. A refused message changes nothing."""
        try:
            return self._apply(message, sender)
        except ProtocolError as error:
            if error.code in _NOTABLE_REFUSALS:
                self._note_refusal(self.jobs.get(message.job), message, error)
            body = {"code": error.code, "text": str(error)[:MAX_TEXT_CHARS]}
            return [self._answer(MessageType.ERROR, message, sender, body=body)]

    def _apply(self, message: Message, sender: Sender) -> list[Outgoing]:
        if message.type is MessageType.RESUME:
            return self._resume(message, sender)
        job = self._job_of(message, sender)
        role, least = self._role(job, message, sender), LEAST_ROLE.get(message.type)
        if least is None or role < least:
            raise self._illegal(job, message, role)
        if job is None and message.type in _FOR_ANY_LIFE:
            return []  # its sender learns by RESUMED that this shard has nothing
        if job is None or (job.view is None and message.type in (MessageType.LIST, MessageType.PULL)):
            named = sorted(known.name for known in self.jobs.values() if known.view is not None)
            raise ProtocolError(
                f"there are no values of the job yet (jobs with values here: {named or 'none'}). Name another"
                " (job=, PSENGINE_JOB), or wait for its first worker.",
                ErrorCode.NOT_READY,
            )
        is_of_life = message.epoch in (0, self.epoch) or message.type in _FOR_ANY_LIFE
        if not (is_of_life or self._is_replaying):
            raise ProtocolError("this server has restarted since", ErrorCode.STALE)
        return self._take[message.type](job, message, sender)

    def _job_of(self, message: Message, sender: Sender) -> Job | None:
        """The job that this is said of: who is to begin one anew sees nothing of the former one."""
        claim = self._claims.get(message.job)
        return claim if claim is not None and sender.route in claim.registrars else self.jobs.get(message.job)

    def _known(self, number: int) -> list[Job]:
        return [known[number] for known in (self.jobs, self._claims) if number in known]

    def _role(self, job: Job | None, message: Message, sender: Sender) -> Role:
        if job is None or message.worker == NOBODY:
            return Role.READER
        if self._is_replaying:  # let in by the life that wrote the log
            return Role.MEMBER if job.is_member(message.worker, message.incarnation) else Role.REGISTRAR
        if self._is_current(job) and job.is_from_member(message, sender):
            return Role.MEMBER
        return Role.REGISTRAR if sender.route in job.registrars else Role.READER

    def _is_current(self, job: Job) -> bool:
        """Whether the job's view names this life of the server."""
        return job.view is not None and self.epoch in job.view.shards

    def _illegal(self, job: Job | None, message: Message, role: Role) -> ProtocolError:
        expected = ", ".join(sorted(kind.name for kind, least in LEAST_ROLE.items() if role >= least))
        what = f"{message.type.name} is not legal from a {role.name.lower()} (expected one of {expected})"
        if message.worker == NOBODY or message.type not in LEAST_ROLE:
            return ProtocolError(what)
        if job is None or not self._is_current(job):
            return ProtocolError(f"{what}: this server waits for a view that names it", ErrorCode.NOT_MEMBER)
        return ProtocolError(
            f"worker {message.worker} of job {job.name!r} was fenced: silent for more than its lease of"
            f" {self.settings.lease_s:g} s, or replaced by a newer process, or the rank belongs to another key. It has"
            f" to say HELLO again; where that happens often, {RAISE_LEASE}.",
            ErrorCode.FENCED,
        )

    def _note_refusal(self, job: Job | None, message: Message, error: ProtocolError) -> None:
        self._note(
            "memory" if error.code == ErrorCode.MEMORY else "refused",
            f"{message.type.name} was refused: {error}",
            job=job.name if job is not None else "",
            worker=message.worker if job is not None and message.worker in job.workers else None,
        )

    # ---- connections and views ---------------------------------------------------------------------------------

    def _resume(self, message: Message, sender: Sender) -> list[Outgoing]:
        if self.is_draining and not self._is_replaying:
            raise ProtocolError("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        job, is_at_work = self.jobs.get(message.job), "open" in message.body
        if job is not None and self._role(job, message, sender) is Role.MEMBER:
            worker = job.workers[message.worker]
            if message.sequence >= worker.resumed:
                worker.proven, worker.route = sender.route, sender.route if is_at_work else b""
                worker.resumed = message.sequence
        if "registration" in message.body:
            self._begin(message, sender)
        job, missing, replies = self._job_of(message, sender), list[int](), list[Reply]()
        if job is not None and is_at_work and self._role(job, message, sender) is Role.MEMBER:
            missing, replies = job.resume(message.worker, message.body.get("open", ()))
            if len(missing) < len(message.body["open"]):
                self._changed(job, message)  # their answers have left, or will
        # One more than another key's: two leads may have drawn the same number.
        key, known = message.body.get("key"), self._known(message.job)
        latest = max((one.registration + (one.key != key) for one in known), default=0)
        body = {**_facts_of(job), "missing": missing, "registration": latest}
        resumed = self._answer(MessageType.RESUMED, message, sender, body=body)
        return [resumed, *([] if job is None else self._outgoing(job, replies))]

    def greetings(self) -> list[Outgoing]:
        """RESUMED to each member, without a question: what it says of the server has changed."""
        return [
            one
            for job in self.jobs.values()
            for rank in job.workers
            for one in self._outgoing(job, [Reply(MessageType.RESUMED, rank, 0, body=_facts_of(job))])
        ]

    def _begin(self, message: Message, sender: Sender) -> None:
        """Somebody with a job's key came: for a new job, for a job that begins anew, or again.

        What a shard has is replaced with the first chunk, or view: by then no other shard has refused.

        Raises:
            ProtocolError: the job is another's, or there is no place for it.
        """
        body, job = message.body, self.jobs.get(message.job)
        name, rule, registration, key = body["job"], body["rule"], body["registration"], body["key"]
        if job is not None and sender is not REPLAYED:
            job.check_place(body)
        known = self._known(message.job)
        for other in known:
            if other.key != key:
                other.registrars.discard(sender.route)
        if (same := next((one for one in known if one.key == key), None)) is not None:
            # A coordinator that restarted goes on with the key, and counts registrations anew.
            same.registration = max(same.registration, registration)
            if not self._is_current(same):  # else it is a member, or was put out
                same.registrars.add(sender.route)
            return
        if any(one.registration >= registration for one in known):
            return  # RESUMED says it: its coordinator, that of another lead perhaps, draws a later one
        if job is not None and self._connected(job):
            raise ProtocolError(
                f"job {name!r} is at work here: it is led by another server. Fix: name the servers in the same order"
                f" everywhere, or drop it by psengine admin forget --job {name}.",
                ErrorCode.FENCED,
            )
        if not self._is_replaying:
            self.settings.check_tier(name, rule)
            if job is None and len(self.jobs) >= MAX_JOBS:
                self._drop_finished()
                if len(self.jobs) >= MAX_JOBS:
                    raise too_many_jobs(MAX_JOBS, name)
        self._claims[message.job] = made = self._make(name, rule)
        made.registration, made.key, made.place = registration, key, body["place"][0]
        made.registrars.add(sender.route)
        made.claim = message
        if job is None or self._is_replaying:
            self._install(made)

    def _install(self, job: Job) -> None:
        """A job that was only claimed takes its place.

        Raises:
            ProtocolError: what is there has been trained meanwhile, or has a later registration.
        """
        if (claim := job.claim) is None:
            return
        if (former := self.jobs.get(job.number)) is not None and not self._is_replaying:
            former.check_place(claim.body)
            if former.registration >= job.registration:
                raise ProtocolError(f"job {job.name!r} was registered later by others", ErrorCode.STALE)
        self.jobs[job.number], job.claim = self._claims.pop(job.number), None
        self._changed(job, claim)

    def _make(self, name: str, rule: dict[str, Any]) -> Job:
        return self.make_job(name, rule, self._take_memory, self._note)

    def _view(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        view, known = view_of(message.body), job.view
        check_digest(message, job.key, view)
        self._install(job)
        is_known = known is not None and view.number <= known.number
        if is_known or not (self.epoch in view.shards or self._is_replaying):
            return []  # its sender learns by RESUMED what this shard holds, and in which life
        replies = job.adopt(view)
        self._changed(job, message)
        return self._outgoing(job, replies)

    def _release(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        release = release_of(message.body)
        check_digest(message, job.key, release)
        # What a former view's releases still decide stands in the view.
        if job.view is None or message.view != job.view.number or release.number <= job.taken:
            return []
        replies = job.release(release)
        self._changed(job, message)
        return self._outgoing(job, replies)

    # ---- steps -------------------------------------------------------------------------------------------------

    def _push(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        job.statistics.bytes_in += _payload_bytes(message)
        replies = job.push(message)
        self._changed(job, message)
        return self._outgoing(job, replies)

    def _waits(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        waiting = job.find(message.key).waits().get(message.worker, [])
        return [self._answer(MessageType.PENDING, message, sender, body={"waiting_for": waiting})]

    def _result(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        return self._outgoing(job, job.supply_result(message))

    # ---- values ------------------------------------------------------------------------------------------------

    def _write(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        self._install(job)
        version = _WRITES[message.type](job, message)
        self._changed(job, message)
        return [self._answer(MessageType.OK, message, sender, version=version)]

    def _list(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        if not self._is_whole(job):
            raise ProtocolError(
                f"this server has restarted, and workers have yet to register chunks of job {job.name!r} again (shard"
                f" {self.index} has {len(job.rules)})",
                ErrorCode.NOT_READY,
            )
        return [self._answer(MessageType.CHUNKS, message, sender, body=job.page(message.body["after"]))]

    def _is_whole(self, job: Job) -> bool:
        """Whether all chunks are here, by a view that names this life: a restart may lose those of averages."""
        if job.holds_weights or job.view is None:
            return job.holds_weights
        numbers = zip(job.view.shards, job.view.chunks, strict=False)
        here = [number for epoch, number in numbers if epoch == self.epoch]
        return self.index < len(here) and len(job.rules) >= here[self.index]

    def _pull(self, job: Job, message: Message, sender: Sender) -> list[Outgoing]:
        if not job.holds_weights and message.worker == NOBODY:
            raise ProtocolError(
                f"job {job.name!r} averages gradients; its weights are in its workers, not here", ErrorCode.NOT_READY
            )
        is_base = not message.body and self._role(job, message, sender) is Role.MEMBER
        if is_base and job.find(message.key).note_base(message.worker):
            self._changed(job, message)
        version, payload, body = job.read(message)
        answer = self._answer(MessageType.VALUES, message, sender, version=version, payload=payload, body=body)
        job.statistics.bytes_out += _payload_bytes(answer.message)
        # Rows that were asked for are in memory of their own.
        return [answer if message.payload is None else answer._replace(place=Place(answer.message.payload))]

    # ---- answers -----------------------------------------------------------------------------------------------

    def _answer(self, type: MessageType, request: Message, sender: Sender, **fields: Any) -> Outgoing:
        """An answer to ``request``, where it came from."""
        reply = Reply(type, request.worker, request.sequence, key=request.key, **fields)
        return Outgoing(sender.route, self._message(reply, request.job, request.incarnation))

    def _outgoing(self, job: Job, replies: Sequence[Reply]) -> list[Outgoing]:
        """What a job's rules say to workers; one without a connection asks again when it is back."""
        outgoing = []
        for reply in replies:
            worker = job.workers.get(reply.rank)
            if worker is None or not worker.route:
                continue
            message = self._message(reply, job.number, worker.incarnation)
            job.statistics.bytes_out += _payload_bytes(message)
            outgoing.append(Outgoing(worker.route, message, reply.place))
        return outgoing

    def _message(self, reply: Reply, number: int, incarnation: int) -> Message:
        job, payload = self.jobs.get(number), reply.payload
        view = 0 if job is None or job.view is None else job.view.number
        dtype, numel = (None, 0) if payload is None else (payload.dtype, payload.numel())
        to = number, self.epoch, reply.rank, incarnation, reply.key, reply.sequence, reply.version
        return Message(reply.type, *to, dtype, numel, reply.body, payload, view=view)

    # ---- what lasts --------------------------------------------------------------------------------------------

    def _changed(self, job: Job, message: Message) -> None:
        """A message has changed what ``capture`` returns."""
        self.changes += 1
        if self.append is None or not (job.holds_weights or message.type in _LOGGED_OF_AVERAGES):
            return
        if not job.holds_weights:  # workers have newer averages by then
            message = replace(message, place=None, payload=None)
        in_place = None if message.place is None else message
        self.append(Record(RecordKind.MESSAGE, job.number, encode(message), in_place=in_place))

    def capture(self, generation: int = 0, kept: Collection[int] = ()) -> list[JobState]:
        """Copies of everything, as it is now; see ``ChunkRule.capture``."""
        return [job.capture(generation, kept) for job in self.jobs.values()]

    def restore(self, states: Sequence[JobState]) -> None:
        """Take over a captured state, tensors included, before the first message."""
        for state in states:
            job = self._make(state.name, state.meta["rule"])
            job.restore(state)
            self.jobs[job.number] = job

    def replay(self, record: Record, known: dict[str, Any]) -> None:
        """Do what a log's record says, or a leader's: it was let in once, and nothing is asked of this server.

        Args:
            record: of any kind but those of files.
            known: all that coordinators know, which it may change.

        Raises:
            ProtocolError, LookupError, TypeError, ValueError, RuntimeError: it fits nothing here.
        """
        if record.kind is RecordKind.MESSAGE:
            self._is_replaying = True
            try:
                self._apply(decode(record.frames), REPLAYED)
            finally:
                self._is_replaying = False
        elif record.kind is RecordKind.COORDINATOR:
            known.update(content_of(record))
            if self.append is not None:
                self.append(record)
        elif record.kind is RecordKind.LIFE:
            self.begin_life(has_all=content_of(record)["has_all"])
        else:
            self.drop(record.job)

    def clear(self) -> None:
        """Forget all jobs: another server's come."""
        self.changes += bool(self.jobs)
        self.jobs.clear()
        self._claims.clear()

    def begin_life(self, *, has_all: bool | None = None) -> None:
        """Go on from what was restored: who still waits for an answer says so by RESUME.

        Args:
            has_all: whether every acknowledged update is here; None: as the settings say.
        """
        keeps_log = self.settings.keeps_updates if has_all is None else has_all
        for job in self.jobs.values():
            for rule in job.rules.values():
                rule.begin_life(keeps_log=keeps_log)

    # ---- jobs --------------------------------------------------------------------------------------------------

    def drop(self, number: int) -> bool:
        """Forget a job, with its values; whether there was one."""
        self._claims.pop(number, None)
        if self.jobs.pop(number, None) is None:
            return False
        self.changes += 1
        if self.append is not None:
            self.append(Record(RecordKind.DROP, number))
        return True

    def members_connected(self) -> int:
        """Workers of all jobs that have a connection."""
        return sum(self._connected(job) for job in self.jobs.values())

    def _connected(self, job: Job) -> int:
        return sum(bool(worker.route) and self._is_connected(worker.route) for worker in job.workers.values())

    def _drop_finished(self) -> None:
        """Forget jobs that nobody may still want: averages without workers, and what was never registered."""
        for number, job in list(self.jobs.items()):
            is_kept = job.view is not None and (job.holds_weights or job.workers)
            if not is_kept and not any(map(self._is_connected, job.registrars)):
                self.drop(number)

    def memory_bytes(self) -> int:
        """Memory of all jobs."""
        return sum(job.size_bytes() for job in self.jobs.values())

    def _take_memory(self, size_bytes: int, what: str) -> None:
        if size_bytes <= 0 or self._is_replaying:
            return
        max_bytes, used_bytes = self.settings.max_memory_bytes, self.memory_bytes()
        if used_bytes + size_bytes > max_bytes:
            self._drop_finished()
            used_bytes = self.memory_bytes()
        if used_bytes + size_bytes > max_bytes:
            raise ProtocolError(
                f"{what} needs {size_bytes} bytes (expected at most {max(0, max_bytes - used_bytes)} free of"
                f" max_memory_bytes = {max_bytes} on this shard). Raise --max-memory-bytes"
                " (psengine run: --server-option max_memory_bytes=SIZE), or add servers.",
                ErrorCode.MEMORY,
            )

    def status(self) -> ShardStatus:
        """The shard as it is now."""
        return ShardStatus(
            index=self.index,
            epoch=self.epoch,
            memory_bytes=self.memory_bytes(),
            max_memory_bytes=self.settings.max_memory_bytes,
            jobs={job.name: job.status() for job in self.jobs.values()},
        )


def _facts_of(job: Job | None) -> dict[str, int]:
    """What RESUMED says of a job here."""
    view = None if job is None else job.view
    return {
        "registration": 0 if job is None else job.registration,
        "chunks": 0 if job is None else len(job.rules),
        "version": 0 if job is None else job.version,
        "view": 0 if view is None else view.number,
        "view_epoch": 0 if view is None else view.epoch,
    }


def _payload_bytes(message: Message) -> int:
    return 0 if message.payload is None else int(message.payload.nbytes)
