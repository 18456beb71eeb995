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
from psengine.errors import ConfigurationError, ServerRefusedError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.options import SessionOptions
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
        ConfigurationError: another run has trained the job's values.
    """
    try:
        yield
    except ServerRefusedError as error:
        if error.code == ErrorCode.OTHER_RUN:
            raise ConfigurationError(str(error)) from None
        if error.code != ErrorCode.ENDED:
            raise
        logger.warning("%s This process ends with exit code 0.", error)
        raise SystemExit(0) from None


# The connection by which a coordinator keeps a rank for this process, until a session takes it over.
_reserved: JobConnection | None = None


def reserve_worker() -> int | None:
    """Ask the servers that PSENGINE_SERVERS names for this process's number; None where it names none.

    Raises:
        SystemExit: the job of this run has ended.
        ServerLostError: no answer within ``connect_timeout_s``.
        ServerRefusedError, AuthenticationError: the server does not let this client in.
    """
    global _reserved
    addresses = parse_addresses(None)
    if not addresses:
        return None
    name = read_variable("PSENGINE_JOB") or DEFAULT_JOB
    keys = keys_from_environment()
    options = SessionOptions(addresses=addresses, job=name, run=run_name(name), keys=keys, uses_segments=False)
    job = JobConnection(options, PROCESS)
    try:
        welcome = job.control.expect(f"HELLO to job {name!r}", options.connect_timeout_s)
        job.open(job.control)
        with ending_with_the_job():
            welcome.wait()
    except BaseException:
        _stop_keeping(job)
        raise
    _reserved = job
    return job.identity.worker


@contextmanager
def taking_reservation(options: SessionOptions) -> Iterator[SessionOptions]:
    """The options by which a session takes this process's reservation, if it has one in that job.

    The session says HELLO inside the block.
    """
    global _reserved
    mine, asked = _reserved, (os.getpid(), options.rank, options.job, tuple(options.addresses))
    # A child process is another worker.
    if mine is None or asked != (mine.parking.process_id, None, mine.options.job, mine.options.addresses):
        yield options if options.run else replace(options, run=run_name(options.job))
        return
    _reserved = None
    try:
        yield replace(options, rank=mine.identity.worker, nonce=mine.nonce, run=mine.options.run)
    finally:
        _stop_keeping(mine)


def _stop_keeping(job: JobConnection) -> None:
    """A session has taken the rank, or after a lease others may get it."""
    job.closing.set()
    job.transport.close()
