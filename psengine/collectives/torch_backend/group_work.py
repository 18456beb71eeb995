"""Operations of a torch.distributed group that complete whether or not anybody waits for them.

A caller of ``wait()`` works on the operation itself. For callers that do not wait, such as native DDP, which waits for
a future, one thread per group waits for operations in the order they began. It starts with the first of them.

::

    caller    begin(0)  begin(1)            wait(1) ── works on 0 and 1 ── True
    waiter       wait(0) ── works on 0 ── future(0) done ── wait(1) ── future(1) done
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from psengine.collectives.shared_memory.collective import SharedMemoryWork
from psengine.errors import CollectiveError

_NO_TIMEOUT = timedelta(0)
# Native DDP's join(divide_by_initial_world_size=False) keeps a forward's count of ranks by its C++ half alone (torch
# 2.13): when Python's half goes, wait() is no longer ours and never returns. So the last works of such a size are kept.
_KEPT, _KEPT_BYTES = 16, 64


class GroupWork(dist.Work):
    """What an operation of ``ProcessGroup`` returns.

    Args:
        operation: in shared memory.
        result: the tensors that hold the result, which the future returns.
        timeout_s: deadline of the operation.
        finish: called once, after the operation: copies results to their places.
    """

    def __init__(
        self,
        operation: SharedMemoryWork,
        result: Sequence[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._operation: Any = operation
        self._result = list(result)
        self._timeout_s = timeout_s
        self._finish: Any = finish
        self._completing = threading.Lock()
        self._is_done = False
        self._until_done = threading.Lock()  # held until then; an Event takes longer to make than a small operation
        self._until_done.acquire()
        self._error: Exception | None = None
        self._signals: list[torch.futures.Future[None]] = []  # of those who asked for a future

    @property
    def result_bytes(self) -> int:
        """Bytes of the result."""
        return sum(tensor.nbytes for tensor in self._result)

    def complete(self) -> None:
        """Work on the operation until it is done or has failed; raises only interrupts."""
        with self._completing:
            if self._is_done:
                return
            try:
                self._operation.wait(timeout_s=self._timeout_s)
                self._finish()
            except Exception as error:
                self._error = error
            self._operation = self._finish = None
            self._is_done = True
            self._until_done.release()
        self._tell_futures()

    def _tell_futures(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._signals.pop().set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the result may be read.

        Args:
            timeout: where it is shorter than the group's own, passing it leaves the operation under way.

        Raises:
            CollectiveError: the operation failed or passed the group's timeout, or ``timeout`` passed.
            PeerLostError: the same, and ranks could be named.
        """
        timeout_s = timeout.total_seconds()
        if 0 < timeout_s < self._timeout_s:
            # Shared memory ends the group at a deadline, so a short wait leaves the work to the group's thread.
            if not self._until_done.acquire(timeout=timeout_s):
                raise CollectiveError(f"the operation did not complete within {timeout_s:g} s; it is still under way")
            self._until_done.release()
        elif not self._is_done:
            self.complete()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result's tensors; failed, it raises a ``RuntimeError`` with the text of the error."""
        # Future.set_exception hides the error from C++, where native DDP waits; a failed callback does not.
        signal: torch.futures.Future[None] = torch.futures.Future()
        future = signal.then(lambda _: self._outcome())
        self._signals.append(signal)
        if self._is_done:
            self._tell_futures()
        return future

    def _outcome(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether the operation is done or has failed."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._is_done and self._error is None


class Waiter:
    """The thread that completes a group's operations in the order they began; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: GroupWork) -> None:
        """Complete ``work`` in its turn."""
        with self._lock:
            if self._thread is None:
                # It holds no reference to this object or the group, so that both can go.
                thread = threading.Thread(target=_complete_in_order, args=(self._works,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self._works.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Let it complete what was begun and end; False where ``timeout_s`` passed first. Safe to call again."""
        self._works.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _complete_in_order(works: queue.SimpleQueue[GroupWork | None]) -> None:
    kept: deque[GroupWork] = deque(maxlen=_KEPT)
    while True:
        work: Any = works.get()
        if work is None:
            return
        if work.result_bytes <= _KEPT_BYTES:
            kept.append(work)
        work.complete()
        del work  # not kept until the next one comes
