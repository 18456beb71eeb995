"""A client's clock, randomness and sockets. A simulation has its own.

A link is one connection at a time: number 0 to the job's coordinator, 1 + k to shard k of the job's shards.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from psengine.errors import AuthenticationError, ProtocolError, PSEngineError
from psengine.parameter_server.client.options import SessionOptions
from psengine.protocol.messages import Message

if TYPE_CHECKING:
    from psengine.parameter_server.client.channel import Channel
    from psengine.parameter_server.client.segments import WorkerSegments

CONTROL = 0  # the link to the coordinator


class Receiver(Protocol):
    """The methods that a transport calls, on one thread; none may raise or block."""

    def received(self, link: int, message: Message, now_s: float) -> None:
        """A message came."""

    def garbled(self, link: int, error: ProtocolError, now_s: float) -> None:
        """Something came that is no message."""

    def connected(self, link: int, now_s: float) -> None:
        """The connection that was opened last is there."""

    def disconnected(self, link: int, now_s: float) -> None:
        """That connection has ended, or could not be made. Nothing more is heard of it."""

    def moved(self, link: int, now_s: float) -> None:
        """Bytes of payloads have left."""

    def rejected(self, link: int, error: AuthenticationError, now_s: float) -> None:
        """The server does not let this client in."""

    def tick(self, now_s: float) -> None:
        """100 ms have passed."""

    def crashed(self, error: PSEngineError) -> None:
        """The transport has ended."""


class Transport(Protocol):
    """Connections, and the thread on which the receiver is called; see ``connection.Connection``.

    Attributes:
        segments: memory shared with servers of this host; None where the transport has no such.
    """

    segments: WorkerSegments | None

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs on that thread, and must not wait for answers."""

    def do(self, function: Callable[..., None], *arguments: object) -> None:
        """Call ``function(*arguments)`` on that thread, in the order of calls; any thread.

        Raises:
            ServerError: the thread has ended, or this is a child process.
        """

    def open(self, link: int, address: str, lease_s: float) -> None:
        """Begin a new connection of this link; a former one is closed. That thread alone.

        A connection that ends is not made again by itself, and one to a silent host ends within about ``lease_s``.
        """

    def send(self, link: int, message: Message) -> bool:
        """Send now; False where there is no connection. A payload must stay as it is. That thread alone."""

    def close(self) -> None:
        """End; the receiver hears ``crashed``. Any thread; idempotent; does nothing in a child process."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """See the module's text.

    Attributes:
        now_s: seconds since any moment, never going back; of the same clock as the receiver's ``now_s``.
        draw_nonce: 64 random bits, by which the coordinator tells this client from others.
        connect: makes the transport for a receiver.
        watch: called with each new channel and the seconds that it may take; says why its server cannot be reached.
        is_listening: whether anything listens at an ipc:// address.
        host, process_id: of this process, for people.
    """

    now_s: Callable[[], float]
    draw_nonce: Callable[[], int]
    connect: Callable[[Receiver, SessionOptions], Transport]
    watch: Callable[[Channel, threading.Event, float], None]
    is_listening: Callable[[str], bool]
    host: Callable[[], str] = socket.gethostname
    process_id: Callable[[], int] = os.getpid
