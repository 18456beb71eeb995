"""The status port's actions: write a snapshot, end a worker's lease, forget a job, drain the server, shut it down.

Every action needs the server's token: pages in the same browser and other users of this machine reach the port too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from psengine.parameter_server.server.core.membership import MAX_WORKERS
from psengine.parameter_server.server.durability.snapshot_thread import SnapshotOutcome

logger = logging.getLogger(__name__)

# Less than the page waits; a snapshot that takes longer is written all the same.
SNAPSHOT_WAIT_S = 6.0

Answer = tuple[int, dict[str, Any]]


class Actions:
    """POST /actions/NAME.

    Args:
        are_on: whether the server has a token for them.
        snapshot: begins one; None where the server keeps none.
        evict: ends the lease of a job's worker at every shard; whether any knew it. Raises
            ``concurrent.futures.TimeoutError`` where a shard is busy, and does it later.
        forget: drops a job without workers, see ``ShardGroup.forget``.
        drain: lets no more workers in, and ends the server once the last one has left; how many there are now.
        shut_down: ends the server in order; returns at once.
    """

    def __init__(
        self,
        are_on: bool,
        *,
        snapshot: Callable[[], Future[SnapshotOutcome]] | None,
        evict: Callable[[str, int], bool],
        forget: Callable[[str], int | None],
        drain: Callable[[], int],
        shut_down: Callable[[], None],
    ) -> None:
        self._are_on = are_on
        self._begin_snapshot = snapshot
        self._end_lease = evict
        self._drop_job = forget
        self._begin_drain = drain
        self._end_server = shut_down
        # By name: the function, and the names of its parameters, all of them needed.
        self._known: dict[str, tuple[Callable[..., Answer], set[str]]] = {
            "snapshot": (self._snapshot, set()),
            "evict": (self._evict, {"job", "worker"}),
            "forget": (self._forget, {"job"}),
            "drain": (self._drain, set()),
            "shutdown": (self._shut_down, set()),
        }

    def refusal(self, name: str, parameters: Mapping[str, str], *, may_act: bool) -> Answer | None:
        """HTTP status and JSON-able content for a request that must not be performed; None for one that may.

        Args:
            name: of the action.
            parameters: of the query.
            may_act: whether the request has the token.
        """
        if not self._are_on:
            return 403, _error(
                "Actions are off (expected a server with a token). Fix: start it with --status-token FILE, where FILE"
                " has mode 0600 and holds the token."
            )
        if not may_act:
            return 401, _error(
                "This needs the token of --status-token (expected the header Authorization: Bearer TOKEN)."
            )
        if name not in self._known:
            return 404, _error(f"There is no such action (expected one of {', '.join(self._known)}).")
        _, needed = self._known[name]
        if set(parameters) != needed:
            wanted, given = (", ".join(sorted(names)) or "none" for names in (needed, parameters))
            return 400, _error(f"{name} has other parameters (expected {wanted}, got {given}).")
        return None

    def perform(self, name: str, parameters: Mapping[str, str]) -> Answer:
        """Perform an action for which there is no ``refusal``; HTTP status and JSON-able content."""
        logger.warning("the status port was told: %s %s", name, dict(parameters) or "")
        act, _ = self._known[name]
        return act(**parameters)

    def _snapshot(self) -> Answer:
        if self._begin_snapshot is None:
            return 409, _error("This server keeps no snapshots (expected a --snapshot-dir).")
        try:
            outcome = self._begin_snapshot().result(SNAPSHOT_WAIT_S)
        except FutureTimeoutError:
            return 202, {"text": f"The snapshot is being written; it takes longer than {SNAPSHOT_WAIT_S:g} s."}
        if outcome.error:
            return 409 if outcome.is_empty else 500, _error(f"No snapshot was written: {outcome.error}.")
        return 200, {"generation": outcome.generation, "text": f"Durable to generation {outcome.generation}."}

    def _evict(self, job: str, worker: str) -> Answer:
        if not (worker.isascii() and worker.isdigit()) or len(worker) > 5 or int(worker) >= MAX_WORKERS:
            return 400, _error(f"worker is no rank (expected 0 to {MAX_WORKERS - 1}, got {worker[:40]!r}).")
        try:
            is_known = self._end_lease(job, int(worker))
        except FutureTimeoutError:
            return 202, {"text": "A shard is busy; it ends the lease as soon as it can."}
        if not is_known:
            return 404, _error(f"There is no worker {worker} in job {job[:100]!r}.")
        return 200, {"text": f"Worker {worker} is out. If its process lives, it says HELLO again and comes back."}

    def _forget(self, job: str) -> Answer:
        try:
            workers = self._drop_job(job)
        except FutureTimeoutError:
            return 503, _error("A shard is busy and did not answer in time. Fix: ask again until the job is gone.")
        if workers is None:
            return 404, _error(f"There is no job {job[:100]!r}.")
        if workers:
            return 409, _error(
                f"Job {job[:100]!r} is in use (expected no workers, got {workers}). Fix: end them, or their leases"
                " (/actions/evict); a worker that died counts until its lease is over."
            )
        return 200, {"text": f"Job {job[:100]!r} is forgotten: its values, and its place among the server's jobs."}

    def _drain(self) -> Answer:
        try:
            count = self._begin_drain()
        except FutureTimeoutError:
            return 202, {"text": "The server drains. A shard is busy; it lets no more workers in as soon as it can."}
        end = f"It ends when the last of {count} has left." if count else "There is none: it ends now."
        return 202, {"workers": count, "text": f"The server lets no more workers in. {end}"}

    def _shut_down(self) -> Answer:
        self._end_server()
        return 202, {"text": "The server shuts down: it answers what is queued, and writes a snapshot if it keeps any."}


def _error(text: str) -> dict[str, Any]:
    return {"error": text}
