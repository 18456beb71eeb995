"""Unix sockets in a directory of this user's own, beside TCP addresses, and who listens at an address.

    tcp://127.0.0.1:7077     every user of the machine may connect, and every user may be the first to listen there
    /tmp/psengine-1000/...   only user 1000 and root can enter the directory, so only they listen in it

The sockets' names have the number of the network namespace: each has its own loopback, and several may share /tmp.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import stat
import struct
import time
from pathlib import Path

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError

# sockaddr_un holds 108 bytes with the final zero.
LONGEST_PATH_BYTES = 107
_DIRECTORY_VARIABLE = "PSENGINE_RUNTIME_DIR"
_LOOPBACK = re.compile(r"tcp://(?P<host>localhost|127(?:\.\d{1,3}){3}|\[::1\]):(?P<port>\d+)")
_TCP = re.compile(r"tcp://(?P<host>[^:\[\]/]+|\[[^\[\]/]+\]):(?P<port>\d+)")
_EVERY_INTERFACE = "tcp://0.0.0.0:"
# Younger sockets may be bound and not listen yet.
_STALE_S = 60.0


def private_directory(*, make: bool = False) -> Path:
    """PSENGINE_RUNTIME_DIR, else /tmp/psengine-UID: a directory that is this user's alone; made where ``make``.

    Neither TMPDIR nor XDG_RUNTIME_DIR counts: they differ between terminals, jobs and services, and the second
    is removed when its user logs out, while servers go on.

    Raises:
        ConfigurationError: it cannot be made, is not ours, or others may enter it.
    """
    user, problem = os.geteuid(), ""
    directory = Path(read_variable(_DIRECTORY_VARIABLE) or f"/tmp/psengine-{user}")
    try:
        if make:
            directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or stat.S_IMODE(status.st_mode) & 0o077:
            problem = f"{stat.filemode(status.st_mode)} of user {status.st_uid}"
    except OSError as error:
        if make or not isinstance(error, FileNotFoundError):
            problem = str(error)
    if problem:
        raise ConfigurationError(
            f"The directory {directory} for Unix sockets must be ours alone (expected drwx------ of user {user}, got"
            f" {problem}). Fix: remove it, or set {_DIRECTORY_VARIABLE}, alike for servers and workers."
        )
    return directory


def is_loopback(address: str) -> bool:
    """Whether only this machine's processes reach a TCP address; judged by its text, names are not looked up."""
    return _LOOPBACK.fullmatch(address) is not None


def host_and_port(address: str) -> tuple[str, int] | None:
    """Those of a TCP address, an IPv6 host without its brackets; None of another address."""
    if not address.startswith("tcp://"):
        return None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def host_of(address: str) -> str:
    """The host of a server's address; loopback of a Unix socket's."""
    place = host_and_port(address)
    return "127.0.0.1" if place is None else place[0]


def socket_beside(address: str, *, make: bool = False) -> str:
    """The ipc:// address of the socket that a server of this user has beside a TCP address that it binds.

    Raises:
        ConfigurationError: see ``private_directory``; or the directory's name is too long for a socket's.
    """
    match = _TCP.fullmatch(address)
    assert match is not None, "a TCP address, as zmq says what is bound"
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/net").st_ino
    return _in_directory(f"tcp-{_host(match)}-{match['port']}-{namespace}", make=make)


def new_socket(name: str) -> str:
    """An ipc:// address for a new socket in the private directory; makes it, and removes stale sockets from it.

    Raises:
        ConfigurationError: see ``socket_beside``.
    """
    address = _in_directory(f"{name}-{os.urandom(8).hex()}", make=True)
    remove_stale_sockets()
    return address


def _in_directory(name: str, *, make: bool) -> str:
    path = str(private_directory(make=make) / name)
    # Further shards append a number.
    if len(os.fsencode(path)) + 4 > LONGEST_PATH_BYTES:
        raise ConfigurationError(
            f"The path of a Unix socket is too long (expected at most {LONGEST_PATH_BYTES} bytes, got {path}). Fix: set"
            f" {_DIRECTORY_VARIABLE} to a shorter one, alike for servers and workers."
        )
    return f"ipc://{path}"


def way_to(address: str) -> str:
    """The address a client connects to: the socket beside ``address``, or beside all interfaces of this host, if this
    user's server listens there.
    """
    match = _TCP.fullmatch(address)
    if match is None or not _is_here(_host(match)):
        return address
    with contextlib.suppress(ConfigurationError):
        for bound in (address, _EVERY_INTERFACE + match["port"]):
            if is_listening(beside := socket_beside(bound)):
                return beside
    return address


def _is_here(host: str) -> bool:
    """Whether this is this host's own name or number; other names are not looked up, because that may take long."""
    if host == socket.gethostname():
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        socket.inet_pton(family, host)
        probe.bind((host, 0))
        return True
    return False


def is_listening(address: str) -> bool:
    """Whether somebody listens at an ipc:// address where this user may connect."""
    with contextlib.suppress(PermissionError), _connected(address) as probe:
        return probe.fileno() >= 0
    return False


def listener_uid(address: str) -> int | None:
    """The user who listens at an ipc:// or a loopback TCP address; None where nobody does, or it cannot be known.

    Raises:
        PermissionError: this user may not connect there.
    """
    if address.startswith("ipc://"):
        with _connected(address) as probe:
            if probe.fileno() < 0 or not hasattr(socket, "SO_PEERCRED"):
                return None
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return int(struct.unpack("3i", credentials)[1])
    match = _LOOPBACK.fullmatch(address)
    return None if match is None else _tcp_listener_uid(int(match["port"]))


def _host(match: re.Match[str]) -> str:
    host = match["host"].strip("[]")
    return {"localhost": "127.0.0.1", "::": "0.0.0.0"}.get(host, host)


def remove_stale_sockets() -> None:
    """Remove the sockets of killed servers from the private directory."""
    with contextlib.suppress(ConfigurationError, OSError):
        for path in private_directory().iterdir():
            with contextlib.suppress(OSError):  # another server removes it too
                status = path.lstat()
                is_old = stat.S_ISSOCK(status.st_mode) and time.time() - status.st_mtime > _STALE_S
                if is_old and not is_listening(f"ipc://{path}"):
                    path.unlink()


def _connected(address: str) -> socket.socket:
    """A socket connected to an ipc:// address; closed where nobody listens. Raises PermissionError."""
    path = address.removeprefix("ipc://")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)  # a listener answers at once; its queue may be full for a moment
        probe.connect("\0" + path[1:] if path.startswith("@") else path)
    except OSError as error:
        if not isinstance(error, TimeoutError):  # else it listens, and is busy
            probe.close()
        if isinstance(error, PermissionError):
            raise
    return probe


def _tcp_listener_uid(port: int) -> int | None:
    """Who listens at a port, at whatever address, by the kernel's tables; of several one that is to be refused."""
    users = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        # Listeners come first. The kernel looks at each place of its table for more lines than are asked for: 7 ms.
        # A line has 150 bytes.
        with contextlib.suppress(OSError), open(table, "rb", buffering=150) as lines:
            for words in map(bytes.split, itertools.islice(lines, 1, None)):
                if words[3] != b"0A":  # it listens
                    break
                if int(words[1].rpartition(b":")[2], 16) == port:
                    users.append(int(words[7]))
    return max(users, key=lambda uid: uid not in (0, os.geteuid()), default=None)
