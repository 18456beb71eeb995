"""One question to a server, from the thread that asks to the answer it gets.

    a worker's thread   push() ───────── wait() ░░░░░░░░░░░░░░░░░░░░░░ answer
    the I/O thread           send ── copy the answer into the destinations ── wake the waiter

A worker's thread makes a request; the I/O thread owns it until ``is_done``.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import override

from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerError
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.parameter_server.client.steps import Step
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message, MessageType
from psengine.tracing.stall_inspector import inspector

if TYPE_CHECKING:
    from psengine.parameter_server.client.link import Link

# The I/O thread ends every request at its deadline; waiters give it this much longer.
WAITER_PATIENCE_S = 10.0
LOOK_S = 0.1

T = TypeVar("T")


class Parking:
    """The threads that wait for one client's requests.

    Args:
        now_s: the clock of the requests' deadlines.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.process_id = os.getpid()
        self._changed = threading.Condition()

    def park(self, request: Request, also: Sequence[Request]) -> None:
        """Wait until ``request`` is done, or one of ``also`` failed."""
        if os.getpid() != self.process_id:
            raise forked_error()
        with inspector.watch_server(lambda: f"a server's answer to {request.describe()}"), self._changed:
            # Said before this looks: the I/O thread sets is_done first, and looks whether to wake second.
            request.is_awaited = True
            while not request.is_done and not any(other.error for other in also):
                wait_s = max(0.0, request.deadline_s + WAITER_PATIENCE_S - self.now_s())
                # The deadline moves while answers arrive.
                if not self._changed.wait(wait_s) and self.now_s() >= request.deadline_s + WAITER_PATIENCE_S:
                    raise ServerError(
                        f"the client's I/O thread did not end {request.describe()}, which is"
                        f" {WAITER_PATIENCE_S:g} s past its deadline. Is the process starved of CPU time?"
                    )

    def look(self, find: Callable[[], T | None]) -> T | None:
        """What ``find`` returns, where that is not None; else wait once, for LOOK_S or until all are woken."""
        if os.getpid() != self.process_id:
            raise forked_error()
        with self._changed:
            if (found := find()) is None:
                self._changed.wait(LOOK_S)
                found = find()
            return found

    def wake_all(self) -> None:
        """Every waiter looks again."""
        with self._changed:
            self._changed.notify_all()


def forked_error() -> ServerError:
    """A child process used its parent's connection."""
    return ServerError(
        "a connection to parameter servers does not survive fork(): its sockets and its thread stay with the parent."
        " Connect again in this process, or start workers with the multiprocessing start method 'spawn' or"
        " 'forkserver'."
    )


@dataclass(eq=False)
class Request:
    """A question to a server; it is asked again on a new connection where its answer did not come.

    Args:
        message: the question; the link fills in job, epoch, view, worker and incarnation when it sends it.
        parking: the client's.
        timeout_s: how long nothing may move; ``deadline_s`` is this long after the last movement.
        destinations: 1-D contiguous CPU tensors of one dtype; the answer's payload is copied into them, one after the
            other. Without them it stays in the answer.
        what: its name, for error messages.
        size_bytes: what counts for the server's credit.
        follows_pushes: it is sent behind the pushes of its link.
        then: called on the I/O thread with the answer, or the failure.

    Attributes:
        is_shared: the answer counts once all of the step's are there.
        reads_in_place: an answer in the server's memory stays there: see ``Push.take``.
        is_awaited: a thread waits for it.
        pending: the body of the last PENDING: what the server waits for.
        asked_s: when that was asked last.
    """

    message: Message
    parking: Parking
    timeout_s: float
    destinations: Sequence[torch.Tensor] = ()
    what: str = field(default="", kw_only=True)
    size_bytes: int = field(default=0, kw_only=True)
    follows_pushes: bool = field(default=False, kw_only=True)
    then: Callable[[Message | PSEngineError], None] | None = field(default=None, kw_only=True)
    pending: dict[str, Any] | None = field(default=None, init=False)
    asked_s: float = field(default=-math.inf, init=False)
    is_shared: bool = field(default=False, kw_only=True)
    reads_in_place: bool = field(default=False, kw_only=True)
    is_sent: bool = field(default=False, init=False)
    is_done: bool = field(default=False, init=False)
    is_awaited: bool = field(default=False, init=False)
    error: PSEngineError | None = field(default=None, init=False)
    answer: Message | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._targets = [(d.data_ptr(), d.nbytes) for d in self.destinations]
        # Of the values that are wanted, dtype and number; one of these, and the first mostly.
        self._forms: list[tuple[torch.dtype, int]] = []
        if self.destinations:
            self._forms.append((self.destinations[0].dtype, sum(map(torch.numel, self.destinations))))
        self.submitted_s = self.parking.now_s()
        self.deadline_s = self.submitted_s + self.timeout_s

    def describe(self) -> str:
        """Its name, for error messages."""
        return self.what or self.message.type.name

    def finish(self, answer: Message) -> None:
        """I/O thread: take the answer, whose payload becomes a tensor; one that does not fit fails the request."""
        if self._forms and (answer.dtype, answer.numel) not in self._forms:
            got = f"{answer.numel} of {answer.dtype}" if answer.payload is not None else "no values"
            expected = " or ".join(f"{numel} of {dtype}" for dtype, numel in self._forms)
            self.fail(ProtocolError(f"the answer to {self.describe()} does not fit (expected {expected}, got {got})"))
            return
        if answer.payload is not None and answer.place is None:
            answer.payload = payload_tensor(answer)  # perhaps a copy
        if self._targets and not (self.reads_in_place and answer.place is not None):
            self._land(answer)
        self.answer = answer
        if not self.is_shared:
            self.complete()

    def complete(self) -> None:
        """I/O thread: the answer counts."""
        self.message.payload = None  # frames that are still being sent keep the memory alive
        self.is_done = True
        if self.is_awaited:
            self.parking.wake_all()
        if self.then is not None and self.answer is not None:
            self.then(self.answer)

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
        if self.then is not None:
            self.then(error)

    def _land(self, answer: Message) -> None:
        """Copy the payload to the destinations."""
        address = answer.payload.data_ptr()
        # memmove runs without the GIL, and without torch's thread pool, which belongs to the training.
        for target, size_bytes in self._targets:
            ctypes.memmove(target, address, size_bytes)
            address += size_bytes
        if not self.is_shared:  # a server that restarts may need an average from here
            answer.payload = None

    def wait(self) -> Message:
        """Wait for the answer, and return it; without destinations its payload is a 1-D tensor, if it has one.

        Raises:
            ServerLostError: no answer before the deadline.
            ServerRefusedError: the server refused it; ``FencedError`` where this worker lost its membership.
            AuthenticationError, ProtocolError, ServerError: see there.
        """
        wait_all((self,))
        assert self.answer is not None
        return self.answer


@dataclass(eq=False)
class Push(Request):
    """A chunk's part in a step; see ``WorkerSession.push``.

    Attributes:
        spec, step, link: the chunk, the step of which it is, and where it goes.
        encoder: makes the chunk's payloads, where the job has a codec.
    """

    spec: ChunkSpec = field(kw_only=True)
    step: Step = field(kw_only=True)
    link: Link = field(kw_only=True)
    encoder: ChunkEncoder | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder = self.encoder
        self._is_concluded = encoder is None
        if encoder is not None and encoder.decodes:
            # The training's threads decode, when they wait; until then the answer stays encoded.
            self._targets, self.reads_in_place = [], False
            self._forms = encoder.forms
        elif self.reads_in_place:
            self._forms = [(self.spec.dtype, self.spec.numel)]

    @property
    def key(self) -> int:
        """The chunk."""
        return self.message.key

    @property
    def is_empty(self) -> bool:
        """Whether all workers abstained: there is no average, and nothing landed."""
        return self.answer is not None and _is_empty(self.answer)

    @override
    def finish(self, answer: Message) -> None:
        if self.is_shared and _is_empty(answer):
            self.answer = answer  # nothing lands; where the step is taken back, another answer may
        else:
            super().finish(answer)

    @override
    def describe(self) -> str:
        return f"push {self.step.number} of {self.spec.describe()}"

    def conclude(self) -> None:
        """A worker's thread: do what remains once it is done; idempotent."""
        if self._is_concluded or not self.is_done:
            return
        self._is_concluded = True
        encoder, answer, counts = self.encoder, self.answer, self.counts
        assert encoder is not None
        if self.message.dtype is not None and counts is not None:  # the push had a payload
            encoder.end(counts=counts)
        if encoder.decodes and answer is not None and not self.is_empty:
            values = encoder.decode(answer.payload, self.destinations, self.step.number)
            if not self.is_shared:
                answer.payload = None if self.destinations else values

    @property
    def counts(self) -> bool | None:
        """Whether its payload is part of the average, or servers stepped with it; None: nobody knows."""
        if self.error is not None or self.answer is None:
            return False if isinstance(self.error, FencedError) else None
        body = self.answer.body
        is_late = self.step.is_late and self.message.dtype is not None
        return not is_late and body.get("refused", "abstained") == "abstained"

    def take(self) -> torch.Tensor | None:
        """The answer's values, 1-D, to be read until the chunk's next push; None if they are in the destinations.

        For a push that ``reads_in_place``; once, but for averages.
        """
        answer = self.answer
        assert answer is not None
        if self.destinations and not (self.reads_in_place and answer.place is not None):
            return None
        values: torch.Tensor = answer.payload
        if not self.is_shared:
            answer.payload = None  # a frame's memory ends with the values
        return values

    def result(self) -> Message:
        """The average as it came, as RESULT."""
        assert self.answer is not None
        came = self.answer
        body = {"contributors": came.body.get("contributors", 0)}
        result = Message(MessageType.RESULT, key=self.key, sequence=self.step.number, body=body, payload=came.payload)
        result.dtype, result.numel, result.version = came.dtype, came.numel, came.version
        return result


def _is_empty(answer: Message) -> bool:
    return answer.dtype is None and answer.body.get("contributors") == 0


def wait_all(requests: Sequence[Request]) -> None:
    """Wait for all of them. The first failure is raised at once, like that of ``Request.wait``."""
    pushes = [request for request in requests if isinstance(request, Push)]
    for push in pushes:
        if not push.step.is_ended:
            push.step.end()
    # From the back: the last question is mostly answered last, so this mostly waits once.
    for request in reversed(requests):
        if not request.is_done:
            request.parking.park(request, requests)
    for push in pushes:
        push.conclude()
    for request in requests:
        if request.error is not None:
            raise request.error.with_traceback(None)
