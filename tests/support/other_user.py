"""A second user of the machine, played by processes that gave up root. Tests that need one are skipped without root."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import psengine
from psengine.errors import PSEngineError
from support.fault_workers import Reports, worker_processes

OTHER_UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_other_user(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function(*arguments)`` returns as another user; (name of its type, text) of the error it raised."""
    with other_user(function, *arguments) as receive:
        return receive()


@contextmanager
def other_user(function: Callable[..., Any], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """Run ``function`` in a process of another user; a generator's yields and then its end are what is received.

    It is killed at the end of the block.
    """
    with worker_processes() as workers:
        worker, numbers = workers.start(_run, function, arguments), itertools.count()
        yield lambda: worker.wait_for(str(next(numbers)))[0]


def _run(reports: Reports, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # All that is imported late, from where the other user may not be able to read.
    with contextlib.suppress(PSEngineError):
        psengine.connect("tcp://127.0.0.1:1", role="reader", timeout_s=0.3, connect_timeout_s=0.3)
    os.setgroups([])
    os.setgid(OTHER_UID)
    os.setuid(OTHER_UID)
    numbers = itertools.count()
    try:
        result = function(*arguments)
        if hasattr(result, "__next__"):
            for item in result:
                reports.say(str(next(numbers)), item)
            result = None
    except Exception as error:
        result = (type(error).__name__, str(error))
    reports.say(str(next(numbers)), result)
