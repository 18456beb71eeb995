"""How long an exchange through parameter servers takes, measured with a server on this host."""

from __future__ import annotations

import statistics
from contextlib import closing

# The first ones open connections and grow buffers.
_WARM_UP = 2
_ROUNDS = 7
MAX_BYTES = 16 << 20
CONNECT_S = 10.0


def server_exchange_s(size_bytes: int) -> float:
    """Seconds that ``size_bytes`` take to a server on this host and back.

    The server applies nothing and serves no other worker.

    Raises:
        MissingExtraError: the extra "server" is not installed.
        PSEngineError: the server did not start, or did not answer.
    """
    from psengine.environment.extras import require_server_packages

    require_server_packages("servers, for measuring what an exchange with them takes,")
    from psengine.parameter_server.client.client import connect
    from psengine.parameter_server.client.embedded import EmbeddedServer

    echoed_bytes = max(1, min(size_bytes, MAX_BYTES))
    with (
        EmbeddedServer.start() as server,
        closing(connect(server.addresses, role="reader", timeout_s=CONNECT_S, connect_timeout_s=CONNECT_S)) as client,
    ):
        seconds = [client.echo(echoed_bytes) for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:]
    return statistics.median(seconds) * max(1.0, size_bytes / echoed_bytes)
