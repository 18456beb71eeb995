"""A parameter server that lives as long as a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psengine.environment.extras import require_server_packages
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError


def names_keys() -> bool:
    """Whether this environment names keys, without which ranks would refuse to meet a server that has none."""
    return bool(read_variable("PSENGINE_SERVER_KEY"))


@contextmanager
def comparison_server() -> Iterator[str]:
    """Start a server for this comparison alone and yield its address.

    Raises:
        ConfigurationError: this environment names keys, which the server would not have.
        MissingExtraError: the packages that servers need are not installed.
        ServerError: it did not start.
    """
    require_server_packages("strategies over parameter servers", "typer")
    from psengine.parameter_server.client.embedded import EmbeddedServer

    if names_keys():
        raise ConfigurationError(
            "the server started here has no keys (expected no PSENGINE_SERVER_KEY). Fix: unset PSENGINE_SERVER_KEY and"
            " PSENGINE_CLIENT_KEY, or name your servers: psengine verify --strategy 'async:servers=tcp://...'"
        )
    with EmbeddedServer.start() as server:
        yield server.addresses[0]
