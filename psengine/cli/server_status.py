"""What servers say of themselves, asked over ZeroMQ or HTTP. One that does not answer is part of the answer.

tcp://a:7077, ipc:///run/b      a reader's STATUS; works before any job exists, and of jobs whose values are workers'
http://127.0.0.1:9100           /status.json of --status-port: knows the event log too
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typing_extensions import override

from psengine.cli.console import printable
from psengine.environment.context import read_variable
from psengine.environment.extras import require_server_packages
from psengine.errors import ConfigurationError, PSEngineError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.parameter_server.client.options import keys_from_environment
from psengine.parameter_server.overview import merge_jobs
from psengine.parameter_server.server.core.telemetry import NOT_FINITE
from psengine.protocol.keys import CurveClientKeys

if TYPE_CHECKING:
    from psengine.parameter_server.client.client import Client

MAX_PAGE_BYTES = 64 << 20
# Of a page that says why there is none.
MAX_REASON_CHARACTERS = 200
PAGE = "/status.json"
# A status has eight levels; another page's may be deeper than Python can go.
MAX_LEVELS = 32
# More than anything that is counted, and less than what a float cannot hold.
MAX_SHOWN = 1e18
LAST_UNIX_S = 253402300799  # of the year 9999, the last that has a calendar

# What is added up, compared or drawn as a number.
_SHARD_NUMBERS = ("memory_bytes", "max_memory_bytes", "uptime_s", "unix_s")
_JOB_NUMBERS = (
    "expected_workers",
    "chunks",
    "values_bytes",
    "version_min",
    "version_max",
    "max_staleness",
    "evicted",
    "applied",
    "averaged",
    "duplicates",
    "late",
    "abstained",
    "non_finite",
    "bytes_in",
    "bytes_out",
)
_JOB_COUNTS = ("refused", "staleness", "lead")
_WORKER_NUMBERS = ("rank", "silent_s", "pushes", "refused", "late")
_TELEMETRY_NUMBERS = ("steps", "steps_per_s", "samples_per_s", "step_s", "blocked_s", "apply_s", "held_s")


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """One server's answer, or why there is none.

    Attributes:
        address: as it was asked.
        error: why there is no answer; "" where there is one.
        healthy: it answered, says that it works, and so does every shard of it.
        shards: each shard's status, with its address where that is known.
        mute: "index" of each shard that did not answer the server, and "error", why; only HTTP tells.
        page: all of /status.json; {} over ZeroMQ.
        answered_s: when, on the monotonic clock.
    """

    address: str
    error: str = ""
    healthy: bool = True
    shards: Sequence[dict[str, Any]] = ()
    mute: Sequence[dict[str, Any]] = ()
    page: dict[str, Any] = field(default_factory=dict)
    answered_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether it says all that there is to say: a job that it does not know is not there."""
        return not self.error and not self.mute

    def about(self, name: str) -> Any:
        """A fact of the server process, wherever it was told; None where it was not."""
        return self.page.get(name, next((shard[name] for shard in self.shards if name in shard), None))


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All servers' reports, and the jobs merged over their shards."""

    reports: Sequence[ServerReport]
    jobs: dict[str, dict[str, Any]]

    @property
    def is_complete(self) -> bool:
        """Whether every shard of every server answered."""
        return all(report.is_complete for report in self.reports)

    @property
    def unix_s(self) -> float:
        """Now, by the clock that the servers' stamps are of; by this machine's where none is told."""
        told = [report.about("unix_s") for report in self.reports]
        return max((stamp for stamp in told if isinstance(stamp, int | float)), default=time.time())

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty where all is well."""
        found = [
            # The client's own errors begin with the address.
            report.error if report.error.startswith(report.address) else f"{report.address}: {report.error}"
            for report in self.reports
            if report.error
        ]
        found += [
            f"{report.address}: shard {shard.get('index')} does not answer: {shard.get('error') or 'it says nothing'}"
            for report in self.reports
            for shard in report.mute
        ]
        found += [
            f"{report.address} answers, but a shard of it does not work"
            for report in self.reports
            if report.is_complete and not report.healthy
        ]
        for name, job in self.jobs.items():
            silent = [str(worker["rank"]) for worker in job.get("workers", ()) if worker.get("state") == "silent"]
            if silent:
                found.append(f"job {name!r}: nothing was heard of worker {', '.join(silent)}")
        return [printable(text) for text in found]

    def to_json(self) -> dict[str, Any]:
        """For programs: strict JSON, in which a loss that is not finite is "nan"."""
        found = {
            "healthy": not self.problems,
            "problems": self.problems,
            "servers": [
                {
                    "address": report.address,
                    "reachable": not report.error,
                    "error": report.error or None,
                    "healthy": report.healthy and not report.error,
                    **{name: report.about(name) for name in ("software", "host", "pid", "uptime_s")},
                    "shards": [*(_without_jobs(shard) for shard in report.shards), *report.mute],
                }
                for report in self.reports
            ],
            "jobs": self.jobs,
            "events": self.events,
        }
        return dict(_finite(found))

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened lately, newest last; only HTTP tells."""
        found = [event for report in self.reports for event in report.page.get("events", ())]
        return sorted(found, key=lambda event: event.get("unix_s", 0.0))


class Source(ABC):
    """A server that can be asked again and again.

    Attributes:
        address: as the user named it.
    """

    address: str

    def ask(self) -> ServerReport:
        """Its report; never raises for a server that is away. Blocks for the timeout at most, per shard."""
        try:
            report = self._ask()
            _check(report)
        except (PSEngineError, OSError, ValueError, RecursionError) as error:
            self.close()
            reason = printable(str(error)) or type(error).__name__
            return ServerReport(address=self.address, error=reason, healthy=False)
        return report

    @abstractmethod
    def _ask(self) -> ServerReport:
        """As ``ask``, but raises."""

    def close(self) -> None:  # noqa: B027 - HTTP holds nothing between questions
        """Drop the connection; the next question makes a new one."""


class ProtocolSource(Source):
    """A server asked as workers ask it."""

    def __init__(self, address: str, keys: CurveClientKeys | None, timeout_s: float) -> None:
        self.address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._client: Client | None = None

    def _ask(self) -> ServerReport:
        from psengine.parameter_server.client.client import connect

        if self._client is None:
            self._client = connect(
                self.address,
                role="reader",
                timeout_s=self._timeout_s,
                connect_timeout_s=self._timeout_s,
                keys=self._keys,
            )
        shards = _printable(self._client.status())
        return ServerReport(address=self.address, shards=shards, answered_s=time.monotonic())

    @override
    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class HttpSource(Source):
    """A server's status page."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.address = url
        self._timeout_s = timeout_s
        # The page is on this machine, or at the end of a tunnel: no proxy knows it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self) -> ServerReport:
        path = urlsplit(self.address).path
        url = self.address if path.endswith(".json") else self.address.rstrip("/") + PAGE
        try:
            with self._opener.open(url, timeout=self._timeout_s) as response:
                content = self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                text = f"{url} answers {error.code} {error.reason}; is it a psengine-server's?{_reason(error)}"
            raise ValueError(text) from None
        except urllib.error.URLError as error:
            raise OSError(str(error.reason)) from None
        # Neither an OSError nor a ValueError: what listens there speaks something else.
        except http.client.HTTPException as error:
            said = str(error).strip()[:MAX_REASON_CHARACTERS]
            raise ValueError(f"{url} is no status page: no HTTP came back ({said or type(error).__name__})") from None
        try:
            page = _printable(json.loads(content))
            shards, mute = ([s for s in page["shards"] if ("jobs" in s) is answered] for answered in (True, False))
            healthy = bool(page["healthy"]) and not mute
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{url} is no status page of a psengine-server") from None
        return ServerReport(
            address=self.address, healthy=healthy, shards=shards, mute=mute, page=page, answered_s=time.monotonic()
        )

    def _read(self, response: Any) -> bytes:
        deadline_s = time.monotonic() + self._timeout_s
        content = bytearray()
        while part := response.read1(1 << 16):
            content += part
            if len(content) > MAX_PAGE_BYTES:
                raise OSError(f"its page is too long (expected at most {MAX_PAGE_BYTES} bytes)")
            if time.monotonic() > deadline_s:
                raise OSError(f"its page had not ended after {self._timeout_s:g} s")
        return bytes(content)


def open_sources(servers: str | None, timeout_s: float) -> list[Source]:
    """A source for each address of an argument, else of PSENGINE_SERVERS.

    Raises:
        ConfigurationError: none is named, one is malformed, or CURVE keys are half given.
        MissingExtraError: an address is to be asked over ZeroMQ, which is not installed.
    """
    text = servers if servers is not None else read_variable("PSENGINE_SERVERS") or ""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(
            "no server is named (expected tcp://host:port, or the http://... of a --status-port; got none)."
            " Fix: --servers tcp://127.0.0.1:7077, or set PSENGINE_SERVERS"
        )
    keys = keys_from_environment()
    sources: list[Source] = []
    for part in dict.fromkeys(parts):
        if part.startswith(("http://", "https://")):
            _check_url(part)
            sources.append(HttpSource(part, timeout_s))
            continue
        require_server_packages("servers asked over ZeroMQ")
        try:
            sources.extend(ProtocolSource(address, keys, timeout_s) for address in parse_addresses(part))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}. A --status-port is asked as http://host:port") from None
    return sources


def ask_all(sources: Sequence[Source], job: str | None = None) -> Overview:
    """Ask all servers at once."""
    with ThreadPoolExecutor(max_workers=len(sources), thread_name_prefix="psengine-status") as pool:
        return merge(list(pool.map(lambda source: source.ask(), sources)), job)


def merge(reports: Sequence[ServerReport], job: str | None = None) -> Overview:
    """One overview; with ``job`` of that job alone. A shard that several addresses lead to counts once."""
    shards: dict[Any, dict[str, Any]] = {}
    for report in reports:
        for shard in report.shards:
            # An epoch is the random number of a server process's life.
            shards.setdefault((shard.get("epoch", report.address), shard.get("index")), shard)
    jobs = merge_jobs(list(shards.values()))
    return Overview(reports=reports, jobs={name: jobs[name] for name in jobs if job is None or name == job})


def shard_bytes(shard: dict[str, Any]) -> tuple[int, int]:
    """Payload bytes a shard received and sent, of all its jobs."""
    jobs = shard.get("jobs", {}).values()
    return sum(job.get("bytes_in", 0) for job in jobs), sum(job.get("bytes_out", 0) for job in jobs)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(value: Any, levels: int = MAX_LEVELS) -> Any:
    """What a server said may not move the cursor, or worse, of the terminal it is shown on.

    Raises:
        ValueError: it is nested too deeply.
    """
    if not levels:
        raise ValueError(f"its status is nested too deeply (expected at most {MAX_LEVELS} levels)")
    if isinstance(value, dict):
        return {_printable(name, levels - 1): _printable(item, levels - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item, levels - 1) for item in value]
    return printable(value) if isinstance(value, str) else value


def _reason(error: urllib.error.HTTPError) -> str:
    """What a page in plain text says of its refusal; "" of other pages."""
    content: Any = error.fp
    if content is None or error.headers.get_content_type() != "text/plain":
        return ""
    # One read, so that there is one timeout; what it says is an extra.
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = content.read1(4 * MAX_REASON_CHARACTERS).decode(errors="replace").strip()
        return f" It says: {text[:MAX_REASON_CHARACTERS]}" if text else ""
    return ""


def _check(report: ServerReport) -> None:
    """Raise ValueError for a status that has not the shape of ours: another version's, or no psengine-server's."""
    try:
        for shard in [*report.shards, *report.mute]:
            _check_shard(shard)
        _check_numbers(report.page, ("uptime_s", "unix_s"), may_lack=True)
        for event in report.page.get("events", ()):
            _check_stamp(event)
        merge_jobs(report.shards)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{report.address} has a status that this psengine does not understand ({type(error).__name__}: {error})."
            " Fix: install the same version on both sides"
        ) from error


def _check_shard(shard: dict[str, Any]) -> None:
    hash((shard.get("index"), shard.get("epoch")))  # by which shards are told apart
    _check_numbers(shard, _SHARD_NUMBERS, may_lack=True)
    for job in shard.get("jobs", {}).values():
        _check_numbers(job, _JOB_NUMBERS)
        for name in _JOB_COUNTS:
            _check_counts(job.get(name, {}))
        for worker in job["workers"]:
            _check_worker(worker)
        for entry in job.get("departed", ()):
            _check_numbers(entry, ("rank",))
            _check_stamp(entry)


def _check_worker(worker: dict[str, Any]) -> None:
    _check_numbers(worker, _WORKER_NUMBERS)
    _check_numbers(worker, ("clock",), may_lack=True)
    for rank in worker["waiting_for"]:
        _check_number("waiting_for", rank)
    _check_counts(worker.get("staleness", {}))
    telemetry = worker.get("telemetry", {})
    _check_numbers(telemetry, _TELEMETRY_NUMBERS, may_lack=True)
    loss = telemetry.get("loss")
    if loss is not None and not isinstance(loss, int | float) and loss != NOT_FINITE:
        raise ValueError(f"loss is no number (got {loss!r:.40})")


def _check_numbers(entry: Mapping[str, Any], names: Iterable[str], *, may_lack: bool = False) -> None:
    for name in names:
        value = entry.get(name)
        if value is not None or not may_lack:
            _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and abs(value) <= MAX_SHOWN):  # nor is NaN
        raise ValueError(f"{name} is no number that can be shown (got {value!r:.40})")


def _check_counts(counts: Mapping[str, Any]) -> None:
    for name, count in counts.items():
        if not (isinstance(count, int) and 0 <= count <= MAX_SHOWN) or name.strip().startswith("-"):
            raise ValueError(f"{name:.40} is no count that can be shown (got {count!r:.40})")


def _check_stamp(entry: Mapping[str, Any]) -> None:
    stamp = entry.get("unix_s", 0.0)
    if not (isinstance(stamp, int | float) and 0 <= stamp <= LAST_UNIX_S):
        raise ValueError(f"unix_s is no time (got {stamp!r:.40})")


def _without_jobs(shard: dict[str, Any]) -> dict[str, Any]:
    bytes_in, bytes_out = shard_bytes(shard)
    rest = {name: value for name, value in shard.items() if name != "jobs"}
    return {**rest, "bytes_in": bytes_in, "bytes_out": bytes_out}


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigurationError(f"a status page's address is malformed (expected http://host:port, got {url!r})")
