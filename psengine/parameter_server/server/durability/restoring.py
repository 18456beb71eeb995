"""The snapshot that a server starts from: loaded, spread over its shards, checked against their memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psengine.errors import ProtocolError, SnapshotError
from psengine.parameter_server.server.core.durable_state import merge_job_meta
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.snapshots.store import JobState, SnapshotStore
from psengine.protocol.layout import balance


@dataclass(frozen=True, slots=True)
class Restored:
    """The snapshot that was restored, if any.

    Attributes:
        generation: the one that was restored; None where there was none.
        summary: how durable the server is, for people.
        notes: newer generations that were skipped, and why.
    """

    generation: int | None
    summary: str
    notes: list[str]


def _without_unfinished(stored: Sequence[list[JobState]]) -> list[list[JobState]]:
    """Leave out jobs that only some shards had when the snapshot was taken: they were being registered."""
    complete = set.intersection(*({job.name for job in jobs} for jobs in stored)) if stored else set()
    return [[job for job in jobs if job.name in complete] for jobs in stored]


def _check_memory(shards: Sequence[Shard], parts: Sequence[list[JobState]], generation: str) -> None:
    for shard, jobs in zip(shards, parts, strict=True):
        # Backups of weights, which pulls make, are not counted: they may exceed the limit, and a server must be able to
        # start from every snapshot that it wrote.
        needed_bytes = sum(
            tensor.nbytes
            for job in jobs
            for chunk in job.chunks
            for name, tensor in chunk.tensors.items()
            if not name.startswith("backup/")
        )
        if needed_bytes > shard.settings.max_memory_bytes:
            raise SnapshotError(
                f"{generation} does not fit --max-memory-bytes (expected at most {shard.settings.max_memory_bytes}"
                f" bytes at shard {shard.index}, its share, got {needed_bytes}). Raise it, or start with an empty"
                " --snapshot-dir."
            )


def restore(store: SnapshotStore, shards: Sequence[Shard]) -> Restored:
    """Restore the newest intact generation into ``shards``, which are empty and whose threads have not started.

    Raises:
        SnapshotError: there are generations and none can be read, or it does not fit these shards or their memory.
    """
    loaded = store.load()
    if loaded is None:
        return Restored(None, f"durable to {store.directory}, no generation yet", [])
    generation = f"Generation {loaded.generation} in {store.directory}"
    try:
        parts = distribute(_without_unfinished(loaded.shards), len(shards), merge_job_meta)
        _check_memory(shards, parts, generation)
        for shard, jobs in zip(shards, parts, strict=True):
            shard.restore(jobs, time.monotonic())
            shard.durable.note(loaded.generation)
    except (ProtocolError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"{generation} cannot be taken over (expected one of this version of psengine, got: {error!r})."
        ) from error
    versions: dict[str, int] = {}
    for shard in shards:
        for name, job in shard.status(time.monotonic()).jobs.items():
            versions[name] = max(versions.get(name, 0), job.version_max)
    shown = ", ".join(f"{name} version {version}" for name, version in versions.items()) or "no job"
    summary = f"durable to {store.directory}, generation {loaded.generation} ({shown})"
    return Restored(loaded.generation, summary, loaded.notes)


def distribute(
    shards_loaded: Sequence[list[JobState]],
    shard_count: int,
    merge_meta: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> list[list[JobState]]:
    """Spread the jobs that some number of shards saved over ``shard_count``; tensors are moved, not copied.

    With as many shards as before everything stays in place. Otherwise every new shard has each job, with the
    ``merge_meta`` of the old shards' metas in their order, and the job's chunks are balanced by bytes.
    """
    if len(shards_loaded) == shard_count:
        return [list(jobs) for jobs in shards_loaded]
    parts: dict[str, list[JobState]] = {}
    for jobs in shards_loaded:
        for job in jobs:
            parts.setdefault(job.name, []).append(job)
    shards: list[list[JobState]] = [[] for _ in range(shard_count)]
    for name, job_parts in parts.items():
        meta = merge_meta([part.meta for part in job_parts])
        here = [JobState(name, copy.deepcopy(meta), []) for _ in range(shard_count)]
        chunks = sorted((chunk for part in job_parts for chunk in part.chunks), key=lambda chunk: chunk.key)
        # A chunk without stored values still causes traffic: empty chunks are balanced by number.
        sizes_bytes = [max(chunk.size_bytes, 1) for chunk in chunks]
        for chunk, shard in zip(chunks, balance(sizes_bytes, shard_count), strict=True):
            here[shard].chunks.append(chunk)
        for jobs, job in zip(shards, here, strict=True):
            jobs.append(job)
    return shards
