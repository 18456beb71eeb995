"""One question to a shard, from the thread that asks to its answer: what it is, where the answer goes, who waits.

    a worker's thread   push() ───────────────────────── wait() ░░░░░░░░ result
    the I/O thread           send ── (resend, probe) ── copy the answer into the destinations, release the waiter

An operation is made by a worker's thread, then belongs to the I/O thread until ``is_done``. Waiting is a lock per
waiting thread, not per operation: a step has a hundred chunks and one thread that waits.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from psengine.codecs.exchange_outcome import ExchangeOutcome
from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerError
from psengine.parameter_server.client.answers import Answer, PushResult
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import Message, MessageType

# The I/O thread ends every operation at its deadline; waiters give it this much longer.
WAITER_PATIENCE_S = 10.0


class Parking:
    """The threads that wait for one connection's operations, so that a failure wakes them all.

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
            # Set before this looked: the I/O thread sets is_done first and releases waiters second.
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
        """Something failed: whoever waits looks again."""
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


class Operation:
    """Base of requests and pushes.

    Args:
        message: what is asked; job, epoch, worker and incarnation are filled in when it is sent.
        what: what error messages call it; called only for those.
        parking: the connection's.
        timeout_s: how long it may take while nothing moves; ``deadline_s`` is so long after the last movement.
        destinations: 1-D contiguous CPU tensors the answer's payload is copied into, one after the other.
        numel, dtype: what the payload must be; None without destinations.
    """

    __slots__ = (
        "_targets",
        "answer",
        "deadline_s",
        "destinations",
        "dtype",
        "error",
        "is_done",
        "is_sent",
        "last_refusal",
        "message",
        "next_at_s",
        "numel",
        "parking",
        "seconds",
        "submitted_s",
        "timeout_s",
        "unanswered",
        "waiters",
        "what",
    )

    def __init__(
        self,
        message: Message,
        what: Callable[[], str],
        parking: Parking,
        timeout_s: float,
        destinations: Sequence[torch.Tensor] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.message = message
        self.what = what
        self.parking = parking
        self.destinations = destinations
        self._targets = [(d.data_ptr(), d.numel() * d.itemsize) for d in destinations]
        self.numel = sum(d.numel() for d in destinations)
        self.dtype = dtype
        self.submitted_s = parking.now_s()
        self.timeout_s = timeout_s
        self.deadline_s = self.submitted_s + timeout_s
        # Questions about it since the last answer to one.
        self.unanswered = 0
        self.next_at_s = 0.0
        self.is_sent = False
        self.is_done = False
        self.error: PSEngineError | None = None
        self.answer: Message | None = None
        self.seconds = 0.0
        self.last_refusal = ""
        self.waiters: list[threading.Lock] = []

    def describe(self) -> str:
        """What error messages call it."""
        return self.what()

    @property
    def is_of_a_live_worker(self) -> bool:
        """Whether a worker that has to rejoin may not ask for it: it would give others what it has missed."""
        return self.message.type in (MessageType.PUSH, MessageType.ADMIT)

    def finish(self, answer: Message, now_s: float) -> PSEngineError | None:
        """I/O thread: take the answer, its payload into the destinations; or say why it cannot be taken."""
        problem = self._take_payload(answer) if self.numel else None
        if problem is not None:
            self.fail(problem)
            return problem
        self.message.payload = None  # free to go; what may still be on its way out keeps it alive
        self.answer = answer
        self.seconds = now_s - self.submitted_s
        self.is_done = True
        for lock in self.waiters:
            release(lock)
        return None

    def fail(self, error: PSEngineError) -> None:
        """I/O thread: it ends without an answer."""
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
        if not self._targets:
            return None
        source = payload_tensor(answer)
        address = source.data_ptr()
        # memmove: without the GIL, and without torch's thread pool, which belongs to the training.
        for target, size_bytes in self._targets:
            ctypes.memmove(target, address, size_bytes)
            address += size_bytes
        answer.payload = None
        return None

    def conclude(self) -> None:
        """The thread that waits: do what is left to do once it is done; a second time does nothing."""

    def settle(self) -> None:
        """Wait for the end, and raise what went wrong.

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


class Request(Operation):
    """A question with an id, asked again where it or its answer was lost.

    ``mark``: the first marker of its link that follows it; see ``Link``.
    ``is_urgent``: part of introducing this worker, so it is sent even while everything else is held.
    ``handles_refusal``: an ERROR ends it whatever it says; of other operations, "fenced" and "not_member" start the
    recovery instead.
    """

    __slots__ = ("handles_refusal", "is_urgent", "mark")

    def __init__(
        self,
        message: Message,
        what: Callable[[], str],
        parking: Parking,
        timeout_s: float,
        destinations: Sequence[torch.Tensor] = (),
        dtype: torch.dtype | None = None,
        *,
        is_urgent: bool = False,
        handles_refusal: bool = False,
    ) -> None:
        super().__init__(message, what, parking, timeout_s, destinations, dtype)
        self.is_urgent = is_urgent
        self.handles_refusal = handles_refusal or is_urgent
        self.mark = 0

    def reply(self) -> Message:
        """The answer as it came; waits for it. Raises like ``wait``."""
        self.settle()
        assert self.answer is not None
        return self.answer

    def wait(self) -> Answer:
        """The answer.

        Raises:
            ServerLostError: no answer before the deadline.
            ServerRefusedError: the server refused it.
        """
        reply = self.reply()
        values = None if reply.payload is None else payload_tensor(reply)
        return Answer(reply.version, reply.body, values, reply.key)


class Push(Operation):
    """A chunk's exchange; see ``WorkerSession.push``.

    ``encoder``: where a codec makes the chunk's payloads. ``keeps_answer``: as it came, after it was decoded, too.
    ``round``: how often it, or its answer, was asked for. ``asked_s``: when the first of the unanswered probes left.
    ``arrived_bytes``: what the server has of everybody, as it said last while it held the answer.
    """

    __slots__ = (
        "_encoder",
        "_is_concluded",
        "_keeps_answer",
        "arrived_bytes",
        "asked_s",
        "fenced_count",
        "round",
        "size_bytes",
        "waiting_for",
    )

    def __init__(
        self,
        message: Message,
        what: Callable[[], str],
        parking: Parking,
        timeout_s: float,
        destinations: Sequence[torch.Tensor],
        dtype: torch.dtype | None,
        encoder: ChunkEncoder | None = None,
        *,
        keeps_answer: bool = False,
    ) -> None:
        super().__init__(message, what, parking, timeout_s, destinations, dtype)
        self._encoder = encoder
        self._keeps_answer = keeps_answer
        self._is_concluded = encoder is None
        if encoder is not None and encoder.decodes:
            # The answer stays as it came until somebody waits: decoding is work for the training's threads.
            self._targets = []
            self.numel, self.dtype = encoder.answer.numel if destinations else 0, encoder.answer.dtype
        self.size_bytes = message.numel * message.dtype.itemsize if message.dtype is not None else 0
        self.fenced_count = 0
        self.round = 1
        self.asked_s = 0.0
        self.arrived_bytes = -1
        self.waiting_for: list[int] | None = None

    @property
    def key(self) -> int:
        """The chunk."""
        return self.message.key

    @property
    def sequence(self) -> int:
        """The number of the exchange."""
        return self.message.sequence

    def wait(self) -> PushResult:
        """Wait until the answer is in the destinations.

        Raises:
            ServerLostError: no answer before the deadline.
            FencedError: this worker's lease ran out while others went on; see ``WorkerSession.rejoin``.
            ServerRefusedError: the server refused it.
        """
        self.settle()
        outcome = self._outcome()
        assert self.answer is not None
        assert outcome is not None
        body = self.answer.body
        return PushResult(self.answer.version, body.get("contributors"), body.get("refused"), outcome, self.seconds)

    @override
    def conclude(self) -> None:
        if self._is_concluded or not self.is_done:
            return
        self._is_concluded = True
        assert self._encoder is not None
        outcome = self._outcome()
        if self.message.dtype is not None and outcome is not None:  # it brought a payload
            self._encoder.end(outcome)
        if self._encoder.decodes and self.destinations and self.answer is not None:
            self._encoder.decode(payload_tensor(self.answer), self.destinations)
            if not self._keeps_answer:
                self.answer.payload = None

    def _outcome(self) -> ExchangeOutcome | None:
        """None: it failed, and nobody knows whether the servers have it."""
        if self.answer is None:
            return ExchangeOutcome.FENCED if isinstance(self.error, FencedError) else None
        body = self.answer.body
        if body.get("refused", "abstained") != "abstained":
            return ExchangeOutcome.REFUSED
        if body.get("late"):
            return ExchangeOutcome.LATE
        return ExchangeOutcome.APPLIED if "contributors" not in body else ExchangeOutcome.AVERAGED

    def result(self) -> torch.Tensor:
        """The values of the answer as they travelled, in memory of their own."""
        assert self.answer is not None
        if self.answer.payload is not None:
            return payload_tensor(self.answer).clone()
        return torch.cat([destination.detach().view(-1) for destination in self.destinations])


def wait_all(operations: Sequence[Operation]) -> None:
    """Wait for all of them; the first failure of any is raised at once.

    Raises:
        ServerLostError, ServerRefusedError, ServerError: see ``Operation.settle``.
    """
    # From the back: the last one asked is mostly the last one answered, so this mostly waits once.
    for operation in reversed(operations):
        if not operation.is_done:
            operation.parking.park(operation, operations)
    for operation in operations:
        operation.conclude()
    for operation in operations:
        if operation.error is not None:
            raise operation.error.with_traceback(None)
