"""All shards of a server: their sockets and threads, and what is asked of all or ordered to all."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import zmq

from psengine.environment.local_sockets import is_loopback, remove_stale_sockets, socket_beside
from psengine.errors import ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.transport.authentication import Authenticator
from psengine.parameter_server.server.transport.endpoint import LINGER_MS, UNREAD_BYTES, BindError, Endpoint
from psengine.parameter_server.server.transport.shard_thread import LAST_MESSAGES_S, ShardEndedError, ShardThread
from psengine.parameter_server.status_model import ShardStatus

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 3.0
# A shard that does not tick for so long is unhealthy; copying a large model for a snapshot takes a second.
HEALTHY_S = 10.0

_Result = TypeVar("_Result")


class ShardGroup:
    """Sockets between ``__enter__`` and ``__exit__``, threads after ``start``. Callable from any thread.

    Args:
        settings: see ``ServerSettings``.

    Attributes:
        authenticator: decides who may connect; None where anybody may.
        endpoints: in the order of shards; [] before ``open``. A shard's thread closes its own.
        threads: likewise; [] before ``start``.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.authenticator: Authenticator | None = None
        self.endpoints: list[Endpoint] = []
        self.threads: list[ShardThread] = []

    def __enter__(self) -> ShardGroup:
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
            self.authenticator = Authenticator(self._context, settings)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.threads:
            for endpoint in self.endpoints:
                endpoint.close(0)
        if self.authenticator is not None:
            self.authenticator.end()
        if any(thread.is_alive() for thread in self.threads):
            logger.error("a shard is still busy; the process ends without it")  # its socket is its own
        else:
            self._context.destroy(linger=LINGER_MS)

    # ---- addresses ---------------------------------------------------------------------------------------------

    def open(self, addresses: Iterable[str]) -> None:
        """Bind these addresses, one for each shard.

        Raises:
            ConfigurationError, BindError: an address cannot be bound.
        """
        for address in addresses:
            endpoint = Endpoint(self._context, address, self.authenticator, lease_s=self._settings.lease_s)
            self.endpoints.append(endpoint)
            # This user's clients on this host look here first; others use TCP, also where /tmp is read-only.
            may_fail = () if is_loopback(endpoint.address) else (ConfigurationError, BindError)
            with suppress(*may_fail):
                if endpoint.address.startswith("tcp://"):
                    remove_stale_sockets()
                    endpoint.open_local(socket_beside(endpoint.address, make=True))
        if self.authenticator is not None:
            # After all binds: a client that TCP refuses looks for the Unix socket once more, and then gives up.
            self.authenticator.start()

    def addresses(self, host: str) -> list[str]:
        """The shards' addresses, with ``host`` for a wildcard; clients replace "*" by the host they connected to."""
        if not self._settings.is_wildcard:
            return [endpoint.address for endpoint in self.endpoints]
        return [f"tcp://{host}:{endpoint.address.rpartition(':')[2]}" for endpoint in self.endpoints]

    def is_connected(self, index: int, route: bytes) -> bool:
        """Whether a connection of this shard stands; in its thread."""
        return self.endpoints[index].peers.is_connected(route)

    # ---- questions ---------------------------------------------------------------------------------------------

    def ask(self, function: Callable[[ShardThread], _Result]) -> list[_Result]:
        """Call ``function`` with every shard's thread, in that thread; the results.

        Raises:
            concurrent.futures.TimeoutError: a shard did not answer; it does what it was asked as soon as it can.
            ShardEndedError: a shard's thread has ended.
        """
        futures = [thread.ask(partial(function, thread)) for thread in self.threads]
        wait(futures, ANSWER_DEADLINE_S)
        return [future.result(0) for future in futures]

    def status(self) -> tuple[ShardStatus, ...]:
        """Each shard's status, or why there is none."""
        futures = [thread.ask(thread.status) for thread in self.threads]
        wait(futures, ANSWER_DEADLINE_S)
        found = []
        for index, future in enumerate(futures):
            try:
                found.append(future.result(0))
            except (FutureTimeoutError, ShardEndedError) as error:
                future.cancel()
                found.append(ShardStatus(index=index, error=str(error) or f"no answer within {ANSWER_DEADLINE_S:g} s"))
        return tuple(found)

    @property
    def are_alive(self) -> bool:
        """Whether every thread lives, also the authenticator's."""
        guard_lives = self.authenticator is None or self.authenticator.is_alive()
        return guard_lives and all(thread.is_alive() for thread in self.threads)

    def is_healthy(self) -> bool:
        """Whether every thread lives and ticks."""
        now_s = time.monotonic()
        return self.are_alive and all(now_s - thread.last_tick_s < HEALTHY_S for thread in self.threads)

    def worker_count(self, *, remembers: bool = False) -> int:
        """Workers: that this server leads, or that are connected to a shard; 1 where a shard does not answer.

        Args:
            remembers: count those too that were put out less than a lease ago, or wait for a job's first values.
        """

        def count(thread: ShardThread) -> int:
            here, led = thread.shard.members_connected(), thread.coordinators
            return here if led is None else max(here, led.remembered_count() if remembers else led.training_count())

        try:
            return max(self.ask(count))
        except (FutureTimeoutError, ShardEndedError):
            return 1

    def free_memory(self, unexplained_bytes: int) -> int:
        """Close connections that fill the memory with messages that do not end; how many there were.

        Args:
            unexplained_bytes: how much is filled, beyond what shards and answers may need.
        """
        try:
            known = self.ask(lambda thread: thread.shard.memory_bytes() + thread.endpoint.unread_bytes)
            known_bytes = sum(known) + UNREAD_BYTES * self.worker_count(remembers=True)
            # Snapshots copy what the shards know of; optimizers and averages need scratch space.
            if unexplained_bytes <= known_bytes * 5 // 2:
                return 0
            return sum(self.ask(lambda thread: thread.endpoint.peers.close_unfinished(UNREAD_BYTES)))
        except (FutureTimeoutError, ShardEndedError):
            return 0

    # ---- the end -----------------------------------------------------------------------------------------------

    def drain(self) -> list[int]:
        """Refuse newcomers and answer queued messages; the indexes of shards that did not finish in time."""
        for thread in self.threads:
            thread.drain()
        return [t.shard.index for t in self.threads if not t.drained.wait(LAST_MESSAGES_S + 1.0)]

    def end(self) -> None:
        """End the threads."""
        for thread in self.threads:
            thread.end()
        for thread in self.threads:
            if thread.is_alive():  # where the start fails none has begun
                thread.join(timeout=2.0)
