"""The thread of a server that follows or may be followed: connections to a leader, and questions to the elector.

┌► messages of the leader ─► Pair ─► KEPT ─► what the elector answered ─► Succession ─► the next question ─┐
└──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

The elector is asked in a thread of its own, which blocks until its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq

from psengine.environment.local_sockets import way_to
from psengine.parameter_server.server.replication.election import Answer, Elector, Question, ask
from psengine.parameter_server.server.replication.etcd import EtcdElector
from psengine.parameter_server.server.replication.pair import Pair
from psengine.parameter_server.server.replication.record_file import FileElector
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.sockets import Waker, make_dealer
from psengine.protocol.keys import KeyPair, read_login

LOOP_MS = 20
# Then the leader hears of what is kept.
RECEIVES_PER_TURN = 64
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _REFUSED


def make_elector(settings: ServerSettings) -> Elector:
    """The one of ``--election``.

    Raises:
        ConfigurationError: a file of its settings cannot be read.
    """
    kind, _, place = (settings.election or "").partition("=")
    if kind == "launcher":
        return FileElector(Path(place))
    hosts, _, name = place.partition("/")
    login = None if settings.etcd_login is None else read_login(settings.etcd_login)
    return EtcdElector(hosts.split(","), name or "default", settings.lease_s, ca=settings.etcd_ca, login=login)


class Replication(threading.Thread):
    """Runs ``pair`` until ``end``, and is its transport: one DEALER socket for each shard of the leader.

    Args:
        elector: asked in a thread of its own.
        keys_for: the server's own keys, which the leader has too, where a connection to an address needs some.
        lease_s: a connection to a host that is gone ends within it.

    Attributes:
        pair: set before the start; used by this thread alone, but for what it says.
        failure: what ended the thread, and ends the server.
        wake: says that there is something to say to the leader; any thread.
    """

    pair: Pair

    def __init__(self, elector: Elector, keys_for: Callable[[str], KeyPair | None], lease_s: float) -> None:
        super().__init__(name="psengine-replication", daemon=True)
        self.failure: Exception | None = None
        self._elector, self._keys_for, self._lease_s = elector, keys_for, lease_s
        self._asked: tuple[Question, Future[Answer]] | None = None
        self._electors_thread = ThreadPoolExecutor(1, thread_name_prefix="psengine-elector")
        self._ends = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: dict[int, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}  # each with its monitor
        self._poller = zmq.Poller()
        self._waker = Waker()
        self.wake = self._waker.wake
        self._poller.register(self._waker.descriptor, zmq.POLLIN)

    # ---- other threads -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """End; the lease is given back, so that the follower leads at once."""
        self._ends.set()
        if self.is_alive():
            self.join(5.0)
        self.close()
        self._waker.close()
        self._context.term()
        self._electors_thread.submit(self._elector.close)
        self._electors_thread.shutdown(wait=True)

    # ---- the transport of ``Following`` ------------------------------------------------------------------------

    def open(self, shard: int, address: str) -> None:
        """Begin a connection to a leader's shard; the pair is told once it has ended, or cannot be made."""
        way = way_to(address)
        keys = self._keys_for(way)
        pair = None if keys is None else (keys.public, keys)
        socket = make_dealer(self._context, address, self._lease_s, pair, linger_ms=0)
        self._sockets[shard] = socket, socket.get_monitor_socket(_ENDS)
        for one in self._sockets[shard]:
            self._poller.register(one, zmq.POLLIN)
        socket.connect(way)

    def send(self, shard: int, frames: Sequence[Any]) -> None:
        """Send, or nothing where there is no connection."""
        if shard in self._sockets:
            self._sockets[shard][0].send_multipart(frames)

    def close(self) -> None:
        """End all connections."""
        sockets, self._sockets = self._sockets, {}
        for socket, events in sockets.values():
            self._poller.unregister(socket)
            self._poller.unregister(events)
            socket.disable_monitor()
            events.close()
            socket.close(0)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop."""
        try:
            while not self._ends.is_set():
                self._receive()
                self.pair.tick(time.monotonic())
                self._ask()
        except Exception as error:
            self.failure = error

    def _receive(self) -> None:
        """Give what comes within a moment to the pair."""
        ready = dict(self._poller.poll(LOOP_MS))
        self._waker.clear()
        for shard, (socket, events) in list(self._sockets.items()):
            for _ in range(RECEIVES_PER_TURN if socket in ready else 0):
                if socket.closed or not socket.poll(0):
                    break
                frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
                self.pair.received(shard, frames, time.monotonic())
            if events in ready and not events.closed:
                self.pair.disconnected(shard)

    def _ask(self) -> None:
        succession = self.pair.succession
        if self._asked is not None and self._asked[1].done():
            question, answered = self._asked
            self._asked = None
            succession.heard(question, answered.result(), time.monotonic())
        if self._asked is None and (wanted := succession.next(time.monotonic())) is not None:
            self._asked = wanted, self._electors_thread.submit(ask, self._elector, wanted)
