"""What a server starts from: a snapshot and the logs that go on from it, spread over its shards. Changes no file.

A log's commands are applied by the code that applied them first, so that all bits come again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psengine.errors import ProtocolError, SnapshotError
from psengine.parameter_server.server.interfaces import ShardSettings
from psengine.parameter_server.server.log.log import Place, segments
from psengine.parameter_server.server.log.reading import WITHOUT_LOG, LogReader
from psengine.parameter_server.server.log.records import Record, RecordKind, content_of
from psengine.parameter_server.server.shard.job import merge_job_meta
from psengine.parameter_server.server.shard.shard import REPLAYED, Shard
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.frames import decode
from psengine.protocol.layout import balance

# What was accepted once has its place.
_SETTINGS = ShardSettings(max_memory_bytes=1 << 62, durability="log")


@dataclass(slots=True)
class Recovered:
    """What a directory holds.

    Attributes:
        generation: the newest intact one; None without one.
        shards: the jobs of each shard that there was.
        coordinators: what coordinators knew, one after the other to be taken over.
        notes: newer generations, and ends of logs, that were left out, and why.
        records: how many the logs had.
        ends: by shard, where its next life goes on.
    """

    generation: int | None = None
    shards: list[list[JobState]] = field(default_factory=list)
    coordinators: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: int = 0
    ends: dict[int, Place] = field(default_factory=dict)

    def describe(self) -> str:
        """What a server starts with, for people."""
        versions: dict[str, int] = {}
        for job in (job for jobs in self.shards for job in jobs):
            versions[job.name] = max([versions.get(job.name, 0), *(chunk.meta["version"] for chunk in job.chunks)])
        jobs = ", ".join(f"{name} version {version}" for name, version in versions.items()) or "no job"
        generation = "no generation" if self.generation is None else f"generation {self.generation}"
        records = f" and {self.records} records of the log" if self.records else ""
        return f"{generation}{records} ({jobs})"


def recover(store: Generations) -> Recovered:
    """Read the newest intact generation, and apply the logs that go on from it.

    Raises:
        SnapshotError: there are generations and none can be read, or a log is damaged or is not there.
    """
    generation, state, notes = store.load()
    recovered, found = Recovered(generation, state.shards, [state.coordinators], notes), segments(store.disk)
    if generation is None:
        state.shards.extend([] for _ in range(max(found, default=-1) + 1))
    is_without = WITHOUT_LOG in store.disk.list()
    if is_without:
        notes.append(f"the log, because there is a file {WITHOUT_LOG}: what it has is lost")
    for shard in sorted({*found, *state.places}):
        reader = LogReader(store.disk, shard, state.places.get(shard), notes)
        # A generation without a place was written by a server that kept no log.
        if not is_without and (generation is None or shard in state.places):
            _replay(recovered, shard, reader)
        recovered.ends[shard] = reader.end._replace(segment=max(found.get(shard, [0])))
    return recovered


def _replay(recovered: Recovered, shard: int, reader: LogReader) -> None:
    """Apply a log to a shard's state."""
    state: Shard | None = None
    epoch = 0
    for record in reader:
        try:
            if state is None or epoch != reader.end.epoch:
                # The server ended, and began anew with what it had.
                is_next, states = state is not None, recovered.shards[shard] if state is None else state.capture()
                state, epoch = Shard(shard, 0, _SETTINGS, _ignore, lambda route: False), reader.end.epoch
                state.restore(states)
                if is_next:
                    state.begin_life()
            recovered.records += 1
            _apply(recovered, state, record)
        except (ProtocolError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise SnapshotError(
                f"{reader.name}: the record at byte {reader.offset} cannot be applied (expected one of this version of"
                f" psengine, with the codecs of --plugins, got: {error!r})"
            ) from error
    if state is not None:
        recovered.shards[shard] = state.capture()


def _ignore(*_: Any, **__: Any) -> None:
    """Events are for people."""


def _apply(recovered: Recovered, shard: Shard, record: Record) -> None:
    if record.kind is RecordKind.MESSAGE:
        shard.apply(decode(record.frames), REPLAYED)
    elif record.kind is RecordKind.COORDINATOR:
        recovered.coordinators.append(content_of(record))
    else:
        shard.drop(record.job)


def place_into(recovered: Recovered, shards: Sequence[Shard], what: str) -> None:
    """Restore it into ``shards``, which are empty and whose threads have not started.

    Raises:
        SnapshotError: it does not fit them or their memory.
    """
    try:
        for shard, jobs in zip(shards, distribute(recovered.shards, len(shards)), strict=True):
            # What answers and pushes make beside values and slots is not counted: it may exceed the limit, and a server
            # must be able to start from every snapshot that it wrote.
            tensors = [item for job in jobs for chunk in job.chunks for item in chunk.tensors.items()]
            needed_bytes = sum(one.nbytes for name, one in tensors if name == "values" or name.startswith("slot/"))
            needed_bytes += sum(chunk.meta.get("rows_bytes", 0) for job in jobs for chunk in job.chunks)
            if needed_bytes > shard.settings.max_memory_bytes:
                raise SnapshotError(
                    f"{what} does not fit --max-memory-bytes (expected at most {shard.settings.max_memory_bytes} bytes"
                    f" at shard {shard.index}, its share, got {needed_bytes}). Raise it, or start with an empty"
                    " --snapshot-dir."
                )
            shard.restore(jobs)
            shard.begin_life()
    except (ProtocolError, LookupError, TypeError, ValueError, RuntimeError) as error:
        text = f"{what} cannot be taken over (expected one of this version of psengine, got: {error!r})."
        raise SnapshotError(text) from error


def distribute(shards: Sequence[list[JobState]], shard_count: int) -> Sequence[list[JobState]]:
    """Spread the jobs that some number of shards saved over ``shard_count``; tensors are moved, not copied.

    With as many shards as before everything stays in place. Otherwise every new shard has each job, and the job's
    chunks are balanced by bytes.
    """
    if len(shards) == shard_count:
        return shards
    parts: dict[str, list[JobState]] = {}
    for jobs in shards:
        for job in jobs:
            parts.setdefault(job.name, []).append(job)
    spread: list[list[JobState]] = [[] for _ in range(shard_count)]
    for name, of_job in parts.items():
        meta = merge_job_meta([part.meta for part in of_job])
        here = [JobState(name, copy.deepcopy(meta), []) for _ in range(shard_count)]
        chunks = sorted((chunk for part in of_job for chunk in part.chunks), key=lambda chunk: chunk.key)
        # A chunk without stored values still causes traffic: empty chunks are balanced by number.
        weights = [max(1, sum(tensor.nbytes for tensor in chunk.tensors.values())) for chunk in chunks]
        for chunk, to in zip(chunks, balance(weights, shard_count), strict=True):
            here[to].chunks.append(chunk)
        for jobs, job in zip(spread, here, strict=True):
            jobs.append(job)
    return spread
