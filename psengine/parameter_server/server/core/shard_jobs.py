"""The jobs of one shard: which there are, and the memory that they may take. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.interfaces import Clocks, ShardSettings
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.journal import Journal
from psengine.parameter_server.server.core.server_weights import JobWithWeights
from psengine.parameter_server.server.core.worker_weights import AveragingJob
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.protocol.messages import ErrorCode

MAX_JOBS = 256


class ShardJobs:
    """See the module's text."""

    def __init__(self, settings: ShardSettings, clocks: Clocks, note: Callable[..., None]) -> None:
        self.settings = settings
        self.by_number: dict[int, Job] = {}
        self.now_s = 0.0  # set by the shard with every message and tick
        self.on_drop: Callable[[Job], None] = lambda job: None  # called with a job that is forgotten
        self.journal = Journal(lambda: self.now_s)
        self._clocks = clocks
        self._note = note

    def find(self, name: str) -> Job | None:
        """The job of this name."""
        return next((job for job in self.by_number.values() if job.name == name), None)

    def begin(self, name: str, rule: dict[str, Any]) -> Job:
        """A job that nobody has named before; it counts once it is ``added``.

        Raises:
            ProtocolError: there is no place for it.
        """
        if len(self.by_number) >= MAX_JOBS:
            self._drop_finished()
        if len(self.by_number) >= MAX_JOBS:
            raise ProtocolError(
                f"this server has its most jobs already (expected at most {MAX_JOBS}, got one more, {name!r}). Fix: end"
                " one that is no longer needed, by psengine admin forget --job NAME; or use another server.",
                ErrorCode.MEMORY,
            )
        return self.make(name, rule)

    def make(self, name: str, rule: dict[str, Any]) -> Job:
        """A job without workers and chunks; not added."""
        job_rule = JobRule(rule)
        kind = JobWithWeights if job_rule.holds_weights else AveragingJob
        lease_s, now_s = self.settings.lease_s, lambda: self.now_s
        interfaces = lease_s, self._clocks, self._take_memory, self._note, now_s, self.journal
        return kind(name, job_rule, *interfaces)

    def add(self, job: Job) -> None:
        """It counts from here on."""
        self.by_number[job.number] = job

    def drop(self, job: Job) -> None:
        """Forget a job, with its values."""
        del self.by_number[job.number]
        self.journal.drop(job)
        self.on_drop(job)

    def _drop_finished(self) -> None:
        """Forget jobs without workers that nobody may still want."""
        for job in list(self.by_number.values()):
            if not job.is_missed(self.now_s):
                self.drop(job)

    def kept(self) -> list[Job]:
        """Those that a snapshot keeps."""
        return [job for job in self.by_number.values() if job.is_sealed and job.is_missed(self.now_s)]

    @property
    def member_count(self) -> int:
        """Workers of all jobs."""
        return sum(len(job.membership.members) for job in self.by_number.values())

    @property
    def remembered_count(self) -> int:
        """The same, with those that were put out less than a lease ago and may come back."""
        return sum(job.membership.remembered_count(self.now_s) for job in self.by_number.values())

    @property
    def training_count(self) -> int:
        """Workers of all jobs, without those that wait for a job's first values."""
        return sum(len(job.membership.members) for job in self.by_number.values() if job.is_sealed)

    def memory_bytes(self) -> int:
        """Memory of all jobs."""
        return sum(job.chunks.size_bytes() for job in self.by_number.values())

    def _take_memory(self, size_bytes: int, what: str) -> None:
        max_bytes, used_bytes = self.settings.max_memory_bytes, self.memory_bytes()
        if used_bytes + size_bytes > max_bytes:
            self._drop_finished()
            used_bytes = self.memory_bytes()
        if used_bytes + size_bytes > max_bytes:
            raise ProtocolError(
                f"{what} needs {size_bytes} bytes (expected at most {max(0, max_bytes - used_bytes)} free of"
                f" max_memory_bytes = {max_bytes} on this shard). Raise --max-memory-bytes, or add servers.",
                ErrorCode.MEMORY,
            )
