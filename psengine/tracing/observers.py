"""Code that only watches training never makes it fail: its errors are logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_missing: set[str] = set()


@contextmanager
def observing(what: str) -> Iterator[None]:
    """A block, or a function that returns nothing, whose ``Exception``s are logged, the first one as a warning.

    Args:
        what: the thing that is missing after an error.
    """
    try:
        yield
    except Exception as error:
        level = logging.DEBUG if what in _missing else logging.WARNING
        _missing.add(what)
        logger.log(level, "%s is missing (%s: %s); training goes on", what, type(error).__name__, error)
        logger.debug("where that was", exc_info=error)
