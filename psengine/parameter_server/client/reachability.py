"""Why a server cannot be reached, does not let this client in, or is not one to trust: the reason and every fix.

libzmq tries again without a word; what it says of its handshakes, and a look at the address, tell why.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from contextlib import suppress

import zmq

from psengine.environment import local_sockets
from psengine.errors import AuthenticationError, ConfigurationError, PSEngineError
from psengine.parameter_server.client.channel import Channel
from psengine.protocol.keys import CurveClientKeys

logger = logging.getLogger(__name__)

# A server that is started together with its workers listens by then.
SILENCE_S = 3.0
CONNECT_S, ANSWER_S = 3.0, 1.0
# So many handshakes cut off, over so long, before any has succeeded: the server refuses. Cuts further apart are of
# handshakes that ran into their time, with a server that is stopped or busy; they do not count.
MAX_CUT_HANDSHAKES = 4
CUT_HANDSHAKES_S = 1.0
SLOW_CUT_S = 1.5
_ANY_SECRET = "--secret-file FILE at the server and PSENGINE_SECRET_FILE=FILE here, one secret for both"


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
        self._cuts_s: deque[float] = deque(maxlen=MAX_CUT_HANDSHAKES)

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
            return self._refused(way)
        if uid in (None, 0, os.geteuid()):
            return None
        return AuthenticationError(
            f"{self._address} is another user's, who could hand out any weights (expected a server of user"
            f" {os.geteuid()} or of root, got user {uid}'s). Fix: name a server of your own; or, to trust this one,"
            f" {_ANY_SECRET}; or keys (psengine-server keygen)."
        )

    def ended(self, event: int, way: str, now_s: float) -> AuthenticationError | None:
        """A handshake ended; why this client is not let in, None where that is not known."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.way = way
            return self.find_stranger(way)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return self._refused(way)
        reason = "one side expects CURVE keys and the other has none, or it is no psengine-server"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if self.way or not self._has_cut_enough(now_s):
                return None
            known = "the server's public key is not the one expected" if self.keys_for(way) else "it expects CURVE keys"
            reason = f"{known}, or it is no psengine-server"
        return self._unfitting_keys(way, reason)

    def _has_cut_enough(self, now_s: float) -> bool:
        cuts_s = self._cuts_s
        if cuts_s and now_s - cuts_s[-1] > SLOW_CUT_S:
            cuts_s.clear()
        cuts_s.append(now_s)
        return len(cuts_s) == MAX_CUT_HANDSHAKES and now_s - cuts_s[0] >= CUT_HANDSHAKES_S

    def _refused(self, way: str) -> AuthenticationError:
        address = self._address
        if self.keys_for(way) is not None:
            return self._unfitting_keys(way, "the server does not know this client's public key")
        if way.startswith("ipc://"):
            return AuthenticationError(
                f"{address} does not let this client in: it takes connections of its own user and of root alone"
                f" (expected one of these, got user {os.geteuid()}). Fix: start this client as the server's user; or"
                f" bind the server to TCP, with {_ANY_SECRET}; or with keys (psengine-server keygen)."
            )
        try:
            is_here, place = local_sockets.is_loopback(address), "on its machine"
            if is_here:
                place = f"at {local_sockets.socket_beside(address).removeprefix('ipc://')}"
        except ConfigurationError as error:
            place = f"in a directory of ours: {error}"
        return AuthenticationError(
            f"{address} does not let this client in: over TCP it takes nobody without a secret or keys, and its own"
            f" user's clients come through its Unix socket (expected that {place}, got none). Fix: start this client as"
            f" the server's user, on its machine, with the server's PSENGINE_RUNTIME_DIR if it has one; or"
            f" {_ANY_SECRET}; or keys (psengine-server keygen); or, where every user of the server's machine may change"
            " its models, psengine-server --insecure."
        )

    def _unfitting_keys(self, way: str, reason: str) -> AuthenticationError:
        """The two sides' keys do not fit, or one side has none."""
        keys = self.keys_for(way)
        if keys is not None and keys.secret_file:
            return AuthenticationError(
                f"{self._address} does not let this client in with the secret in {keys.secret_file}: {reason}. Fix:"
                " give both sides the same secret: start the server with --secret-file, and set PSENGINE_SECRET_FILE to"
                " a copy here."
            )
        shown = "without CURVE keys" if keys is None else "with the CURVE keys it was given"
        return AuthenticationError(
            f"{self._address} does not let this client in {shown}: {reason}. Fix: give both sides the keys that"
            " psengine-server keygen wrote, and add the client's public key to the server's allow-list; or, where the"
            " server has a secret (--secret-file), set PSENGINE_SECRET_FILE to a copy here."
        )


def watch_first_contact(channel: Channel) -> None:
    """Say why an address does not answer: its name does not resolve, nobody listens there, or somebody else does.

    The reason stands in the log and in the channel's errors; the job fails where a program answers that is no server
    of psengine. A look may take long and has a thread of its own, which nobody waits for.

    Args:
        channel: to an address as ``addresses.parse_addresses`` returns it; ipc:// is not checked.
    """
    closing, options, server = channel.job.closing, channel.job.options, channel.address
    address = local_sockets.host_and_port(server)
    if address is None:
        return
    deadline_s = min(options.connect_timeout_s, options.timeout_s)

    def look() -> None:
        reason, fix = f"the host name {address[0]!r} does not resolve here", "or add the name to DNS or /etc/hosts"
        try:
            socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            reason, fix = "nobody can be reached there", "or start psengine-server there"
            if closing.wait(min(SILENCE_S, deadline_s / 2)) or channel.last_heard_s is not None:
                return
            reason = what_listens(server)
        except (OSError, UnicodeError) as error:
            reason = f"{reason} ({getattr(error, 'strerror', None) or error})"
        except ConfigurationError as error:
            _give_up(channel, error)
            return
        if channel.last_heard_s is None and not closing.is_set():
            channel.last_problem = reason
            logger.warning(
                "the server %s does not answer: %s. Correct the address (PSENGINE_SERVERS, or servers=), %s; it is"
                " tried again for %g s in all.",
                server,
                reason,
                fix,
                deadline_s,
            )

    threading.Thread(target=look, name="psengine-reachability", daemon=True).start()


def refuse(channel: Channel, error: PSEngineError) -> None:
    """Let the job fail because of a handshake; with another reason where no ZeroMQ program answers the address."""

    def look() -> None:
        reason = error
        try:
            what_listens(channel.address)
        except ConfigurationError as stranger:
            reason = stranger
        except OSError:
            pass
        _give_up(channel, reason)

    threading.Thread(target=look, name="psengine-reachability", daemon=True).start()


def _give_up(channel: Channel, error: PSEngineError) -> None:
    with suppress(PSEngineError):  # the job has ended
        channel.job.transport.do(channel.not_let_in, error)


def what_listens(server: str) -> str:
    """Who takes connections at a server's address and may yet be a server of psengine, in words.

    Raises:
        OSError: nobody does.
        ConfigurationError: another program answers; the message names it.
    """
    address = local_sockets.host_and_port(server)
    if address is None:
        return "a Unix socket"
    with socket.create_connection(address, CONNECT_S) as probe:
        first = _first_bytes(probe)
        if not first:
            # Most programs wait for a question.
            with suppress(OSError):
                probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
            first = _first_bytes(probe)
    if first.startswith(b"\xff"):  # ZMTP's signature
        return "a ZeroMQ program listens there: a psengine-server that is busy, or another program"
    if not first:
        return "a program listens there that says nothing: a psengine-server that is stopped, or another program"
    head = first.partition(b"\r\n\r\n")[0].decode("latin-1").splitlines() or [""]
    said = [repr(line[:80]) for line in (head[0], *(one for one in head if one.lower().startswith("server:")))]
    who = "a web server" if head[0].startswith("HTTP/") else "another program"
    raise ConfigurationError(
        f"{server} is no psengine-server: {who} answers there (expected ZeroMQ, got {', '.join(said)}). Fix: correct"
        " the address (PSENGINE_SERVERS, or servers=)"
    )


def _first_bytes(probe: socket.socket) -> bytes:
    probe.settimeout(ANSWER_S)
    with suppress(OSError):  # it may say nothing, or end the connection
        return probe.recv(1024)
    return b""
