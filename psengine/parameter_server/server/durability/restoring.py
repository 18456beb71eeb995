"""What a server starts from: a snapshot and the logs that go on from it. Changes no file.

A log's commands are applied by the code that applied them first, so that all bits come again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psengine.errors import ProtocolError, SnapshotError
from psengine.parameter_server.server.interfaces import ShardSettings
from psengine.parameter_server.server.log.log import Place, segments
from psengine.parameter_server.server.log.reading import WITHOUT_LOG, LogReader
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.parameter_server.server.snapshots.generations import Generations

_SETTINGS = ShardSettings(keeps_updates=True)


@dataclass(slots=True)
class Recovered:
    """What a directory holds.

    Attributes:
        generation: the newest intact one; None without one.
        shards: the jobs of each shard that there was.
        coordinators: what they knew.
        notes: newer generations, and ends of logs, that were left out, and why.
        records: how many the logs had.
        ends: by shard, where its next life goes on.
    """

    generation: int | None = None
    shards: list[list[JobState]] = field(default_factory=list)
    coordinators: dict[str, Any] = field(default_factory=dict)
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
    recovered, found = Recovered(generation, state.shards, state.coordinators, notes), segments(store.disk)
    if generation is None:
        state.shards.extend([] for _ in range(max(found, default=-1) + 1))
    is_without = WITHOUT_LOG in store.disk.list()
    if is_without:
        notes.append(f"the log, because there is a file {WITHOUT_LOG}: what it has is lost")
    for shard in sorted({*found, *state.places}):
        reader = LogReader(store.disk, shard, state.places.get(shard), notes)
        # A generation without a place was written by a server that kept no log.
        if not is_without and (generation is None or shard in state.places):
            held = recovered.shards[shard]
            recovered.shards[shard] = replay_log(reader, shard, held, recovered.coordinators).capture()
            recovered.records += reader.records
        recovered.ends[shard] = reader.end._replace(segment=max(found.get(shard, [0])))
    return recovered


def replay_log(
    reader: LogReader,
    index: int,
    held: Sequence[JobState],
    known: dict[str, Any],
    make_job: Callable[..., Job] = Job,
) -> Shard:
    """Apply a log, life after life, to what a shard held where it begins; the shard at its end.

    Args:
        reader: of the log.
        index: of the shard.
        held: tensors are taken over.
        known: what coordinators knew there, and know at the log's end.
        make_job: makes jobs that are watched.

    Raises:
        SnapshotError: the log is damaged, or has a record that cannot be applied.
    """

    def begin(states: Sequence[JobState]) -> Shard:
        shard = Shard(index, 0, _SETTINGS, lambda *_, **__: None, lambda route: False)
        shard.make_job = make_job
        shard.restore(states)
        return shard

    shard, epoch = begin(held), reader.end.epoch
    for record in reader:
        try:
            if epoch != reader.end.epoch:
                # The server ended, and began anew with what it had.
                shard, epoch = begin(shard.capture()), reader.end.epoch
                shard.begin_life()
            shard.replay(record, known)
        except (ProtocolError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise SnapshotError(
                f"{reader.name}: the record at byte {reader.offset} cannot be applied (expected one of this version of"
                f" psengine, with the codecs of --plugins, got: {error!r})"
            ) from error
    return shard


def place_into(recovered: Recovered, shards: Sequence[Shard], what: str) -> None:
    """Restore it into ``shards``, which are empty and whose threads have not started.

    Raises:
        SnapshotError: it does not fit them or their memory.
    """
    if any(recovered.shards) and len(recovered.shards) != len(shards):
        raise SnapshotError(
            f"{what} is of another number of shards (expected --shards {len(recovered.shards)}, got {len(shards)}):"
            " workers know which shard has which part of their model. Fix: start with that number, or with an empty"
            " --snapshot-dir."
        )
    try:
        for shard, jobs in zip(shards, recovered.shards, strict=False):
            # What answers and pushes make beside values and slots is not counted: it may exceed the limit, and a server
            # must be able to start from every snapshot that it wrote.
            tensors = [item for job in jobs for chunk in job.chunks for item in chunk.tensors.items()]
            needed_bytes = sum(one.nbytes for name, one in tensors if name == "values" or name.startswith("slot/"))
            needed_bytes += sum(chunk.meta.get("rows_bytes", 0) for job in jobs for chunk in job.chunks)
            if needed_bytes > shard.settings.max_memory_bytes:
                raise SnapshotError(
                    f"{what} does not fit --max-memory-bytes (expected at most {shard.settings.max_memory_bytes} bytes"
                    f" at shard {shard.index}, its share, got {needed_bytes}). Raise it (psengine run:"
                    " --server-option max_memory_bytes=SIZE), or start with an empty --snapshot-dir."
                )
            shard.restore(jobs)
            shard.begin_life()
    except (ProtocolError, LookupError, TypeError, ValueError, RuntimeError) as error:
        text = f"{what} cannot be taken over (expected one of this version of psengine, got: {error!r})."
        raise SnapshotError(text) from error
