"""What a server starts from: a snapshot and the logs that go on from it, spread over its shards."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psengine.errors import ProtocolError, SnapshotError
from psengine.parameter_server.server.core.durable_state import merge_job_meta
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.durability.replay import Replay
from psengine.parameter_server.server.log.log import segment_name, segments
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.rules.chunk_store import UNDER_WAY
from psengine.parameter_server.server.snapshots.files import JobState, LogPlaces
from psengine.parameter_server.server.snapshots.generations import Generations, Loaded
from psengine.protocol.layout import balance


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        generation: the snapshot's; None where there was none.
        summary: how durable the server is, for people.
        notes: newer generations, and ends of logs, that were left out, and why.
        places: where this life of the server begins each shard's log.
        records: how many of the log were applied to it.
    """

    generation: int | None
    summary: str
    notes: list[str]
    places: LogPlaces = field(default_factory=dict)
    records: int = 0

    @property
    def is_something(self) -> bool:
        """Whether the directory had a generation or a log, which may be empty."""
        return self.generation is not None or bool(self.places)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A snapshot with the logs that go on from it.

    Attributes:
        loaded: the snapshot; None without one.
        shards: the jobs of each shard that there was.
        records: how many each shard's log had.
        places: where each shard's log ends.
        headless: files that were being created; they hold nothing.
        notes: ends of logs that were left out, and why.
    """

    loaded: Loaded | None
    shards: list[list[JobState]]
    records: list[int]
    places: LogPlaces
    headless: list[str]
    notes: list[str]


def recover(store: Generations) -> Recovered:
    """Read the newest intact generation, and apply the logs that go on from it; nothing is changed on the disk.

    Raises:
        SnapshotError: there are generations and none can be read, or a log is damaged.
    """
    loaded = store.load()
    found = segments(store.disk)
    starts: LogPlaces = {} if loaded is None else loaded.log
    stored = [] if loaded is None else loaded.shards
    count = max([len(stored), *(shard + 1 for shard in found)])
    recovered = Recovered(loaded, [], [], dict(starts), [], [] if loaded is None else list(loaded.notes))
    for shard in range(count):
        replay = Replay(stored[shard] if shard < len(stored) else [])
        segment, first = starts.get(shard, (1, 0))
        reader = LogReader(store.disk, shard, segment, first)
        replay.take(reader)
        recovered.shards.append(replay.states(is_whole=not replay.records))
        recovered.records.append(replay.records)
        if shard in found or shard in starts:
            recovered.places[shard] = reader.last_segment + 1, reader.end
        if reader.headless:
            recovered.headless.append(reader.headless)
        recovered.notes.extend(reader.notes)
        if loaded is not None and shard in starts and reader.last_segment < segment:
            recovered.notes.append(
                f"{segment_name(shard, segment)}, the log from generation {loaded.generation} on, is missing or empty."
                " A server that died right after that generation leaves this, and nothing is lost. If the file was"
                " removed, what was acknowledged after the generation is lost: put the file back before a server starts"
            )
    return recovered


def _without_unfinished(stored: Sequence[list[JobState]]) -> list[list[JobState]]:
    """Leave out jobs that only some shards had when the snapshot was taken: they were being registered."""
    complete = (
        set.intersection(*({job.name for job in jobs if job.meta.get("is_sealed", True)} for jobs in stored))
        if stored
        else set()
    )
    return [[job for job in jobs if job.name in complete] for jobs in stored]


def _check_memory(shards: Sequence[Shard], parts: Sequence[list[JobState]], generation: str) -> None:
    for shard, jobs in zip(shards, parts, strict=True):
        # Backups of weights, which pulls make, and means of squares, which pushes make, are not counted: they may
        # exceed the limit, and a server must be able to start from every snapshot that it wrote.
        needed_bytes = sum(
            tensor.nbytes
            for job in jobs
            for chunk in job.chunks
            for name, tensor in chunk.tensors.items()
            if not name.startswith(("backup/", "mean_squares", UNDER_WAY))
        )
        if needed_bytes > shard.settings.max_memory_bytes:
            raise SnapshotError(
                f"{generation} does not fit --max-memory-bytes (expected at most {shard.settings.max_memory_bytes}"
                f" bytes at shard {shard.index}, its share, got {needed_bytes}). Raise it, or start with an empty"
                " --snapshot-dir."
            )


def restore(store: Generations, shards: Sequence[Shard]) -> Restored:
    """Restore what is durable into ``shards``, which are empty and whose threads have not started.

    Raises:
        SnapshotError: see ``recover``; or it does not fit these shards or their memory.
    """
    recovered = recover(store)
    for name in recovered.headless:
        store.disk.delete(name)
    loaded, records = recovered.loaded, sum(recovered.records)
    if loaded is None and not records:
        summary = f"durable to {store.disk}, no generation yet"
        return Restored(None, summary, recovered.notes, recovered.places)
    number = None if loaded is None else loaded.generation
    generation = f"Generation {number or 0} in {store.disk}"
    try:
        parts = distribute(_without_unfinished(recovered.shards), len(shards), merge_job_meta)
        _check_memory(shards, parts, generation)
        for shard, jobs in zip(shards, parts, strict=True):
            shard.restore(jobs, time.monotonic())
            shard.durable.note(number)
    except (ProtocolError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"{generation} cannot be taken over (expected one of this version of psengine, got: {error!r})."
        ) from error
    versions: dict[str, int] = {}
    for jobs in parts:
        for job in jobs:
            # An averaging job itself begins at 0: its workers say where they are.
            versions[job.name] = max([versions.get(job.name, 0), *(chunk.meta["version"] for chunk in job.chunks)])
    shown = ", ".join(f"{name} version {version}" for name, version in versions.items()) or "no job"
    summary = f"durable to {store.disk}, {'no generation' if number is None else f'generation {number}'}"
    summary += f" and {records} records of the log ({shown})" if records else f" ({shown})"
    return Restored(number, summary, recovered.notes, recovered.places, records)


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
