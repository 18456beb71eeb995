"""The thread of one shard: socket in, coordinators or shard, socket out.

    ┌► wait for a message, at most until the next tick ─► take up to DRAIN_MESSAGES ─► answers ─► tick, if it is due ─┐
    └──────────────────────────────────── functions that others asked for ◄──────────────────────────────────────────┘

    HELLO HEARTBEAT COMMIT LEAVE ─► Coordinators   at a server's first shard; they alone are told the time
    STATUS ECHO ADMIN            ─► answered here
    everything else              ─► Shard

Nothing else touches the shard, the coordinators or the socket: other threads ``ask`` for a function to be called here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec
import torch

from psengine.errors import ProtocolError, ServerError
from psengine.parameter_server.server.coordinator.claims import SHOWN
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.interfaces import Outgoing, Sender
from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.log.records import Record, RecordKind, json_record
from psengine.parameter_server.server.replication.pair import Pair
from psengine.parameter_server.server.replication.stream import Stream
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots.files import ServerState, records_of
from psengine.parameter_server.server.transport.endpoint import Endpoint, Received
from psengine.parameter_server.server.transport.segments import ShardSegments
from psengine.parameter_server.sockets import Waker
from psengine.protocol.bodies import MAX_TEXT_CHARS
from psengine.protocol.frames import decode, encode, payload_tensor, refusal, split
from psengine.protocol.messages import NOBODY, TO_COORDINATOR, ErrorCode, Message, MessageType
from psengine.status_port.status_model import ServerFacts, ShardStatus, Transport
from psengine.tracing.logging_format import RateLimit
from psengine.version import __version__

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# How often the coordinators look at the time. A leap of it counts as one of these: if it counted as nothing, a server
# that is always short of processor would never find a worker dead.
TICK_S = 0.1
DRAIN_MESSAGES = 64
# Answers in shared memory travel together while messages are waiting: few, so that the worker copies the first values
# while the next chunks are stepped.
ANSWERS_PER_GROUP = 4
# How long messages that are queued when the server ends may take to be answered.
LAST_MESSAGES_S = 2.0
# These say nothing of updates, so they do not wait for the log: a server whose disk is slow, or full, can be looked at.
_DO_NOT_WAIT = frozenset(
    {MessageType.STATUS_REPORT, MessageType.ECHOED, MessageType.ERROR, MessageType.PENDING, MessageType.CHUNKS,
     MessageType.STATE_WANTED, MessageType.WELCOME, MessageType.RESUMED}
)  # fmt: skip
# Orders whose outcome a restart could make untrue; others can be given while the log has no room.
_CHANGES_JOBS = ("evict", "forget")
# What a server answers that does not lead.
_OF_ANY_SERVER = frozenset({MessageType.STATUS, MessageType.ECHO, MessageType.ADMIN})


class LogFailedError(ServerError):
    """The log cannot be written any more: nothing may be acknowledged."""


class HeldAnswers:
    """Answers that wait for sinks: what a worker is told is on the disk, and at the follower, or did not depend on it.

        shard    handle ─► records ─► answers, held ···················· released in order
        log                  ├─► write ─► sync (a group) ─► wake ────────┤
        stream               └─► send ─────────────────────► KEPT ───────┘

    An answer waits until each sink is as far as it was when the answer was made. Those that wait keep their order; what
    says nothing of updates does not wait, so that a server whose disk is full can be looked at.

    Args:
        endpoint: of the shard, whose thread uses this, but for ``wake``.

    Attributes:
        sinks: each with ``end``, the number of the next record; ``durable``: all below are there to stay; ``failure``:
            why nothing becomes so any more. None where nothing lasts.
        descriptor: readable where something may leave.
        wake: says that the log is further, or has failed; callable from the threads that write it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.sinks: list[ShardLog | Stream] = []
        self._endpoint = endpoint
        # How far sinks have to be; an answer's route; what to do then.
        self._held: deque[tuple[list[tuple[ShardLog | Stream, int]], bytes, Callable[[], object]]] = deque()
        self._waker = Waker()
        self.descriptor, self.wake = self._waker.descriptor, self._waker.wake

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_durable(self) -> bool:
        """Whether nothing waits for a sink."""
        return not self._held and all(sink.durable == sink.end for sink in self.sinks)

    def append(self, record: Record) -> None:
        """A record for all sinks."""
        for sink in self.sinks:
            sink.append(record)

    def send(self, route: bytes, frames: Sequence[Any], *, place: Place | None = None, waits: bool = True) -> None:
        """Send now, or once all records are durable.

        Args:
            route: as ``frames``, see ``Endpoint.send``.
            frames: the message's.
            place: the last frame's memory, which does not change while it is being read; None: it may at any time.
            waits: False: it says nothing that a restart could make untrue.
        """
        if place is not None:
            place.hold(frames[-1])
        if not waits or self.is_durable:
            self._endpoint.send(route, frames, copies=place is None)
            return
        if place is None:
            frames = [bytes(frame) for frame in frames]
        self.then(partial(self._endpoint.send, route, frames, copies=place is None), route)

    def then(self, call: Callable[[], object], route: bytes = b"") -> None:
        """Call it once all records are durable, which may be now."""
        if self.is_durable:
            call()
        else:
            self._held.append(([(sink, sink.end) for sink in self.sinks], route, call))

    def holds(self, route: bytes) -> bool:
        """Whether something to this connection waits."""
        return any(one[1] == route for one in self._held)

    def release(self) -> None:
        """Send what may leave.

        Raises:
            LogFailedError: the log has failed; nothing may leave any more.
        """
        self._waker.clear()
        for sink in self.sinks:
            if sink.failure:
                raise LogFailedError(sink.failure)
        while self._held and all(number <= sink.durable for sink, number in self._held[0][0]):
            self._held.popleft()[-1]()

    def close(self) -> None:
        """What is held is never sent."""
        self._held.clear()
        self._waker.close()


class ShardEndedError(ServerError):
    """The shard's thread has ended."""


class ShardThread(threading.Thread):
    """Runs ``shard`` on ``endpoint`` until ``end``.

    Args:
        shard: used by this thread only once it started.
        endpoint: closed by this thread.
        addresses: of all shards of the server, as clients are told.
        on_admin: called with an operator's ADMIN, the route, and who sent it; answers through ``answer``.
        facts: what the server says of itself; None but at its first shard.
        pair: the server and its follower; None where it has none, so that it leads.

    Attributes:
        coordinators: of the jobs that the server leads; None but at its first shard.
        leads: the shard is the job's; else it has what a disk kept, or the copy of another's, and answers nothing.
        known: what the coordinators of that knew.
        kept: all of the other's records below are here to stay.
        on_kept: called when it grows.
        last_tick_s: monotonic time of the last tick.
        answers: what leaves, once the log is as far; its log is set before the start.
        segments: the memory that workers of this host share; used by this thread only once it started.
        snapshot: asks for a snapshot of the server; None where none is needed, or none is written.
        drained: set once every queued message was answered after ``drain``.
    """

    def __init__(
        self,
        shard: Shard,
        endpoint: Endpoint,
        addresses: Sequence[str],
        on_admin: Callable[[ShardThread, bytes, Message, str], None],
        *,
        facts: Callable[[], ServerFacts] | None = None,
        pair: Pair | None = None,
    ) -> None:
        super().__init__(name=f"psengine-shard-{shard.index}", daemon=True)
        self.shard = shard
        self.endpoint = endpoint
        endpoint.owed_bytes = shard.memory_bytes
        self.coordinators: Coordinators | None = None
        self.answers = HeldAnswers(endpoint)
        self.segments = ShardSegments()
        self.pair, self.leads = pair, pair is None
        self.known: dict[str, Any] = {}
        self.kept = 0
        self.on_kept: Callable[[], object] = lambda: None
        self.stream: Stream | None = None
        if pair is not None:
            self.stream = Stream(self._send_record, partial(pair.tell, shard.index), shard.settings.lease_s)
            self.answers.sinks.append(self.stream)
        self.last_tick_s = self._now_s = time.monotonic()
        self.snapshot: Callable[[], Future[int]] | None = None
        self.drained = threading.Event()
        self._addresses = list(addresses)
        self._facts = facts
        self._on_admin = on_admin
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A worker's answers without a payload frame that leave together, and its route.
        self._group: list[bytes] = []
        self._group_route = b""
        # The status as JSON, made at most once in a tick: that of many workers and chunks takes milliseconds.
        self._report: torch.Tensor | None = None
        self._ends = False
        self._has_ended = False
        self._drain_until_s: float | None = None
        self._complaints = RateLimit()
        self._traces = RateLimit()
        self.bad_messages = 0
        self.failures = 0

    # ---- for other threads -------------------------------------------------------------------------------------

    def ask(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Have ``function`` called in this thread, soon; at once before its start. Wait with a timeout.

        The future raises ``ShardEndedError`` where the thread has ended, or ends before the call.
        """
        future: Future[_Result] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._has_ended:
                    raise ShardEndedError(f"shard {self.shard.index} has ended, and answers nothing any more")
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._asked.put(call)
        if self._has_ended or self.ident is None:
            self._answer_asked()  # the thread may have ended without seeing this call
        self.answers.wake()
        return future

    def answer(self, route: bytes, request: Message, body: dict[str, Any]) -> None:
        """Send OK, or the ERROR that the body describes, from this thread, if it is still there."""
        body["text"] = body["text"][:MAX_TEXT_CHARS]
        kind = MessageType.ERROR if "code" in body else MessageType.OK
        answer = [Outgoing(route, self._to(request, kind, body=body))]
        waits = request.body.get("action") in _CHANGES_JOBS
        self._asked.put(lambda: None if self._has_ended else self._send(answer, waits=waits))

    def drain(self) -> None:
        """Let nobody in, answer queued messages, then take no more; sets ``drained``."""
        self.shard.is_draining = True
        self._drain_until_s = time.monotonic() + LAST_MESSAGES_S

    def end(self) -> None:
        """Leave the loop and close the socket; join afterwards."""
        self._ends = True

    # ---- for functions that are called in this thread ------------------------------------------------------------

    def status(self) -> ShardStatus:
        """The shard's status, with its socket's counts, and that of the jobs that are led here."""
        here = {"bad_messages": self.bad_messages, "failures": self.failures}
        here |= {name: getattr(self.endpoint.peers, name) for name in ("connections", "turned_away", "dropped")}
        moved = {one.name: getattr(self.endpoint, one.name) for one in fields(Transport) if one.name not in here}
        status = self.shard.status()
        return replace(
            status,
            jobs=status.jobs if self.leads else {},  # the leader shows them
            transport=Transport(**moved, **here),
            coordinated={} if self.coordinators is None else self.coordinators.status(time.monotonic()),
        )

    def evict(self, job: str, rank: int) -> bool:
        """End a worker's lease before its time; whether there is such a worker."""
        now_s = self._look_at_time()
        outgoing = None if self.coordinators is None else self.coordinators.evict(job, rank, now_s)
        self._send_decided(outgoing or [])
        return outgoing is not None

    def forget_led(self, job: str) -> int | None:
        """Forget a job that is led here; how many workers keep it, None where it is not led here."""
        kept = None if self.coordinators is None else self.coordinators.forget(job)
        self._send_decided([])
        return kept

    def jobs_in_use(self) -> dict[str, bool]:
        """The jobs here, each with whether it has workers, or may get them back soon."""
        led = {} if self.coordinators is None else self.coordinators.by_number
        connected = self.endpoint.peers.is_connected
        found = {one.name: bool(one.remembered_count) for one in led.values()}
        for job in self.shard.jobs.values():
            routes = [*job.registrars, *(worker.route for worker in job.workers.values())]
            found[job.name] = found.get(job.name, False) or any(map(connected, routes))
        return found

    # ---- another server's shard, and the lead --------------------------------------------------------------------

    def add_sink(self, sink: ShardLog | Stream) -> None:
        """Records go there too, and answers wait for it."""
        self.answers.sinks.append(sink)
        self._look_at_sinks()

    def _look_at_sinks(self) -> None:
        self.shard.append = self.answers.append if any(sink.is_open for sink in self.answers.sinks) else None

    def take_copy(self, state: ServerState, number: int) -> None:
        """Throw away what is here, and go on from the leader's snapshot, behind which is this record of its."""
        self.shard.clear()
        self.shard.restore(state.shards[0])
        self.known = state.coordinators
        self._keep(number)

    def take_records(self, records: Sequence[Record]) -> None:
        """The leader's shard has changed."""
        for record in records:
            self.shard.replay(record, self.known)
        self._keep(records[-1].number + 1)

    def _keep(self, number: int) -> None:
        """All of the leader's records below are applied: say so once they are in this server's log, if it has one."""

        def keep() -> None:
            self.kept = number
            self.on_kept()

        self.answers.then(keep)

    def lead(self, epoch: int, now_s: float, coordinators: Coordinators | None = None) -> None:
        """From here on the shard is the job's: a restart, with what this server holds.

        Args:
            epoch: of this life.
            now_s: monotonic.
            coordinators: of the first shard; new.
        """
        self.shard.epoch, self._now_s = epoch, now_s
        if self.shard.append is not None:
            has_all = self.shard.settings.keeps_updates
            self.shard.append(json_record(RecordKind.LIFE, {"epoch": epoch, "term": self._term, "has_all": has_all}))
        self.shard.begin_life()
        if coordinators is not None:
            coordinators.restore(self.known, now_s)
            self.coordinators = coordinators
        self.leads = True

    @property
    def _term(self) -> int:
        return 0 if self.pair is None else self.pair.succession.term

    def _send_record(self, route: bytes, number: int, pieces: Sequence[Any]) -> None:
        header = Message(MessageType.RECORD, epoch=self.shard.epoch, term=self._term, sequence=number)
        self.endpoint.send(route, [*encode(header), *(memoryview(piece) for piece in pieces)], copies=False)

    def _follow(self, received: Received, message: Message) -> None:
        """FOLLOW: send a copy, and what changes it.

        Raises:
            ProtocolError: the sender may not, or cannot, follow.
        """
        body, offered = message.body, self.shard.settings.durability
        expected = {"software": __version__, "shards": len(self._addresses), "index": self.shard.index}
        expected |= self.shard.settings.likeness
        if not self.endpoint.may_follow(received):
            text = "only this server's user, or who has its keys, may follow it (its --curve-key, or --secret-file)"
            raise ProtocolError(text, ErrorCode.NOT_ALLOWED)
        if self.stream is None or self.pair is None:
            text = f"this server has no followers (expected --durability replica or log+replica, got {offered})"
            raise ProtocolError(text, ErrorCode.RULE_MISMATCH)
        for name, value in expected.items():
            if body[name] != value:
                text = f"a follower is like its leader (expected {name} {value}, got {body[name]})"
                raise ProtocolError(f"{text}. Fix: give both servers the same", ErrorCode.RULE_MISMATCH)
        if message.epoch <= self.shard.epoch:
            text = f"a follower's life begins after its leader's (expected an epoch above {self.shard.epoch}, got"
            raise ProtocolError(f"{text} {message.epoch})", ErrorCode.STALE)
        if self.stream.follower or not self.pair.claim(message.epoch, body["addresses"]):
            whom = " ".join(self.pair.replicas) or "a former one may still be recorded as in sync"
            raise ProtocolError(f"this server has a follower: {whom}. Fix: end it, or wait", ErrorCode.NOT_READY)
        known = {} if self.coordinators is None else self.coordinators.to_meta()
        snapshot = records_of(ServerState([self.shard.capture()], coordinators=known))
        self.stream.open(message.epoch, received.route, snapshot, time.monotonic())
        self._look_at_sinks()
        greetings = self.shard.greetings()
        for one in greetings:
            self._introduce(one.message)
        self._send(greetings)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop."""
        torch.set_num_threads(1)  # the setting is this thread's own in OpenMP builds
        try:
            while not self._ends:
                self._turn()
        except BaseException:
            logger.critical("shard %d failed; the server ends", self.shard.index, exc_info=True)
        finally:
            self.answers.close()
            self.endpoint.close()
            # So that nobody waits for answers that cannot come.
            self._has_ended = True
            self.drained.set()
            self._answer_asked()

    def _turn(self) -> None:
        self.answers.release()
        if self.drained.is_set():
            time.sleep(0.005)
        else:
            self._receive(self.last_tick_s + TICK_S - time.monotonic())
        now_s = time.monotonic()
        if now_s >= self.last_tick_s + TICK_S:
            self.last_tick_s, self._report = now_s, None
            self.endpoint.peers.look()
            if not self.drained.is_set():
                self._guarded(self._tick)
        # After the tick, so that a status does not show a pause of this process as the workers' silence.
        self._answer_asked()

    def _tick(self) -> None:
        self.segments.look()
        if self.stream is not None:
            self.stream.tick(time.monotonic(), self.endpoint.peers.is_connected)
            self._look_at_sinks()
        if self.coordinators is not None and (self.pair is None or self.pair.leads):
            self._send_decided(self.coordinators.tick(self._look_at_time()))

    def _look_at_time(self) -> float:
        """The time for the coordinators, who are told of a leap: workers' messages of that time are still unread."""
        now_s = time.monotonic()
        passed_s, self._now_s = now_s - self._now_s, now_s
        # A lease outlasts several heartbeats: a pause shorter than one harms nobody.
        if self.coordinators is not None and passed_s > max(self.shard.settings.heartbeat_s, 2 * TICK_S):
            self.coordinators.stood_still(passed_s - TICK_S)
        return now_s

    def _receive(self, wait_s: float) -> None:
        is_draining = self._drain_until_s is not None
        if not self.endpoint.poll(0.001 if is_draining else wait_s, self.answers.descriptor):
            if is_draining and not self.answers:
                self.drained.set()
            return
        self.answers.release()
        for _ in range(DRAIN_MESSAGES):
            received = self.endpoint.receive()
            if received is None:
                break
            for part in split(received.frames):
                self._take(received._replace(frames=part))
            if time.monotonic() >= self.last_tick_s + TICK_S:
                break  # large messages take long, and other work waits for the rest of the turn
        self._send_group()
        if self._drain_until_s is not None and time.monotonic() > self._drain_until_s:
            self.drained.set()

    # ---- messages ------------------------------------------------------------------------------------------------

    def _take(self, received: Received) -> None:
        message: Message | None = None
        try:
            message = decode(received.frames)
            if message.type not in _OF_ANY_SERVER:
                self._check_leads()
            if message.type is MessageType.FOLLOW:
                self._follow(received, message)
                return
            if message.type is MessageType.ADMIN:
                self._administer(received, message)
                return
            _, process = received.peer if message.type in (MessageType.HELLO, MessageType.RESUME) else (None, 0)
            self._handle(Sender(received.route, received.user_id, process), message)
        except ProtocolError as error:
            if message is None or error.code == ErrorCode.BAD_MESSAGE:
                self._note_bad(received, error)
            self._refuse(received, error)
        except Exception as error:
            one = "a message that could not be decoded"
            what = one if message is None else f"{message.type.name} of worker {message.worker}"
            self._report_failure(what)
            text = f"the server failed on {what}: {error!r}; its log has more"
            self._refuse(received, ProtocolError(text, ErrorCode.INTERNAL))

    def _check_leads(self) -> None:
        if self.pair is not None:
            self.pair.check_leads()
            if not self.leads:
                raise ProtocolError("this server is about to lead", ErrorCode.NOT_LEADING)

    def _handle(self, sender: Sender, message: Message) -> None:
        kind, coordinators = message.type, self.coordinators
        if kind is MessageType.KEPT:
            if self.stream is not None:
                self.stream.kept(sender.route, message.sequence, time.monotonic())
                self.answers.release()
        elif kind in TO_COORDINATOR or (kind in SHOWN and coordinators and coordinators.has_asked(message, sender)):
            if coordinators is None:
                raise ProtocolError(f"{kind.name} goes to the first shard of the job's first server")
            outgoing = coordinators.handle(message, sender, self._look_at_time())
            self._send_decided(outgoing, is_heartbeat=kind is MessageType.HEARTBEAT)
        elif kind is MessageType.STATUS:
            self._send([Outgoing(sender.route, self._to(message, MessageType.STATUS_REPORT, payload=self._status()))])
        elif kind is MessageType.ECHO:
            echoed = [Outgoing(sender.route, self._to(message, MessageType.ECHOED, payload=payload_tensor(message)))]
            job = self.shard.jobs.get(message.job)
            is_registrar = job is not None and job.is_registering and sender.route in job.registrars
            if self.snapshot is None or not is_registrar:
                self._send(echoed)
            else:  # no view comes before it, so what a restart may lose of a job is never all
                self.snapshot().add_done_callback(partial(self._answer_saved, message, echoed))
        else:
            job = self.shard.jobs.get(message.job) if kind is MessageType.PUSH else None
            if job is not None and job.is_from_member(message, sender):
                self.segments.find(message)
            outgoing = self.shard.apply(message, sender)
            if kind is MessageType.RESUME and outgoing[0].message.type is MessageType.RESUMED:
                self._complete(outgoing[0].message, message, sender)
            elif kind is MessageType.WAITS and self.answers and "waiting_for" in outgoing[0].message.body:
                outgoing[0].message.body["log"] = True
            self._send(outgoing, may_wait=True)

    def _answer_saved(self, request: Message, answer: list[Outgoing], written: Future[int]) -> None:
        """Send the answer if the snapshot is there, else why it is not; called from the thread that writes it."""
        if (error := written.exception()) is None:
            self.ask(lambda: self._send(answer))
        else:
            body = {"code": ErrorCode.SNAPSHOT_FAILED, "text": f"no snapshot was written: {error}"[:MAX_TEXT_CHARS]}
            refused = Outgoing(answer[0].route, self._to(request, MessageType.ERROR, body=body))
            self.ask(lambda: self._send([refused]))

    def _to(self, request: Message, kind: MessageType, **fields: Any) -> Message:
        """An answer to its sender."""
        names = ("job", "worker", "incarnation", "key", "sequence")
        return Message(kind, epoch=self.shard.epoch, **{name: getattr(request, name) for name in names}, **fields)

    def _status(self) -> torch.Tensor:
        """The status as JSON in UTF-8, which anybody may ask for as often as they like."""
        if self._report is None:
            status = replace(self.status(), transport=None, server=None if self._facts is None else self._facts())
            self._report = torch.frombuffer(bytearray(msgspec.json.encode(status)), dtype=torch.uint8)
        return self._report

    def _administer(self, received: Received, order: Message) -> None:
        """An operator's order; ProtocolError from anybody else."""
        operator = self.endpoint.operator(received)
        if not operator:
            raise ProtocolError(
                "this server does not obey this client (expected the server's own user over its Unix socket, or a key"
                " of --admin-allow)",
                ErrorCode.NOT_ALLOWED,
            )
        self._on_admin(self, received.route, order, operator)

    def _note_bad(self, received: Received, error: ProtocolError) -> None:
        self.bad_messages += 1
        if (suppressed := self._complaints.allows(time.monotonic())) is not None:
            peer = received.route.hex() + (f" with key {received.user_id}" if received.user_id else "")
            text = "shard %d refused a message from peer %s: %s (%d like it unmentioned)"
            logger.warning(text, self.shard.index, peer, error, suppressed)

    def _refuse(self, received: Received, error: ProtocolError) -> None:
        answer = refusal(received.frames, error)
        if answer is not None:
            answer.epoch = self.shard.epoch
            self._send([Outgoing(received.route, answer)])

    # ---- answers -------------------------------------------------------------------------------------------------

    def _send_decided(self, outgoing: list[Outgoing], *, is_heartbeat: bool = False) -> None:
        """Send what the coordinators say; what they have to remember is recorded before it."""
        changed = None if self.coordinators is None else self.coordinators.take_changed()
        if changed is not None:
            self.shard.changes += 1
            if self.shard.append is not None:
                self.shard.append(json_record(RecordKind.COORDINATOR, changed))
        for one in outgoing:
            is_ok = is_heartbeat and one.message.type is MessageType.OK
            if is_ok or one.message.type is MessageType.WELCOME:
                self._add_replicas(one.message)
            self._send([one], waits=not is_ok)

    def _send(self, outgoing: list[Outgoing], *, may_wait: bool = False, waits: bool = True) -> None:
        """Send these; ``may_wait``: answers in shared memory leave with the next ones, at the latest before a wait."""
        for one in outgoing:
            message = one.message
            message.term = self._term
            if message.type is MessageType.UPDATED and self.segments.put(message, one.place):
                if one.route != self._group_route or len(self._group) == ANSWERS_PER_GROUP:
                    self._send_group()
                self._group_route = one.route
                self._group.append(b"".join(encode(message)))
                continue
            self._send_group()  # a connection keeps its order
            # A new registration has to be the only one, whatever happens to this server.
            is_new = message.type not in _DO_NOT_WAIT or message.body.get("state") == "initialise"
            # By a worker's ECHO the coordinator counts the pushes before it, which may not be lost then.
            is_new |= message.type is MessageType.ECHOED and message.worker != NOBODY
            # Nor may an older WELCOME come after a newer one.
            is_new |= message.type is MessageType.WELCOME and self.answers.holds(one.route)
            self.answers.send(one.route, encode(message), place=one.place, waits=waits and is_new)
        if not may_wait:
            self._send_group()

    def _complete(self, resumed: Message, resume: Message, sender: Sender) -> None:
        """Add what only this thread knows. It does not wait: a worker learns from its version what was lost."""
        self._introduce(resumed)
        job = self.shard.jobs.get(resume.job)
        if job is not None and (memory := self.segments.attach(job, resume, sender)) is not None:
            resumed.body["memory"] = memory

    def _introduce(self, resumed: Message) -> None:
        resumed.body["shards"] = self._addresses
        self._add_replicas(resumed)

    def _add_replicas(self, answer: Message) -> None:
        """Tell where this server's follower is."""
        if self.pair is not None and self.pair.replicas:
            answer.body["replicas"] = self.pair.replicas

    def _send_group(self) -> None:
        if self.stream is not None:
            self.stream.flush()
        if self._group:
            self.answers.send(self._group_route, [b"".join(self._group)])
            self._group = []

    # ---- other work ----------------------------------------------------------------------------------------------

    def _answer_asked(self) -> None:
        with suppress(Empty):
            while True:
                self._guarded(self._asked.get_nowait())

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            self._report_failure("between messages")

    def _report_failure(self, what: str) -> None:
        """Log a bug of ours, and go on serving."""
        self.failures += 1
        if (suppressed := self._traces.allows(time.monotonic())) is not None:
            logger.exception("shard %d: %s (%d more unmentioned)", self.shard.index, what, suppressed)
