"""One question to a server, from the thread that asks to the answer it gets.

    a worker's thread   push() ───────── wait() ░░░░░░░░░░░░░░░░░░░░░░ result
    the I/O thread           send ── copy the answer into the destinations ── release the waiter

A worker's thread makes an operation; the I/O thread owns it until ``is_done``. Each waiting thread has one lock: a step
has a hundred chunks and one thread that waits for them.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from psengine.codecs.exchange_outcome import ExchangeOutcome
from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerError
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.parameter_server.client.steps import Step
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message, MessageType

if TYPE_CHECKING:
    from psengine.parameter_server.client.link import Link

# The I/O thread ends every operation at its deadline; waiters give it this much longer.
WAITER_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        version: the chunk's version at the server; 0 where the answer has none.
        body: the answer's fields.
        values: 1-D; None where the request named destinations, or without a payload.
        key: number of the chunk, or of the blob's piece.
    """

    version: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    values: torch.Tensor | None = None
    key: int = 0


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push; its values are in the destinations.

    Attributes:
        version: of the chunk, including this push.
        contributors: how many workers' gradients are in the average; None where servers apply updates.
        refused: why the server did not use the push ("non_finite"); None where it did.
        outcome: whether the push counts.
        seconds: from ``push()`` to the answer.
    """

    version: int
    contributors: int | None
    refused: str | None
    outcome: ExchangeOutcome
    seconds: float


class Parking:
    """The threads that wait for one client's operations, so that a failure wakes all of them.

    Args:
        now_s: the clock of the operations' deadlines.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.process_id = os.getpid()
        self._locks: set[threading.Lock] = set()

    def park(self, operation: Operation, also: Sequence[Operation]) -> None:
        """Wait until ``operation`` is done, or one of ``also`` failed."""
        if os.getpid() != self.process_id:
            raise forked_error()
        lock = threading.Lock()
        lock.acquire()
        self._locks.add(lock)
        operation.waiters.append(lock)
        try:
            # The waiter is registered before this looks: the I/O thread sets is_done first and releases second.
            while not operation.is_done and not any(other.error for other in also):
                wait_s = max(0.0, operation.deadline_s + WAITER_PATIENCE_S - self.now_s())
                # The deadline moves while answers arrive.
                if not lock.acquire(timeout=wait_s) and self.now_s() >= operation.deadline_s + WAITER_PATIENCE_S:
                    raise ServerError(
                        f"the client's I/O thread did not end {operation.describe()}, which is"
                        f" {WAITER_PATIENCE_S:g} s past its deadline. Is the process starved of CPU time?"
                    )
        finally:
            self._locks.discard(lock)

    def wake_all(self) -> None:
        """An operation failed: every waiter looks again."""
        for lock in tuple(self._locks):
            release(lock)


def release(lock: threading.Lock) -> None:
    """Release a waiter that may have been released already."""
    with suppress(RuntimeError):
        lock.release()


def forked_error() -> ServerError:
    """A child process used its parent's connection."""
    return ServerError(
        "a connection to parameter servers does not survive fork(): its sockets and its thread stay with the parent."
        " Connect again in this process, or start workers with the multiprocessing start method 'spawn' or"
        " 'forkserver'."
    )


@dataclass(eq=False)
class Operation:
    """Base of requests and pushes.

    Args:
        message: the question; the link fills in job, epoch, view, worker and incarnation when it sends it.
        parking: the client's.
        timeout_s: how long nothing may move; ``deadline_s`` is this long after the last movement.
        destinations: 1-D contiguous CPU tensors; the answer's payload is copied into them, one after the other.
        dtype: of the payload; None without destinations.
        lands_late: copy it when it was waited for; the destinations may share the payload's memory.
        reads_in_place: leave a payload that lies in the server's memory there: see ``Push.lent``. Without destinations,
            leave any payload where it came: see ``Push.take``.

    Attributes:
        numel: of the answer's payload; 0 where none is wanted.
        size_bytes: what counts for the server's credit.
        last_refusal: why the server did not take it last time.
    """

    message: Message
    parking: Parking
    timeout_s: float
    destinations: Sequence[torch.Tensor] = ()
    dtype: torch.dtype | None = None
    lands_late: bool = field(default=False, kw_only=True)
    reads_in_place: bool = field(default=False, kw_only=True)
    size_bytes: int = field(default=0, kw_only=True)
    is_sent: bool = field(default=False, init=False)
    is_done: bool = field(default=False, init=False)
    error: PSEngineError | None = field(default=None, init=False)
    answer: Message | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)
    last_refusal: str = field(default="", init=False)
    waiters: list[threading.Lock] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._targets = [(d.data_ptr(), d.nbytes) for d in self.destinations]
        self.numel = sum(map(torch.numel, self.destinations))
        self.submitted_s = self.parking.now_s()
        self.deadline_s = self.submitted_s + self.timeout_s

    def describe(self) -> str:
        """Its name, for error messages."""
        raise NotImplementedError

    def finish(self, answer: Message, now_s: float) -> None:
        """I/O thread: take the answer, with its payload; an answer that does not fit fails the operation."""
        if self.numel:
            if (problem := self._misfit(answer)) is not None:
                self.fail(problem)
                return
            if self._targets and not self.lands_late:
                self._land(answer)
        self.answer = answer
        self.seconds = now_s - self.submitted_s
        self._end()

    def _end(self) -> None:
        self.message.payload = None  # frames that are still being sent keep the memory alive
        self.is_done = True
        self.wake()

    def wake(self) -> None:
        """I/O thread: it is done."""
        for lock in self.waiters:
            release(lock)

    def abandon(self) -> None:
        """Nobody waits for it any more: its channel drops it at the next tick."""
        self.timeout_s = self.deadline_s = -math.inf

    def fail(self, error: PSEngineError) -> None:
        """I/O thread: end it without an answer."""
        if self.is_done:
            return
        self.error = error
        self.is_done = True
        self.parking.wake_all()

    def _misfit(self, answer: Message) -> ProtocolError | None:
        if answer.payload is not None and answer.numel == self.numel and answer.dtype is self.dtype:
            return None
        got = f"{answer.numel} of {answer.dtype}" if answer.payload is not None else "no values"
        return ProtocolError(
            f"the answer to {self.describe()} does not fit (expected {self.numel} of {self.dtype}, got {got})"
        )

    def _land(self, answer: Message) -> None:
        """Copy the payload to the destinations."""
        if self._stays(answer):
            return
        source = payload_tensor(answer)  # perhaps a copy, which lives as long as this name
        address = source.data_ptr()
        # memmove runs without the GIL, and without torch's thread pool, which belongs to the training.
        for target, size_bytes in self._targets:
            if target != address:  # the server may have written it there
                ctypes.memmove(target, address, size_bytes)
            address += size_bytes
        self._release_payload(answer)

    def _release_payload(self, answer: Message) -> None:
        answer.payload = None

    def _stays(self, answer: Message) -> bool:
        return self.reads_in_place and answer.in_segment and "place" in answer.body

    def begin_wait(self) -> None:
        """A thread is about to wait for it."""

    def conclude(self) -> None:
        """A worker's thread: do what remains once it is done; idempotent."""

    def settle(self) -> None:
        """Wait for the end.

        Raises:
            ServerLostError: no answer before the deadline.
            ServerRefusedError: the server refused it; ``FencedError`` where this worker lost its membership.
            AuthenticationError, ProtocolError, ServerError: see there.
        """
        wait_all((self,))


@dataclass(eq=False)
class Request(Operation):
    """A question with an id; it is asked again on a new connection where its answer did not come.

    Attributes:
        what: its name, for error messages.
        then: called on the I/O thread with the answer, or the failure.
        follows_pushes: it is sent behind the pushes of its link.
    """

    what: str = field(default="", kw_only=True)
    then: Callable[[Message | PSEngineError], None] | None = field(default=None, kw_only=True)
    follows_pushes: bool = field(default=False, kw_only=True)

    @override
    def describe(self) -> str:
        return self.what or self.message.type.name

    def reply(self) -> Message:
        """Wait for the answer and return it as it came. Raises like ``settle``."""
        self.settle()
        assert self.answer is not None
        return self.answer

    def wait(self) -> Answer:
        """Wait for the answer. Raises like ``settle``."""
        reply = self.reply()
        values = None if reply.payload is None else payload_tensor(reply)
        return Answer(reply.version, reply.body, values, reply.key)

    @override
    def _end(self) -> None:
        super()._end()
        if self.then is not None and self.answer is not None:
            self.then(self.answer)

    @override
    def fail(self, error: PSEngineError) -> None:
        was_done = self.is_done
        super().fail(error)
        if self.then is not None and not was_done:
            self.then(error)


@dataclass(eq=False)
class Push(Operation):
    """A chunk's part in a step; see ``WorkerSession.push``.

    Attributes:
        spec, step, link: the chunk, the step of which it is, and where it goes.
        encoder: makes the chunk's payloads, where the job has a codec.
        is_shared: servers average: the answer counts once all of the step's are there.
        waiting_for: the workers that the server waits for, where it said so; else None.
    """

    spec: ChunkSpec = field(kw_only=True)
    step: Step = field(kw_only=True)
    link: Link = field(kw_only=True)
    encoder: ChunkEncoder | None = None
    is_shared: bool = field(default=False, kw_only=True)
    waiting_for: list[int] | None = field(default=None, init=False)
    asked_s: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder = self.encoder
        self._is_concluded = encoder is None and not self.lands_late
        if encoder is not None and encoder.decodes:
            # The training's threads decode, when they wait; until then the answer stays encoded.
            self._targets = []
            is_wanted = self.destinations or encoder.answers_differences
            self.numel, self.dtype = encoder.answer.numel if is_wanted else 0, encoder.answer.dtype

    @property
    def key(self) -> int:
        """The chunk."""
        return self.message.key

    @override
    def describe(self) -> str:
        return f"push {self.step.number} of {self.spec.describe()}"

    def wait(self) -> PushResult:
        """Wait until the answer is in the destinations. Raises like ``settle``."""
        self.settle()
        outcome = self._outcome()
        assert self.answer is not None
        assert outcome is not None
        body = self.answer.body
        return PushResult(self.answer.version, body.get("contributors"), body.get("refused"), outcome, self.seconds)

    @override
    def begin_wait(self) -> None:
        if not self.step.is_ended:
            self.step.end()

    @override
    def _end(self) -> None:
        if not self.is_shared:
            super()._end()

    def complete(self) -> None:
        """I/O thread: the step is complete; ``wake`` follows once all its pushes know."""
        answer = self.answer
        if answer is not None and answer.payload is not None and answer.in_segment and "place" not in answer.body:
            # The shard writes the next answer there, and then a server that restarts may need this one.
            answer.payload = payload_tensor(answer).clone()
        self.message.payload = None
        self.is_done = True

    @override
    def _misfit(self, answer: Message) -> ProtocolError | None:
        encoder = self.encoder
        if encoder is not None and answer.payload is not None and encoder.is_whole(answer.dtype, answer.numel):
            return None
        return super()._misfit(answer)

    @override
    def _release_payload(self, answer: Message) -> None:
        if not self.is_shared:  # a server that restarts may need an average from here
            answer.payload = None

    @override
    def conclude(self) -> None:
        if self._is_concluded or not self.is_done:
            return
        self._is_concluded = True
        encoder, answer, outcome = self.encoder, self.answer, self._outcome()
        if encoder is None:
            if answer is not None and self._targets:
                self._land(answer)
            return
        if self.message.dtype is not None and outcome is not None:  # the push had a payload
            encoder.end(outcome)
        if encoder.decodes and self.numel and answer is not None:
            encoder.decode(payload_tensor(answer), self.destinations, self.step.number)
            self._release_payload(answer)

    def _outcome(self) -> ExchangeOutcome | None:
        """None: the push failed, and nobody knows whether the servers have it."""
        if self.error is not None or self.answer is None:
            return ExchangeOutcome.FENCED if isinstance(self.error, FencedError) else None
        body = self.answer.body
        if body.get("refused", "abstained") != "abstained":
            return ExchangeOutcome.REFUSED
        if body.get("late") or (self.step.is_late and self.message.dtype is not None):
            return ExchangeOutcome.LATE
        return ExchangeOutcome.APPLIED if "contributors" not in body else ExchangeOutcome.AVERAGED

    @property
    def lent(self) -> torch.Tensor | None:
        """The answer's values in the server's memory, to be read until the chunk's next push; None if they landed."""
        return self.answer.payload if self.answer is not None and self._stays(self.answer) else None

    def take(self) -> torch.Tensor:
        """The answer's values, 1-D, to be read until the chunk's next push; once. For a push without destinations."""
        assert self.answer is not None
        values = payload_tensor(self.answer)
        self._release_payload(self.answer)  # a frame's memory ends with the values
        return values

    def result(self) -> Message:
        """The average as it came, as RESULT."""
        assert self.answer is not None
        came = self.answer
        body = {"contributors": came.body.get("contributors", 0)}
        result = Message(MessageType.RESULT, key=self.key, sequence=self.step.number, body=body, payload=came.payload)
        result.dtype, result.numel, result.version = came.dtype, came.numel, came.version
        return result


def wait_all(operations: Sequence[Operation]) -> None:
    """Wait for all of them; the first failure of any is raised at once. Raises like ``Operation.settle``."""
    for operation in operations:
        operation.begin_wait()
    # From the back: the last question is mostly answered last, so this mostly waits once.
    for operation in reversed(operations):
        if not operation.is_done:
            operation.parking.park(operation, operations)
    for operation in operations:
        operation.conclude()
    for operation in operations:
        if operation.error is not None:
            raise operation.error.with_traceback(None)
