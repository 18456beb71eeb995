"""Joiners that wait for this worker's state: heard of on the I/O thread, taken by the thread that trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joiner wants the state of this worker."""

    rank: int
    incarnation: int


class StateRequests:
    """See the module's text."""

    def __init__(self) -> None:
        self._open: dict[int, StateRequest] = {}
        self._taken: set[StateRequest] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def hear(self, request: StateRequest) -> None:
        """STATE_WANTED came; each shard says it, and again each second."""
        if request not in self._taken:
            self._open[request.rank] = request

    def take(self) -> StateRequest | None:
        """One that waits; None without one. Until ``forget`` it is not heard of again."""
        if not self._open:
            return None
        request = self._open.pop(next(iter(tuple(self._open))))
        self._taken.add(request)
        return request

    def forget(self, request: StateRequest) -> None:
        """It was served: the joiner may ask again."""
        self._taken.discard(request)
