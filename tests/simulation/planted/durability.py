"""Bugs of snapshots and logs."""

from __future__ import annotations

from contextlib import suppress
from unittest import mock

from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import RecordKind
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots import generations
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.parameter_server.server.transport.shard_thread import HeldAnswers, ShardThread
from psengine.protocol.messages import MessageType
from simulation.disk import SimulatedDisk, SimulatedFile
from simulation.planted.registry import Bug, after, plant, with_patch

# ---- snapshots -------------------------------------------------------------------------------------------------------

plant("a job's first snapshot is not awaited", Job, "is_registering", value=False)


plant("a snapshot has one job only", Shard, "capture", after(lambda states: states[:1]))


@plant("a snapshot lacks the table of steps", Apply, "capture")
def _forget_steps(capture, self, *known):
    state = capture(self, *known)
    for worker in state.meta["workers"].values():
        worker["step"] = 0
    return state


@plant("a snapshot's version is one ahead", Apply, "capture")
def _be_one_ahead(capture, self, *known):
    state = capture(self, *known)
    state.meta["version"] += 1
    return state


@plant("a snapshot keeps the values that the server goes on changing", Apply, "capture")
def _keep_values(capture, self, *known):
    state = capture(self, *known)
    state.tensors["values"] = self.values
    return state


@plant("the older snapshots are deleted before the next one is there", Generations, "save")
def _delete_first(save, self, state):
    for number in self.numbers():
        self.disk.delete(f"generation-{number:012d}")
    return save(self, state)


plant("a single snapshot is kept", generations, "KEPT", value=1)
plant("a snapshot's file is not synced", SimulatedFile, "commit", with_patch(SimulatedFile, "sync"))
plant("a snapshot's name is not synced", SimulatedFile, "commit", with_patch(SimulatedDisk, "sync_names"))

# ---- logs ------------------------------------------------------------------------------------------------------------


@plant("an update is acknowledged before its fsync", HeldAnswers, "send")
def _send_at_once(send, self, route, frames, *, place=None, waits=True):
    return send(self, route, frames, place=place, waits=False)


@plant("the log is written and never synced", ShardLog, "sync")
def _say_it_is_durable(sync, self):
    self.durable = self.written


@plant("a log goes on after an fsync that failed", ShardLog, "sync")
def _ignore_its_failure(sync, self):
    with suppress(OSError):
        sync(self)
    self.durable = self.written


def _unlogged(is_left_out: Bug) -> Bug:
    """What a shard does not append to its log, of its messages."""

    def changed_unlogged(changed, self, job, message):
        append, self.append = self.append, None if is_left_out(message) else self.append
        changed(self, job, message)
        self.append = append

    return changed_unlogged


def _is_third(message):
    return message.type is MessageType.PUSH and message.sequence % 3 == 0


plant("every third push is not logged", Shard, "_changed", _unlogged(_is_third))
plant("releases are not logged", Shard, "_changed", _unlogged(lambda message: message.type is MessageType.RELEASE))
plant("views are not logged", Shard, "_changed", _unlogged(lambda message: message.type is MessageType.VIEW))
plant("the log is not replayed", Shard, "replay", lambda replay, self, *given: self.epoch and replay(self, *given))


@plant("what coordinators decide is not logged", ShardLog, "append")
def _append_no_decision(append, self, record):
    return 0 if record.kind is RecordKind.COORDINATOR else append(self, record)


@plant("what coordinators decide is sent before it is in the log", ShardThread, "_send_decided")
def _send_decided_at_once(send_decided, self, outgoing, **options):
    with mock.patch.object(self, "_send", lambda said, **_: ShardThread._send(self, said, waits=False)):
        send_decided(self, outgoing, **options)


@plant("segments that a snapshot needs are deleted", Generations, "_prune")
def _delete_needed(prune, self, places, room_bytes):
    """Deleting looks at them to find those that no generation needs."""
    later = {shard: place._replace(segment=place.segment + 1) for shard, place in places.items()}
    with mock.patch.object(generations, "read_places", return_value=later):
        prune(self, later, room_bytes)


plant("a life's number is by the clock alone", Generations, "begin_life", lambda begin, self, drawn, *known: drawn)


@plant("a torn record is taken for damage", LogReader, "_check_rest")
def _take_for_damage(check_rest, self, file):
    raise self._damage("its last record is torn")
