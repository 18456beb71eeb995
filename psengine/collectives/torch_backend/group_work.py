"""Operations of a torch.distributed group that complete whether or not anybody waits for them.

Whoever calls ``wait()`` works on the operation itself. For those who do not, native DDP among them, which waits for a
future, one thread per group waits for operations in the order they began. It starts with the first of them.

::

    caller    begin(0)  begin(1)            wait(1) ── works on 0 and 1 ── True
    waiter       wait(0) ── works on 0 ── future(0) done ── wait(1) ── future(1) done
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from psengine.collectives.shared_memory.collective import SharedMemoryWork
from psengine.errors import CollectiveError

_NO_TIMEOUT = timedelta(0)


class GroupWork(dist.Work):
    """What an operation of ``ProcessGroup`` returns.

    Args:
        operation: the last of the operations in shared memory; those before it complete first. None: nothing to do.
        result: the tensors that hold the result, which ``result()`` and the future return.
        timeout_s: deadline of the operation.
        finish: called once, after the operation and before anybody learns of it: copies results to their places.
    """

    def __init__(
        self,
        operation: SharedMemoryWork | None,
        result: Sequence[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._result = list(result)
        self._timeout_s = timeout_s
        self._finish = finish
        self._lock = threading.Lock()
        self._is_done = False
        self._error: Exception | None = None
        self._done_event: threading.Event | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._signal: torch.futures.Future[None] | None = None

    def complete(self) -> None:
        """Work on the operation until it is done or has failed, and tell everybody; raises only interrupts."""
        error = None
        operation = self._operation  # once: another thread may settle meanwhile
        if operation is not None:
            try:
                operation.wait(self._timeout_s)
            except Exception as failure:
                error = failure
        self._settle(error)

    def _settle(self, error: Exception | None) -> None:
        with self._lock:
            if self._is_done:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as failure:
                    error = failure
            self._error, self._finish, self._operation = error, None, None
            self._is_done = True
            done_event, signal = self._done_event, self._signal
        if done_event is not None:
            done_event.set()
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the result may be read.

        Args:
            timeout: where it is shorter than the group's own, passing it leaves the operation under way.

        Raises:
            CollectiveError: the operation failed or passed the group's timeout, or ``timeout`` passed.
            PeerLostError: the same, and ranks could be named.
        """
        timeout_s = timeout.total_seconds()
        if not self._is_done and 0 < timeout_s < self._timeout_s:
            self._wait_for_event(timeout_s)
        elif not self._is_done:
            self.complete()
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_event(self, timeout_s: float) -> None:
        """Shared memory ends the group at a deadline, so short waits look on while the group's thread works."""
        with self._lock:
            if self._done_event is None:
                self._done_event = threading.Event()
                if self._is_done:
                    self._done_event.set()
        if not self._done_event.wait(timeout_s):
            raise CollectiveError(f"the operation did not complete within {timeout_s:g} s; it is still under way")

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result's tensors; failed, it raises a ``RuntimeError`` whose text is that of the error."""
        with self._lock:
            if self._future is None:
                # Future.set_exception hides the error from C++, where native DDP waits; a failed callback does not.
                self._signal = torch.futures.Future()
                self._future = self._signal.then(lambda _: self._outcome())
                is_unheard = self._is_done
            else:
                is_unheard = False
        if is_unheard:
            assert self._signal is not None
            self._signal.set_result(None)
        return self._future

    def _outcome(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether the operation is done or has failed; never blocks."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._is_done and self._error is None

    def exception(self) -> Exception | None:
        """What it failed with."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result, once complete."""
        return self._result

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()


class OrdinaryWork(dist.Work):
    """Another transport's work, whose errors say what failed.

    Args:
        work: the work of the other transport.
        describe: makes the error to raise of the one that ``work`` failed with.
    """

    def __init__(self, work: dist.Work, describe: Callable[[RuntimeError], Exception]) -> None:
        super().__init__()
        self._work = work
        self._describe = describe

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """As the transport's; a ``timeout`` that passes leaves the operation under way."""
        try:
            return self._work.wait(timeout)
        except RuntimeError as error:
            raise self._describe(error) from error

    def get_future(self) -> torch.futures.Future[Any]:
        """The transport's."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Whether the operation is done or has failed; never blocks."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._work.is_success()

    def exception(self) -> Any:
        """What it failed with."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result, once complete."""
        return self._work.result()

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()


class Waiter:
    """The thread that completes a group's operations in the order they began; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: GroupWork) -> None:
        """Complete ``work`` in its turn."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # It holds no reference to this object or the group, so that both can go.
                    thread = threading.Thread(
                        target=_complete_in_order, args=(self._works,), name=self._name, daemon=True
                    )
                    thread.start()
                    self._thread = thread
        self._works.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Let it complete what was begun and end; False where ``timeout_s`` passed first. Safe to call again."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            self._works.put(None)
            return True
        self._works.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()


def _complete_in_order(works: queue.SimpleQueue[GroupWork | None]) -> None:
    while True:
        work: Any = works.get()
        if work is None:
            return
        work.complete()
        del work  # not kept until the next one comes
