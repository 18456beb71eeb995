"""A shard's log applied to the snapshot that it goes on from: the state that the shard had when it stopped. Pure.

Chunks take the messages that they took, in the same order, by the same rules, so that all bits come again. What a job
knows beside its chunks is as the last record says. Nothing is answered, and no time passes but that of the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from psengine.errors import ProtocolError, SnapshotError
from psengine.parameter_server.server.core import exchanges
from psengine.parameter_server.server.interfaces import Clocks, ShardSettings
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.core.shard_jobs import ShardJobs
from psengine.parameter_server.server.core.states import JobEvent, JobPhase
from psengine.parameter_server.server.log.log import segment_name
from psengine.parameter_server.server.log.reading import LogReader, Placed, start_of
from psengine.parameter_server.server.log.records import Record, RecordKind
from psengine.parameter_server.server.rules.chunk_store import UNDER_WAY, chunk_state
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.protocol.frames import decode
from psengine.protocol.messages import Message, MessageType

# What was accepted once has its place.
_SETTINGS = ShardSettings(max_memory_bytes=1 << 62)
_CLOCKS = Clocks(wall_s=lambda: 0.0, measure_s=lambda: 0.0)


class Replay:
    """One shard's state, from a snapshot's on.

    Args:
        states: the shard's jobs in the snapshot, with what was under way; their tensors are taken over.

    Attributes:
        records: how many were applied.
    """

    def __init__(self, states: Sequence[JobState]) -> None:
        self.records = 0
        self._jobs = ShardJobs(_SETTINGS, _CLOCKS, lambda *arguments, **options: None)
        for state in states:
            job = self._job(state.name, state.meta, is_sealed=state.meta.get("is_sealed", True))
            for chunk in state.chunks:
                rule = job.chunks.restore_rule(chunk.meta, chunk.tensors)
                if UNDER_WAY in chunk.meta:
                    start = f"{UNDER_WAY}/"
                    tensors = {k.removeprefix(start): t for k, t in chunk.tensors.items() if k.startswith(start)}
                    rule.go_on(chunk.meta[UNDER_WAY], tensors)
                job.chunks.rules[chunk.key] = rule
                _note_reached(job, chunk.key, chunk.meta["version"])

    def take(self, reader: LogReader) -> None:
        """Apply a log.

        Raises:
            SnapshotError: it is damaged, or says what cannot have happened; with file and offset.
        """
        for placed in reader:
            try:
                self.apply(placed)
            except (ProtocolError, LookupError, TypeError, ValueError) as error:
                name = segment_name(reader.shard, placed.segment)
                raise SnapshotError(
                    f"{name}: the record at byte {placed.offset} cannot be applied (expected one of this version of"
                    f" psengine, with the codecs of --plugins, got: {error!r})"
                ) from error

    def apply(self, placed: Placed) -> None:
        """Apply one record."""
        record = placed.record
        if record.kind is RecordKind.SEGMENT:
            if start_of(placed)["begins_life"]:
                self._restart()
            return
        self.records += 1
        self._jobs.now_s = record.now_s
        if record.kind is RecordKind.MEMBERS:
            self._set_members(json.loads(bytes(record.frames[0])))
        else:
            _APPLY[record.kind](self, self._jobs.by_number[record.job], record)

    def states(self, *, is_whole: bool = False) -> list[JobState]:
        """All jobs; the tensors are this object's. ``is_whole``: with what is under way."""
        return [
            JobState(
                job.name,
                {**job.to_meta(), "is_sealed": job.is_sealed, "last_stores": job.chunks.last_stores()},
                [chunk_state(rule, is_whole=is_whole) for rule in job.rules],
            )
            for job in self._jobs.by_number.values()
        ]

    def _restart(self) -> None:
        """The server ended and began anew: it forgot what was under way, and workers send that again."""
        for job in list(self._jobs.by_number.values()):
            if not job.is_sealed:
                self._jobs.drop(job)  # its first worker registers the chunks again
            job.membership.forget_waits()
            for key, rule in job.chunks.rules.items():
                state = chunk_state(rule)
                job.chunks.rules[key] = job.chunks.restore_rule(state.meta, state.tensors)
                _note_reached(job, key, state.meta["version"])

    def _job(self, name: str, meta: dict[str, Any], *, is_sealed: bool) -> Job:
        job = self._jobs.find(name)
        if job is None:
            job = self._jobs.make(name, meta["rule"])
            self._jobs.add(job)
        job.restore_meta(meta, self._jobs.now_s)
        if not is_sealed:
            job.phase = JobPhase.NEW
        return job

    def _set_members(self, content: dict[str, Any]) -> None:
        known = self._jobs.find(content["name"])
        if known is not None and known.is_sealed and not content["is_sealed"]:
            known.chunks.clear()  # it began anew
        job = self._job(content["name"], content["meta"], is_sealed=content["is_sealed"])
        if not job.rule.holds_weights:
            return
        for rule in job.rules:
            if content["came"] is not None:
                rank, is_new_process = content["came"]
                rule.worker_came(rank, is_new_process=is_new_process)
            elif content["left"] is not None:
                rule.worker_left(content["left"])

    def _take_message(self, job: Job, record: Record) -> None:
        message = decode(record.frames)
        _TAKE[message.type](job, message, record.now_s)

    def _tick(self, job: Job, record: Record) -> None:
        job.tick_rules()

    def _end(self, job: Job, record: Record) -> None:
        content = json.loads(bytes(record.frames[0]))
        _note_reached(job, content["key"], content["version"])
        if job.is_sealed:
            job.advance(JobEvent.ENDED)  # who comes without the job's state has to join from here on

    def _drop(self, job: Job, record: Record) -> None:
        self._jobs.drop(job)


def _note_reached(job: Job, key: int, version: int) -> None:
    """A chunk of an averaging job is as far as this; its workers say where they go on."""
    rule = job.chunks.rules.get(key)
    if rule is not None and not job.rule.holds_weights:
        rule.progress.version = version


_APPLY: dict[RecordKind, Callable[[Replay, Job, Record], None]] = {
    RecordKind.MESSAGE: Replay._take_message,
    RecordKind.TICK: Replay._tick,
    RecordKind.ENDED: Replay._end,
    RecordKind.DROP: Replay._drop,
}


def _sender(job: Job, message: Message) -> Member:
    return job.membership.members[message.worker]


def _store(job: Job, message: Message, now_s: float) -> None:
    job.chunks.store(message)
    if not message.body:
        _note_base(job, message, now_s)


def _note_base(job: Job, message: Message, now_s: float) -> None:
    job.chunks.find(message.key).outcome.note_base(message.worker)


def _probe(job: Job, message: Message, now_s: float) -> None:
    exchanges.probe(job, _sender(job, message), message)


_TAKE: dict[MessageType, Callable[[Job, Message, float], object]] = {
    MessageType.PUSH: lambda job, message, now_s: exchanges.push(job, _sender(job, message), message, now_s),
    MessageType.PROBE: _probe,
    MessageType.REPEAT: _probe,
    MessageType.REGISTER: lambda job, message, now_s: job.chunks.register(message),
    MessageType.CONFIGURE: lambda job, message, now_s: job.chunks.configure(message),
    MessageType.STORE: _store,
    MessageType.PULL: _note_base,
}
