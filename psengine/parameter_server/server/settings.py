"""Every setting of a server, in one place; ``psengine-server`` makes an option of each."""
# ruff: noqa: RUF009 - _setting() makes a dataclass field

from __future__ import annotations

import difflib
import importlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from psengine.environment.local_sockets import LONGEST_PATH_BYTES
from psengine.errors import ConfigurationError

DEFAULT_BIND = "tcp://127.0.0.1:7077"
MAX_SHARDS = 256
ENVIRONMENT_PREFIX = "PSENGINE_"

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[^:/\[\]\s]+):(?P<port>\d{1,5}|\*)")
_IPC = re.compile(r"ipc://(?P<path>[^\s*]+)")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _setting(default: Any, explanation: str, parse: Callable[[str], Any] | None = None) -> Any:
    return field(default=default, metadata={"help": explanation, "parse": parse})


def size(text: str) -> int:
    """Bytes of ``8GiB``, ``512 MB`` or a number.

    Raises:
        ValueError: it is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a size such as 8GiB, or a number of bytes, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _path(text: str) -> Path:
    if not text.strip():
        raise ValueError("expected a path, got nothing")
    return Path(text).expanduser()


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(f"expected names of modules, with commas, got {text!r}")
    return names


class SettingError(ConfigurationError):
    """One setting's value is out of its bounds.

    Attributes:
        setting: its name.
    """

    def __init__(self, setting: str, text: str) -> None:
        super().__init__(text)
        self.setting = setting


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server process runs. A field's metadata has its explanation and its parser.

    Raises:
        ConfigurationError: a value is out of its bounds, or two contradict each other.
    """

    bind: str = _setting(
        DEFAULT_BIND,
        "Address of the first shard: tcp://HOST:PORT (port 0 takes a free one; the others get PORT+1, ...) or"
        " ipc://PATH (the others PATH-1, ...).",
    )
    shards: int = _setting(1, "Threads that keep parameters, each with its own socket.")
    snapshot_dir: Path | None = _setting(None, "Directory of snapshots; without it a restart forgets all.", _path)
    snapshot_interval_s: float = _setting(
        60.0, "Seconds between snapshots, which a crash may lose. 0: only on request and at the end."
    )
    durability: str | None = _setting(
        None,
        "memory, snapshot or log. log: an update is acknowledged once it is on the disk, so none that was acknowledged"
        " is lost. The last two need a snapshot directory. Default: snapshot with a directory, else memory.",
    )
    lease_s: float = _setting(5.0, "Seconds of silence (five heartbeats) after which a worker counts as dead.")
    status_port: int | None = _setting(
        None, "Port of the dashboard, /status.json, /metrics and /healthz; 0 takes a free one."
    )
    status_bind: str = _setting(
        "127.0.0.1",
        "Address of the status port. One that other machines reach needs a certificate and a token, and answers nobody"
        " without the token.",
    )
    status_token: Path | None = _setting(
        None,
        "File of mode 0600 with the token for actions (psengine admin, the dashboard): snapshot, evict, forget, drain,"
        " shut down. It reads too. Needs a status port.",
        _path,
    )
    status_read_token: Path | None = _setting(
        None,
        "File of mode 0600 with a token that only reads, such as Prometheus's; without one loopback is open.",
        _path,
    )
    status_cert: Path | None = _setting(None, "The status port's certificate, in PEM: it speaks HTTPS.", _path)
    status_key: Path | None = _setting(None, "The certificate's private key, in PEM, in a file of mode 0600.", _path)
    curve_key: Path | None = _setting(None, "The server's .key file of keygen: encrypts every connection.", _path)
    allow: Path | None = _setting(
        None, "Clients' public keys: a directory of .pub files, or one file; others are refused.", _path
    )
    secret_file: Path | None = _setting(
        None,
        "File of mode 0600 with one random word, the same for clients (PSENGINE_SECRET_FILE): encrypts TCP, and"
        " admits clients that have the word. Instead of keys.",
        _path,
    )
    admin_allow: Path | None = _setting(
        None,
        "Public keys, as in --allow, of operators: they may connect, and give orders (psengine admin). Needs a curve"
        " key.",
        _path,
    )
    admin_secret_file: Path | None = _setting(
        None,
        "File of mode 0600 with a second random word, for operators (PSENGINE_ADMIN_SECRET_FILE of psengine admin)."
        " Needs a secret file, which holds another word.",
        _path,
    )
    insecure: bool = _setting(
        False,
        "Admit every client without keys: everybody who reaches the address, also other local users, can change"
        " the model.",
    )
    max_memory_bytes: int | None = _setting(
        None,
        "Most memory for values, optimizer state and held gradients, such as 8GiB; shards share it evenly. Default:"
        " four fifths of the machine's.",
        size,
    )
    plugins: tuple[str, ...] | None = _setting(
        None, "Modules to import at the start, with commas: those that register codecs of your own.", _modules
    )
    log_format: str = _setting("text", "text or json: what a line of the log looks like.")

    def __post_init__(self) -> None:
        """Check bounds, and that a reachable address is protected."""
        self._check("shards", 1 <= self.shards <= MAX_SHARDS, f"1 to {MAX_SHARDS}")
        self._check("lease_s", _is_between(self.lease_s, 0.2, 86400.0), "0.2 to 86400 seconds")
        self._check("snapshot_interval_s", _is_between(self.snapshot_interval_s, 0.0, 1e7), "0 or a number of seconds")
        self._check("status_port", self.status_port is None or 0 <= self.status_port < 2**16, "0 to 65535")
        self._check("max_memory_bytes", self.max_memory_bytes is None or self.max_memory_bytes > 0, "more than 0 bytes")
        self._check("log_format", self.log_format in ("text", "json"), "text or json")
        self._check("durability", self.tier in ("memory", "snapshot", "log"), "memory, snapshot or log")
        if (self.tier == "memory") != (self.snapshot_dir is None):
            raise SettingError(
                "durability",
                "A server keeps what it has in a directory (expected durability snapshot or log with snapshot_dir, or"
                f" memory without, got {self.tier} and snapshot_dir = {_shown(self.snapshot_dir)}). Fix: give"
                " --snapshot-dir DIRECTORY, or leave both out.",
            )
        self.bind_addresses()
        if (self.status_cert is None) != (self.status_key is None):
            raise ConfigurationError(
                "A certificate needs its key (expected status_cert and status_key together, got status_cert ="
                f" {_shown(self.status_cert)}, status_key = {_shown(self.status_key)})."
            )
        if (self.curve_key is None) != (self.allow is None):
            raise ConfigurationError(
                "Keys need both sides (expected curve_key and allow together, got"
                f" curve_key={_shown(self.curve_key)}, allow={_shown(self.allow)}). Fix: psengine-server keygen makes"
                " the server's key; --allow names the directory of the clients' .pub files."
            )
        given = {"curve_key": self.curve_key, "secret_file": self.secret_file, "insecure": self.insecure or None}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ConfigurationError(
                f"curve_key, secret_file and insecure exclude each other (expected one of them, got"
                f" {' and '.join(chosen)})."
            )
        for name, needed in {"admin_allow": "curve_key", "admin_secret_file": "secret_file"}.items():
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ConfigurationError(
                    f"{name} names operators beside the workers (expected {needed} with it, got none). Fix: give both;"
                    " the server's own user needs neither over the Unix socket."
                )
        if not self.is_local and not chosen:
            raise ConfigurationError(
                f"Addresses that other machines reach need keys (expected curve_key and allow, or secret_file, for"
                f" bind={self.bind!r}, got neither). Fix: psengine-server keygen DIRECTORY --name server, and the same"
                " for each client; or --secret-file, a secret that all have; or bind to 127.0.0.1 or ipc://; or, where"
                " only friends reach this network, --insecure."
            )

    @property
    def tier(self) -> str:
        """What it keeps through its end: one of the protocol's ``DURABILITY_TIERS``."""
        if self.durability is not None:
            return self.durability
        return "memory" if self.snapshot_dir is None else "snapshot"

    @property
    def heartbeat_s(self) -> float:
        """Seconds between a worker's heartbeats."""
        return self.lease_s / 5

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine reach the address; names are not looked up."""
        if self.bind.startswith("ipc://"):
            return True
        host = self.host
        return host == "localhost" or host == "::1" or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None

    @property
    def host(self) -> str:
        """The host part of a tcp address, without brackets; "" for ipc."""
        match = _TCP.fullmatch(self.bind)
        return match["host"].strip("[]") if match else ""

    @property
    def is_wildcard(self) -> bool:
        """Whether the address means every interface, so that clients have to know the host by another name."""
        return self.host in ("*", "0.0.0.0", "::")

    def bind_addresses(self) -> list[str]:
        """The address each shard binds, as zmq takes them."""
        tcp, ipc = _TCP.fullmatch(self.bind), _IPC.fullmatch(self.bind)
        if ipc is not None:
            paths = [ipc["path"] + (f"-{index}" if index else "") for index in range(self.shards)]
            self._check(
                "bind", all(len(p.encode()) <= LONGEST_PATH_BYTES for p in paths), "a path of at most 107 bytes"
            )
            return [f"ipc://{path}" for path in paths]
        if tcp is None:
            self._check("bind", False, "tcp://HOST:PORT or ipc://PATH")
            return []
        host = "127.0.0.1" if tcp["host"] == "localhost" else tcp["host"]
        first = 0 if tcp["port"] == "*" else int(tcp["port"])
        ports = [first + index if first else 0 for index in range(self.shards)]
        self._check("bind", ports[-1] < 2**16, "ports up to 65535, one for each shard")
        return [f"tcp://{host}:{port or '*'}" for port in ports]

    def _check(self, name: str, is_good: bool, expected: str) -> None:
        if not is_good:
            raise SettingError(name, f"{name} is out of bounds (expected {expected}, got {getattr(self, name)!r}).")


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, by name.

    Raises:
        ConfigurationError: it cannot be read, or has a name that is no setting's, or a value of a wrong type.
    """
    # tomllib came with Python 3.11; tomli is its source.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        found: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The configuration file {path} cannot be read: {error}") from error
    known = [one.name for one in fields(ServerSettings)]
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
            hint = f"Fix: did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
            raise ConfigurationError(f"{path} has an unknown setting (expected a known name, got {key!r}). {hint}")
    hints = get_type_hints(ServerSettings)
    for one in fields(ServerSettings):
        if one.name in found:
            _check_type(path, one.name, found[one.name], one.metadata["parse"] or _reader_of(hints[one.name]))
    return found


def _reader_of(kind: Any) -> Callable[[str], Any]:
    """What reads a setting of this type from a text."""
    plain: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: _boolean}
    return next((plain[one] for one in (*get_args(kind), kind) if one in plain), str)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError("expected true or false")
    return text.lower() in ("true", "1", "yes", "on")


def _check_type(path: Path, name: str, value: Any, read: Callable[[str], Any]) -> None:
    texts = value if isinstance(value, list) and name == "plugins" else [value]
    try:
        if isinstance(value, dict) or (isinstance(value, list) and name != "plugins"):
            raise ValueError("expected one value")
        for text in texts:
            read(str(text))
    except ValueError as error:
        raise ConfigurationError(f"{path}: {name} = {value!r} is not understood: {error}") from error


def _is_between(value: float, lowest: float, highest: float) -> bool:
    return math.isfinite(value) and lowest <= value <= highest


def _shown(path: Path | None) -> str:
    return "nothing" if path is None else str(path)
