"""One question to a shard, from the thread that asks to the answer it gets.

    a worker's thread   push() ───────────────────────── wait() ░░░░░░░░ result
    the I/O thread           send ── (resend, probe) ── copy the answer into the destinations, release the waiter

A worker's thread makes an operation; the I/O thread owns it until ``is_done``. Each waiting thread has one lock: a step
has a hundred chunks and one thread that waits for them.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.exchange_outcome import ExchangeOutcome
from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerError
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import ErrorCode, Message, MessageType

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
    try:
        lock.release()
    except RuntimeError:
        return


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
        message: the question; the link fills in job, epoch, worker and incarnation when it sends it.
        describe: returns the operation's name for error messages.
        parking: the client's.
        timeout_s: how long nothing may move; ``deadline_s`` is this long after the last movement.
        destinations: 1-D contiguous CPU tensors; the answer's payload is copied into them, one after the other.
        dtype: of the payload; None without destinations.
        reads_in_place: leave a payload that lies in the server's memory there: see ``Push.lent``. Without destinations,
            leave any payload where it came: see ``Push.take``.

    Attributes:
        numel: of the answer's payload; 0 where none is wanted.
        unanswered: questions about it since the last answer to one.
        next_at_s: when the link asks about it next.
        last_refusal: why the server did not take it last time.
    """

    message: Message
    describe: Callable[[], str]
    parking: Parking
    timeout_s: float
    destinations: Sequence[torch.Tensor] = ()
    dtype: torch.dtype | None = None
    reads_in_place: bool = field(default=False, kw_only=True)
    unanswered: int = field(default=0, init=False)
    next_at_s: float = field(default=0.0, init=False)
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

    @property
    def is_of_a_live_worker(self) -> bool:
        """Whether a worker that has to rejoin may not ask it: it would pass on a state that misses updates."""
        return self.message.type in (MessageType.PUSH, MessageType.STORE, MessageType.ADMIT)

    def finish(self, answer: Message, now_s: float) -> PSEngineError | None:
        """I/O thread: take the answer and copy its payload; return why that is not possible."""
        problem = self._take_payload(answer) if self.numel else None
        if problem is not None:
            self.fail(problem)
            return problem
        self.message.payload = None  # frames that are still being sent keep the memory alive
        self.answer = answer
        self.seconds = now_s - self.submitted_s
        self.is_done = True
        for lock in self.waiters:
            release(lock)
        return None

    def abandon(self) -> None:
        """Nobody waits for it any more: its link drops it at the next tick."""
        self.timeout_s = self.deadline_s = -math.inf

    def fail(self, error: PSEngineError) -> None:
        """I/O thread: end it without an answer."""
        if self.is_done:
            return
        self.error = error
        self.is_done = True
        self.parking.wake_all()

    def _take_payload(self, answer: Message) -> ProtocolError | None:
        if answer.payload is None or answer.numel != self.numel or answer.dtype is not self.dtype:
            got = f"{answer.numel} of {answer.dtype}" if answer.payload is not None else "no values"
            return ProtocolError(
                f"the answer to {self.describe()} does not fit (expected {self.numel} of {self.dtype}, got {got})"
            )
        if not self._targets or self._stays(answer):
            return None
        source = payload_tensor(answer)
        address = source.data_ptr()
        # memmove runs without the GIL, and without torch's thread pool, which belongs to the training.
        for target, size_bytes in self._targets:
            if target != address:  # the server may have written it there
                ctypes.memmove(target, address, size_bytes)
            address += size_bytes
        answer.payload = None
        return None

    def _stays(self, answer: Message) -> bool:
        return self.reads_in_place and answer.in_segment and "place" in answer.body

    def conclude(self) -> None:
        """A worker's thread: do what remains once it is done; idempotent."""

    def settle(self) -> None:
        """Wait for the end.

        Raises:
            ServerLostError: no answer before the deadline.
            ServerRefusedError: the server refused it; ``FencedError`` where this worker lost its membership.
            AuthenticationError, ProtocolError, ServerError: see there.
        """
        if not self.is_done:
            self.parking.park(self, (self,))
        self.conclude()
        if self.error is not None:
            raise self.error.with_traceback(None)


@dataclass(eq=False)
class Request(Operation):
    """A question with an id; the link sends it again where it or its answer was lost.

    Attributes:
        is_urgent: it belongs to the handshake, and is sent while everything else is held.
        handles_refusal: any ERROR ends it; for other operations "fenced" and "not_member" start a recovery.
        mark: the first marker of its link that follows it; see ``Link``.
    """

    is_urgent: bool = field(default=False, kw_only=True)
    handles_refusal: bool = field(default=False, kw_only=True)
    mark: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handles_refusal = self.handles_refusal or self.is_urgent

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


@dataclass(eq=False)
class Push(Operation):
    """A chunk's exchange; see ``WorkerSession.push``.

    Attributes:
        encoder: makes the chunk's payloads, where the job has a codec.
        keeps_answer: keep the encoded answer after it was decoded.
        round: how often the push, or its answer, was sent.
        asked_s: when the first of the unanswered probes was sent.
        arrived_bytes: bytes of this exchange that the server has from all workers, by its last PENDING.
        waiting_for: the workers that the server waits for, where its last word was PENDING; else None.
    """

    encoder: ChunkEncoder | None = None
    keeps_answer: bool = field(default=False, kw_only=True)
    fenced_count: int = field(default=0, init=False)
    round: int = field(default=1, init=False)
    asked_s: float = field(default=0.0, init=False)
    arrived_bytes: int = field(default=-1, init=False)
    waiting_for: list[int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder, message = self.encoder, self.message
        self._is_concluded = encoder is None
        if encoder is not None and encoder.decodes:
            # The training's threads decode, when they wait; until then the answer stays encoded.
            self._targets = []
            is_wanted = self.destinations or encoder.answers_differences
            self.numel, self.dtype = encoder.answer.numel if is_wanted else 0, encoder.answer.dtype
        self.size_bytes = message.numel * message.dtype.itemsize if message.dtype is not None else 0

    @property
    def key(self) -> int:
        """The chunk."""
        return self.message.key

    @property
    def sequence(self) -> int:
        """The number of the exchange."""
        return self.message.sequence

    @property
    def is_held(self) -> bool:
        """Whether the server has it and waits for others, by its answer to the last question."""
        return self.waiting_for is not None and not self.unanswered

    def wait(self) -> PushResult:
        """Wait until the answer is in the destinations. Raises like ``settle``."""
        self.settle()
        outcome = self._outcome()
        assert self.answer is not None
        assert outcome is not None
        body = self.answer.body
        return PushResult(self.answer.version, body.get("contributors"), body.get("refused"), outcome, self.seconds)

    @override
    def _take_payload(self, answer: Message) -> ProtocolError | None:
        if (
            self.encoder is not None
            and answer.payload is not None
            and self.encoder.is_whole(answer.dtype, answer.numel)
        ):
            return None
        return super()._take_payload(answer)

    @override
    def conclude(self) -> None:
        if self._is_concluded or not self.is_done:
            return
        self._is_concluded = True
        assert self.encoder is not None
        outcome = self._outcome()
        if self.message.dtype is not None and outcome is not None:  # the push had a payload
            self.encoder.end(outcome)
        if self.encoder.decodes and self.numel and self.answer is not None:
            self.encoder.decode(payload_tensor(self.answer), self.destinations, self.sequence)
            if not self.keeps_answer:
                self.answer.payload = None

    def _outcome(self) -> ExchangeOutcome | None:
        """None: the push failed, and nobody knows whether the servers have it."""
        if self.answer is None:
            return ExchangeOutcome.FENCED if isinstance(self.error, FencedError) else None
        body = self.answer.body
        if body.get("refused", "abstained") != "abstained":
            return ExchangeOutcome.REFUSED
        if body.get("late"):
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
        self.answer.payload = None  # a frame's memory ends with the values
        return values

    def result(self) -> torch.Tensor:
        """A copy of the answer's values as they travelled."""
        assert self.answer is not None
        if self.answer.payload is not None:
            return payload_tensor(self.answer).clone()
        return torch.cat([destination.detach().view(-1) for destination in self.destinations])


def wait_all(operations: Sequence[Operation]) -> None:
    """Wait for all of them; the first failure of any is raised at once. Raises like ``Operation.settle``."""
    # From the back: the last question is mostly answered last, so this mostly waits once.
    for operation in reversed(operations):
        if not operation.is_done:
            operation.parking.park(operation, operations)
    for operation in operations:
        operation.conclude()
    for operation in operations:
        if operation.error is not None:
            raise operation.error.with_traceback(None)


def says_hello_again(operation: Operation | None, code: str) -> bool:
    """Whether a refusal means that this worker lost its membership, so that a recovery has to follow."""
    if isinstance(operation, Request) and operation.handles_refusal:
        return False
    if operation is not None and operation.message.type is MessageType.ADMIT and code == ErrorCode.NOT_READY:
        return True  # the server knows this worker, and exchanges do not wait for it any more
    return code in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)
