"""What a shard writes to its log: every change of what a restart must find, in the order in which it was made. Pure.

The payload of a push is logged as it came, encoded: the rule that applied it applies it again, with the same bits.
Clocks and connections are not: what a shard decided by them (who came and left, which answers left because of time) is
logged as decided. ``durability/replay.py`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from psengine.parameter_server.server.log.records import Record, RecordKind
from psengine.protocol.frames import encode, payload_tensor
from psengine.protocol.messages import Message


class Logged(Protocol):
    """What is logged of a job, see ``Job``."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def is_sealed(self) -> bool: ...

    def to_meta(self) -> dict[str, Any]: ...


class Journal:
    """One shard's; it writes nothing until it has an ``append``.

    Args:
        now_s: the time that the shard was given last.

    Attributes:
        append: takes a record; ``ShardLog.append``, or what calls it.
    """

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        self.append: Callable[[Record], object] | None = None
        self._now_s = now_s

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self.append is not None

    def message(self, job: Logged, message: Message) -> None:
        """A worker's message has changed a chunk."""
        if self.append is None:
            return
        if message.in_segment:
            # Nobody hurries the worker to leave its memory alone, and what is written must be what is hashed.
            payload = None if message.payload is None else payload_tensor(message).clone()
            message = replace(message, in_segment=False, payload=payload)
        self._write(RecordKind.MESSAGE, job, encode(message))

    def members(self, job: Logged, *, came: tuple[int, bool] | None = None, left: int | None = None) -> None:
        """The job knows something else beside its chunks.

        Args:
            job: as it is now.
            came: the rank that the job's chunks were told of, and whether it is a new process.
            left: the rank that they were told to be gone.
        """
        if self.append is not None:
            content = {"name": job.name, "is_sealed": job.is_sealed, "meta": job.to_meta(), "came": came, "left": left}
            self._write(RecordKind.MEMBERS, job, [_json(content)])

    def tick(self, job: Logged) -> None:
        """Time passed, and answers left because of it."""
        if self.append is not None:
            self._write(RecordKind.TICK, job, [])

    def ended(self, job: Logged, key: int, version: int) -> None:
        """An exchange of an averaging job has ended, as this version of the chunk."""
        if self.append is not None:
            self._write(RecordKind.ENDED, job, [_json({"key": key, "version": version})])

    def drop(self, job: Logged) -> None:
        """The job is forgotten."""
        if self.append is not None:
            self._write(RecordKind.DROP, job, [])

    def _write(self, kind: RecordKind, job: Logged, frames: list[Any]) -> None:
        assert self.append is not None
        self.append(Record(kind, job.number, self._now_s(), frames))


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
