"""A second user of the machine, played by processes that gave up root. Tests that need one are skipped without root."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

import psengine
from psengine.errors import PSEngineError
from support.processes import forkserver

OTHER_UID = 65534
DEADLINE_S = 30.0

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
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=_main, args=(function, arguments, sender), daemon=True)
    process.start()
    sender.close()

    def receive() -> Any:
        if not receiver.poll(DEADLINE_S):
            raise AssertionError(f"{function.__name__} as another user said nothing for {DEADLINE_S:g} s")
        return pickle.loads(receiver.recv_bytes())

    try:
        yield receive
    finally:
        process.kill()
        process.join(10)
        receiver.close()


def _main(function: Callable[..., Any], arguments: tuple[Any, ...], sender: Connection) -> None:
    # All that is imported late, from where the other user may not be able to read.
    with contextlib.suppress(PSEngineError):
        psengine.connect("tcp://127.0.0.1:1", role="reader", timeout_s=0.3, connect_timeout_s=0.3)
    os.setgroups([])
    os.setgid(OTHER_UID)
    os.setuid(OTHER_UID)
    try:
        result = function(*arguments)
        if hasattr(result, "__next__"):
            for item in result:
                sender.send_bytes(pickle.dumps(item))
            result = None
    except Exception as error:
        result = (type(error).__name__, str(error))
    sender.send_bytes(pickle.dumps(result))
