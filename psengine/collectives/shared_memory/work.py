"""An operation in shared memory, on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

from psengine.collectives.base import Work
from psengine.tracing.timeline import is_profiling, profiled


class Runner(Protocol):
    """Who runs operations; see ``SharedMemoryCollective``."""

    timeout_s: float

    def completed(self) -> int: ...

    def finish(self, operation: int, what: str, timeout_s: float, *, has_spun: bool = False) -> None: ...


class SharedMemoryWork(Work):
    """An operation in shared memory.

    Args:
        collective: runs the operation.
        operation: its number.
        what: its name in errors.
        timeout_s: deadline of the wait; None takes the collective's.
        finish: copy results to their places; called once, in order, when the operation is over.
    """

    def __init__(
        self,
        collective: Runner,
        operation: int,
        what: str,
        *,
        timeout_s: float | None = None,
        finish: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._collective = collective
        self._operation = operation
        self._what = what
        self._timeout_s = collective.timeout_s if timeout_s is None else timeout_s
        self._finish = finish

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once; advances operations."""
        return self._collective.completed() >= self._operation

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """``timeout_s`` overrides the deadline. Passing it ends the whole group."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if is_profiling():
            with profiled(f"wait for {self._what}"):
                self._collective.finish(self._operation, self._what, timeout_s)
        else:
            self._collective.finish(self._operation, self._what, timeout_s)
        finish, self._finish = self._finish, ()
        for copy in finish:
            copy()
