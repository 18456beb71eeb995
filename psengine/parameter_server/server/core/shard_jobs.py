"""The jobs of one shard: which there are, how many there may be, and the memory that they may take. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.clocks import Clocks
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.job_places import check_place, find_replaceable, is_full
from psengine.parameter_server.server.core.shard_settings import ShardSettings
from psengine.protocol.messages import ErrorCode

logger = logging.getLogger(__name__)


class ShardJobs:
    """See the module's text.

    Args:
        settings: of the shard.
        clocks: see there.
        note: see ``EventLog.note``.

    Attributes:
        by_number: the jobs.
        now_s: the time; set by the shard with every message and tick.
        on_drop: called with a job that is forgotten.
    """

    def __init__(self, settings: ShardSettings, clocks: Clocks, note: Callable[..., None]) -> None:
        self.by_number: dict[int, Job] = {}
        self.now_s = 0.0
        self.on_drop: Callable[[Job], None] = lambda job: None
        self._settings = settings
        self._clocks = clocks
        self._note = note

    def find(self, name: str) -> Job | None:
        """The job of this name."""
        return next((job for job in self.by_number.values() if job.name == name), None)

    def begin(self, body: dict[str, Any], peer: str) -> Job:
        """A job that ``peer`` is the first to name; it counts once it is ``added``.

        Raises:
            ProtocolError: there is no place for it.
        """
        jobs = self.by_number.values()
        if is_full(jobs, peer):
            self._drop_finished()
        if is_full(jobs, peer):
            replaceable = find_replaceable(jobs, peer, self.now_s - 2 * self._settings.heartbeat_s)
            if replaceable is not None:
                self.drop(replaceable)
        check_place(jobs, peer, body["job"])
        return self.make(body["job"], body["rule"], peer)

    def make(self, name: str, rule: dict[str, Any], begun_by: str = "") -> Job:
        """A job without workers and chunks; not added."""
        return Job(name, rule, self._settings.lease_s, self._clocks, self._take_memory, self._note, begun_by)

    def add(self, job: Job) -> None:
        """It counts from here on."""
        self.by_number[job.number] = job

    def drop(self, job: Job) -> None:
        """Forget a job, with its values."""
        del self.by_number[job.number]
        self.on_drop(job)

    def _drop_finished(self) -> None:
        """Forget jobs without workers whose values are nobody's."""
        for job in list(self.by_number.values()):
            if not job.weights.is_missed(self.now_s):
                self.drop(job)

    def kept(self) -> list[Job]:
        """Those that a snapshot keeps."""
        return [job for job in self.by_number.values() if job.is_sealed and job.weights.is_missed(self.now_s)]

    @property
    def member_count(self) -> int:
        """Workers of all jobs."""
        return sum(len(job.membership.members) for job in self.by_number.values())

    @property
    def training_count(self) -> int:
        """The same, without those that wait for a job's first values."""
        return sum(len(job.membership.members) for job in self.by_number.values() if job.is_sealed)

    def memory_bytes(self) -> int:
        """What all jobs hold."""
        return sum(job.chunks.size_bytes() for job in self.by_number.values())

    def _take_memory(self, size_bytes: int, what: str) -> None:
        most_bytes, used_bytes = self._settings.max_memory_bytes, self.memory_bytes()
        if used_bytes + size_bytes > most_bytes:
            self._drop_finished()
            used_bytes = self.memory_bytes()
        if used_bytes + size_bytes > most_bytes:
            raise ProtocolError(
                f"{what} needs {size_bytes} bytes (expected at most {max(0, most_bytes - used_bytes)} free of"
                f" max_memory_bytes = {most_bytes} on this shard). Raise --max-memory-bytes, or add servers.",
                ErrorCode.MEMORY,
            )
