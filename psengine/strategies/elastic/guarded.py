"""A collective whose waits end where the group is to change: nobody waits for a member that is gone."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from psengine.collectives.base import Collective, Intermediate, Interruption, Work
from psengine.collectives.forwarding import Forwarding
from psengine.errors import CollectiveError


class GuardedCollective(Forwarding):
    """Passes operations on to ``inner``; a wait raises CollectiveError soon after ``has_news`` returns True."""

    def __init__(self, inner: Collective, has_news: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._has_news = has_news

    @override
    def wrapped(self, work: Work) -> Work:
        guarded = GuardedWork(work, self._has_news)
        return Intermediate(guarded) if isinstance(work, Intermediate) else guarded


class GuardedWork(Work):
    """See ``GuardedCollective``."""

    def __init__(self, work: Work, has_news: Callable[[], bool]) -> None:
        self._work, self._has_news = work, has_news

    @override
    def wait(self, is_interrupted: Interruption = None) -> bool:
        if not self._work.wait(self._has_news):
            raise CollectiveError("the group of workers changes: one of them died, was put out, or another one comes")
        return True
