"""Procedures that need several answers: generators that yield the operations, or the seconds, they wait for.

::

    request = job.ask(link, message)
    yield [request]                 until all of these are answered; the first failure is raised here
    answer = request.wait()
    yield 0.1                       for so many seconds

A worker's thread runs a flow to its end; a simulation steps it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import TypeVar

from psengine.parameter_server.client.operation import Request, wait_all

T = TypeVar("T")

Awaited = Sequence[Request] | float
Flow = Generator[Awaited, None, T]


def run(flow: Flow[T], closing: threading.Event) -> T:
    """Return what ``flow`` returns; blocks. Pauses end early once ``closing`` is set."""
    error: BaseException | None = None
    while True:
        try:
            awaited = next(flow) if error is None else flow.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        error = None
        try:
            if isinstance(awaited, float):
                closing.wait(awaited)
            else:
                wait_all(awaited)
        except BaseException as failure:
            error = failure
