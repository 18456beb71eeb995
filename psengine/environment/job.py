"""Which worker of the job this process is, whatever launched it: ``Context.worker`` and ``Context.workers``.

The first line that applies::

    the process group has several ranks    its rank, and its world size
    PSENGINE_WORKER is set                 an independent worker: that number, of PSENGINE_WORKERS
    the servers gave a number              that one, since this process wrapped its model
    otherwise                              0 of 1
"""

from __future__ import annotations

import logging

from psengine.environment.launchers import WORKER, WORKERS
from psengine.environment.variables import given_worker, read_variable
from psengine.errors import EnvironmentVariableError

logger = logging.getLogger(__name__)

# The number that the servers gave to this process's first model, and the warnings that were given.
_assigned: int | None = None
_was_read_before = False
_said: set[str] = set()


def worker_of(rank: int, world_size: int) -> int:
    """Return this process's number among the workers of the job; ``rank`` and ``world_size`` are the process group's.

    Raises:
        EnvironmentVariableError: PSENGINE_WORKER or PSENGINE_WORKERS is malformed.
    """
    if world_size > 1:
        return rank
    global _was_read_before
    worker, _ = given_worker()
    if worker is not None:
        return worker
    _was_read_before |= _assigned is None
    if _assigned is None and read_variable("PSENGINE_SERVERS"):
        _warn(
            f"this process does not know yet which worker of the job it is, and counts as worker 0: {WORKER} is not"
            f" set, and the servers assign a number when the model is wrapped. Set {WORKER} and {WORKERS}, or start the"
            " workers with `psengine run --independent`."
        )
    return _assigned or 0


def workers_of(rank: int, world_size: int) -> int:
    """Return the number of workers of the job; arguments as for ``worker_of``.

    Raises:
        EnvironmentVariableError: PSENGINE_WORKER is set and PSENGINE_WORKERS is not, or one is malformed.
    """
    if world_size > 1:
        return world_size
    named, workers = given_worker()
    worker = worker_of(rank, world_size)
    if workers is None and named is not None:
        raise EnvironmentVariableError(
            f"The number of workers of the job is not known (expected {WORKERS} beside {WORKER}={named}, got none)."
            f" Fix: set {WORKERS} to the number of workers of the whole job, the same on each of them."
        )
    if workers is None:
        if _assigned is not None:
            _warn(
                f"the number of workers of the job is not known, because {WORKERS} is not set: it counts as"
                f" {worker + 1}, one more than this worker's number"
            )
        return worker + 1
    if worker >= workers:
        raise EnvironmentVariableError(
            f"The servers have assigned more workers than {WORKERS} names (expected a worker below {workers}, got"
            f" {worker}). Fix: set {WORKERS} to the number of workers of the whole job."
        )
    return workers


def assign(worker: int) -> None:
    """The servers gave this process a number. A later model of the process may get another one; the first counts."""
    global _assigned
    if _assigned is None:
        _assigned = worker
        if worker and _was_read_before and not _said:  # the strategy's argument names the servers, no variable does
            _warn(
                f"the servers have made this process worker {worker} of the job, and it counted as worker 0 before: its"
                f" share of the data may be worker 0's. Set {WORKER} and {WORKERS}, or wrap the model first."
            )


def forget() -> None:
    """Forget the servers' number and the warnings, at the end of a training."""
    global _assigned, _was_read_before
    _assigned, _was_read_before = None, False
    _said.clear()


def _warn(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)
