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
# The store ends with the launcher that holds it: whoever tells stays until the others have looked.
LINGER_S = 3.0
_KEY = "psengine/first_failure"
_CONNECT = timedelta(seconds=10)


class NodeFailures:
    """Looks now and then whether another node's rank has failed. A context manager.

    Args:
        on_failure: called, from a thread, with another node's first failure.

    Attributes:
        first: the run's first failure, once some node has told it.
    """

    def __init__(self, on_failure: Callable[[RankEnd], None]) -> None:
        self.first: RankEnd | None = None
        self._on_failure = on_failure
        self._own: RankEnd | None = None
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> NodeFailures:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, host: str, port: int) -> None:
        """The nodes have met at ``host:port``. Called again where they meet again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(host, port), name="psengine-nodes", daemon=True)
            self._thread.start()

    def settle(self, own: RankEnd) -> None:
        """Here ``own`` failed first: learn whether another was before it, else tell the others."""
        deadline_s = time.monotonic() + LINGER_S
        while own.speaks_of_peer and self.first is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        if self.first is None and self._tell(own):
            time.sleep(LINGER_S)

    def _tell(self, own: RankEnd) -> bool:
        with self._lock:
            if self._store is None:
                return False
            try:
                self._own = own
                found = self._store.compare_set(_KEY, "", json.dumps(asdict(own)))
            except RuntimeError:
                return False  # the store's node is gone
        self.first = _read(found)
        return True

    def _watch(self, host: str, port: int) -> None:
        try:
            store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
        except RuntimeError:
            return
        with self._lock:
            self._store = store
        while not self._is_over.wait(POLL_S):
            with self._lock:
                try:
                    found = store.get(_KEY) if store.check([_KEY]) else None
                except RuntimeError:
                    return
            if found is not None:
                self.first = _read(found)
                if self._own is None:
                    self._on_failure(self.first)
                return


def _read(found: bytes) -> RankEnd:
    described = json.loads(found)
    return RankEnd(**{**described, "traceback": tuple(described["traceback"])})
