"""Servers' addresses as people write them, and the keys for them that the environment names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError
from psengine.protocol.keys import CurveClientKeys

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]/:*]+):([0-9]{1,5})|ipc://\S+")


def is_address(text: str) -> bool:
    """Whether this is the address of one process."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and (match[2] is None or 0 < int(match[2]) < 65536)


def parse_addresses(servers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Servers from an argument (a list, or a text with commas), else from PSENGINE_SERVERS; () where none is named.

    A server is an address, or two with "|" between them: its own, and that of its follower.

    Raises:
        ConfigurationError: an address is malformed, or a server has others than these two.
    """
    if servers is None:
        servers = read_variable("PSENGINE_SERVERS") or ""
    parts = servers.split(",") if isinstance(servers, str) else list(servers)
    if not all(isinstance(part, str) for part in parts):
        raise ConfigurationError(f"servers' addresses are text (expected a str or a list of them, got {servers!r})")
    named = tuple(part.strip() for part in parts if part.strip())
    for server in named:
        addresses = server.split("|")
        for address in addresses:
            if not is_address(address):
                fix = f". Did you mean tcp://{address}?" if is_address(f"tcp://{address}") else ""
                raise ConfigurationError(
                    f"a server's address is malformed (expected tcp://host:port or ipc:///path, got {address!r}){fix}"
                )
        if len(addresses) > 2 or len(set(addresses)) < len(addresses):
            raise ConfigurationError(
                f"a server has one address, or two where it has a follower (expected tcp://a:7077|tcp://b:7077, got"
                f" {server!r}). Fix: commas between servers."
            )
    return named


def keys_from_environment() -> CurveClientKeys | None:
    """The CURVE keys that PSENGINE_SERVER_KEY (a .pub file) and PSENGINE_CLIENT_KEY (a .key file) name, or None.

    Where neither is set, those of the secret in PSENGINE_SECRET_FILE.

    Raises:
        ConfigurationError: only one key is named, or a file is missing, malformed or readable by others.
    """
    server_key, client_key = read_variable("PSENGINE_SERVER_KEY"), read_variable("PSENGINE_CLIENT_KEY")
    if not server_key and not client_key:
        if not (secret_file := read_variable("PSENGINE_SECRET_FILE")):
            return None
        from psengine.parameter_server.shared_secret import client_keys_of_secret

        return client_keys_of_secret(secret_file)
    if not (server_key and client_key):
        raise ConfigurationError(
            "CURVE needs both keys (expected PSENGINE_SERVER_KEY, the server's public key file, and"
            " PSENGINE_CLIENT_KEY, this worker's own key file; got only"
            f" {'the first' if server_key else 'the second'})"
        )
    return CurveClientKeys.load(client_key, server_key)
