"""A client's clock and sockets. A simulation has its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from psengine.environment.processes import process_table
from psengine.protocol.messages import Message

if TYPE_CHECKING:
    from psengine.parameter_server.client.channel import Channel
    from psengine.parameter_server.client.job_client import JobClient
    from psengine.parameter_server.client.segments import WorkerSegments


class Transport(Protocol):
    """Connections, and the thread on which channels hear of them; see ``connection.Connection``.

    A channel has one connection at a time. On that thread, ``received``, ``garbled``, ``connected``, ``disconnected``
    and ``moved`` of channels are called, and ``tick`` (each 100 ms), ``fail`` and ``crashed`` of the job's connection.

    Attributes:
        segments: memory shared with servers of this host; None where the transport has no such.
    """

    segments: WorkerSegments | None

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs on that thread, and must not wait for answers."""

    def do(self, function: Callable[..., None], *arguments: object) -> None:
        """Call ``function(*arguments)`` on that thread: now if this is it, else soon, in the order of calls.

        Raises:
            ServerError: the thread has ended, or this is a child process.
        """

    def open(self, channel: Channel) -> None:
        """Begin a new connection of this channel; a former one is closed. That thread alone.

        A connection that ends is not made again by itself, and one to a silent host ends within about a lease.
        """

    def send(self, channel: Channel, message: Message) -> None:
        """Send now; nothing where there is no connection. A payload must stay as it is. That thread alone."""

    def close(self) -> None:
        """End; the job hears ``crashed``. Any thread; idempotent; does nothing in a child process."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """See the module's text.

    Attributes:
        now_s: seconds since any moment, never going back.
        connect: makes the transport.
        host, process_id: of this process, for people.
        process_table: see ``environment/processes.py``.
    """

    now_s: Callable[[], float]
    connect: Callable[[JobClient], Transport]
    host: Callable[[], str] = socket.gethostname
    process_id: Callable[[], int] = os.getpid
    process_table: Callable[[], str] = process_table
