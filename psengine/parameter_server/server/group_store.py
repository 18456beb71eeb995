"""The store where members of elastic jobs meet when they form a group: torch's TCPStore, from its first use on.

It lives as long as the server, so no worker's death ends it. It knows no keys: whoever reaches its port can disturb a
group that is being formed. It listens at the server's address, or on loopback beside a Unix socket.
"""

from __future__ import annotations

import socket
from typing import Any

from psengine.environment.local_sockets import host_of
from psengine.parameter_server.server.shard_group import ShardGroup


class GroupStore:
    """See the module's text; used by one thread.

    Args:
        shards: the server's; the first one's address is that of the store.
    """

    def __init__(self, shards: ShardGroup) -> None:
        self._shards = shards
        self._store: Any = None

    def port(self) -> int:
        """Where it listens; the first call opens it."""
        if self._store is None:
            from torch.distributed import TCPStore

            host = host_of(self._shards.endpoints[0].address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return int(self._store.port)
