"""Other users of the machine, played by processes that gave up root. Tests that need one are skipped without root."""

import contextlib
import ctypes
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
_PR_SET_DUMPABLE = 4
_FIRST_USER = 60_000

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


def live_on_host(number: int) -> None:
    """From now on this process shares memory only with processes that have called this with the same number.

    It becomes another user, and the kernel lets no user open another one's memory.
    """
    user = _FIRST_USER + number
    os.setresuid(user, user, user)
    # A process that changes its user hides its /proc from everybody until it says otherwise (man 2 prctl).
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
