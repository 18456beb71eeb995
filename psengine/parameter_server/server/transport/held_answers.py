"""Answers that wait for the log: what a worker is told is on the disk, or did not depend on it.

    shard    handle ─► records ─► answers, held ···················· released in order
    log                  └─► write ─► sync (a group) ─► wake ────────┘

An answer waits until the log is as far as it was when the answer was made. Those that wait keep their order; what says
nothing of updates does not wait, so that a server whose disk is full can be looked at.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from psengine.errors import ServerError
from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.transport.endpoint import Endpoint


class LogFailedError(ServerError):
    """The log cannot be written any more: nothing may be acknowledged."""


class _Held(NamedTuple):
    upto: int  # what ``durable`` has to reach
    route: bytes
    frames: Sequence[Any]
    copies: bool


class HeldAnswers:
    """Of one shard; used in the shard's thread, but for ``wake`` and ``fail``.

    Args:
        endpoint: sends them.

    Attributes:
        log: the shard's; None where nothing is logged.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.log: ShardLog | None = None
        self._endpoint = endpoint
        self._held: deque[_Held] = deque()
        self._failure = ""
        self._lock = threading.Lock()
        self._is_closed = False
        # Readable once the log is further.
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_durable(self) -> bool:
        """Whether nothing waits for the log."""
        return self.log is None or (not self._held and self.log.durable == self.log.end)

    def send(self, route: bytes, frames: Sequence[Any], *, place: Place | None = None, waits: bool = True) -> None:
        """Send now, or once the log is durable.

        Args:
            route: as ``frames``, see ``Endpoint.send``.
            frames: the message's.
            place: the last frame's memory, which does not change while it is being read; None: it may at any time.
            waits: False: it says nothing that a restart could make untrue.
        """
        if place is not None:
            place.sent(frames[-1])
        if not waits or self.is_durable:
            self._endpoint.send(route, frames, copies=place is None)
            return
        assert self.log is not None
        if place is None:
            frames = [bytes(frame) for frame in frames]
        self._held.append(_Held(self.log.end, route, frames, place is None))

    def release(self) -> None:
        """Send what may leave.

        Raises:
            LogFailedError: the log has failed; nothing may leave any more.
        """
        if self._failure:
            raise LogFailedError(self._failure)
        if self.log is None:
            return
        while self._held and self._held[0].upto <= self.log.durable:
            one = self._held.popleft()
            self._endpoint.send(one.route, one.frames, copies=one.copies)

    def acknowledge_wake(self) -> None:
        """The thread has woken."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def wake(self) -> None:
        """The log is further; callable from the thread that writes it."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.descriptor, 1)

    def fail(self, reason: str) -> None:
        """The log has failed; callable from the thread that writes it."""
        self._failure = reason
        self.wake()

    def close(self) -> None:
        """What is held is never sent."""
        self._held.clear()
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)
