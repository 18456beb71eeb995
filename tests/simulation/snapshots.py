"""A server's snapshots, and the disk that outlives it: ``Durability`` without its thread.

    capture each shard ─ write ─ durable        a death while it is written leaves a part of it, and the older ones

What writes, keeps and reads generations is the real ``Generations``, over a simulated disk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability.restoring import Recovered, place_into, recover
from psengine.parameter_server.server.log.log import BEGINNING, ShardLog
from psengine.parameter_server.server.snapshots.files import ServerState
from psengine.parameter_server.server.snapshots.generations import Generations
from simulation.disk import Killed, SimulatedDisk
from simulation.logs import SimulatedLog
from simulation.violation import require

LONGEST_CAPTURE_S = 0.02
LONGEST_WRITE_S = 0.3
KEPT = 2
# A snapshot of a simulated job takes about so many calls of the disk.
CALLS_PER_SNAPSHOT = 10
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
        self._damaged.add(_number(name))
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

    def begin_copy(self) -> None:
        """The generations that are there are of another server's past."""
        self._saved = 0

    def clear(self) -> None:
        """A new disk."""
        self._saved = 0
        self.files.clear()
        self.notes.clear()
        self._damaged.clear()


def _number(name: str) -> int:
    return int(name.removeprefix(_GENERATION))


@dataclass
class _Captured:
    """A snapshot on its way, and the oracle's note, by job."""

    state: ServerState
    changes: int
    wishes: list[Future[int]]  # that it fulfils
    note: dict[int, dict[int, int]] = field(default_factory=dict)


class Snapshots:
    """Those that one life of a server writes.

    Args:
        interval_s: from the end of one to the next.
    """

    def __init__(self, server, disk: ServerDisk, world, interval_s: float, rng: random.Random) -> None:
        self.server, self.disk, self.world = server, disk, world
        self.store = Generations(disk.files)
        self._interval_s, self._rng = interval_s, rng
        self._due_s = server.clock.now_s + interval_s
        self._captured: _Captured | None = None
        self._wishes: list[Future[int]] = []
        self._written_s: float | None = None  # when what was captured is on the disk
        self._saved_changes = -1
        self._recovered, self.previous = Recovered(), 0
        self.logs: list[SimulatedLog] = []

    def restore(self) -> dict[str, Any]:
        """Take over what is durable, before the first message; what coordinators knew. See ``Durability``.

        Raises:
            SnapshotError: something is damaged.
            OSError: nothing can be written.
        """
        self.disk.files.state.calls_left = None
        self.store.begin()
        self._recovered = recovered = recover(self.store)
        if recovered.generation is not None or recovered.records:
            place_into(recovered, self.server.shards, "what is on the disk")
        self.previous = recovered.ends[0].epoch if 0 in recovered.ends else 0
        self.server.epoch = self.store.begin_life(self.server.epoch, *(end.epoch for end in recovered.ends.values()))
        return recovered.coordinators

    def begin_logs(self, fails: Callable[[], None], *, is_copy: bool = False) -> None:
        """Begin this life's logs, from a snapshot of all that is there; ``is_copy``: not of what was restored.

        Raises:
            SnapshotError, OSError: it could not be written.
        """
        server = self.server
        for thread in server.threads:
            shard = thread.shard.index
            last = self._recovered.ends.get(shard, BEGINNING)
            log = ShardLog(self.disk.files, shard, server.epoch, last._replace(number=last.number + is_copy))
            self.logs.append(SimulatedLog(server, thread, log, self._rng, fails))
        if is_copy:
            self.store.begin_anew()
            self.disk.begin_copy()
        captured = self._begin()
        for thread in server.threads:
            self._capture(captured, thread)
        for log in self.logs:
            log.write_all()
        self._save(captured)
        for log in self.logs:
            log.follow()

    def kill(self) -> None:
        """The process ends, perhaps while it writes a snapshot."""
        if self._captured is not None and self._written_s is not None and self._have_logs_begun():
            self.disk.files.state.calls_left = self._rng.randrange(CALLS_PER_SNAPSHOT)
            with suppress(Killed, SnapshotError):
                self._save(self._captured)

    def wish(self) -> Future[int]:
        """See ``Durability.snapshot``."""
        self._wishes.append(Future())
        return self._wishes[-1]

    def tick(self) -> None:
        """Some time has passed."""
        clock = self.server.clock
        if self._captured is None:
            if self._wishes or (clock.now_s >= self._due_s and self._changes() != self._saved_changes):
                self._captured = captured = self._begin()
                for thread in self.server.threads:
                    clock.after(self._rng.random() * LONGEST_CAPTURE_S, self._capture_alive, captured, thread)
                clock.after(LONGEST_CAPTURE_S, self._end_capture)
        elif self._written_s is not None and clock.now_s >= self._written_s and self._have_logs_begun():
            captured, self._captured, self._written_s = self._captured, None, None
            self._due_s = clock.now_s + self._interval_s
            try:
                self._save(captured)
            except SnapshotError as error:
                for wish in captured.wishes:
                    wish.set_exception(error)
                return
            clock.note("snapshot", self.server.host, self.store.last)
            for wish in captured.wishes:
                wish.set_result(self.store.last)

    def _changes(self) -> int:
        return sum(thread.shard.changes for thread in self.server.threads)

    def _begin(self) -> _Captured:
        wishes, self._wishes = self._wishes, []
        return _Captured(ServerState([[] for _ in self.server.shards]), self._changes(), wishes)

    def _capture_alive(self, captured: _Captured, thread) -> None:
        if self.server.is_up:
            self._capture(captured, thread)

    def _capture(self, captured: _Captured, thread) -> None:
        """A shard's part."""
        index = thread.shard.index
        if index == 0:
            known = thread.known if thread.coordinators is None else thread.coordinators.to_meta()
            captured.state.coordinators = {number: one for number, one in known.items() if one is not None}
        captured.state.shards[index] = thread.shard.capture(self.store.last + 1, self.store.kept_rows())
        for training in self.world.trainings:
            captured.note.setdefault(training.number, {}).update(training.job.captured(self.server, thread.shard))
        if self.logs:
            captured.state.places[index] = self.logs[index].log.cut()

    def _end_capture(self) -> None:
        if self._captured is not None:
            self._written_s = self.server.clock.now_s + self._rng.random() * LONGEST_WRITE_S

    def _have_logs_begun(self) -> bool:
        assert self._captured is not None
        places = self._captured.state.places
        return all(self.logs[index].log.begun >= place.segment for index, place in places.items())

    def _save(self, captured: _Captured) -> None:
        self.disk.notes[self.store.last + 1] = captured.note
        self.store.save(captured.state)
        self.disk.saved()
        self._saved_changes = captured.changes
        for training in self.world.trainings:
            training.job.durable(self.server, captured.note[training.number])
