"""Servers asked for their status, and all of them together. A server that does not answer is a report too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from psengine.cli.console import printable
from psengine.errors import ConfigurationError, PSEngineError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.overview import merge_jobs, owns_weights
from psengine.parameter_server.status_model import Event, JobStatus, ServerFacts, ShardStatus
from psengine.protocol.keys import CurveClientKeys

if TYPE_CHECKING:
    from psengine.parameter_server.client.worker_session import WorkerSession


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """One server's answer: its shards; or an ``error`` that says why there is none."""

    address: str
    error: str = ""
    shards: tuple[ShardStatus, ...] = ()

    @property
    def facts(self) -> ServerFacts:
        """What the server says of itself."""
        return next((shard.server for shard in self.shards if shard.server is not None), ServerFacts())


class StatusSource:
    """A server, asked as workers ask it; works before any job exists, for every kind of job, and for a follower.

    Args:
        address: of its first shard.
        keys: CURVE keys, if it wants some.
        timeout_s: deadline of one answer.
    """

    def __init__(self, address: str, keys: CurveClientKeys | None, timeout_s: float) -> None:
        self.address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._session: WorkerSession | None = None

    def ask(self) -> ServerReport:
        """Its report; never raises for a server that is away. Keeps the connection for the next question."""
        try:
            shards = _printable(self.connected().status())
            report = ServerReport(
                address=self.address, shards=msgspec.convert(shards, tuple[ShardStatus, ...], str_keys=True)
            )
            merge_jobs(report.shards)
        except msgspec.ValidationError as error:
            text = f"{self.address} has a status that this psengine does not understand ({error}). Fix: install the"
            return ServerReport(address=self.address, error=f"{text} same version on both sides")
        except (PSEngineError, ValueError, LookupError, TypeError) as error:
            self.close()
            return ServerReport(address=self.address, error=printable(str(error)) or type(error).__name__)
        return report

    def connected(self) -> WorkerSession:
        """The connection; PSEngineError where the server does not answer, or does not let us in."""
        from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession

        if self._session is None:
            wait_s, addresses = self._timeout_s, [self.address]
            session = WorkerSession(
                SessionOptions(
                    addresses=addresses, timeout_s=wait_s, connect_timeout_s=wait_s, keys=self._keys, follows_lead=False
                )
            )
            session.start()
            self._session = session
        return self._session

    def close(self) -> None:
        """Drop the connection; the next question makes a new one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All servers' reports, and the jobs merged over their shards."""

    reports: Sequence[ServerReport]
    jobs: Mapping[str, JobStatus]

    @property
    def unix_s(self) -> float:
        """Now, by the servers' clock, which dates events; by this machine's where no server tells."""
        stamps = [report.facts.unix_s for report in self.reports]
        return max((stamp for stamp in stamps if stamp is not None), default=time.time())

    @property
    def events(self) -> list[Event]:
        """The latest events, newest last."""
        return sorted((e for report in self.reports for e in report.facts.events), key=lambda event: event.unix_s)

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty where all is well."""
        found = []
        for report in self.reports:
            address, error = report.address, report.error
            if error:
                found.append(error if error.startswith(address) else f"{address}: {error}")
            elif not report.facts.healthy:
                found.append(f"{address} answers, but a shard of it does not work")
            replica = report.facts.replica
            if replica is not None and (not replica.is_in_sync or replica.why):
                missing = "no other server can take over" if replica.role == "leading" else "it copies its leader"
                found.append(f"{address}: {replica.text}: {replica.why or missing}")
            found += [
                f"{address}: no room for the log of shard {log.shard}: nothing is acknowledged until its disk has some"
                for log in report.facts.logs
                if log.is_full
            ]
        for name, job in self.jobs.items():
            if job.lost:
                found.append(job.lost)
            silent = [str(worker.rank) for worker in job.workers if worker.state == "silent"]
            if silent:
                found.append(f"job {name!r}: nothing was heard of worker {', '.join(silent)}")
        return found

    @property
    def warnings(self) -> list[str]:
        """What may be meant so, in words."""
        found = []
        for report in self.reports:
            forgotten = {
                repr(name)
                for shard in report.shards
                for name, job in shard.jobs.items()
                if report.facts.durability == "memory" and owns_weights(job.rule)
            }
            if forgotten:
                text = f"has durability memory: when it ends, the model of job {', '.join(sorted(forgotten))} is lost"
                found.append(f"{report.address} {text} (--snapshot-dir)")
            if report.facts.is_draining:
                found.append(f"{report.address} drains: it lets no more workers in, and ends when the last has left")
        return found

    def to_json(self) -> dict[str, Any]:
        """For programs, without the problems."""
        return {
            "warnings": self.warnings,
            "servers": [_server_json(report) for report in self.reports],
            "jobs": self.jobs,
            "events": self.events,
        }


def open_sources(servers: str | None, timeout_s: float) -> list[StatusSource]:
    """A source for each address of an argument, else of PSENGINE_SERVERS: followers too.

    Args:
        servers: addresses with commas.
        timeout_s: deadline of one answer.

    Raises:
        ConfigurationError: none is named, one is malformed, or CURVE keys are half given.
    """
    addresses = parse_addresses(servers)
    if not addresses:
        raise ConfigurationError(
            "no server is named (expected tcp://host:port; got none). Fix: --server-address tcp://127.0.0.1:7077, or"
            " set PSENGINE_SERVERS"
        )
    keys = keys_from_environment()
    return [StatusSource(address, keys, timeout_s) for address in dict.fromkeys("|".join(addresses).split("|"))]


def ask_all(sources: Sequence[StatusSource], job: str | None = None) -> Overview:
    """Ask all servers at once; with ``job`` about that job alone."""
    pool = ThreadPoolExecutor(max_workers=len(sources), thread_name_prefix="psengine-status")
    try:
        return merge(list(pool.map(StatusSource.ask, sources)), job)
    finally:
        pool.shutdown(wait=False)  # Ctrl-C waits for no answer


def merge(reports: Sequence[ServerReport], job: str | None = None) -> Overview:
    """One overview; with ``job`` of that job alone. A shard that several addresses lead to counts once."""
    # An epoch is the random number of a server process's life.
    shards = {(shard.epoch, shard.index): shard for report in reports for shard in report.shards}
    jobs = merge_jobs(shards.values())
    return Overview(reports=reports, jobs={name: jobs[name] for name in jobs if job is None or name == job})


def shard_bytes(shard: ShardStatus) -> tuple[int, int]:
    """Payload bytes a shard received and sent, of all its jobs."""
    return sum(job.bytes_in for job in shard.jobs.values()), sum(job.bytes_out for job in shard.jobs.values())


def _server_json(report: ServerReport) -> dict[str, Any]:
    own = {name: value for name, value in vars(report.facts).items() if name != "events"}
    shards = [
        {name: value for name, value in vars(shard).items() if name not in ("jobs", "server")}
        for shard in report.shards
    ]
    return {"address": report.address, "error": report.error or None, **own, "shards": shards}


def _printable(value: Any) -> Any:
    """A status whose texts have the characters spelled out that a terminal would obey."""
    if isinstance(value, dict):
        return {printable(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
