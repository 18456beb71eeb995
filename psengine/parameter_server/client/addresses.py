"""Servers' addresses as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]/:*]+):([0-9]{1,5})|ipc://\S+")


def parse_addresses(servers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Addresses from an argument (a list, or a text with commas), else from PSENGINE_SERVERS; () where none is named.

    Raises:
        ConfigurationError: an address is malformed.
    """
    if servers is None:
        servers = read_variable("PSENGINE_SERVERS") or ""
    parts = servers.split(",") if isinstance(servers, str) else list(servers)
    if not all(isinstance(part, str) for part in parts):
        raise ConfigurationError(f"servers' addresses are text (expected a str or a list of them, got {servers!r})")
    addresses = tuple(part.strip() for part in parts if part.strip())
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not (match[2] is None or 0 < int(match[2]) < 65536):
            raise ConfigurationError(
                f"a server's address is malformed (expected tcp://host:port or ipc:///path, got {address!r})"
            )
    return addresses
