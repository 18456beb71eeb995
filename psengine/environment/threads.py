"""Calls in threads that may be left behind: into torch's stores, which may never answer, or beside other waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begin(action: Callable[[], Result], name: str) -> Future[Result]:
    """Call ``action`` in a daemon thread of this name; the future has its result, or its error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
