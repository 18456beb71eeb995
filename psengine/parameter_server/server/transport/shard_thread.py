"""The thread of one shard: socket in, shard, socket out.

    ┌► wait for a message, at most until the next tick ─► take up to DRAIN_MESSAGES ─► answers ─► tick, if it is due ─┐
    └──────────────────────────────────── functions that others asked for ◄──────────────────────────────────────────┘

Nothing else touches the shard or its socket: other threads ``ask`` for a function to be called in this one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from psengine.errors import ProtocolError, ServerError
from psengine.parameter_server.server.interfaces import Outgoing, Sender
from psengine.parameter_server.server.core.shard import TICK_S, Shard
from psengine.parameter_server.server.transport.endpoint import Endpoint, Received
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from psengine.parameter_server.server.transport.segments import ShardSegments
from psengine.parameter_server.status_model import ShardStatus, Transport
from psengine.protocol.frames import decode, encode, refusal
from psengine.protocol.groups import split
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

DRAIN_MESSAGES = 64
# Answers in shared memory travel together while messages are waiting: few, so that the worker copies the first values
# while the next chunks are stepped.
ANSWERS_PER_GROUP = 4
# How often the queue of a peer that does not read is tried.
FLUSH_S = 0.002
# How long messages that are queued when the server ends may take to be answered.
LAST_MESSAGES_S = 2.0
# These do not wait for the log: a server whose disk is slow lives, and can be looked at.
_SAYS_NOTHING_NEW = frozenset({MessageType.HEARTBEAT_ACK, MessageType.STATUS_REPORT, MessageType.ECHOED})


class ShardEndedError(ServerError):
    """The shard's thread has ended."""


class ShardThread(threading.Thread):
    """Runs ``shard`` on ``endpoint`` until ``end``.

    Args:
        shard: used by this thread only once it started.
        endpoint: closed by this thread.
        on_snapshot: called with the route and the message of a member's SNAPSHOT; answers through ``post``.
        on_admin: likewise with an operator's ADMIN, and who sent it.

    Attributes:
        last_tick_s: monotonic time of the last tick.
        answers: what leaves, once the log is as far; its log is set before the start.
        segments: the memory that workers of this host share; used by this thread only once it started.
        drained: set once every queued message was answered after ``drain``.
    """

    def __init__(
        self,
        shard: Shard,
        endpoint: Endpoint,
        on_snapshot: Callable[[ShardThread, bytes, Message], None],
        on_admin: Callable[[ShardThread, bytes, Message, str], None],
    ) -> None:
        super().__init__(name=f"psengine-shard-{shard.index}", daemon=True)
        self.shard = shard
        self.endpoint = endpoint
        self.answers = HeldAnswers(endpoint)
        self.segments = ShardSegments()
        self.last_tick_s = time.monotonic()
        self.drained = threading.Event()
        shard.want_snapshot = lambda route, message: on_snapshot(self, route, message)
        self._on_admin = on_admin
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A worker's answers without a payload frame that leave together, and its route.
        self._group: list[bytes] = []
        self._group_route = b""
        self._group_answers = 0
        self._ends = False
        self._has_ended = False
        self._drain_until_s: float | None = None
        self._complaints = RateLimit()
        self._traces = RateLimit()
        self.bad_messages = 0
        self.failures = 0

    # ---- for other threads -------------------------------------------------------------------------------------

    def ask(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Have ``function`` called in this thread, within a tick; wait for the result with a timeout.

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
        if self._has_ended:
            self._answer_asked()  # the thread may have ended without seeing this call
        return future

    def post(self, outgoing: Outgoing) -> None:
        """Send a message from this thread, if it is still there."""
        self._asked.put(lambda: None if self._has_ended else self._send([outgoing]))

    def drain(self) -> None:
        """Refuse newcomers, answer queued messages, then take no more; sets ``drained``."""
        self.shard.is_draining = True
        self._drain_until_s = time.monotonic() + LAST_MESSAGES_S

    def end(self) -> None:
        """Leave the loop and close the socket; join afterwards."""
        self._ends = True

    def status(self) -> ShardStatus:
        """The shard's status, with its socket's counts; call it in this thread."""
        here = {"bad_messages": self.bad_messages, "failures": self.failures}
        moved = {one.name: getattr(self.endpoint, one.name) for one in fields(Transport) if one.name not in here}
        transport = Transport(**moved, **here)
        return replace(self.shard.status(time.monotonic()), address=self.endpoint.address, transport=transport)

    def evict(self, job: str, rank: int) -> bool:
        """End a worker's lease, see ``Shard.evict``; call it in this thread."""
        outgoing = self.shard.evict(job, rank, time.monotonic())
        self._send(outgoing or [])
        return outgoing is not None

    # ---- in this thread ----------------------------------------------------------------------------------------

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
        wait_s = self.last_tick_s + TICK_S - time.monotonic()
        if self.drained.is_set():
            time.sleep(0.005)
        else:
            self._receive(min(wait_s, FLUSH_S) if self.endpoint.flush() else wait_s)
        now_s = time.monotonic()
        if now_s >= self.last_tick_s + TICK_S:
            self.last_tick_s = now_s
            if not self.drained.is_set():
                self._guarded(lambda: self._send(self.shard.tick(now_s)))
                self._guarded(lambda: self.segments.keep_members(self.shard))
        # After the tick, so that a status does not show a pause of this process as the workers' silence.
        self._answer_asked()

    def _receive(self, wait_s: float) -> None:
        is_draining = self._drain_until_s is not None
        if not self.endpoint.poll(0.001 if is_draining else wait_s, self.answers.descriptor):
            if is_draining and not self.answers:
                self.drained.set()
            return
        self.answers.acknowledge_wake()
        self.answers.release()
        for _ in range(DRAIN_MESSAGES):
            received = self.endpoint.receive()
            if received is None:
                break
            self._hear(received)
            if time.monotonic() >= self.last_tick_s + TICK_S:
                break  # large messages take long, and other work waits for the rest of the turn
        self._send_group()
        if self._drain_until_s is not None and time.monotonic() > self._drain_until_s:
            self.drained.set()

    def _hear(self, received: Received) -> None:
        size_bytes = received.size_bytes
        for part in split(received.frames):
            self._take(received._replace(frames=part, size_bytes=size_bytes))
            size_bytes = 0  # the bytes are counted with the first

    def _take(self, received: Received) -> None:
        message: Message | None = None
        try:
            if received.is_admin:
                self._administer(received)
                return
            message = decode(received.frames)
            if message.type is MessageType.PUSH:
                self.segments.find(message)
            outgoing = self.shard.handle(Sender(received.route, received.user_id), message, time.monotonic())
            # A worker that asks for an answer again may be reading the place where it was written before.
            self._send(outgoing, may_share=message.type is not MessageType.REPEAT, may_wait=True)
        except ProtocolError as error:
            self._note_bad(received, error)
            self._refuse(received, error)
        except Exception as error:
            what = "a message that could not be decoded"
            if message is not None:
                what = f"{message.type.name} of worker {message.worker}"
            self._report_failure(what)
            text = f"the server failed on {what}: {error!r}; its log has more"
            self._refuse(received, ProtocolError(text, ErrorCode.INTERNAL))

    def _administer(self, received: Received) -> None:
        """An operator's order; ProtocolError from anybody else, before the message is decoded."""
        operator = self.endpoint.operator(received)
        if not operator:
            raise ProtocolError(
                "this server does not obey this client (expected the server's own user over its Unix socket, a key of"
                " --admin-allow, or the secret of --admin-secret-file)",
                ErrorCode.NOT_ALLOWED,
            )
        self._on_admin(self, received.route, decode(received.frames), operator)

    def _note_bad(self, received: Received, error: ProtocolError) -> None:
        self.bad_messages += 1
        suppressed = self._complaints.allows(time.monotonic())
        if suppressed is not None:
            sizes = [len(frame) for frame in received.frames[:4]]
            logger.warning(
                "shard %d refused a message from peer %s%s: %s (frames of %s bytes%s; %d like it unmentioned)",
                self.shard.index,
                received.route.hex(),
                f" with key {received.user_id}" if received.user_id else "",
                error,
                sizes,
                ", ..." if len(received.frames) > 4 else "",
                suppressed,
            )

    def _refuse(self, received: Received, error: ProtocolError) -> None:
        answer = refusal(received.frames, error)
        if answer is not None:
            answer.epoch = self.shard.epoch
            self._send([Outgoing(received.route, answer)])

    def _send(self, outgoing: list[Outgoing], *, may_share: bool = True, may_wait: bool = False) -> None:
        """Send these; ``may_wait``: answers in shared memory leave with the next ones, at the latest before a wait."""
        for one in outgoing:
            kind = one.message.type
            if kind is MessageType.UPDATED and may_share and self.segments.put(one.message, one.pins):
                self._send_with_others(one)
                continue
            self._send_group()  # a connection keeps its order
            if kind is MessageType.WELCOME:
                self.segments.sign(one.message)
            pins = one.pins if one.message.payload is not None else None
            self.answers.send(one.route, encode(one.message), pins=pins, is_urgent=kind in _SAYS_NOTHING_NEW)

        if not may_wait:
            self._send_group()

    def _send_with_others(self, one: Outgoing) -> None:
        if one.route != self._group_route:
            self._send_group()
        self._group_route = one.route
        self._group.extend(encode(one.message))
        self._group_answers += 1
        if self._group_answers == ANSWERS_PER_GROUP:
            self._send_group()

    def _send_group(self) -> None:
        if not self._group:
            return
        frames, self._group, self._group_answers = [b"".join(self._group)], [], 0
        self.answers.send(self._group_route, frames)

    def _answer_asked(self) -> None:
        while True:
            try:
                call = self._asked.get_nowait()
            except Empty:
                return
            self._guarded(call)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._report_failure("between messages")

    def _report_failure(self, what: str) -> None:
        """Log a bug of ours, and go on serving."""
        self.failures += 1
        suppressed = self._traces.allows(time.monotonic())
        if suppressed is not None:
            logger.exception("shard %d: %s (%d more unmentioned)", self.shard.index, what, suppressed)
