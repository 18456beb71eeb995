"""A server's snapshots, and the disk that outlives it: ``SnapshotThread`` without its thread.

    capture ─ write ─ durable        a death while it is written leaves a part of it, and the older ones

What writes, keeps and reads generations is the real ``Generations``, over a simulated disk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from psengine.errors import SnapshotError
from psengine.parameter_server.server.core.durable_state import merge_job_meta
from psengine.parameter_server.server.durability.restoring import _without_unfinished, distribute, recover
from psengine.parameter_server.server.log.log import LogStart, delete_before
from psengine.parameter_server.server.snapshots.files import JobState, LogPlaces
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.messages import ErrorCode, Message, MessageType
from simulation.disk import Killed, SimulatedDisk
from simulation.logs import SimulatedLog
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.server import ServerProcess

LONGEST_WRITE_S = 0.3
KEPT = 2
# A snapshot of a simulated job takes about so many calls of the disk.
CALLS_PER_SNAPSHOT = 16
_GENERATION = "generation-"


class ServerDisk:
    """The disk of one server, with what the oracle knows of the generations on it.

    Attributes:
        files: snapshots and logs.
        notes: by generation, what the oracle said when it was captured.
    """

    def __init__(self, rng: random.Random) -> None:
        self.files = SimulatedDisk(rng)
        self.notes: dict[int, Any] = {}
        self._saved = 0
        self._damaged: set[int] = set()

    def flip_bit(self, *, has_log: bool) -> tuple[bool, Any]:
        """A bit flips: whether a server may lose by it what its tier promises, and the note of what is left.

        An older generation and the log that goes on from it are as good as the newest one.
        """
        name = self.files.flip_bit()
        if not name.startswith(_GENERATION):
            return bool(name), None
        self._damaged.add(_number(name.partition("/")[0]))
        complete = {_number(one) for one in self.files.list() if one.startswith(_GENERATION)}
        intact = max(complete - self._damaged, default=None)
        if intact is None:
            return True, None
        return intact != max(complete) and not has_log, self.notes[intact]

    def saved(self) -> None:
        """A generation is complete: the one before is kept, to fall back on."""
        self._saved += 1
        complete = [name for name in self.files.list() if name.startswith(_GENERATION)]
        require(len(complete) >= min(KEPT, self._saved), "of {} snapshots only {} are there", self._saved, complete)

    def clear(self) -> None:
        """A new disk."""
        self._saved = 0
        self.files.clear()
        self.notes.clear()
        self._damaged.clear()


def _number(name: str) -> int:
    return int(name.removeprefix(_GENERATION))


class SnapshotWitness(Protocol):
    """The oracle's view of snapshots."""

    def captured(self, server: ServerProcess) -> Any:
        """The shards are being copied; what this returns is kept with the snapshot."""

    def durable(self, server: ServerProcess, note: Any) -> None:
        """The snapshot is on the disk."""


class Snapshots:
    """Those that one life of a server writes.

    Args:
        interval_s: from the end of one to the next.
    """

    def __init__(
        self, server: ServerProcess, disk: ServerDisk, witness: SnapshotWitness, interval_s: float, rng: random.Random
    ) -> None:
        self.server, self.disk, self.witness = server, disk, witness
        self.store = Generations(disk.files)
        self._interval_s, self._rng = interval_s, rng
        self._due_s = server.clock.now_s + interval_s
        self._note: Any = None
        # What is being written, and when that ends.
        self._written: tuple[float, list[list[JobState]]] | None = None
        # Requests that the next snapshot answers, and those that the present one does.
        self._wishes: list[tuple[bytes, Message]] = []
        self._answers: list[tuple[bytes, Message]] = []
        self._places: LogPlaces = {}
        self._has_replayed = False
        self.logs: list[SimulatedLog] = []
        for shard in server.shards:
            shard.want_snapshot = lambda route, message: self._wishes.append((route, message))

    def restore(self) -> Any:
        """Take over what is durable, before the first message; the note of its snapshot. See ``Durability``.

        Raises:
            SnapshotError: something is damaged.
        """
        self.disk.files.state.calls_left = None
        self.store.begin()
        recovered = recover(self.store)
        for name in recovered.headless:
            self.disk.files.delete(name)
        loaded, shards = recovered.loaded, self.server.shards
        self._places, self._has_replayed = recovered.places, any(recovered.records)
        if loaded is None and not any(recovered.records):
            return None
        generation = None if loaded is None else loaded.generation
        parts = distribute(_without_unfinished(recovered.shards), len(shards), merge_job_meta)
        for shard, jobs in zip(shards, parts, strict=True):
            shard.restore(jobs, self.server.clock.now_s)
            shard.durable.note(generation)
        return None if generation is None else self.disk.notes[generation]

    def keep_logs(self, fails: Callable[[], None]) -> None:
        """Begin this life's logs, from a snapshot of all that is there; also where a replay left no job.

        What was replayed may not be durable, because the last life may have died before its fsync.

        Raises:
            SnapshotError: it could not be written.
        """
        server = self.server
        if self._has_replayed or any(shard.jobs.by_number for shard in server.shards):
            self._save([shard.durable.capture_whole() for shard in server.shards], self.witness.captured(server))
        for shard, answers in zip(server.shards, server.answers, strict=True):
            start = LogStart(shard.index, *self._places.get(shard.index, (1, 0)), shard.epoch)
            self.logs.append(SimulatedLog(server, shard, answers, self.disk.files, start, self._rng, fails))

    def kill(self) -> None:
        """The process ends, perhaps while it writes a snapshot."""
        if self._written is None:
            return
        self.disk.files.state.calls_left = self._rng.randrange(CALLS_PER_SNAPSHOT)
        with suppress(Killed, SnapshotError):
            self._save(self._written[1], self._note)

    def _save(self, states: list[list[JobState]], note: Any) -> int:
        self.disk.notes[self.store.last + 1] = note
        number = self.store.save(states, self._places)
        self.disk.saved()
        with suppress(SnapshotError):
            delete_before(self.disk.files, self.store.needed_segments())
        return number

    def tick(self) -> None:
        """Some time has passed."""
        now_s = self.server.clock.now_s
        if self._written is not None:
            if now_s >= self._written[0]:
                self._commit(self._written[1])
        elif now_s >= self._due_s or self._wishes:
            self._due_s = now_s + self._interval_s
            self._answers, self._wishes = self._wishes, []
            if any(shard.durable.has_changed() for shard in self.server.shards):
                self._capture(now_s)
            else:
                self._answer(self.store.newest)

    def _capture(self, now_s: float) -> None:
        shards = self.server.shards
        self._note = self.witness.captured(self.server)
        if self.logs:
            self._places = self._places | {log.log.start.shard: log.cut() for log in self.logs}
            self._end_capture(now_s, [shard.durable.capture_whole() for shard in shards])
        else:
            self._end_capture(now_s, [shard.durable.capture() for shard in shards])

    def _end_capture(self, now_s: float, shards: list[list[JobState]]) -> None:
        if not any(shards) and self.store.newest is None:
            self._answer(None)
            return
        self._written = now_s + self._rng.random() * LONGEST_WRITE_S, shards

    def _commit(self, states: list[list[JobState]]) -> None:
        self._written = None
        try:
            number = self._save(states, self._note)
        except SnapshotError:
            self._answer(None)
            return
        self.server.clock.note("snapshot", self.server.index, number)
        for shard in self.server.shards:
            shard.durable.note(number)
        self.witness.durable(self.server, self._note)
        self._answer(number)

    def _answer(self, generation: int | None) -> None:
        answers, self._answers = self._answers, []
        for route, message in answers:
            self.server.answer_snapshot(route, message, generation)


def snapshot_answer(message: Message, epoch: int, generation: int | None) -> Message:
    """OK, or ERROR where none was written."""
    to = {"job": message.job, "epoch": epoch, "worker": message.worker, "incarnation": message.incarnation}
    if generation is not None:
        return Message(MessageType.OK, sequence=message.sequence, body={"generation": generation}, **to)
    body = {"code": ErrorCode.SNAPSHOT_FAILED, "text": "the simulated disk"}
    return Message(MessageType.ERROR, sequence=message.sequence, body=body, **to)
