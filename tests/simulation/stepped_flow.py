"""A client's procedure without a thread of its own."""

from __future__ import annotations

from typing import Generic, TypeVar

from psengine.errors import PSEngineError
from psengine.parameter_server.client.flow import Awaited, Flow

T = TypeVar("T")


class SteppedFlow(Generic[T]):
    """A flow that is stepped when answers or the time may let it go on.

    Attributes:
        is_over: it has returned, or raised.
        result: what it returned.
        error: what it raised.
    """

    def __init__(self, flow: Flow[T]) -> None:
        self._flow = flow
        self._awaited: Awaited = 0.0
        self._since_s = float("-inf")
        self.is_over = False
        self.result: T | None = None
        self.error: Exception | None = None

    def step(self, now_s: float) -> None:
        """Go on as far as possible now."""
        while not self.is_over and self._may_go_on(now_s):
            failure = self._failure()
            try:
                self._awaited = next(self._flow) if failure is None else self._flow.throw(failure)
                self._since_s = now_s
            except StopIteration as end:
                self.is_over, self.result = True, end.value
            except Exception as error:
                self.is_over, self.error = True, error

    def _may_go_on(self, now_s: float) -> bool:
        if isinstance(self._awaited, float):
            return now_s >= self._since_s + self._awaited
        is_done = True
        for operation in self._awaited:
            if operation.error is not None:
                return True
            is_done = is_done and operation.is_done
        return is_done

    def _failure(self) -> PSEngineError | None:
        if isinstance(self._awaited, float):
            return None
        for operation in self._awaited:
            if operation.error is not None:
                return operation.error
        return None
