"""Bugs of snapshots and logs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

from psengine.parameter_server.server.durability import restoring
from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import RecordKind
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots import generations
from psengine.parameter_server.server.snapshots.files import ChunkState
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.parameter_server.server.transport.shard_thread import HeldAnswers
from psengine.protocol.messages import MessageType
from simulation.disk import SimulatedDisk, SimulatedFile
from simulation.planted.registry import after, constant, plant, without


def _without_steps(state: ChunkState) -> ChunkState:
    for worker in state.meta["workers"].values():
        worker["step"] = 0
    return state


def _one_ahead(state: ChunkState) -> ChunkState:
    state.meta["version"] += 1
    return state


def _keeps_values(capture: Any) -> Any:
    def one(self: Apply) -> ChunkState:
        state: ChunkState = capture(self)
        state.tensors["values"] = self.values
        return state

    return one


plant("a snapshot lacks the table of steps", Apply, "capture", after(_without_steps))
plant("a snapshot's version is one ahead", Apply, "capture", after(_one_ahead))
plant("a snapshot keeps the values that the server goes on changing", Apply, "capture", _keeps_values)


def _deletes_first(save: Any) -> Any:
    def one(self: Generations, state: Any) -> int:
        for number in self.numbers():
            self.disk.delete(f"generation-{number:012d}")
        return save(self, state)  # type: ignore[no-any-return]

    return one


plant("the older snapshots are deleted before the next one is there", Generations, "save", _deletes_first)
plant("a single snapshot is kept", generations, "KEPT", lambda kept: 1)
plant("a snapshot's file is not synced", SimulatedFile, "commit", without(SimulatedFile, "sync"))
plant("a snapshot's name is not synced", SimulatedFile, "commit", without(SimulatedDisk, "sync_names"))
plant(
    "an update is acknowledged before its fsync",
    HeldAnswers,
    "send",
    lambda send: (
        lambda self, route, frames, *, place=None, waits=True: send(self, route, frames, place=place, waits=False)
    ),
)


def _only_says(sync: Any) -> Any:
    def one(self: ShardLog) -> None:
        self.durable = self.written

    return one


plant("the log is written and never synced", ShardLog, "sync", _only_says)
plant("the log is not replayed", restoring, "_apply", constant(None))


def _every_third(changed: Any) -> Any:
    def one(self: Shard, job: Any, message: Any) -> None:
        if message.type is MessageType.PUSH and message.sequence % 3 == 0:
            with mock.patch.object(self, "append", None):
                changed(self, job, message)
        else:
            changed(self, job, message)

    return one


def _except(kind: MessageType) -> Any:
    def make(changed: Any) -> Any:
        def one(self: Shard, job: Any, message: Any) -> None:
            append, self.append = self.append, None if message.type is kind else self.append
            changed(self, job, message)
            self.append = append

        return one

    return make


plant("every third push is not logged", Shard, "_changed", _every_third)
plant("releases are not logged", Shard, "_changed", _except(MessageType.RELEASE))
plant("views are not logged", Shard, "_changed", _except(MessageType.VIEW))


def _without_coordinators(append: Any) -> Any:
    return lambda self, record: 0 if record.kind is RecordKind.COORDINATOR else append(self, record)


plant("what coordinators decide is not logged", ShardLog, "append", _without_coordinators)


def _deletes_needed(segments: Any) -> Any:
    """Deleting looks at them to find those that no generation needs."""

    def one(self: Generations, places: Any, room_bytes: int) -> None:
        later = {shard: place._replace(segment=place.segment + 1) for shard, place in places.items()}
        with mock.patch.object(generations, "read_places", return_value=later):
            segments(self, later, room_bytes)

    return one


def _ignores_its_failure(sync: Any) -> Any:
    def one(self: ShardLog) -> None:
        with suppress(OSError):
            sync(self)
        self.durable = self.written

    return one


def _damage(check_rest: Any) -> Any:
    def one(self: LogReader, file: Any) -> None:
        raise self._damage("its last record is torn")

    return one


plant("segments that a snapshot needs are deleted", Generations, "_prune", _deletes_needed)
plant("a log goes on after an fsync that failed", ShardLog, "sync", _ignores_its_failure)
plant("a torn record is taken for damage", LogReader, "_check_rest", _damage)
