"""A client of a job's coordinator: who it is, what it asks, and how all ends.

    any thread       ask(channel, message) ── do ──►  the I/O thread: channel.begin
    the transport    received, connected, tick ─────► channels

Pure: clock and sockets come with the ``Runtime``.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from psengine.errors import PSEngineError
from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.control import Control
from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.client.operation import Parking, Request
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime, Transport
from psengine.parameter_server.client.stalls import StallWatch
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, Message
from psengine.protocol.views import View, release_of
from psengine.tracing.stall_inspector import stall_after_s
from psengine.tracing.telemetry import Telemetry

logger = logging.getLogger(__name__)

# Decisions since the view, for shards that a new connection is made to: a shard has taken earlier ones.
KEPT_RELEASES = 64
# Request ids lie above any step, so that an ERROR's sequence tells which of the two it is about.
FIRST_REQUEST = 1 << 40


@dataclass(slots=True)
class Identity:
    """Who this client is: its job's number, its rank (NOBODY for readers and before WELCOME), which process it is."""

    job: int
    worker: int = NOBODY
    incarnation: int = 0


class JobClient:
    """See the module's text. Subclasses take part in a job; their own attributes are there before this constructor.

    Args:
        options: of the client.
        runtime: the clock and sockets.

    Attributes:
        identity: who this client is.
        nonce: tells the coordinator this client from others that claim its rank.
        servers: what is known of each; the first is the lead.
        control: the connection to the coordinator; a reader never opens it.
        key: the job's, by WELCOME.
        view, view_number: the view that this worker is in; None, 0 while it is in none.
        view_message: what shards hear first: that view, or the one without workers with which the job begins anew.
        releases: the decisions that came since.
        news: grows with each WELCOME and each view.
        lease_s, heartbeat_s: as the coordinator said.
        telemetry: the counters in this worker's heartbeats.
        fatal: why nothing can go on; None while it can.
        closing: set when the client ends.
    """

    transport: Transport

    def __init__(self, options: SessionOptions, runtime: Runtime) -> None:
        self.options = options
        self.runtime = runtime
        self.identity = Identity(job_number(options.job))
        self.nonce = secrets.randbits(64) if options.nonce is None else options.nonce
        self.key: bytes | None = None
        self.view: View | None = None
        self.view_number = 0
        self.view_message: Message | None = None
        self.releases: deque[Message] = deque(maxlen=KEPT_RELEASES)
        self.news = 0
        self.lease_s, self.heartbeat_s = 5.0, 1.0
        self.telemetry = Telemetry(runtime.now_s)
        self.fatal: PSEngineError | None = None
        self.parking = Parking(runtime.now_s)
        self.closing = threading.Event()
        self._ids = itertools.count(FIRST_REQUEST)
        self._stalls = StallWatch(stall_after_s())
        self.servers = [KnownServer(name) for name in options.addresses]
        self.control = Control(self, self.servers[0])
        self.transport = runtime.connect(self)

    def __str__(self) -> str:
        """Who this is, for the log."""
        rank = self.identity.worker
        return f"{'a reader' if rank == NOBODY else f'worker {rank}'} of job {self.options.job!r}"

    # ---- asking; any thread ------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A request's id."""
        return next(self._ids)

    def open(self, channel: Channel) -> None:
        """Begin a connection."""
        self.transport.do(lambda: channel.open(self.runtime.now_s()))

    def ask(self, channel: Channel, message: Message, *, timeout_s: float | None = None, **options: Any) -> Request:
        """Begin a request; its id is set here. The options are those of ``Request``.

        Raises:
            ServerError: the client is closed.
        """
        message.sequence = self.next_id()
        request = Request(message, self.parking, self.options.timeout_s if timeout_s is None else timeout_s, **options)
        self.transport.do(self.begin, channel, request)
        return request

    def begin(self, channel: Channel, request: Request) -> None:
        """A request was made; the I/O thread."""
        if self.fatal is not None:
            request.fail(self.fatal)
        else:
            channel.begin(request)

    # ---- the coordinator; the I/O thread -----------------------------------------------------------------------

    def hello(self, now_s: float) -> dict[str, Any]:
        """HELLO's fields about this client's part in the job."""
        raise NotImplementedError

    def membership(self, completed: int) -> dict[str, Any]:
        """HELLO's fields about the view that this client is in."""
        assert self.view is not None, "it is in one"
        assert self.view_message is not None, "the view came with it"
        said = {"view": self.view.number, "digest": self.view_message.body["digest"], "completed": completed}
        releases = [*self.view.releases, *(release_of(one.body) for one in self.releases)]
        return said | ({"release": max(one.number for one in releases)} if releases else {})

    def progress(self, now_s: float) -> dict[str, Any]:
        """HEARTBEAT's."""
        raise NotImplementedError

    def welcomed(self, message: Message, now_s: float, *, is_same: bool) -> None:
        """The coordinator lets this client in; ``is_same``: the same life of it as before."""
        body = message.body
        self.identity.worker, self.identity.incarnation = message.worker, message.incarnation
        self.lease_s, self.heartbeat_s = body["lease_s"], body["heartbeat_s"]
        self.key = body.get("key", self.key)
        if "warning" in body:
            logger.warning("%s", body["warning"])

    def prepare(self, number: int) -> None:
        """PREPARE: a view will come."""
        raise NotImplementedError

    def receive_view(self, message: Message, now_s: float) -> None:
        """VIEW."""
        raise NotImplementedError

    def receive_release(self, message: Message) -> None:
        """RELEASE."""

    def receive_state_wanted(self, message: Message) -> None:
        """STATE_WANTED."""

    def receive_meet(self, message: Message) -> None:
        """MEET."""

    def gather(self, server: KnownServer, now_s: float) -> None:
        """Another process leads this server, or has told of its shards: all channels go there."""
        for channel in self.channels:
            place = server.places[0]
            is_open = channel.is_connected or channel.retry_at_s < math.inf
            if is_open and channel.server is server and channel.address not in place and channel.shard < len(place):
                channel.open(now_s, place[channel.shard])

    # ---- endings -----------------------------------------------------------------------------------------------

    @property
    def channels(self) -> list[Channel]:
        """All connections."""
        return [self.control]

    def fail(self, error: PSEngineError) -> None:
        """Nothing can go on: every operation ends with ``error``."""
        if self.fatal is None:
            self.fatal = error
        for channel in self.channels:
            for operation in reversed(channel.open_operations()):
                channel.fail(operation, self.fatal)

    # ---- called by the transport -------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """100 ms have passed."""
        if self.fatal is None:
            for channel in self.channels:
                channel.tick(now_s)
        self._stalls.look(self, self.channels, now_s)

    def crashed(self, error: PSEngineError) -> None:
        """The transport has ended."""
        self._stalls.look(str(self), self.channels, self.runtime.now_s())  # the end of a stall may be unseen yet
        self.fail(error)
