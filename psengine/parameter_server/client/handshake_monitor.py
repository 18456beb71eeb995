"""Whether a socket's handshakes succeed, and with whom: libzmq retries for ever without a word."""

from __future__ import annotations

import itertools
import os
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from psengine.environment import local_sockets
from psengine.errors import AuthenticationError
from psengine.parameter_server.client import refusals
from psengine.protocol.keys import CurveClientKeys

# So many handshakes cut off, over so long, before any has succeeded: the server refuses. Cuts further apart are of
# handshakes that ran into HANDSHAKE_MS, with a server that is stopped or busy; they do not count.
MAX_CUT_HANDSHAKES = 4
CUT_HANDSHAKES_S = 1.0
SLOW_CUT_S = 1.5
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitor_numbers = itertools.count()


class HandshakeMonitor:
    """Watches one socket's handshakes.

    Once a handshake has succeeded, handshakes that are cut most likely mean a restarting server behind a tunnel, a
    proxy or a load balancer, which take connections and drop them: the client goes on trying.
    """

    def __init__(self, socket: Any, address: str, keys: CurveClientKeys | None) -> None:
        self._socket = socket
        self._address = address
        self._keys = keys
        # pyzmq would name it by the descriptor, whose number may be in use again.
        name = f"inproc://psengine-monitor-{next(_monitor_numbers)}"
        socket.monitor(name, _EVENTS)
        self._events: Any = socket.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(name)
        self.has_succeeded = False
        self._cut_off = 0
        self._first_cut_s = 0.0
        self._last_cut_s = 0.0
        self.is_new = False  # a connection that the reader of the events has yet to report
        self.way = ""  # where the socket is connected to

    def keys_for(self, way: str) -> CurveClientKeys | None:
        """The keys to use there: with a secret instead of keys, none for Unix sockets, which know the client's user."""
        is_known_by_user = self._keys is not None and self._keys.secret_file and way.startswith("ipc://")
        return None if is_known_by_user else self._keys

    def find_stranger(self, way: str) -> AuthenticationError | None:
        """Without keys: why the process that listens at ``way`` is not to be trusted; None where it is."""
        is_ours = way != self._address  # in a directory of this user's own
        if is_ours or self.keys_for(way) is not None:
            return None
        try:
            uid = local_sockets.listener_uid(way)
        except PermissionError:
            return refusals.refused(self._address, way, None)
        return None if uid in (None, 0, os.geteuid()) else refusals.another_user(self._address, uid)

    def read(self, now_s: float) -> AuthenticationError | None:
        """Why this client is not let in, by the events until now; None where that is not known."""
        found: AuthenticationError | None = None
        has_keys = self.keys_for(self.way) is not None
        while self._events.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._events, zmq.NOBLOCK)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.has_succeeded = self.is_new = True
                self._cut_off = 0
                found = self.find_stranger(self.way)
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                found = refusals.refused(self._address, self.way, self.keys_for(self.way))
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                found = self._error("one side expects CURVE keys and the other has none, or it is no psengine-server")
            else:
                self._count_cut(now_s)
        if self._cut_off >= MAX_CUT_HANDSHAKES and now_s - self._first_cut_s >= CUT_HANDSHAKES_S:
            self._cut_off = 0
            if not self.has_succeeded:
                found = self._error(
                    "the server's public key is not the one expected, or it is no psengine-server"
                    if has_keys
                    else "it expects CURVE keys, or it is no psengine-server"
                )
        return found

    def _count_cut(self, now_s: float) -> None:
        if self._cut_off == 0 or now_s - self._last_cut_s > SLOW_CUT_S:
            self._cut_off, self._first_cut_s = 0, now_s
        self._cut_off += 1
        self._last_cut_s = now_s

    def _error(self, reason: str) -> AuthenticationError:
        return refusals.unfitting_keys(self._address, self.keys_for(self.way), reason)

    def close(self) -> None:
        """End watching."""
        try:
            self._socket.disable_monitor()
        finally:
            self._events.close()
