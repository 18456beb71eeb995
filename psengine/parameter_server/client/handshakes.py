"""Whether a server lets this client in, and whether it is one to trust, by what libzmq says of its handshakes."""

from __future__ import annotations

import os

import zmq

from psengine.environment import local_sockets
from psengine.errors import AuthenticationError
from psengine.parameter_server.client import refusals
from psengine.protocol.keys import CurveClientKeys

# So many handshakes cut off, over so long, before any has succeeded: the server refuses. Cuts further apart are of
# handshakes that ran into their time, with a server that is stopped or busy; they do not count.
MAX_CUT_HANDSHAKES = 4
CUT_HANDSHAKES_S = 1.0
SLOW_CUT_S = 1.5


class Handshakes:
    """Those with one address.

    Once a handshake has succeeded, handshakes that are cut most likely mean a restarting server behind a tunnel, a
    proxy or a load balancer, which take connections and drop them: the client goes on trying.

    Attributes:
        way: where the last one succeeded; "" before.
    """

    def __init__(self, address: str, keys: CurveClientKeys | None) -> None:
        self._address = address
        self._keys = keys
        self.way = ""
        self._cut_off = 0
        self._first_cut_s = self._last_cut_s = 0.0

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

    def ended(self, event: int, way: str, now_s: float) -> AuthenticationError | None:
        """A handshake ended; why this client is not let in, None where that is not known."""
        keys = self.keys_for(way)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.way, self._cut_off = way, 0
            return self.find_stranger(way)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return refusals.refused(self._address, way, keys)
        reason = "one side expects CURVE keys and the other has none, or it is no psengine-server"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if not self._has_cut_enough(now_s):
                return None
            reason = "the server's public key is not the one expected" if keys else "it expects CURVE keys"
            reason += ", or it is no psengine-server"
        return refusals.unfitting_keys(self._address, keys, reason)

    def _has_cut_enough(self, now_s: float) -> bool:
        if self._cut_off == 0 or now_s - self._last_cut_s > SLOW_CUT_S:
            self._cut_off, self._first_cut_s = 0, now_s
        self._cut_off += 1
        self._last_cut_s = now_s
        if self._cut_off < MAX_CUT_HANDSHAKES or now_s - self._first_cut_s < CUT_HANDSHAKES_S:
            return False
        self._cut_off = 0
        return not self.way
