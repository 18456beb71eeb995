"""Whether a socket's handshakes succeed, and with whom: libzmq retries for ever without a word."""

from __future__ import annotations

import contextlib
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
# A ZMTP server sends the first bytes of its greeting at once and unasked.
KNOCK_S = 2.0
# https://rfc.zeromq.org/spec/23: the signature is FF, eight bytes of padding, 7F.
_SIGNATURE_FIRST, _SIGNATURE_LAST, _SIGNATURE_BYTES = 0xFF, 0x7F, 10

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitor_numbers = itertools.count()


class _Knock:
    """A connection that sends nothing and waits for a ZMTP greeting: is a server behind an address?"""

    def __init__(self, context: Any, address: str, now_s: float) -> None:
        self._ends_s = now_s + KNOCK_S
        self._received = b""
        self._socket: Any = context.socket(zmq.STREAM)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)

    def look(self, now_s: float) -> bool | None:
        """Whether a server greets; None while that is open."""
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            # An empty message says that the connection was made, or has ended.
            self._received += self._socket.recv_multipart(zmq.NOBLOCK)[-1][:_SIGNATURE_BYTES]
        if len(self._received) >= _SIGNATURE_BYTES:
            return (self._received[0], self._received[_SIGNATURE_BYTES - 1]) == (_SIGNATURE_FIRST, _SIGNATURE_LAST)
        return False if now_s >= self._ends_s else None

    def close(self) -> None:
        self._socket.close(linger=0)


class HandshakeMonitor:
    """Watches one socket's handshakes.

    Once a handshake has succeeded, handshakes that are cut most likely mean a restarting server behind a tunnel, a
    proxy or a load balancer, which take connections and drop them. Only where a server greets meanwhile (``_Knock``)
    its keys have changed.
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
        self._knock: _Knock | None = None
        self._was_greeted = False  # since the last handshake that succeeded
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
                self._begin_anew()
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
            elif self._was_greeted:
                self._begin_anew()
                found = self._error("it did before, and its public key is not the one expected any more")
            elif has_keys and self._knock is None and self._address.startswith("tcp://"):
                with contextlib.suppress(zmq.ZMQError):  # no descriptor is left; the handshakes go on
                    self._knock = _Knock(self._socket.context, self._address, now_s)
        self._look_who_greets(now_s)
        return found

    def _look_who_greets(self, now_s: float) -> None:
        greets = None if self._knock is None else self._knock.look(now_s)
        if greets is not None:
            self._begin_anew()  # only handshakes that are cut from here on are cut by the server that greeted
            self._was_greeted = greets

    def _begin_anew(self) -> None:
        """Forget the cut handshakes, and the greeting."""
        self._cut_off = 0
        self._was_greeted = False
        if self._knock is not None:
            self._knock.close()
            self._knock = None

    def _count_cut(self, now_s: float) -> None:
        if self._cut_off == 0 or now_s - self._last_cut_s > SLOW_CUT_S:
            self._cut_off, self._first_cut_s = 0, now_s
        self._cut_off += 1
        self._last_cut_s = now_s

    def _error(self, reason: str) -> AuthenticationError:
        return refusals.unfitting_keys(self._address, self.keys_for(self.way), reason)

    def close(self) -> None:
        """End watching."""
        self._begin_anew()
        try:
            self._socket.disable_monitor()
        finally:
            self._events.close()
