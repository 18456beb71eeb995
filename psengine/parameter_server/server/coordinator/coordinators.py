"""The jobs that a server leads: a coordinator for each, and what is remembered of those that have ended. Pure.

any message of TO_COORDINATOR ─► handle(message, sender, now) ─► [Outgoing]
now and then:                        tick(now) ─► [Outgoing], for leases and windows that ran out
after each of both:          take_changed() ─► what a log has to have before these leave
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.coordinator.coordinator import Coordinator, Interfaces
from psengine.parameter_server.server.coordinator.elastic import ElasticCoordinator
from psengine.parameter_server.server.coordinator.states import JobState
from psengine.parameter_server.server.interfaces import Outgoing, Sender, too_many_jobs
from psengine.protocol.layout import job_number
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.status_port.status_model import CoordinatedJob

MAX_JOBS = 256


class Coordinators:
    """See the module's text.

    Attributes:
        by_number: the jobs.
    """

    def __init__(self, interfaces: Interfaces) -> None:
        self.by_number: dict[int, Coordinator] = {}
        self._paused_s = 0.0  # the process stood still for so long: leases did not run meanwhile
        self._interfaces = interfaces
        self._is_closed = False
        self._dropped: list[int] = []

    def handle(self, message: Message, sender: Sender, now_s: float) -> list[Outgoing]:
        """A worker's message.

        Raises:
            ProtocolError: it is refused; ``code`` says how to answer.
        """
        try:
            return self._job_of(message, sender).handle(message, sender, now_s - self._paused_s)
        except ProtocolError as error:
            job = self.by_number.get(message.job)
            if error.code not in (ErrorCode.NOT_READY, ErrorCode.VIEW_WANTED):
                text = f"{message.type.name} was refused: {error}"
                self._interfaces.note("refused", text, job="" if job is None else job.name)
            raise

    def has_asked(self, message: Message, sender: Sender) -> bool:
        """Whether this VIEW or RELEASE is not for shards: a coordinator has asked for it."""
        job = self.by_number.get(message.job)
        return job is not None and job.claims.has_asked(sender.route)

    def _job_of(self, message: Message, sender: Sender) -> Coordinator:
        job = self.by_number.get(message.job)
        if message.type is not MessageType.HELLO:
            if job is None:
                raise ProtocolError("this server has restarted since; say HELLO again", ErrorCode.NOT_MEMBER)
            return job
        name = message.body["job"]
        if self._is_closed and (job is None or not job.is_awaited(message, sender.user_id)):
            raise ProtocolError(
                "this server lets no more workers in: it was told to drain (psengine admin drain), and ends when the"
                " last of its workers has left",
                ErrorCode.SHUTTING_DOWN,
            )
        if job is None:
            self._make_room(name)
        rule = message.body.get("rule")
        if job is None or (job.rule is None and rule is not None and type(job) is not _kind_of(rule)):
            former, job = job, _kind_of(rule)(name, self._interfaces)
            self.by_number[message.job] = job
            if former is not None:
                job.take_over(former)
        return job

    def _make_room(self, name: str) -> None:
        if len(self.by_number) >= MAX_JOBS:
            for number, job in list(self.by_number.items()):
                if not job.here_count and (job.averages or job.state is JobState.NEW):
                    self._drop(number)
        if len(self.by_number) >= MAX_JOBS:
            raise too_many_jobs(MAX_JOBS, name)

    def tick(self, now_s: float) -> list[Outgoing]:
        """Look at the clock; call it ten times a second."""
        return [outgoing for job in list(self.by_number.values()) for outgoing in job.tick(now_s - self._paused_s)]

    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` until now the process was stopped, or the clock leapt: no lease ran meanwhile."""
        self._paused_s += pause_s
        if any(job.workers.present for job in self.by_number.values()):
            text = f"the coordinator stood still for {pause_s:.1f} s; no worker's lease ran meanwhile"
            self._interfaces.note("stood_still", text)

    # ---- for operators and people ------------------------------------------------------------------------------

    def find(self, name: str) -> Coordinator | None:
        """The job of this name."""
        return self.by_number.get(job_number(name))

    def evict(self, job: str, rank: int, now_s: float) -> list[Outgoing] | None:
        """End a worker's lease before its time; None where there is none."""
        found = self.find(job)
        return None if found is None else found.evict(rank, now_s - self._paused_s)

    def forget(self, job: str) -> int | None:
        """Drop a job; None where there is none. Workers that it still has keep it: how many."""
        found = self.find(job)
        if found is None:
            return None
        if not found.here_count:
            self._drop(found.number)
        return found.here_count

    def _drop(self, number: int) -> None:
        del self.by_number[number]
        self._dropped.append(number)

    def close(self) -> int:
        """Let no more workers in, but those of its jobs that come back; how many there are."""
        self._is_closed = True
        return self.remembered_count()

    def remembered_count(self) -> int:
        """Workers of all jobs, with those that were put out lately and may come back."""
        return sum(job.remembered_count for job in self.by_number.values())

    def training_count(self) -> int:
        """Workers of all jobs, without those that wait for a job's first view."""
        return sum(job.here_count for job in self.by_number.values() if job.view is not None)

    def status(self, now_s: float) -> dict[str, CoordinatedJob]:
        """The jobs as they are now, by name."""
        return {job.name: job.status(now_s - self._paused_s) for job in self.by_number.values()}

    # ---- for the disk ------------------------------------------------------------------------------------------

    def to_meta(self) -> dict[str, Any]:
        """All that a restart has to find, JSON-able."""
        return {str(number): job.to_meta() for number, job in self.by_number.items()}

    def take_changed(self) -> dict[str, Any] | None:
        """The same of jobs that have changed since the last call, None of one that is forgotten; None without any."""
        changed: dict[str, Any] = {str(number): None for number in self._dropped}
        self._dropped.clear()
        for number, job in self.by_number.items():
            if job.is_changed:
                job.is_changed = False
                changed[str(number)] = job.to_meta()
        return changed or None

    def restore(self, meta: Mapping[str, Any], now_s: float) -> None:
        """Take over what ``to_meta`` gave, and then, in order, what each ``take_changed`` gave."""
        for number, one in meta.items():
            self.by_number.pop(int(number), None)
            if one is not None:
                job = self.by_number[int(number)] = _kind_of(one["rule"])(one["name"], self._interfaces)
                job.restore(one, now_s - self._paused_s)


def _kind_of(rule: Mapping[str, Any] | None) -> type[Coordinator]:
    """What leads a job of this rule."""
    return ElasticCoordinator if rule is not None and rule["name"] == "elastic" else Coordinator
