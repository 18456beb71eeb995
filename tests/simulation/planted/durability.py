"""Bugs of snapshots and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from psengine.parameter_server.server.core.durable_state import DurableState
from psengine.parameter_server.server.core.journal import Journal
from psengine.parameter_server.server.durability.replay import Replay
from psengine.parameter_server.server.rules.step import StepOutcome

from psengine.parameter_server.server.core.membership import Membership
from psengine.parameter_server.server.log import records
from psengine.parameter_server.server.log.log import SegmentWriter
from psengine.parameter_server.server.log.reading import DamagedLogError, LogReader
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.snapshots import files, generations
from psengine.parameter_server.server.snapshots.files import write_generation
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from psengine.protocol.messages import MessageType
from simulation import snapshots
from simulation.planted.registry import plant


def _without(*names: str) -> Callable[[Any], Any]:
    def make(to_meta: Any) -> Any:
        return lambda self: {**to_meta(self), **{name: {} for name in names}}

    return make


plant("a snapshot lacks the table of numbers", Apply, "to_meta", _without("last_sequence"))


def _version_ahead(to_meta: Any) -> Any:
    return lambda self: {**to_meta(self), "version": self.progress.version + 1}


plant("a snapshot's version is one ahead", StepOutcome, "to_meta", _version_ahead)
plant(
    "a snapshot keeps the values that the server goes on changing",
    StepOutcome,
    "tensors",
    lambda tensors: (
        lambda self: {
            name: _Uncopied.of(tensor) if name == "values" else tensor for name, tensor in tensors(self).items()
        }
    ),
)


class _Uncopied:
    """A tensor whose clone is itself, once."""

    @staticmethod
    def of(tensor: Any) -> Any:
        shown = tensor.view(-1)
        shown.clone = lambda: tensor
        return shown


def _deletes_first(save: Any) -> Any:
    def one(self: Generations, *arguments: Any) -> int:
        for number in self.numbers():
            self._discard("generation", number)
        return save(self, *arguments)

    return one


plant("the older snapshots are deleted before the next one is there", Generations, "save", _deletes_first)
plant("a single snapshot is kept", generations, "KEPT", lambda kept: 1)


@contextmanager
def _unsynced_file(disk: Any, name: str) -> Iterator[Any]:
    file = disk.create(name)
    yield file
    file.close()


def _renames_only(write: Any) -> Any:
    def one(self: Generations, number: int, *content: Any) -> None:
        unfinished = f"unfinished-{number:012d}"
        write_generation(self.disk.make_directory(unfinished), number, *content)
        self.disk.rename(unfinished, f"generation-{number:012d}")

    return one


plant("a snapshot's files are not synced", files, "_new_file", lambda new_file: _unsynced_file)
plant("a snapshot's name is not synced", Generations, "_write", _renames_only)


def _says_so_at_once(note_captured: Any) -> Any:
    def one(self: DurableState) -> None:
        note_captured(self)
        self._version = dict(self._captured_version)

    return one


plant("a version is called durable when its snapshot begins", DurableState, "_note_captured", _says_so_at_once)


def _at_once(send: Any) -> Any:
    def one(self: HeldAnswers, route: bytes, frames: Any, *, pins: Any = None, is_urgent: bool = False) -> None:
        send(self, route, frames, pins=pins, is_urgent=True)

    return one


plant("an update is acknowledged before its fsync", HeldAnswers, "send", _at_once)
plant("the log is written and never synced", SegmentWriter, "sync", lambda sync: lambda self: None)
plant("the log is not replayed", Replay, "take", lambda take: lambda self, reader: [None for _ in reader] and None)


def _every_third(message: Any) -> Any:
    def one(self: Journal, job: Any, taken: Any) -> None:
        if taken.type is not MessageType.PUSH or taken.sequence % 3:
            message(self, job, taken)

    return one


plant("every third push is not logged", Journal, "message", _every_third)
plant(
    "segments that the snapshot needs are deleted",
    snapshots,
    "delete_before",
    lambda delete: lambda disk, starts: delete(disk, {shard: first + 1 for shard, first in starts.items()}),
)


def _without_its_name(write: Any) -> Any:
    def one(self: SegmentWriter, batch: Any) -> None:
        with mock.patch.object(self._disk, "sync_names"):
            write(self, batch)

    return one


def _ignores_its_failure(sync: Any) -> Any:
    def one(self: SegmentWriter) -> None:
        with suppress(OSError):
            sync(self)

    return one


def _damage(check_rest: Any) -> Any:
    def one(self: LogReader, file: Any, name: str, offset: int) -> None:
        if file.size_bytes > offset:
            raise DamagedLogError(name, offset, "its last record is torn")

    return one


plant("a segment's name is not synced", SegmentWriter, "write", _without_its_name)
plant("a log goes on after an fsync that failed", SegmentWriter, "sync", _ignores_its_failure)
plant("a log's records are not checked", records, "_digest", lambda digest: lambda header, frames: 0)
plant("a torn record is taken for damage", LogReader, "_check_rest", _damage)
plant(
    "rarely: who came and who left is not logged",
    Journal,
    "members",
    lambda members: lambda self, job, *, came=None, left=None: members(self, job),
)
plant(
    "rarely: a restart forgets which processes were replaced",
    Membership,
    "to_meta",
    lambda to_meta: lambda self: {**to_meta(self), "replaced": {}, "ended": []},
)
