"""A worker's part in a job whose workers exchange among themselves: who takes part, by the coordinator's word.

    the coordinator      PREPARE                            VIEW
    the I/O thread         └─► preparing                      └─► view
    the training's thread         └─ regroup ── COMMIT prepared ... ┴─► the members, who form a group

The training answers PREPARE itself, between two steps: from then on it completes none until the view comes. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from psengine.errors import ServerLostError, ServerRefusedError
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.job_client import JobClient
from psengine.parameter_server.client.operation import Request
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import View, view_of

logger = logging.getLogger(__name__)

# How long a member waits for the others to come back into psengine's hands, while the coordinator is heard.
REGROUP_S = 1800.0
# How often a worker that leaves looks whether it may.
LEAVE_LOOK_S = 0.02
# After these the coordinator has restarted, or put this worker out; the answer to HELLO says which.
_SAYS_HELLO = (ErrorCode.NOT_MEMBER, ErrorCode.FENCED)


def elastic_rule(virtual_workers: int, facts: Mapping[str, str]) -> dict[str, Any]:
    """The rule of such a job, as HELLO says it; ``facts``: what all workers must have alike, by name."""
    return {"name": "elastic", "virtual_workers": virtual_workers, "facts": dict(facts)}


class ElasticClient(JobClient):
    """See the module's text.

    Args:
        options: with an ``elastic_rule``.
        runtime: the clock and sockets.
        checkpoint: the step of the newest checkpoint that this worker can load; 0 none.

    Attributes:
        completed: the last step whose averages this worker had when it last got its group's state, or last answered
            PREPARE; None: it has no state. The training sets it.
        preparing: the PREPARE whose view has not come; None without one.
        met: what members of the present view have said to form their group, by key.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime, checkpoint: int = 0) -> None:
        self.completed: int | None = None
        self.preparing: Message | None = None
        self.met: dict[str, bytes] = {}
        self._checkpoint = checkpoint
        super().__init__(options, runtime)

    def has_ended(self, number: int) -> bool:
        """Whether the view of this number is not the present one, or is about to end, or nothing goes on any more."""
        return self.view is None or self.view.number != number or self.preparing is not None or self.fatal is not None

    # ---- the I/O thread ----------------------------------------------------------------------------------------

    @override
    def hello(self, now_s: float) -> dict[str, Any]:
        said: dict[str, Any] = {"checkpoint": self._checkpoint, "processes": self.runtime.process_table()}
        if self.completed is None:
            # This worker loses nothing by coming as a new one, and a coordinator that has restarted may have begun
            # without it. It leaves the group of its view: the coordinator would not know of a state got there.
            self.view = self.view_message = None
        if self.view is not None:
            said |= self.membership(self.completed or 0)
        return said

    @override
    def progress(self, now_s: float) -> dict[str, Any]:
        return {"completed": self.completed or 0}

    @override
    def welcomed(self, message: Message, now_s: float, *, is_same: bool) -> None:
        super().welcomed(message, now_s, is_same=is_same)
        self._tell(message)

    @override
    def prepare(self, number: int) -> None:
        if number > self.view_number:
            self.preparing = Message(MessageType.PREPARE, view=number)
            self._tell(self.preparing)

    @override
    def receive_view(self, message: Message, now_s: float) -> None:
        view = view_of(message.body)
        me = view.member(self.identity.worker)
        if me is None or me.incarnation != self.identity.incarnation or view.number <= self.view_number:
            return
        self.view, self.view_number, self.view_message, self.met = view, view.number, message, {}
        if self.preparing is not None and self.preparing.view <= view.number:
            self.preparing = None
        self._tell(message)

    @override
    def receive_meet(self, message: Message) -> None:
        if message.view == self.view_number:
            self.met[message.body["key"]] = message.body["value"]
            self.parking.wake_all()

    def withdraw(self, request: Request) -> None:
        """Nobody waits for this answer of the coordinator."""
        self.control.requests.pop(request.message.sequence, None)

    def meet(self, view: int, key: str, value: bytes) -> Request:
        """Begin to say something to all members of the view of this number; any thread."""
        message = Message(MessageType.MEET, view=view, body={"key": key, "value": value})
        return self.ask(self.control, message, what=f"MEET {key!r} of {self}")

    def _tell(self, message: Message) -> None:
        self.news += 1
        self.control.met(message)


# ---- the training's thread -----------------------------------------------------------------------------------------


def regroup(job: ElasticClient, former: int, lost: Sequence[int] | None = None) -> Flow[View]:
    """Say how far this worker is (``job.completed``), and wait for the view after number ``former``.

    Args:
        job: the worker's.
        former: of the view whose members this worker has met; 0 none.
        lost: where they cannot exchange any more, those of them whose processes this worker sees are gone.

    Raises:
        FencedError: the others went on without this worker.
        ServerLostError: the coordinator was not heard for ``timeout_s``, or a member did not answer for ``REGROUP_S``.
    """
    answered, began_s = None, job.runtime.now_s()
    if lost is not None and job.preparing is None:
        yield from _said(job, job.control.commit("failed", view=former, lost=list(lost)))
    while True:
        seen, prepare, view = job.news, job.preparing, job.view
        if view is not None and view.number > former and prepare is None:
            return view
        if prepare is not None and prepare is not answered:
            answered = prepare
            completed, has_state = job.completed or 0, job.completed is not None
            said = job.control.commit("prepared", view=prepare.view, completed=completed, has_state=has_state)
            if not (yield from _said(job, said)):
                answered = None
        else:
            yield from _heard(job, job.control.expect(f"the next view of {job}", job.options.timeout_s, seen), began_s)


def _said(job: ElasticClient, request: Request) -> Flow[bool]:
    """Wait for the answer to a COMMIT; False where this worker has to say HELLO, and does."""
    try:
        yield [request]
    except ServerRefusedError as error:
        if job.fatal is not None or error.code not in _SAYS_HELLO:
            raise job.fatal or error from None  # the answer to HELLO says more
        logger.info("saying HELLO again: %s", error)
        return False
    return True


def _heard(job: ElasticClient, request: Request, began_s: float) -> Flow[bool]:
    """Wait for ``request``, for as long as the coordinator is heard at all; whether it is answered.

    A worker with a state, which others wait for too, gives up ``REGROUP_S`` after ``began_s``; a spare never does.
    """
    try:
        yield [request]
    except ServerLostError:
        heard_s, now_s = job.control.last_heard_s, job.runtime.now_s()
        is_late = job.completed is not None and now_s - began_s >= REGROUP_S
        if job.fatal is not None or heard_s is None or now_s - heard_s >= job.options.timeout_s or is_late:
            raise
        return False
    return True


def leave(job: ElasticClient) -> Flow[bool]:
    """Say LEAVE after step ``job.completed``, and wait until the others lack nothing of it.

    Returns:
        False: another view is prepared before; ``regroup``, then this again.
    """
    request, began_s = None, job.runtime.now_s()
    while request is None or not request.is_done:
        message = Message(MessageType.LEAVE, body={"completed": job.completed or 0})
        request = job.ask(job.control, message, what="LEAVE")
        while not request.is_done:
            if job.preparing is not None:
                # Not sent again on another connection: it would be heard under the next view.
                job.transport.do(job.withdraw, request)
                return False
            yield LEAVE_LOOK_S
        if not (yield from _heard(job, request, began_s)):
            request = None
    return True
