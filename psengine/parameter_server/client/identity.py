"""Who this process is at the servers before it has a model: its run, and the rank that ``init()`` reserves.

init()     HELLO without a rule ──► coordinator: a rank          HEARTBEAT ... HEARTBEAT
wrapping   HELLO of the model's session, with the same nonce: the rank is the session's
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from psengine.environment.variables import launched_run, read_variable
from psengine.errors import AuthenticationError, ProtocolError, PSEngineError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import CONTROL, Receiver, Runtime
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType
from psengine.version import __version__

logger = logging.getLogger(__name__)

DEFAULT_JOB = "default"
# Until the coordinator has said how long its lease is.
LEASE_S = 30.0

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


class Reservation(Receiver):
    """A rank that a coordinator keeps for this process until a session of this process takes it.

    Args:
        options: of the session to come; ``rank`` and ``nonce`` are not read.
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
        self.options = replace(options, nonce=runtime.draw_nonce())
        self.process_id = os.getpid()
        self._runtime = runtime
        self._incarnation = 0
        self._heartbeat_s, self._lease_s = 1.0, LEASE_S
        self._is_open = True
        self._next_s = 0.0
        self._error: PSEngineError | None = None
        self._is_answered = threading.Event()
        self._transport = runtime.connect(self, options)
        self._transport.do(self._open)
        answered = self._is_answered.wait(options.connect_timeout_s)
        error = self._error
        if not answered:
            error = ServerLostError(
                f"{options.addresses[0]} did not say which worker this process is within"
                f" {options.connect_timeout_s:g} s. Fix: start the server, correct PSENGINE_SERVERS, or set"
                " PSENGINE_WORKER and PSENGINE_WORKERS."
            )
        if error is not None:
            self.close()
            raise error

    @property
    def rank(self) -> int:
        """The number of this process in the job."""
        assert self.options.rank is not None, "answered"
        return self.options.rank

    def close(self) -> None:
        """Stop keeping it: a session has taken it, or after a lease others may get it. Idempotent."""
        self._transport.close()

    # ---- I/O thread --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_open = True
        self._transport.open(CONTROL, self.options.addresses[0], self._lease_s)

    def _say(self, kind: MessageType, body: dict[str, object]) -> None:
        worker = NOBODY if self.options.rank is None else self.options.rank
        message = Message(kind, job_number(self.options.job), worker=worker, incarnation=self._incarnation, body=body)
        self._transport.send(CONTROL, message)

    def connected(self, link: int, now_s: float) -> None:
        """Ask for a rank, or for the same one again."""
        options, runtime = self.options, self._runtime
        self._say(
            MessageType.HELLO,
            {
                "job": options.job,
                "run": options.run,
                "nonce": options.nonce,
                "host": runtime.host()[:255],
                "pid": runtime.process_id(),
                "software": __version__,
                "servers": list(options.addresses),
                **({} if options.rank is None else {"rank": options.rank}),
            },
        )

    def received(self, link: int, message: Message, now_s: float) -> None:
        """Take the rank, or the refusal."""
        if message.type is MessageType.WELCOME:
            self.options = replace(self.options, rank=message.worker)
            self._incarnation = message.incarnation
            self._heartbeat_s, self._lease_s = message.body["heartbeat_s"], message.body["lease_s"]
            self._is_answered.set()
        elif message.type is MessageType.ERROR and not self._is_answered.is_set():
            self._fail(ServerRefusedError(message.body["text"], message.body["code"]))
        elif message.type is MessageType.ERROR:
            # Its lease ran out while this process stood still; whoever has the rank by now keeps it.
            logger.debug("the reserved rank %s: %s", self.options.rank, message.body["text"])
            self._incarnation = 0
            self.connected(link, now_s)

    def tick(self, now_s: float) -> None:
        """Keep the rank; after a connection that ended, make another."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._heartbeat_s
        if not self._is_open:
            self._open()
        elif self._is_answered.is_set():
            self._say(MessageType.HEARTBEAT, {})

    def disconnected(self, link: int, now_s: float) -> None:
        """The next tick opens another."""
        self._is_open = False

    def moved(self, link: int, now_s: float) -> None:
        """Nothing waits for it."""

    def rejected(self, link: int, error: AuthenticationError, now_s: float) -> None:
        """The server does not let this client in."""
        self._fail(error)

    def garbled(self, link: int, error: ProtocolError, now_s: float) -> None:
        """The peer is no server of this version."""
        self._fail(error)

    def crashed(self, error: PSEngineError) -> None:
        """The transport has ended."""
        self._fail(error)

    def _fail(self, error: PSEngineError) -> None:
        if not self._is_answered.is_set():
            self._error = error
            self._is_answered.set()


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
        _reservation = Reservation(
            SessionOptions(
                addresses=addresses, job=job, run=run_name(job), role="reader", keys=keys, uses_segments=False
            )
        )
    return _reservation.rank


@contextmanager
def taking_reservation(options: SessionOptions) -> Iterator[SessionOptions]:
    """The options by which a session takes this process's reservation, if it has one in that job.

    The session says HELLO inside the block.
    """
    global _reservation
    mine = _reservation
    fits = (
        mine is not None
        and (mine.process_id, options.rank) == (os.getpid(), None)
        and (mine.options.job, tuple(mine.options.addresses)) == (options.job, tuple(options.addresses))
    )
    if mine is None or not fits:
        yield options if options.run else replace(options, run=run_name(options.job))
        return
    _reservation = None
    try:
        yield replace(options, rank=mine.rank, nonce=mine.options.nonce, run=mine.options.run)
    finally:
        mine.close()
