"""Who this process is at the servers before it has a model: its run, and the rank that ``init()`` reserves.

init()     HELLO without a rule ──► coordinator: a rank          HEARTBEAT ... HEARTBEAT
wrapping   HELLO of the model's session, with the same nonce: the rank is the session's
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from psengine.environment.variables import launched_run, read_variable
from psengine.errors import ServerRefusedError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime
from psengine.protocol.messages import ErrorCode

logger = logging.getLogger(__name__)

DEFAULT_JOB = "default"

_runs: Counter[str] = Counter()


def run_name(job: str) -> str:
    """The name of this launch for the next training of ``job`` by this process; "" where no launcher names one.

    A process that is started again has the same name as before it, and so learns that its job has ended. A script may
    train one job after another.
    """
    run, number = launched_run(), _runs[job]
    _runs[job] += 1
    return f"{run}#{number}" if run and number else run


@contextmanager
def ending_with_the_job() -> Iterator[None]:
    """A process that comes to a job of its own run that has ended has nothing to do.

    Raises:
        SystemExit: with exit code 0.
    """
    try:
        yield
    except ServerRefusedError as error:
        if error.code != ErrorCode.ENDED:
            raise
        logger.warning("%s This process ends with exit code 0.", error)
        raise SystemExit(0) from None


class Reservation:
    """A rank that a coordinator keeps for this process until a session of this process takes it.

    Args:
        options: of the session to come, without a rule; with the run.
        runtime: as of ``WorkerSession``.

    Attributes:
        options: with the rank and the nonce by which the session takes it over.
        process_id: of the process that made it; a child process is another worker.

    Raises:
        ServerLostError: no answer within ``connect_timeout_s``.
        ServerRefusedError: the job has ended ("ended"), ...
        AuthenticationError: the server does not let this client in.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime = PROCESS) -> None:
        self.process_id = os.getpid()
        self._job = JobConnection(options, runtime)
        try:
            welcome = self._job.control.expect(f"HELLO to job {options.job!r}", options.connect_timeout_s)
            self._job.open(self._job.control)
            welcome.wait()
        except BaseException:
            self.close()
            raise
        self.options = replace(options, rank=self._job.identity.worker, nonce=self._job.nonce)

    def close(self) -> None:
        """Stop keeping it: a session has taken it, or after a lease others may get it. Idempotent."""
        self._job.closing.set()
        self._job.transport.close()


# Of this process, until a session takes it.
_reservation: Reservation | None = None


def reserve_worker() -> int | None:
    """Ask the servers that PSENGINE_SERVERS names for this process's number; None where it names none.

    Raises:
        SystemExit: the job of this run has ended.
        ConfigurationError, ServerError: as of ``Reservation``.
    """
    global _reservation
    addresses = parse_addresses(None)
    if not addresses:
        return None
    job = read_variable("PSENGINE_JOB") or DEFAULT_JOB
    with ending_with_the_job():
        keys = keys_from_environment()
        options = SessionOptions(addresses=addresses, job=job, run=run_name(job), keys=keys, uses_segments=False)
        _reservation = Reservation(options)
    return _reservation.options.rank


@contextmanager
def taking_reservation(options: SessionOptions) -> Iterator[SessionOptions]:
    """The options by which a session takes this process's reservation, if it has one in that job.

    The session says HELLO inside the block.
    """
    global _reservation
    mine, asked = _reservation, (os.getpid(), options.rank, options.job, tuple(options.addresses))
    if mine is None or asked != (mine.process_id, None, mine.options.job, mine.options.addresses):
        yield options if options.run else replace(options, run=run_name(options.job))
        return
    _reservation = None
    try:
        yield replace(options, rank=mine.options.rank, nonce=mine.options.nonce, run=mine.options.run)
    finally:
        mine.close()
