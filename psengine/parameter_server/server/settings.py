"""Every setting of a server, in one place: its type, bounds, default and explanation.

``psengine-server`` makes an option of each. An option beats a variable (PSENGINE_SHARDS).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from psengine.environment.local_sockets import LONGEST_PATH_BYTES, is_loopback
from psengine.errors import ConfigurationError

DEFAULT_BIND = "tcp://127.0.0.1:7077"
MAX_SHARDS = 256
ENVIRONMENT_PREFIX = "PSENGINE_"

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[^:/\[\]\s]+):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://(?P<path>[^\s*]+)")

_PLACE = r"(\[[^\s/,\]]+\]|[^:/,\[\]\s]+):\d{1,5}"
_ELECTION = re.compile(rf"launcher=.+|etcd={_PLACE}(,{_PLACE})*(/[\w.-]+)?")


def _address(text: str) -> str:
    if not _TCP.fullmatch(text) and not _IPC.fullmatch(text):
        raise ValueError("expected tcp://HOST:PORT or ipc://PATH")
    return text


def _election(text: str) -> str:
    if not _ELECTION.fullmatch(text):
        raise ValueError("expected launcher=PATH or etcd=HOST:PORT[,HOST:PORT...][/NAME]")
    return text


def _modules(value: Any) -> tuple[str, ...]:
    names = tuple(str(name).strip() for name in (value.split(",") if isinstance(value, str) else value))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("expected names of modules, with commas")
    return names


def _kept(text: str) -> str:
    if not re.fullmatch(r"\d{1,6}d?", text):
        raise ValueError("expected a number of jobs, such as 30, or of days, such as 30d")
    return text


def _expanded(path: Path) -> Path:
    if path == Path():
        raise ValueError("expected a path")
    return path.expanduser()


UserPath = Annotated[Path, AfterValidator(_expanded)]


class ServerSettings(BaseModel):
    """How a server process runs.

    Raises:
        pydantic.ValidationError: a value is out of its bounds, or two contradict each other; ``make_settings`` raises
            a ConfigurationError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    bind: Annotated[str, AfterValidator(_address)] = DEFAULT_BIND
    """Address of the first shard: tcp://HOST:PORT (port 0 takes a free one; the others get PORT+1, ...) or ipc://PATH
    (the others PATH-1, ...)."""
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    """Threads that keep parameters, each with its own socket."""
    snapshot_dir: UserPath | None = None
    """Directory of snapshots; without it a restart forgets all."""
    snapshot_interval_s: float = Field(60.0, ge=0.0, le=1e7)
    """Seconds between snapshots, which a crash may lose. 0: only on request and at the end."""
    durability: Literal["memory", "snapshot", "log", "replica", "log+replica"] | None = None
    """memory, snapshot, log, replica or log+replica. log: an update is acknowledged once it is on the disk; replica:
    once a follower has it; so none that was acknowledged is lost. snapshot and log need a snapshot directory. Default:
    snapshot with a directory, else memory."""
    keep_history: bool = False
    """Never delete the log's older segments, so that psengine replay can tell the run again. Needs the tier log."""
    follow: Annotated[str, AfterValidator(_address)] | None = None
    """Address of the server to follow, while the election names none: this one keeps a copy, and can take its place.
    Needs durability replica or log+replica."""
    election: Annotated[str, AfterValidator(_election)] | None = None
    """Who decides which of a server and its follower leads; durability replica and log+replica need it:
    etcd=HOST:PORT[,HOST:PORT...][/NAME], servers of one etcd (a NAME for each such two, default "default"), or
    launcher=PATH, a file that psengine run makes."""
    etcd_ca: UserPath | None = None
    """File of the certificates that etcd's must be signed by: connections to etcd use TLS."""
    etcd_login: UserPath | None = None
    """File of mode 0600 with one line, NAME:PASSWORD: a user of etcd's. Needs etcd_ca."""
    lease_s: float = Field(5.0, ge=0.2, le=86400.0)
    """Seconds of silence (five heartbeats) after which a worker counts as dead."""
    status_port: int | None = Field(None, ge=0, le=65535)
    """Port of the dashboard, /status.json, /metrics and /healthz; 0 takes a free one."""
    status_bind: str = "127.0.0.1"
    """Address of the status port. Everybody who reaches it may read: names of jobs and hosts, steps, losses, no
    weights."""
    curve_key: UserPath | None = None
    """The server's .key file of keygen: encrypts every connection."""
    allow: UserPath | None = None
    """Clients' public keys: a directory of .pub files, or one file; others are refused."""
    secret_file: UserPath | None = None
    """File of mode 0600 with one random word, the same for clients (PSENGINE_SECRET_FILE): encrypts TCP, and admits
    clients that have the word. Instead of keys."""
    admin_allow: UserPath | None = None
    """Public keys, as in --allow, of operators: they may connect, and give orders (psengine admin). Needs a curve
    key."""
    insecure: bool = False
    """Admit every client without keys: everybody who reaches the address, also other local users, can change the
    model."""
    max_memory_bytes: ByteSize | None = Field(None, gt=0)
    """Most memory for values, optimizer state and held gradients, such as 8GiB; shards share it evenly. Default: four
    fifths of the machine's."""
    keep_ended_jobs: Annotated[str, AfterValidator(_kept)] | None = None
    """Jobs without workers to keep: how many, such as 30, or for how many days since their last worker or the server's
    start, such as 30d. The others are forgotten, with their values. Default: all are kept."""
    plugins: Annotated[tuple[str, ...], BeforeValidator(_modules)] | None = None
    """Modules to import at the start, with commas: those that register codecs of your own."""
    log_format: Literal["text", "json"] = "text"
    """text or json: what a line of the log looks like."""

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        """Check what belongs together, and that a reachable address is protected."""
        if self.tier != "replica" and (self.tier == "memory") != (self.snapshot_dir is None):
            raise ValueError(
                "A server keeps what it has in a directory (expected durability snapshot or log with snapshot_dir, or"
                f" memory without, got {self.tier} and snapshot_dir = {self.snapshot_dir}). Fix: give"
                " --snapshot-dir DIRECTORY, or leave both out.",
            )
        if self.keep_history and "log" not in self.tier:
            raise ValueError(
                f"The history is in the log (expected durability log with keep_history, got {self.tier}). Fix: give"
                " --durability log (psengine run: --server-option durability=log)."
            )
        self._check_election()
        for name, needed in {"curve_key": "allow", "allow": "curve_key", "admin_allow": "curve_key"}.items():
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(
                    f"Keys need both sides (expected {needed} with {name}, got none). Fix: psengine-server keygen makes"
                    " the server's --curve-key; --allow names the directory of the clients' .pub files, --admin-allow"
                    " that of operators', who are named beside the workers."
                )
        chosen = [name for name in ("curve_key", "secret_file", "insecure") if getattr(self, name)]
        if len(chosen) > 1:
            text = "curve_key, secret_file and insecure exclude each other (expected one of them, got"
            raise ValueError(f"{text} {' and '.join(chosen)}).")
        if not self.is_local and not chosen:
            raise ValueError(
                f"Addresses that other machines reach need keys (expected curve_key and allow, or secret_file, for"
                f" bind={self.bind!r}, got neither). Fix: psengine-server keygen DIRECTORY --name server, and the same"
                " for each client; or --secret-file, a secret that all have; or bind to 127.0.0.1 or ipc://; or, where"
                " only friends reach this network, --insecure."
            )
        return self

    def _check_election(self) -> None:
        addresses = self.bind_addresses()
        named = [name for name in ("follow", "election") if getattr(self, name) is not None]
        if named and not self.has_replica:
            raise ValueError(
                f"A follower has what is acknowledged (expected durability replica or log+replica with {named[0]}, got"
                f" {self.tier}). Fix: give --durability replica to both servers."
            )
        if self.has_replica and self.election is None:
            raise ValueError(
                "An elector decides which of a server and its follower leads (expected election with durability"
                f" {self.tier}, got none). Fix: --election etcd=HOST:PORT; or, on one machine, --election"
                " launcher=PATH, the same file for both; psengine run --server-option durability=replica gives it."
            )
        is_by_etcd = (self.election or "").startswith("etcd=")
        for name, needed in {"etcd_ca": is_by_etcd, "etcd_login": self.etcd_ca is not None}.items():
            if getattr(self, name) is not None and not needed:
                raise ValueError(
                    f"{name} is for etcd over TLS (expected election etcd=HOST:PORT and etcd_ca with {name}, got"
                    f" election {self.election} and etcd_ca {self.etcd_ca})."
                )
        if self.follow in addresses:
            raise ValueError(f"A server follows another one (expected another address in follow, got {self.follow}).")

    @property
    def has_replica(self) -> bool:
        """Whether updates are acknowledged once a follower has them."""
        return "replica" in self.tier

    @property
    def tier(self) -> str:
        """What it keeps through its end: one of the protocol's ``DURABILITY_TIERS``."""
        return self.durability or ("memory" if self.snapshot_dir is None else "snapshot")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine reach the address; names are not looked up."""
        return self.bind.startswith("ipc://") or is_loopback(self.bind)

    @property
    def is_wildcard(self) -> bool:
        """Whether the address means every interface, so that clients have to know the host by another name."""
        return self.bind.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"))

    def bind_addresses(self) -> list[str]:
        """The address each shard binds, as zmq takes them."""
        tcp, ipc = _TCP.fullmatch(self.bind), _IPC.fullmatch(self.bind)
        if ipc is not None:
            paths = [ipc["path"] + (f"-{index}" if index else "") for index in range(self.shards)]
            if not all(len(path.encode()) <= LONGEST_PATH_BYTES for path in paths):
                raise ValueError(f"bind is too long (expected a path of at most 107 bytes, got {self.bind!r})")
            return [f"ipc://{path}" for path in paths]
        assert tcp is not None
        host = "127.0.0.1" if tcp["host"] == "localhost" else tcp["host"]
        first = int(tcp["port"])
        ports = [first + index if first else 0 for index in range(self.shards)]
        if ports[-1] >= 2**16:
            raise ValueError(f"bind has too high a port (expected ports up to 65535, one a shard, got {self.bind!r})")
        return [f"tcp://{host}:{port or '*'}" for port in ports]


def make_settings(values: Mapping[str, Any]) -> ServerSettings:
    """Settings of these values, by name; texts are read as on the command line.

    Raises:
        ConfigurationError: a name is unknown, a value is out of its bounds, or two contradict each other.
    """
    try:
        return ServerSettings(**values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(map(_line, error.errors()))) from None


def _line(error: ErrorDetails) -> str:
    said = error["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
    if error["type"].startswith("byte_size"):
        said = "expected a size such as 8GiB, or a number of bytes"
    if not error["loc"]:
        return said
    name = str(error["loc"][0])
    flag, variable = f"--{name.replace('_', '-')}", ENVIRONMENT_PREFIX + name.upper()
    return f"{name} ({flag}, {variable}) is not understood ({said}, got {error['input']!r})"
