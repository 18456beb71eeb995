"""What the status port can do, besides show: write a snapshot, end a worker's lease, forget a job,
end the server.

Only whoever knows the token may: another page in the same browser or another user of this machine reaches
the port too.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from psengine.parameter_server.server.core.membership import MAX_WORKERS
from psengine.parameter_server.server.durability.snapshot_thread import SnapshotOutcome

logger = logging.getLogger(__name__)

# Less than a request's deadline; a snapshot that takes longer is written all the same.
SNAPSHOT_WAIT_S = 6.0

Answer = tuple[int, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Deeds:
    """What the server lends its actions; each may be called from any thread.

    Attributes:
        snapshot: begins one; None where the server keeps none.
        evict: ends the lease of a job's worker at every shard; whether any knew it. Raises
            ``concurrent.futures.TimeoutError`` where a shard is busy, and does it later.
        forget: drops a job without workers at every shard, and from the next snapshot on; how many workers keep it, 0
            where it is gone now, None where no shard knows it. Raises ``concurrent.futures.TimeoutError`` where a shard
            is busy.
        shut_down: ends the server in order; returns at once.
    """

    snapshot: Callable[[], Future[SnapshotOutcome]] | None
    evict: Callable[[str, int], bool]
    forget: Callable[[str], int | None]
    shut_down: Callable[[], None]


class Actions:
    """POST /actions/NAME, for those who know the token.

    Args:
        token: "" switches all actions off.
        deeds: see there.
    """

    def __init__(self, token: str, deeds: Deeds) -> None:
        self._token = token.encode()
        self._deeds = deeds
        # By name: what is done, and the names of its parameters, all of them needed.
        self._known: dict[str, tuple[Callable[[Mapping[str, str]], Answer], frozenset[str]]] = {
            "snapshot": (self._snapshot, frozenset()),
            "evict": (self._evict, frozenset({"job", "worker"})),
            "forget": (self._forget, frozenset({"job"})),
            "shutdown": (self._shut_down, frozenset()),
        }

    def perform(self, name: str, parameters: Mapping[str, str], authorization: str | None) -> Answer:
        """HTTP status and JSON-able content.

        Args:
            name: of the action.
            parameters: of the query.
            authorization: the request's header of that name.
        """
        refused = self.refusal(name, parameters, authorization)
        if refused is not None:
            return refused
        logger.warning("the status port was told: %s %s", name, dict(parameters) or "")
        act, _ = self._known[name]
        return act(parameters)

    def refusal(self, name: str, parameters: Mapping[str, str], authorization: str | None) -> Answer | None:
        """What ``perform`` answers where it does nothing; None where it acts."""
        if not self._token:
            return 403, _error(
                "Actions are off (expected a server with a token). Fix: start it with --status-token FILE, where FILE"
                " has mode 0600 and holds the token."
            )
        scheme, _, given = (authorization or "").partition(" ")
        # Bytes, as compare_digest takes no texts beyond ASCII; headers are Latin-1.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            return 401, _error("This needs the server's token (expected the header Authorization: Bearer TOKEN).")
        if name not in self._known:
            return 404, _error(f"There is no such action (expected one of {', '.join(self._known)}).")
        _, needed = self._known[name]
        if set(parameters) != needed:
            return 400, _error(
                f"{name} has other parameters (expected {', '.join(sorted(needed)) or 'none'}, got"
                f" {', '.join(sorted(parameters)) or 'none'})."
            )
        return None

    def _snapshot(self, parameters: Mapping[str, str]) -> Answer:
        if self._deeds.snapshot is None:
            return 409, _error("This server keeps no snapshots (expected a --snapshot-dir).")
        try:
            outcome = self._deeds.snapshot().result(SNAPSHOT_WAIT_S)
        except FutureTimeoutError:
            return 202, {"text": f"The snapshot is being written; it takes longer than {SNAPSHOT_WAIT_S:g} s."}
        if outcome.is_empty:
            return 409, _error(f"No snapshot was written: {outcome.error}.")
        if outcome.error:
            return 500, _error(f"No snapshot was written: {outcome.error}")
        return 200, {"generation": outcome.generation, "text": f"Durable to generation {outcome.generation}."}

    def _evict(self, parameters: Mapping[str, str]) -> Answer:
        job, text = parameters["job"], parameters["worker"]
        if not (text.isascii() and text.isdigit()) or len(text) > 5 or int(text) >= MAX_WORKERS:
            return 400, _error(f"worker is no rank (expected 0 to {MAX_WORKERS - 1}, got {text[:40]!r}).")
        try:
            is_known = self._deeds.evict(job, int(text))
        except FutureTimeoutError:
            return 202, {"text": "A shard is busy; it ends the lease as soon as it can."}
        if not is_known:
            return 404, _error(f"There is no worker {text} in job {job[:100]!r}.")
        return 200, {"text": f"Worker {text} is out. If its process lives, it says HELLO again and comes back."}

    def _forget(self, parameters: Mapping[str, str]) -> Answer:
        job = parameters["job"]
        try:
            workers = self._deeds.forget(job)
        except FutureTimeoutError:
            return 503, _error(
                "A shard is busy and did not answer in time. Fix: ask again, until there is no such job."
            )
        if workers is None:
            return 404, _error(f"There is no job {job[:100]!r}.")
        if workers:
            return 409, _error(
                f"Job {job[:100]!r} is in use (expected no workers, got {workers}). Fix: end them, or their leases"
                " (/actions/evict); one that died counts until its lease is over."
            )
        return 200, {"text": f"Job {job[:100]!r} is forgotten: its values, and its place among the server's jobs."}

    def _shut_down(self, parameters: Mapping[str, str]) -> Answer:
        self._deeds.shut_down()
        return 202, {
            "text": "The server ends in order: it answers what is queued and writes a snapshot if it keeps any."
        }


def _error(text: str) -> dict[str, Any]:
    return {"error": text}
