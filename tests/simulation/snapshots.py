"""A server's snapshots, and the disk that outlives it: ``SnapshotThread``, ``SnapshotStore``, no threads, no files.

    capture ─ steps under way are awaited ─ write ─ sync ─ durable        a death before the last leaves the older one

What is on the disk is bytes: nothing that the server goes on changing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from psengine.parameter_server.server.core.capture import Capture, Goals
from psengine.parameter_server.server.core.durable_state import merge_job_meta
from psengine.parameter_server.server.durability.restoring import _without_unfinished, distribute, recover
from psengine.parameter_server.server.durability.snapshot_thread import STEPS_DEADLINE_S
from psengine.parameter_server.server.log.log import LogStart, delete_before
from psengine.parameter_server.server.snapshots.store import KEPT, ChunkState, JobState, Loaded, LogPlaces
from psengine.protocol.messages import ErrorCode, Message, MessageType
from simulation.disk import SimulatedDisk
from simulation.logs import SimulatedLog

if TYPE_CHECKING:
    from simulation.server import ServerProcess

LONGEST_WRITE_S = 0.3


@dataclass
class Generation:
    """One snapshot.

    Attributes:
        note: what the oracle said when it was captured.
        is_damaged: bits have flipped; the hash of the file tells.
    """

    number: int
    shards: list[list[JobState]]
    note: Any
    places: LogPlaces
    is_damaged: bool = False


@dataclass
class SnapshotDisk:
    """The snapshots of one server, and the disk that its log is on. A ``SnapshotStore``, as ``recover`` needs it."""

    files: SimulatedDisk
    generations: list[Generation] = field(default_factory=list)
    last: int = 0

    def newest(self) -> Generation | None:
        """That which can be read."""
        return next((one for one in reversed(self.generations) if not one.is_damaged), None)

    def load(self) -> Loaded | None:
        """See ``SnapshotStore``."""
        newest = self.newest()
        if newest is None:
            return None
        return Loaded(newest.number, [[_copy(job) for job in jobs] for jobs in newest.shards], dict(newest.places))

    def save(self, shards: list[list[JobState]], note: Any, places: LogPlaces) -> int:
        """Make one more durable."""
        self.last += 1
        copies = [[_copy(job) for job in jobs] for jobs in shards]
        self.generations.append(Generation(self.last, copies, note, dict(places)))
        del self.generations[:-KEPT]
        kept = [one.places for one in self.generations if not one.is_damaged]
        shards_kept = {shard for places in kept for shard in places}
        needed = {shard: min(places.get(shard, (1, 0))[0] for places in kept) for shard in shards_kept}
        delete_before(self.files, needed)
        return self.last


class SnapshotWitness(Protocol):
    """The oracle's view of snapshots."""

    def captured(self, server: ServerProcess) -> Any:
        """The shards are being copied; what this returns is kept with the snapshot."""

    def complete(self, server: ServerProcess, note: Any, *, is_torn: bool) -> None:
        """The copies are complete."""

    def durable(self, server: ServerProcess, note: Any) -> None:
        """The snapshot is on the disk."""


class _Met:
    """The shards' meeting before they are copied: here they all stand still anyway."""

    def __init__(self, furthest: Goals) -> None:
        self._furthest = furthest

    def wait(self, begun: Goals) -> Goals:
        return self._furthest


class Snapshots:
    """Those that one life of a server writes.

    Args:
        interval_s: from the end of one to the next.
    """

    def __init__(
        self, server: ServerProcess, disk: SnapshotDisk, witness: SnapshotWitness, interval_s: float, rng: random.Random
    ) -> None:
        self.server, self.disk, self.witness = server, disk, witness
        self._interval_s, self._rng = interval_s, rng
        self._due_s = server.clock.now_s + interval_s
        self._captures: list[Capture] = []
        self._captured_s = 0.0
        self._note: Any = None
        self._is_torn = False
        self._written: tuple[float, list[list[JobState]]] | None = None
        # Requests that the next snapshot answers, and those that the present one does.
        self._wishes: list[tuple[bytes, Message]] = []
        self._answers: list[tuple[bytes, Message]] = []
        self._places: LogPlaces = {}
        self.logs: list[SimulatedLog] = []
        for shard in server.shards:
            shard.want_snapshot = lambda route, message: self._wishes.append((route, message))

    def restore(self) -> Generation | None:
        """Take over what is durable, before the first message; the snapshot that it is from. See ``Durability``.

        Raises:
            SnapshotError: something is damaged.
        """
        recovered = recover(self.disk, self.disk.files)  # type: ignore[arg-type]
        for name in recovered.headless:
            self.disk.files.delete(name)
        newest, shards = self.disk.newest(), self.server.shards
        self._places = recovered.places
        if newest is None and not any(recovered.records):
            return None
        parts = distribute(_without_unfinished(recovered.shards), len(shards), merge_job_meta)
        for shard, jobs in zip(shards, parts, strict=True):
            shard.restore(jobs, self.server.clock.now_s)
            shard.durable.note(None if newest is None else newest.number)
        return newest

    def keep_logs(self, fails: Callable[[], None]) -> None:
        """Begin this life's logs, from a snapshot of all that is there."""
        server = self.server
        if any(shard.jobs.by_number for shard in server.shards):
            note = self.witness.captured(server)
            self.disk.save([shard.durable.capture_whole() for shard in server.shards], note, self._places)
        for shard, answers in zip(server.shards, server.answers, strict=True):
            start = LogStart(shard.index, *self._places.get(shard.index, (1, 0)), shard.epoch)
            self.logs.append(SimulatedLog(server, shard, answers, self.disk.files, start, self._rng, fails))

    def tick(self) -> None:
        """Some time has passed."""
        now_s = self.server.clock.now_s
        if self._written is not None:
            if now_s >= self._written[0]:
                self._commit(self._written[1])
        elif self._captures:
            self._look(now_s)
        elif now_s >= self._due_s or self._wishes:
            self._due_s = now_s + self._interval_s
            self._answers, self._wishes = self._wishes, []
            if any(shard.durable.has_changed() for shard in self.server.shards):
                self._capture(now_s)
            else:
                self._answer(self.disk.generations[-1].number if self.disk.generations else None)

    def _capture(self, now_s: float) -> None:
        shards = self.server.shards
        furthest: Goals = {}
        for shard in shards:
            for job in shard.jobs.kept():
                known = furthest.setdefault(job.number, {})
                for rank, number in job.cuts.begun.items():
                    known[rank] = max(number, known.get(rank, 0))
        self._note = self.witness.captured(self.server)
        self._captured_s, self._is_torn = now_s, False
        if self.logs:
            self._places = self._places | {log.log.start.shard: log.cut() for log in self.logs}
            self._end_capture(now_s, [shard.durable.capture_whole() for shard in shards])
            return
        self._captures = [shard.meet_and_capture(_Met(furthest)) for shard in shards]  # type: ignore[arg-type]
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        if now_s >= self._captured_s + STEPS_DEADLINE_S:
            for capture in self._captures:
                if not capture.states.done():
                    self._is_torn = bool(capture.end()) or self._is_torn
        if not all(capture.states.done() for capture in self._captures):
            return
        captures, self._captures = self._captures, []
        self._end_capture(now_s, [capture.states.result() for capture in captures])

    def _end_capture(self, now_s: float, shards: list[list[JobState]]) -> None:
        states = [[_copy(job) for job in jobs] for jobs in shards]
        self.witness.complete(self.server, self._note, is_torn=self._is_torn)
        if not any(states) and not self.disk.generations:
            self._answer(None)
            return
        self._written = now_s + self._rng.random() * LONGEST_WRITE_S, states

    def _commit(self, states: list[list[JobState]]) -> None:
        self._written = None
        disk = self.disk
        if disk.files.problem:
            disk.last += 1
            self._answer(None)
            return
        disk.save(states, self._note, self._places)
        self.server.clock.note("snapshot", self.server.index, disk.last)
        for shard in self.server.shards:
            shard.durable.note(disk.last)
        self.witness.durable(self.server, self._note)
        self._answer(disk.last)

    def _answer(self, generation: int | None) -> None:
        answers, self._answers = self._answers, []
        for route, message in answers:
            self.server.answer_snapshot(route, message, generation)


def _copy(job: JobState) -> JobState:
    """As it comes back from the disk."""
    chunks = [
        ChunkState(
            chunk.key,
            json.loads(json.dumps(chunk.meta)),
            {name: tensor.clone() for name, tensor in chunk.tensors.items()},
        )
        for chunk in job.chunks
    ]
    return JobState(job.name, json.loads(json.dumps(job.meta)), chunks)


def snapshot_answer(message: Message, epoch: int, generation: int | None) -> Message:
    """OK, or ERROR where none was written."""
    to = {"job": message.job, "epoch": epoch, "worker": message.worker, "incarnation": message.incarnation}
    if generation is not None:
        return Message(MessageType.OK, sequence=message.sequence, body={"generation": generation}, **to)
    body = {"code": ErrorCode.SNAPSHOT_FAILED, "text": "the simulated disk"}
    return Message(MessageType.ERROR, sequence=message.sequence, body=body, **to)
