"""The state of a shard's jobs that is in a snapshot on disk, and the copies for the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.shard_jobs import ShardJobs
from psengine.parameter_server.server.snapshots.files import JobState


class DurableState:
    """See the module's text."""

    def __init__(self, jobs: ShardJobs) -> None:
        self.generation: int | None = None  # of the snapshot that is on disk; None without one
        self._jobs = jobs
        jobs.on_drop = self._forget
        self._version: dict[int, int] = {}
        self._captured_version: dict[int, int] = {}
        # Grows with every change of what a snapshot keeps; what ``_state`` was when the durable one was captured.
        self._changes = 0
        self._captured_state: tuple[int, int] | None = None
        self._durable_state: tuple[int, int] | None = None

    def note_change(self) -> None:
        """The state that a snapshot keeps may have changed."""
        self._changes += 1

    def _forget(self, job: Job) -> None:
        self.note_change()
        # A new job of that name has nothing durable yet.
        self._version.pop(job.number, None)
        self._captured_version.pop(job.number, None)

    def version_of(self, job_number: int) -> int | None:
        """The version that all of the job's chunks have on disk; None where the job is not there."""
        return self._version.get(job_number)

    def capture(self) -> list[JobState]:
        """Copies of everything a snapshot keeps, as it is now."""
        self._note_captured()
        return [job.copy() for job in self._jobs.kept()]

    def capture_whole(self) -> list[JobState]:
        """The same with what is under way, and jobs that are not complete: a log goes on from exactly here."""
        self._note_captured()
        return [job.copy(is_whole=True) for job in self._jobs.by_number.values()]

    def _note_captured(self) -> None:
        self._captured_version = {job.number: job.version for job in self._jobs.kept()}
        self._captured_state = self._state()

    def _state(self) -> tuple[int, int]:
        """Equal as long as ``capture`` would return the same; jobs also end without a message."""
        return self._changes, len(self._jobs.kept())

    def has_changed(self) -> bool:
        """Whether ``capture`` may return something else than what is durable."""
        return self._state() != self._durable_state

    def note(self, generation: int | None) -> None:
        """The last capture is on disk as this generation; None: the snapshot on disk has disappeared."""
        self.generation = generation
        self._version = {} if generation is None else dict(self._captured_version)
        self._durable_state = None if generation is None else self._captured_state

    def restore(self, states: Sequence[JobState]) -> None:
        """Take over a snapshot's state, before the first message."""
        for state in states:
            if not state.meta.get("is_sealed", True):
                continue  # its first worker registers the chunks again
            job = self._jobs.make(state.name, state.meta["rule"])
            job.restore_meta(state.meta, self._jobs.now_s)
            job.membership.forget_waits()
            for chunk in state.chunks:
                job.chunks.rules[chunk.key] = job.chunks.restore_rule(chunk.meta, chunk.tensors)
            self._jobs.add(job)
        self._note_captured()


def merge_job_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One job's meta from those of several shards of a server: it may be restored by another number of shards."""
    return {
        **metas[0],
        **merge_members(metas),
        "has_started": any(meta["has_started"] for meta in metas),
        "last_stores": [store for meta in metas for store in meta.get("last_stores", ())],
        "came": sorted({rank for meta in metas for rank in meta["came"]}),
        "expected_workers": max(meta["expected_workers"] for meta in metas),
    }


def merge_members(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One job's members as several shards saved them: each rank's newest incarnation, present rather than gone; and
    every process that any of them knows as replaced.
    """
    entries = [(m["incarnation"], kind, m) for meta in metas for kind in ("absent", "members") for m in meta[kind]]
    newest: dict[int, tuple[str, dict[str, Any]]] = {}
    for _, kind, entry in sorted(entries, key=lambda entry: (entry[0], entry[1])):
        newest[entry["rank"]] = (kind, entry)
    replaced: dict[str, list[int]] = {}
    for meta in metas:
        for rank, nonces in meta.get("replaced", {}).items():
            known = replaced.setdefault(rank, [])
            known.extend(nonce for nonce in nonces if nonce not in known)
    present = {kind: [entry for k, entry in newest.values() if k == kind] for kind in ("members", "absent")}
    ended = {rank for meta in metas for rank in meta.get("ended", ())}
    return {**present, "replaced": replaced, "ended": sorted(ended)}
