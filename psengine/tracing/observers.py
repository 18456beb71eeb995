"""Code that only watches training never makes it fail: its errors are logged."""

from __future__ import annotations

import logging
from contextlib import ContextDecorator
from types import TracebackType

logger = logging.getLogger(__name__)


class Observer(ContextDecorator):
    """A block, or a function that returns nothing, whose ``Exception``s are logged, the first one as a warning.

    Args:
        what: the thing that is missing after an error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._has_failed = False

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        logger.log(level, "%s is missing (%s: %s); training goes on", self._what, type(error).__name__, error)
        logger.debug("where that was", exc_info=error)
        return True
