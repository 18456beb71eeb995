"""Who may connect to the server's sockets.

    Unix socket, in the clear    the server's own user and root; the kernel names a connection's user
    with CURVE                   clients whose key is in the server's key ring
    TCP, in the clear            nobody

zmq asks an authenticator (ZAP, https://rfc.zeromq.org/spec/27) in this process about every handshake. zmq fails open in
two cases: without a living authenticator it accepts everybody, unless ZMQ_ZAP_ENFORCE_DOMAIN is set; with that option
but an empty domain it does not ask the authenticator. So both are set here.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from psengine.errors import ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.shared_secret import pairs_of_secret
from psengine.protocol.keys import KeyPair, read_allowed, read_key_pair, write_key_pair
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "psengine"
# How often the lists of keys are read again, so that workers can be added and removed while the server runs.
RELOAD_S = 1.0
_POLL_MS = 100
# How libzmq names the other end of a Unix socket: its user, group and, where the system tells it, process.
_LOCAL_PEER = re.compile(rb"localhost:(?P<uid>\d+):\d*(?::(?P<pid>\d+))?:?")


# ---- keys ------------------------------------------------------------------------------------------------------------


class KeyList:
    """The public keys of files, all valid at the start.

    They are read again while the server runs; then a missing or malformed file allows nobody. Connected clients stay.

    Args:
        path: directory or file of public keys.

    Raises:
        ConfigurationError: a file is missing or malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_allowed(path)
        # Errors of the last reading; each is logged once.
        self._faults: set[str] = set()
        self._read_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        now_s = time.monotonic()
        if now_s - self._read_s > RELOAD_S:
            self._read_s = now_s
            self._read()
        return key in self._keys

    def _read(self) -> None:
        """Read them file by file: one that is malformed must not keep a removed key allowed."""
        keys, faults = set(), set()
        for file in self._path.glob("*.pub") if self._path.is_dir() else [self._path]:
            try:
                keys |= read_allowed(file)
            except ConfigurationError as error:
                faults.add(str(error))
        for fault in sorted(faults - self._faults):
            logger.error("keys that cannot be read are not allowed: %s", fault)
        self._keys, self._faults = keys, faults


def new_key_pair() -> KeyPair:
    """A random pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def local_peer(address: bytes) -> tuple[int | None, int]:
    """The user and the process at the other end of a Unix socket, by its address in libzmq.

    None for any other address; process 0 where the system does not tell.
    """
    peer = _LOCAL_PEER.fullmatch(address)
    return (None, 0) if peer is None else (int(peer["uid"]), int(peer["pid"] or 0))


def keygen(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Write a new ``NAME.key`` (ours alone, mode 0600) and ``NAME.pub``; the two paths.

    Raises:
        ConfigurationError: the name is no file name, or the files exist or cannot be written.
    """
    return write_key_pair(directory, name, new_key_pair())


# ---- who may connect -------------------------------------------------------------------------------------------------


class Authenticator(threading.Thread):
    """Answers zmq's question who may connect.

    Args:
        context: its sockets are guarded; one authenticator per context.
        settings: name the files of keys. With a curve key a Unix socket needs a client's key too.

    Attributes:
        refused: number of handshakes that it refused.
        names_peers: whether a key says which client it is, so that a worker belongs to the key it came with.

    Raises:
        ConfigurationError: a file is missing, malformed, or readable by others.
    """

    def __init__(self, context: zmq.Context[Any], settings: ServerSettings) -> None:
        super().__init__(name="psengine-authenticator", daemon=True)
        self._own: KeyPair | None = None
        # The one of a secret is public to whoever has the secret.
        self._clients: KeyList | AbstractSet[str] = frozenset()
        self._operators: KeyList | AbstractSet[str] = frozenset()
        self.names_peers = settings.curve_key is not None
        if settings.curve_key is not None and settings.allow is not None:
            self._own, self._clients = read_key_pair(settings.curve_key), KeyList(settings.allow)
            if settings.admin_allow is not None:
                self._operators = KeyList(settings.admin_allow)
        elif settings.secret_file is not None:
            self._own, client = pairs_of_secret(settings.secret_file)
            self._clients = {client.public}
        self._users = frozenset() if self.names_peers else frozenset({os.geteuid(), 0})
        self._refusals = RateLimit()
        self._ends = threading.Event()
        self.refused = 0
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)

    def describe(self) -> str:
        """Who may connect, for the lines of start-up."""
        curve = ""
        if self._own is not None:
            clients = f"{len(self._clients)} keys" if self.names_peers else "whoever has the secret is"
            operators = f", {len(self._operators)} of operators" if self._operators else ""
            curve = f"CURVE: {clients} allowed{operators}; "
        local = "" if self.names_peers else f"over the Unix socket user {os.geteuid()} and root; "
        return f"{curve}{local}nobody else"

    def is_operator(self, key: str) -> bool:
        """Whether a client with this public key may give orders."""
        return key in self._operators

    def is_own(self, key: str) -> bool:
        """Whether a client with this public key has the server's keys: its follower, which leads with them one day."""
        return self._own is not None and key == self._own.public

    def keys_for(self, address: str) -> KeyPair | None:
        """The server's keys, where a connection to this address needs some."""
        return self._own if self.names_peers or not address.startswith("ipc://") else None

    def secure(self, router: zmq.Socket[bytes], address: str) -> None:
        """Set a socket's options so that zmq asks this authenticator about connections to ``address``, bound next."""
        keys = self.keys_for(address)
        router.setsockopt(zmq.CURVE_SERVER, int(keys is not None))
        if keys is not None:
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            router.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def run(self) -> None:
        """Answer until ``end``."""
        try:
            while not self._ends.is_set():
                if self._socket.poll(_POLL_MS, zmq.POLLIN):
                    self._socket.send_multipart(self.judge(self._socket.recv_multipart()))
        except BaseException:
            # zmq refuses everybody from now on; the daemon sees the dead thread.
            logger.critical("the authenticator failed", exc_info=True)
        finally:
            self._socket.close(linger=0)

    def judge(self, request: list[bytes]) -> list[bytes]:
        """The answer to one request: 200 and, with keys that name peers, the User-Id; or 400."""
        version, number, domain, address, _, mechanism, *credentials = request
        user_id = ""
        if version != b"1.0" or domain != ZAP_DOMAIN.encode():
            reason = "wrong ZAP version or domain"
        elif mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85.encode(credentials[0]).decode()
            reason = "" if key in self._clients or key in self._operators or self.is_own(key) else f"unknown key {key}"
            user_id = key if self.names_peers or self.is_own(key) else ""
        elif mechanism == b"NULL" and not credentials and self._users:
            reason = self._judge_user(address)
        else:
            reason = "only CURVE is taken"
        if reason:
            self._count_refusal(address.decode("ascii", "replace"), reason)
            return [b"1.0", number, b"400", reason.encode(), b"", b""]
        return [b"1.0", number, b"200", b"OK", user_id.encode(), b""]

    def _judge_user(self, address: bytes) -> str:
        """Why a connection in the clear is refused; "" where it is accepted."""
        user, _ = local_peer(address)
        if user is None:
            return "over TCP in the clear"
        return "" if user in self._users else f"user {user} is another"

    def _count_refusal(self, address: str, reason: str) -> None:
        self.refused += 1
        if (suppressed := self._refusals.allows(time.monotonic())) is not None:
            logger.warning("refused a connection from %s: %s (%d unmentioned)", address, reason, suppressed)

    def end(self) -> None:
        """Stop answering: zmq refuses everybody from now on."""
        self._ends.set()
        if self.is_alive():
            self.join(timeout=5.0)
