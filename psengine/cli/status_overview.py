"""What all servers together say: their reports, the jobs over all shards, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psengine.cli.console import printable
from psengine.parameter_server.overview import merge_jobs
from psengine.parameter_server.status_model import Event, JobStatus, MuteShard, ServerStatus, ShardStatus, to_json

NO_STATUS = ServerStatus(healthy=False, shards=())


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """One server's answer, or why there is none.

    Attributes:
        address: as it was asked.
        error: why there is no answer; "" where there is one.
        status: the answer; over ZeroMQ its shards alone.
        answered_s: when, on the monotonic clock.
    """

    address: str
    error: str = ""
    status: ServerStatus = NO_STATUS
    answered_s: float = 0.0

    @property
    def shards(self) -> list[ShardStatus]:
        """Those that answered."""
        return self.status.answering

    @property
    def mute(self) -> list[MuteShard]:
        """Those that did not answer the server; only HTTP tells."""
        return self.status.mute

    @property
    def healthy(self) -> bool:
        """Whether it answered, says that it works, and so does every shard of it."""
        return self.status.healthy and not self.mute

    @property
    def is_complete(self) -> bool:
        """Whether every shard answered: a job that none of them has does not exist there."""
        return not self.error and not self.mute


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All servers' reports, and the jobs merged over their shards."""

    reports: Sequence[ServerReport]
    jobs: Mapping[str, JobStatus]

    @property
    def is_complete(self) -> bool:
        """Whether every shard of every server answered."""
        return all(report.is_complete for report in self.reports)

    @property
    def unix_s(self) -> float:
        """Now, by the servers' clock, which their stamps are of; by this machine's where none is told."""
        stamps = [report.status.unix_s for report in self.reports]
        return max((stamp for stamp in stamps if stamp is not None), default=time.time())

    @property
    def events(self) -> list[Event]:
        """What happened lately, newest last; only HTTP tells."""
        return sorted((e for report in self.reports for e in report.status.events), key=lambda event: event.unix_s)

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty where all is well."""
        found = []
        for report in self.reports:
            if report.error:
                # The client's own errors begin with the address.
                is_named = report.error.startswith(report.address)
                found.append(report.error if is_named else f"{report.address}: {report.error}")
            found += [f"{report.address}: shard {one.index} does not answer: {one.error}" for one in report.mute]
            if report.is_complete and not report.healthy:
                found.append(f"{report.address} answers, but a shard of it does not work")
        for name, job in self.jobs.items():
            silent = [str(worker.rank) for worker in job.workers if worker.state == "silent"]
            if silent:
                found.append(f"job {name!r}: nothing was heard of worker {', '.join(silent)}")
        return [printable(text) for text in found]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "healthy": not self.problems,
            "problems": self.problems,
            "servers": [_server_json(report) for report in self.reports],
            "jobs": to_json(self.jobs),
            "events": to_json(self.events),
        }


def merge(reports: Sequence[ServerReport], job: str | None = None) -> Overview:
    """One overview; with ``job`` of that job alone. A shard that several addresses lead to counts once."""
    # An epoch is the random number of a server process's life.
    shards = {(shard.epoch or report.address, shard.index): shard for report in reports for shard in report.shards}
    jobs = merge_jobs(shards.values())
    return Overview(reports=reports, jobs={name: jobs[name] for name in jobs if job is None or name == job})


def shard_bytes(shard: ShardStatus) -> tuple[int, int]:
    """Payload bytes a shard received and sent, of all its jobs."""
    return sum(job.bytes_in for job in shard.jobs.values()), sum(job.bytes_out for job in shard.jobs.values())


def _server_json(report: ServerReport) -> dict[str, Any]:
    status = report.status
    shards = []
    for shard in report.shards:
        bytes_in, bytes_out = shard_bytes(shard)
        shards.append({**to_json(shard), "bytes_in": bytes_in, "bytes_out": bytes_out})
        del shards[-1]["jobs"]
    return {
        "address": report.address,
        "reachable": not report.error,
        "error": report.error or None,
        "healthy": report.healthy,
        "software": status.software or None,
        "host": status.host or None,
        "pid": status.pid,
        "uptime_s": status.uptime_s,
        "shards": [*shards, *to_json(report.mute)],
    }
