"""All servers together: their reports, the jobs over all shards, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psengine.cli.console import printable
from psengine.parameter_server.overview import merge_jobs
from psengine.parameter_server.status_model import Event, JobStatus, ServerStatus, ShardStatus, to_json


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
    status: ServerStatus = field(default_factory=lambda: ServerStatus(healthy=False, shards=()))
    answered_s: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether the server answered, says that it works, and all its shards answered it."""
        return self.status.healthy and not self.status.mute

    @property
    def is_complete(self) -> bool:
        """Whether every shard answered: a job that none of them has does not exist there."""
        return not self.error and not self.status.mute


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
        """Now, by the servers' clock, which dates events; by this machine's where no server tells."""
        stamps = [report.status.unix_s for report in self.reports]
        return max((stamp for stamp in stamps if stamp is not None), default=time.time())

    @property
    def events(self) -> list[Event]:
        """The latest events, newest last; only HTTP tells them."""
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
            found += [f"{report.address}: shard {one.index} does not answer: {one.error}" for one in report.status.mute]
            found += [
                f"{report.address}: the disk of shard {one.shard}'s log is full: nothing is acknowledged until there is"
                " room"
                for one in report.status.logs
                if one.is_full
            ]
            if report.is_complete and not report.healthy:
                found.append(f"{report.address} answers, but a shard of it does not work")
        for name, job in self.jobs.items():
            silent = [str(worker.rank) for worker in job.workers if worker.state == "silent"]
            if silent:
                found.append(f"job {name!r}: nothing was heard of worker {', '.join(silent)}")
        return [printable(text) for text in found]

    @property
    def warnings(self) -> list[str]:
        """What may be meant so, in words."""
        found = []
        for report in self.reports:
            if any(shard.durability == "memory" for shard in report.status.answering):
                text = "has durability memory: when it ends, the models of its async jobs are lost (--snapshot-dir)"
                found.append(f"{report.address} {text}")
            if report.status.is_draining:
                found.append(f"{report.address} drains: it lets no more workers in, and ends when the last has left")
        return [printable(text) for text in found]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "healthy": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "servers": [_server_json(report) for report in self.reports],
            "jobs": to_json(self.jobs),
            "events": to_json(self.events),
        }


def merge(reports: Sequence[ServerReport], job: str | None = None) -> Overview:
    """One overview; with ``job`` of that job alone. A shard that several addresses lead to counts once."""
    # An epoch is the random number of a server process's life.
    shards = {(s.epoch or report.address, s.index): s for report in reports for s in report.status.answering}
    jobs = merge_jobs(shards.values())
    return Overview(reports=reports, jobs={name: jobs[name] for name in jobs if job is None or name == job})


def shard_bytes(shard: ShardStatus) -> tuple[int, int]:
    """Payload bytes a shard received and sent, of all its jobs."""
    return sum(job.bytes_in for job in shard.jobs.values()), sum(job.bytes_out for job in shard.jobs.values())


def _server_json(report: ServerReport) -> dict[str, Any]:
    status = report.status
    shards = []
    for shard in status.answering:
        members = {name: member for name, member in to_json(shard).items() if name != "jobs"}
        shards.append(members | dict(zip(("bytes_in", "bytes_out"), shard_bytes(shard), strict=True)))
    return {
        "address": report.address,
        "reachable": not report.error,
        "error": report.error or None,
        "healthy": report.healthy,
        "software": status.software or None,
        "host": status.host or None,
        "pid": status.pid,
        "uptime_s": status.uptime_s,
        "shards": [*shards, *to_json(status.mute)],
    }
