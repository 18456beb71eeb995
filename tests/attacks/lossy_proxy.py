"""A bad network between workers and one shard: each way it drops, doubles, delays and so reorders messages.

Every message's fate depends on the seed and its number alone, not on when it came.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from psengine.environment.local_sockets import way_to

DELAY_S = 0.15
POLL_MS = 5


class LossyProxy:
    """Stands in for a shard: a ROUTER for the workers, and for each of them a DEALER to the shard.

    Args:
        target: address of the shard.
        seed: of all fates.
        share: of messages that are dropped, as many again doubled, and as many again delayed.

    Attributes:
        address: where workers connect to.
        counts: how many messages were "passed", "dropped", "doubled" and "delayed".
    """

    def __init__(self, target: str, *, seed: int, share: float) -> None:
        self.counts: Counter[str] = Counter()
        self._target = target
        self._seed = seed
        self._share = share
        self._numbers = {"up": itertools.count(), "down": itertools.count()}
        self._context: Any = zmq.Context()
        self._front: Any = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, Any] = {}
        self._routes: dict[Any, bytes] = {}
        # (when, number, socket, frames) of what is delayed.
        self._later: list[tuple[float, int, Any, list[bytes]]] = []
        self._order = itertools.count()
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it.

        Raises:
            BaseException: what ended it before.
        """
        self._is_stopping = True
        self._thread.join(timeout=10)
        self._context.destroy(linger=0)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            self._failure = error

    def _turn(self) -> None:
        poller = zmq.Poller()
        for socket in (self._front, *self._routes):
            poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(POLL_MS):
            frames = socket.recv_multipart()
            if socket is self._front:
                self._decide("up", self._back_of(frames[0]), frames[1:])
            else:
                self._decide("down", self._front, [self._routes[socket], *frames])
        while self._later and self._later[0][0] <= time.monotonic():
            _, _, socket, frames = heapq.heappop(self._later)
            socket.send_multipart(frames)

    def _back_of(self, route: bytes) -> Any:
        if route not in self._backs:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(way_to(self._target))
            self._backs[route] = socket
            self._routes[socket] = route
        return self._backs[route]

    def _decide(self, way: str, socket: Any, frames: list[bytes]) -> None:
        fate = random.Random(f"{self._seed} {way} {next(self._numbers[way])}").random()
        if fate < self._share:
            self.counts["dropped"] += 1
        elif fate < 2 * self._share:
            self.counts["doubled"] += 1
            socket.send_multipart(frames)
            socket.send_multipart(frames)
        elif fate < 3 * self._share:
            # Later than what comes next: the order changes.
            self.counts["delayed"] += 1
            heapq.heappush(self._later, (time.monotonic() + DELAY_S, next(self._order), socket, frames))
        else:
            self.counts["passed"] += 1
            socket.send_multipart(frames)


@contextmanager
def lossy_proxy(target: str, *, seed: int, share: float) -> Iterator[LossyProxy]:
    """A proxy before the shard at ``target``, ended with this context."""
    proxy = LossyProxy(target, seed=seed, share=share)
    try:
        yield proxy
    finally:
        proxy.close()
