"""Answers that wait for the log: what a worker is told is on the disk, or did not depend on it.

    shard    handle ─► records ─► answers, held ···················· released in order
    log                  └─► write ─► sync (a group) ─► wake ────────┘

An answer waits until the log is as far as it was when the answer was made. All of a shard's messages keep their order,
but for what only says that the server lives.
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
from psengine.parameter_server.server.rules.exchange import PayloadPins
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

    def send(
        self, route: bytes, frames: Sequence[Any], *, pins: PayloadPins | None = None, is_urgent: bool = False
    ) -> None:
        """Send now, or once the log is durable.

        Args:
            route: as ``frames``, see ``Endpoint.send``.
            frames: the message's.
            pins: of the last frame's memory, which does not change while they hold it; None: it may at any time.
            is_urgent: it says nothing that a restart could make untrue.
        """
        log = self.log
        if pins is not None:
            pins.pin(frames[-1])
        if log is None or is_urgent or (not self._held and log.durable == log.end):
            self._endpoint.send(route, frames, copies=pins is None)
            return
        if pins is None:
            frames = [bytes(frame) for frame in frames]
        self._held.append(_Held(log.end, route, frames, pins is None))

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
