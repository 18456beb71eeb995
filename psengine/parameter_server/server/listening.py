"""The addresses at which a server's shards listen."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType
from typing import Any

import zmq

from psengine.environment.local_sockets import is_loopback, remove_stale_sockets, socket_beside
from psengine.errors import ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.shard_group import ShardGroup
from psengine.parameter_server.server.transport.authentication import Authenticator
from psengine.parameter_server.server.transport.endpoint import LINGER_MS, BindError, Endpoint
from psengine.parameter_server.server.transport.key_rings import (
    AllowedKeys,
    KeyList,
    KeyRing,
    OperatorKeys,
    OperatorSecret,
    SecretKeys,
)

logger = logging.getLogger(__name__)

CONTEXT_DEADLINE_S = 5.0


class Listeners:
    """One endpoint for each shard, between ``__enter__`` and ``__exit__``; a shard's thread closes its own.

    Args:
        settings: see ``ServerSettings``.
        shards: use the endpoints.

    Attributes:
        authenticator: decides who may connect; None where anybody may.
        endpoints: in the order of shards; [] before ``open``.
    """

    def __init__(self, settings: ServerSettings, shards: ShardGroup) -> None:
        self._settings = settings
        self._shards = shards
        self.authenticator: Authenticator | None = None
        self.endpoints: list[Endpoint] = []

    def __enter__(self) -> Listeners:
        settings = self._settings
        # A thread serves one TCP stream at full speed, a third of one with CURVE. Two were no faster on two cores.
        self._context: zmq.Context[Any] = zmq.Context(max(1, min(settings.shards, (os.cpu_count() or 1) // 2)))
        if settings.insecure:
            logger.warning(
                "INSECURE: %s takes anybody who reaches it%s, without keys and in the clear; whoever does can read and"
                " overwrite every model here. Use psengine-server keygen, --curve-key and --allow, or --secret-file.",
                settings.bind,
                ", every user of this machine" if settings.is_local else "",
            )
        else:
            try:
                self.authenticator = Authenticator(self._context, _key_ring(settings), _operators(settings))
            except BaseException:
                self._end_context()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._shards.threads:
            for endpoint in self.endpoints:
                endpoint.close(0)
        if self.authenticator is not None:
            self.authenticator.end()
        if any(thread.is_alive() for thread in self._shards.threads):
            logger.error("a shard is still busy; the process ends without it")  # its socket is its own
        else:
            self._end_context()

    def open(self) -> None:
        """Bind all addresses.

        Raises:
            ConfigurationError, BindError: an address cannot be bound.
        """
        for address in self._settings.bind_addresses():
            self.endpoints.append(Endpoint(self._context, address, self.authenticator))
            self._open_local(self.endpoints[-1])
        if self.authenticator is not None:
            # After all binds: a client that TCP refuses looks for the Unix socket once more, and then gives up.
            self.authenticator.start()
            found = [*(_reachable(e.address) for e in self.endpoints), *(e.local_address for e in self.endpoints)]
            self.authenticator.probe([address for address in found if address])

    def addresses(self, host: str) -> list[str]:
        """The shards' addresses, with ``host`` for a wildcard; clients replace "*" by the host they connected to."""
        if not self._settings.is_wildcard:
            return [endpoint.address for endpoint in self.endpoints]
        return [f"tcp://{host}:{endpoint.address.rpartition(':')[2]}" for endpoint in self.endpoints]

    @property
    def is_guarded(self) -> bool:
        """Whether the authenticator, where there is one, lives."""
        return self.authenticator is None or self.authenticator.is_alive()

    @property
    def refused(self) -> int:
        """How many connections were refused."""
        return 0 if self.authenticator is None else self.authenticator.refused

    def _open_local(self, endpoint: Endpoint) -> None:
        """Listen beside loopback TCP too, where this user's clients look first; others use TCP.

        Raises:
            ConfigurationError, BindError: it cannot be opened, and is the only way in.
        """
        if not is_loopback(endpoint.address):
            return
        remove_stale_sockets()
        try:
            endpoint.open_local(socket_beside(endpoint.address, make=True))
        except (ConfigurationError, BindError) as error:
            settings = self._settings
            if not (settings.insecure or settings.curve_key or settings.secret_file):
                raise
            logger.warning("clients on this machine use TCP, which is slower: %s", error)

    def _end_context(self) -> None:
        # An open socket would make this wait for ever.
        ending = threading.Thread(target=self._context.destroy, kwargs={"linger": LINGER_MS}, daemon=True)
        ending.start()
        ending.join(timeout=CONTEXT_DEADLINE_S)
        if ending.is_alive():
            logger.error("sockets were not closed within %g s; the process ends without them", CONTEXT_DEADLINE_S)


def _key_ring(settings: ServerSettings) -> KeyRing | None:
    if settings.curve_key is not None and settings.allow is not None:
        return AllowedKeys(settings.curve_key, settings.allow)
    return None if settings.secret_file is None else SecretKeys(settings.secret_file)


def _operators(settings: ServerSettings) -> OperatorKeys | None:
    if settings.admin_allow is not None:
        return KeyList(settings.admin_allow)
    if settings.admin_secret_file is None or settings.secret_file is None:
        return None
    return OperatorSecret(settings.admin_secret_file, settings.secret_file)


def _reachable(address: str) -> str:
    """The address by which this process reaches one that it bound."""
    return address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
