"""Does a socket's handshake succeed, and is who answers to be trusted? libzmq tries for ever, and says nothing."""

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

# Handshakes that are cut off this often, for this long, and never succeeded, are so for a reason. Those that run into
# HANDSHAKE_MS come slower: a server that is stopped or busy is none that refuses.
MAX_CUT_HANDSHAKES = 4
CUT_HANDSHAKES_S = 1.0
SLOW_CUT_S = 1.5
# Whoever is asked whether it is a server at all says so at once: the first bytes of a ZMTP greeting go out unasked.
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
    """A connection that waits for a ZMTP server's greeting and says nothing: is there one behind an address?"""

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
            # An empty one says that the connection was made, or has ended.
            self._received += self._socket.recv_multipart(zmq.NOBLOCK)[-1][:_SIGNATURE_BYTES]
        if len(self._received) >= _SIGNATURE_BYTES:
            return (self._received[0], self._received[_SIGNATURE_BYTES - 1]) == (_SIGNATURE_FIRST, _SIGNATURE_LAST)
        return False if now_s >= self._ends_s else None

    def close(self) -> None:
        self._socket.close(linger=0)


class HandshakeMonitor:
    """Watches one socket's handshakes: a refused client would else try for ever and say nothing.

    Once one has succeeded, those that are cut are most likely a server's that restarts behind a tunnel, a proxy or a
    load balancer, which take connections and drop them. Only where a server greets all the while (``_Knock``) were its
    keys changed.
    """

    def __init__(self, socket: Any, address: str, keys: CurveClientKeys | None) -> None:
        self._socket = socket
        self._address = address
        self._keys = keys
        # pyzmq's own name for it is taken from the descriptor, whose number may be in use again.
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
        # Since the last handshake that succeeded, a server was there; handshakes were cut before, and are after.
        self._was_greeted = False
        # Whoever reads the events has yet to be told of a connection.
        self.is_new = False
        # Where the socket is connected to; "" nowhere yet.
        self.way = ""

    def keys_for(self, way: str) -> CurveClientKeys | None:
        """What to show there: who has a secret instead of keys goes through Unix sockets as the user it is."""
        is_known_by_user = self._keys is not None and self._keys.secret_file and way.startswith("ipc://")
        return None if is_known_by_user else self._keys

    def find_stranger(self, way: str) -> AuthenticationError | None:
        """Why whoever listens at ``way`` is not to be trusted, which keys would tell; None where it is."""
        is_ours = way != self._address  # in a directory of this user's own
        if is_ours or self.keys_for(way) is not None:
            return None
        try:
            uid = local_sockets.listener_uid(way)
        except PermissionError:
            return refusals.refused(self._address, way, None)
        return None if uid in (None, 0, os.geteuid()) else refusals.another_user(self._address, uid)

    def read(self, now_s: float) -> AuthenticationError | None:
        """What the events since the last call amount to."""
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
            self._begin_anew()  # only what is cut from here on is cut by the server that greeted
            self._was_greeted = greets

    def _begin_anew(self) -> None:
        """Forget what was cut, and who greeted."""
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
