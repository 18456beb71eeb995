"""CURVE on the server's sockets: who may connect, and proof at start-up that others may not.

zmq asks an authenticator (ZAP, https://rfc.zeromq.org/spec/27) in this process about every handshake. It fails open in
two ways: with a domain but without a living authenticator everybody is let in, unless ZMQ_ZAP_ENFORCE_DOMAIN is set;
with that but an empty domain the authenticator is not asked. Both are set here, and ``probe`` tries the locks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from psengine.errors import AuthenticationError, ConfigurationError
from psengine.protocol.keys import KeyPair, read_allowed, read_key_pair, write_key_pair
from psengine.server.logging_format import RateLimit

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "psengine"
PROBE_DEADLINE_S = 3.0
# An unknown key makes the list be read again, so that workers can be added while the server runs; not more often.
RELOAD_S = 1.0
_POLL_MS = 100

_VERDICT_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
_monitor_numbers = itertools.count()
_VERDICTS: dict[int, str] = {zmq.EVENT_HANDSHAKE_SUCCEEDED: "accepted", zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused"}


def new_key_pair() -> KeyPair:
    """A random pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def keygen(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Write a new ``NAME.key`` (ours alone, mode 0600) and ``NAME.pub``; the two paths.

    Raises:
        ConfigurationError: the name is no file name, or the files exist or cannot be written.
    """
    if not zmq.has("curve"):
        raise ConfigurationError("This libzmq was built without CURVE (expected pyzmq with libsodium, as its wheels).")
    return write_key_pair(directory, name, new_key_pair())


class Authenticator(threading.Thread):
    """Answers zmq's question who may connect: clients with a key of ``allow``, by CURVE, and nobody else.

    Args:
        context: whose sockets are guarded; one authenticator per context.
        curve_key: the server's ``.key`` file.
        allow: directory or file of public keys, all good at the start. It is read again while the server runs, and
            then a file that is gone or malformed allows nobody. Who is connected already stays.

    Attributes:
        refused: handshakes refused; those of clients that expect another server's key count once the locks are probed.

    Raises:
        ConfigurationError: a file is missing, malformed, or readable by others.
    """

    def __init__(self, context: zmq.Context[Any], curve_key: Path, allow: Path) -> None:
        super().__init__(name="psengine-authenticator", daemon=True)
        self._context = context
        self._pair = read_key_pair(curve_key)
        self._allow = allow
        self._allowed = read_allowed(allow)
        # Why some of it could not be read the last time; said once.
        self._faults: set[str] = set()
        self._read_s = time.monotonic()
        self._refusals = RateLimit()
        self._ends = threading.Event()
        self.refused = 0
        self._is_probed = False
        # Sockets whose handshakes are watched once the probe, which fails on purpose, is over; then their events.
        self._unwatched: list[zmq.Socket[bytes]] | None = []
        self._new_doors: SimpleQueue[zmq.Socket[Any]] = SimpleQueue()
        self._doors: list[zmq.Socket[Any]] = []
        if self._pair.public in self._allowed:
            logger.warning("the server's own key is among the allowed clients in %s", allow)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)

    @property
    def client_count(self) -> int:
        """How many keys are allowed."""
        return len(self._allowed)

    @property
    def public_key(self) -> str:
        """The server's, which clients have to know."""
        return self._pair.public

    def secure(self, router: zmq.Socket[bytes]) -> None:
        """Make an unbound socket take CURVE clients that this authenticator lets in."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        router.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._unwatched is None:
            self._watch(router)
        else:
            self._unwatched.append(router)

    def _watch(self, router: zmq.Socket[bytes]) -> None:
        """Have this thread hear of handshakes that fail on ``router``; call it in the thread that owns the socket."""
        name = f"inproc://psengine-door-{next(_monitor_numbers)}"
        router.monitor(name, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_MONITOR_STOPPED)
        events: zmq.Socket[Any] = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        events.setsockopt(zmq.RCVHWM, 0)  # zmq's own thread would wait for a place
        events.connect(name)
        self._new_doors.put(events)

    def run(self) -> None:
        """Answer until ``end``."""
        try:
            while not self._ends.is_set():
                if self._socket.poll(_POLL_MS, zmq.POLLIN):
                    self._socket.send_multipart(self.judge(self._socket.recv_multipart()))
                self._look_at_doors()
        except BaseException:
            # Nobody gets in any more; who is in stays. The daemon sees the dead thread.
            logger.critical("the authenticator failed", exc_info=True)
        finally:
            self._socket.close(linger=0)
            for door in self._doors:
                door.close(linger=0)

    def _look_at_doors(self) -> None:
        try:
            while True:
                self._doors.append(self._new_doors.get_nowait())
        except Empty:
            pass
        for door in tuple(self._doors):
            while door.poll(0, zmq.POLLIN):
                event = recv_monitor_message(door, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    self._doors.remove(door)
                    door.close(linger=0)
                    break
                # The authenticator is not asked, as zmq cannot even read whose key it would be.
                if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                    where = event["endpoint"].decode("ascii", "replace")
                    self._count_refusal(f"at {where}: its client expects a server with another key")

    def judge(self, request: list[bytes]) -> list[bytes]:
        """The answer to one request: 200 and the key as User-Id, or 400."""
        if len(request) < 6:
            return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"malformed request", b"", b""]
        version, number, domain, address, _, mechanism, *credentials = request
        reason = ""
        key = ""
        if version != b"1.0" or domain != ZAP_DOMAIN.encode():
            reason = "wrong ZAP version or domain"
        elif mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            reason = "only CURVE is taken"
        else:
            key = z85.encode(credentials[0]).decode()
            if not self._is_allowed(key):
                reason = "unknown key"
        if reason:
            shown = f"{reason} {key}" if key else reason
            self._count_refusal(f"from {address.decode('ascii', 'replace')}: {shown}")
            return [b"1.0", number, b"400", reason.encode(), b"", b""]
        return [b"1.0", number, b"200", b"OK", key.encode(), b""]

    def _is_allowed(self, key: str) -> bool:
        now_s = time.monotonic()
        if now_s - self._read_s > RELOAD_S:
            self._read_s = now_s
            self._allowed, faults = _read_what_is_good(self._allow)
            for fault in sorted(faults - self._faults):
                logger.error("keys that cannot be read are not allowed: %s", fault)
            self._faults = faults
        return key in self._allowed

    def _count_refusal(self, what: str) -> None:
        if self._is_probed:
            return
        self.refused += 1
        suppressed = self._refusals.allows(time.monotonic())
        if suppressed is not None:
            logger.warning("refused a connection %s (%d unmentioned)", what, suppressed)

    def probe(self, addresses: list[str]) -> None:
        """See ``probe``; the strangers it plays are neither counted nor logged."""
        self._is_probed = True
        try:
            probe(self._context, addresses, self.public_key)
        finally:
            self._is_probed = False
        for router in self._unwatched or ():
            self._watch(router)
        self._unwatched = None

    def end(self) -> None:
        """Stop answering: nobody gets in any more."""
        self._ends.set()
        if self.is_alive():
            self.join(timeout=5.0)


def _read_what_is_good(allow: Path) -> tuple[dict[str, str], set[str]]:
    """``read_allowed`` file by file, and why files were left out: a bad one must not keep in who was removed."""
    keys: dict[str, str] = {}
    faults: set[str] = set()
    try:
        files = sorted(path for path in allow.iterdir() if path.name.endswith(".pub"))
    except NotADirectoryError:
        files = [allow]
    except OSError as error:
        return {}, {f"{allow} cannot be read, so that nobody is let in any more ({error.strerror})"}
    for file in files:
        try:
            keys.update(read_allowed(file))
        except (ConfigurationError, OSError) as error:
            faults.add(str(error))
    return keys, faults


def probe(context: zmq.Context[Any], addresses: list[str], server_public: str) -> None:
    """See that a client with an unknown key, and one without any, are refused by every address.

    Raises:
        AuthenticationError: one was let in, or was not refused within the deadline.
    """
    for address in addresses:
        # One with a key must be refused by the authenticator, which also shows that there is one.
        for pair, expected in ((new_key_pair(), ("refused",)), (None, ("refused", "cut"))):
            verdict = try_handshake(context, address, server_public, pair)
            if verdict not in expected:
                who = "a client without a key" if pair is None else "a client with an unknown key"
                raise AuthenticationError(
                    f"{address} does not keep strangers out (expected {who} to be {expected[0]}, got: {verdict})."
                    " The server does not start; this is a bug of psengine or of this libzmq build, please report it."
                )


def try_handshake(
    context: zmq.Context[Any],
    address: str,
    server_public: str,
    pair: KeyPair | None,
    deadline_s: float = PROBE_DEADLINE_S,
) -> str:
    """Connect with ``pair`` (None: without CURVE) and say what came of it.

    Returns:
        "accepted"; "refused" by the authenticator; "cut", the handshake failed before it was asked, or got no answer;
        "no verdict" by the deadline.
    """
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    if "[" in address:
        dealer.setsockopt(zmq.IPV6, 1)
    if pair is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    events = dealer.get_monitor_socket(_VERDICT_EVENTS)
    try:
        dealer.connect(address)
        last_s = time.monotonic() + deadline_s
        while (left_s := last_s - time.monotonic()) > 0:
            if events.poll(max(1, int(left_s * 1000)), zmq.POLLIN):
                event = recv_monitor_message(events, zmq.NOBLOCK)["event"]
                return _VERDICTS.get(event, "cut")
        return "no verdict"
    finally:
        dealer.disable_monitor()
        events.close(linger=0)
        dealer.close(linger=0)
