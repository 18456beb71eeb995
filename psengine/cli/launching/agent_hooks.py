"""What is added to torchrun's agent from outside: pipes and variables, news of starts, a signal, silence."""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from typing_extensions import override

from psengine.environment.variables import read_variable


class Pipes(LogsSpecs):
    """torchrun's log files where the user asked for some; our pipes for what would go to the terminal."""

    def __init__(self, inner: LogsSpecs, prepare: Callable[[dict[int, dict[str, str]], LogsDest], None]) -> None:
        super().__init__()
        self._inner = inner
        self._prepare = prepare

    @property
    @override
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = self._inner.reify(envs)
        self._prepare(envs, destinations)
        return destinations


class StartEvents(logging.Handler):
    """Hears from the agent which process is which rank."""

    def __init__(self, started: Callable[[int, int], None]) -> None:
        super().__init__(logging.INFO)
        self._started = started

    @override
    def emit(self, record: logging.LogRecord) -> None:
        metadata = json.loads(record.getMessage())["metadata"]
        if metadata["state"] == "START":
            self._started(int(metadata["global_rank"]), int(metadata["worker_id"]))


def raise_in(thread: threading.Thread, number: int) -> None:
    """Raise what torchrun's own signal handler would raise, were the agent in the main thread."""

    class Interrupted(SignalException):
        def __init__(self) -> None:
            super().__init__(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted))


@contextmanager
def quiet_agent() -> Iterator[None]:
    """Keep the agent's own log to itself: what it says is said better at the end. LOGLEVEL brings it back."""
    levels = {}
    if not read_variable("LOGLEVEL"):
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.startswith("torch.distributed") and isinstance(logger, logging.Logger):
                levels[logger] = logger.level
                logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
