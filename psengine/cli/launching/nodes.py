"""Which node's rank failed first: the nodes' launchers tell each other through the store at which their agents meet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import TCPStore

from psengine.cli.launching.failure import RankEnd

POLL_S = 1.0
# The store ends with the launcher that holds it, so a launcher that tells stays until the others have looked.
LINGER_S = 3.0
# A store on a host that stands still never answers, and some requests to it have no deadline.
ANSWER_S = 5.0
_KEY = "psengine/first_failure"
_CONNECT = timedelta(seconds=10)


class NodeFailures:
    """The run's first failure, shared by the nodes. Only its thread speaks with the store; waits for it are bounded.

    Attributes:
        first: the run's first failure, once some node has told it.
    """

    def __init__(self) -> None:
        self.first: RankEnd | None = None
        self._own: RankEnd | None = None
        self._told_s: float | None = None  # time.monotonic()
        self._wake = threading.Event()
        self._is_answered = threading.Event()  # the others know ``_own``, or cannot be told
        self._is_over = False
        self._thread: threading.Thread | None = None

    def watch(self, host: str, port: int) -> None:
        """The nodes have met at ``host:port``. Called again where they meet again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(host, port), name="psengine-nodes", daemon=True)
            self._thread.start()

    def tell(self, own: RankEnd) -> None:
        """Tell the other nodes of ``own``, this node's first failure, unless another node's was earlier."""
        self._own = own
        self._wake.set()

    def settle(self, own: RankEnd, is_hurried: Callable[[], bool]) -> None:
        """Learn whether another node failed before ``own``, else tell the others; at once when ``is_hurried``."""
        if own.speaks_of_peer:
            _wait(lambda: self.first is not None or is_hurried(), LINGER_S)
        if self.first is None and self._thread is not None:
            self.tell(own)
            _wait(lambda: self._is_answered.is_set() or is_hurried(), ANSWER_S)
        if self._told_s is not None:
            _wait(is_hurried, self._told_s + LINGER_S - time.monotonic())

    def close(self) -> None:
        """End the thread."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(POLL_S)

    def _watch(self, host: str, port: int) -> None:
        try:
            store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
            while not self._is_over and self.first is None:
                if self._own is not None:
                    self.first = RankEnd(**json.loads(store.compare_set(_KEY, "", json.dumps(asdict(self._own)))))
                    self._told_s = time.monotonic()
                elif store.check([_KEY]):
                    self.first = RankEnd(**json.loads(store.get(_KEY)))
                else:
                    self._wake.wait(POLL_S)
                    self._wake.clear()
        except RuntimeError:
            return  # the store's node is gone
        finally:
            self._is_answered.set()


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.05)
