"""Every setting of a server, in one place: argument before environment before file before default."""
# ruff: noqa: RUF009 - _setting() makes a dataclass field

from __future__ import annotations

import difflib
import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from psengine.environment.installation import install_command
from psengine.environment.local_sockets import LONGEST_PATH_BYTES
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, MissingExtraError

DEFAULT_BIND = "tcp://127.0.0.1:7077"
MAX_SHARDS = 256
ENVIRONMENT_PREFIX = "PSENGINE_"

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[^:/\[\]\s]+):(?P<port>\d{1,5}|\*)")
_IPC = re.compile(r"ipc://(?P<path>[^\s*]+)")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _setting(default: Any, parse: Callable[[Any], Any], explanation: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": explanation})


def parse_size(value: Any) -> int:
    """Bytes of ``8GiB``, ``512 MB`` or a number.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a size such as 8GiB, or a number of bytes")
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError("a size such as 8GiB, or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value.strip()


def _parse_integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a whole number")
    try:
        return int(value)
    except ValueError:
        raise ValueError("a whole number") from None


def _parse_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number of seconds")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number of seconds") from None


def _parse_modules(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError("names of modules, with commas")
    names = [name.strip() for name in names]
    if not names or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("names of modules, with commas")
    return tuple(names)


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError("a path")
    return Path(value).expanduser()


def _parse_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server process runs; ``describe_settings`` lists what each setting means.

    Raises:
        ConfigurationError: a value is out of its bounds, or two contradict each other.
    """

    bind: str = _setting(
        DEFAULT_BIND,
        _parse_text,
        "Address of the first shard: tcp://HOST:PORT (port 0 takes a free one; the others get PORT+1, ...) or"
        " ipc://PATH (the others PATH-1, ...).",
    )
    shards: int = _setting(1, _parse_integer, "Threads that keep parameters, each with its own socket.")
    snapshot_dir: Path | None = _setting(None, _parse_path, "Where snapshots go; without it a restart forgets all.")
    snapshot_interval_s: float = _setting(
        60.0, _parse_seconds, "Seconds between snapshots; what a crash may lose. 0: only on request and at the end."
    )
    lease_s: float = _setting(
        5.0, _parse_seconds, "Seconds of silence after which a worker counts as dead, five heartbeats long."
    )
    status_port: int | None = _setting(
        None,
        _parse_integer,
        "Port on 127.0.0.1 of the dashboard, /status.json, /metrics and /healthz; 0 takes a free one.",
    )
    status_token: Path | None = _setting(
        None,
        _parse_path,
        "File of mode 0600 with the token for what the dashboard can do: snapshot, evict a worker, shut down."
        " Not used without a status port.",
    )
    curve_key: Path | None = _setting(None, _parse_path, "The server's .key file of keygen: encrypts every connection.")
    allow: Path | None = _setting(
        None, _parse_path, "Clients' public keys: a directory of .pub files, or one file; others are refused."
    )
    secret_file: Path | None = _setting(
        None,
        _parse_path,
        "File of mode 0600 with one random word that clients have too (PSENGINE_SECRET_FILE): encrypts TCP, and"
        " lets in whoever has it. In the place of keys.",
    )
    insecure: bool = _setting(
        False,
        _parse_flag,
        "Let anybody in without keys: whoever reaches the address, any local user too, owns the model.",
    )
    max_memory_bytes: int | None = _setting(
        None,
        parse_size,
        "Most memory for values, optimizer state and held gradients, such as 8GiB; shards share it evenly. Default:"
        " four fifths of the machine's.",
    )
    plugins: tuple[str, ...] | None = _setting(
        None, _parse_modules, "Modules to import at the start, with commas: those that register codecs of your own."
    )
    log_format: str = _setting("text", _parse_text, "text or json: what a line of the log looks like.")

    def __post_init__(self) -> None:
        """Check bounds, and that a reachable address is protected."""
        self._check("shards", 1 <= self.shards <= MAX_SHARDS, f"1 to {MAX_SHARDS}")
        self._check("lease_s", _is_between(self.lease_s, 0.2, 86400.0), "0.2 to 86400 seconds")
        self._check("snapshot_interval_s", _is_between(self.snapshot_interval_s, 0.0, 1e7), "0 or a number of seconds")
        self._check("status_port", self.status_port is None or 0 <= self.status_port < 2**16, "0 to 65535")
        self._check("max_memory_bytes", self.max_memory_bytes is None or self.max_memory_bytes > 0, "more than 0 bytes")
        self._check("log_format", self.log_format in ("text", "json"), "text or json")
        self.bind_addresses()
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
        if not self.is_local and not chosen:
            raise ConfigurationError(
                f"Addresses that other machines reach need keys (expected curve_key and allow, or secret_file, for"
                f" bind={self.bind!r}, got neither). Fix: psengine-server keygen DIRECTORY --name server, and the same"
                " for each client; or --secret-file, a secret that all have; or bind to 127.0.0.1 or ipc://; or, where"
                " only friends reach this network, --insecure."
            )

    @property
    def heartbeat_s(self) -> float:
        """How often workers say that they live."""
        return self.lease_s / 5

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine reach the address: by literal, names are not looked up."""
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
            raise ConfigurationError(f"{name} is out of bounds (expected {expected}, got {getattr(self, name)!r}).")

    @classmethod
    def load(cls, arguments: Mapping[str, Any] | None = None, *, config: str | Path | None = None) -> ServerSettings:
        """Settings from arguments (None: not given), then ``PSENGINE_*`` variables, then a TOML file, then defaults.

        Args:
            arguments: by name of the setting, as texts or values.
            config: path of the file; default ``PSENGINE_CONFIG``, else none is read.

        Raises:
            ConfigurationError: an unknown name in the file, or a value that a setting cannot have.
        """
        values: dict[str, Any] = {}
        path = config or read_variable(f"{ENVIRONMENT_PREFIX}CONFIG")
        settings = {setting.name: setting for setting in fields(cls)}
        from_file = _read_toml(Path(path), settings) if path else {}
        for name, setting in settings.items():
            argument = (arguments or {}).get(name)
            variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
            text = read_variable(variable)
            if argument is not None:
                values[name] = _parsed(setting, argument, f"--{name.replace('_', '-')}")
            elif text is not None and text.strip():
                values[name] = _parsed(setting, text, variable)
            elif name in from_file:
                values[name] = _parsed(setting, from_file[name], f"{name} in {path}")
        return cls(**values)


def describe_settings() -> dict[str, tuple[str, Any]]:
    """Name of each setting, in order, to what it means and its default."""
    return {
        setting.name: (setting.metadata["help"], None if setting.default is MISSING else setting.default)
        for setting in fields(ServerSettings)
    }


def _parsed(setting: Field[Any], value: Any, source: str) -> Any:
    try:
        return setting.metadata["parse"](value)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{source} is not understood (expected {error}, got {value!r}).") from None


def _read_toml(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    # tomllib came with Python 3.11; tomli is its source.
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        toml = importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"Reading {path} needs the package tomli on Python 3.10. Fix: {install_command('server')}, or"
            " pip install tomli; or use PSENGINE_* variables."
        ) from error
    try:
        found: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The configuration file {path} cannot be read: {error}") from error
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
            hint = f"Fix: did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
            raise ConfigurationError(f"{path} has an unknown setting (expected a known name, got {key!r}). {hint}")
    return found


def _is_between(value: float, lowest: float, highest: float) -> bool:
    return math.isfinite(value) and lowest <= value <= highest


def _shown(path: Path | None) -> str:
    return "nothing" if path is None else str(path)
