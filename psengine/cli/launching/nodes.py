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
# A store whose host stands still answers nobody, and knows no deadline for some questions.
ANSWER_S = 5.0
_KEY = "psengine/first_failure"
_CONNECT = timedelta(seconds=10)


class NodeFailures:
    """Looks now and then whether another node's rank has failed. A context manager.

    Only its thread speaks with the store, and nobody waits for that thread without a timeout.

    Args:
        on_failure: called, from a thread, with another node's first failure.
        interrupted: the end of this node's launcher by a signal, of which the other nodes are told; None while there
            is none.

    Attributes:
        first: the run's first failure, once some node has told it.
    """

    def __init__(
        self, on_failure: Callable[[RankEnd], None], interrupted: Callable[[], RankEnd | None] = lambda: None
    ) -> None:
        self.first: RankEnd | None = None
        self._on_failure = on_failure
        self._interrupted = interrupted
        self._own: RankEnd | None = None
        self._told_s: float | None = None  # time.monotonic()
        self._wake = threading.Event()
        self._is_answered = threading.Event()  # the others know ``_own``, or cannot be told
        self._is_over = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> NodeFailures:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(POLL_S)

    def watch(self, host: str, port: int) -> None:
        """The nodes have met at ``host:port``. Called again where they meet again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(host, port), name="psengine-nodes", daemon=True)
            self._thread.start()

    def settle(self, own: RankEnd, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Here ``own`` failed first: learn whether another was before it, else tell the others.

        ``is_hurried`` says when there is no time for either any more.
        """
        _wait(lambda: not own.speaks_of_peer or self.first is not None or is_hurried(), LINGER_S)
        if self.first is None and self._thread is not None:
            self._own = own
            self._wake.set()
            _wait(lambda: self._is_answered.is_set() or is_hurried(), ANSWER_S)
        if self._told_s is not None:
            _wait(is_hurried, self._told_s + LINGER_S - time.monotonic())

    def _watch(self, host: str, port: int) -> None:
        try:
            store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
            while not self._is_over and self.first is None:
                own = self._own or self._interrupted()
                if own is not None:
                    self._own = own
                    found = store.compare_set(_KEY, "", json.dumps(asdict(own)))
                    self._told_s = time.monotonic()
                    self.first = _read(found)
                elif store.check([_KEY]):
                    self.first = _read(store.get(_KEY))
                    self._on_failure(self.first)
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


def _read(found: bytes) -> RankEnd:
    described = json.loads(found)
    return RankEnd(**{**described, "traceback": tuple(described["traceback"])})
