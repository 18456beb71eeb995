"""A worker's life with its servers: enter, exchange chunks, leave. Strategies and ``Client`` are built on it.

with WorkerSession(options) as session:                      HELLO, RESUME
    session.enter(layout, initial)                           REGISTER | LIST and compare | COMMIT "join"; VIEW
    push = session.push(key, gradient, [weights])            PUSH ─► UPDATED
    push.wait()
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from psengine.errors import ConfigurationError, FencedError, ProtocolError, ServerRefusedError
from psengine.parameter_server.client import join
from psengine.parameter_server.client.chunk_exchanges import ChunkExchanges
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.flow import Flow, run
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.operation import Answer, Push, PushResult, Request, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, ErrorCode, Message, MessageType
from psengine.tracing.telemetry import Telemetry

__all__ = ["Answer", "Push", "PushResult", "Request", "SessionOptions", "WorkerSession", "wait_all"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerSession(ChunkExchanges):
    """A worker (or a reader) of one job. Methods may be called from any thread; the sockets have a thread of their own.

    Args:
        options: see there.
        runtime: the clock, randomness and sockets; a simulation has its own.

    Attributes:
        state: what the coordinator first said: "initialise" (give the job its values), "wait" (another worker does),
            "ready", or "join" (an averaging job is under way). For a reader "ready", or "wait": the job has no values.
        job_connection: the client's core.

    A context manager; ``close`` is idempotent, and is called at interpreter exit for sessions left open.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime = PROCESS) -> None:
        options.check()
        self.options = options
        self.state = ""
        super().__init__(JobConnection(options, runtime))
        # Called at exit too; it holds no reference to this object, so that a forgotten session is collected.
        self._finalizer = weakref.finalize(self, _say_goodbye, self.job_connection, os.getpid())

    def __enter__(self) -> WorkerSession:
        if not self.state:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)

    # ---- entering and leaving ----------------------------------------------------------------------------------

    def start(self) -> str:
        """Say HELLO, and connect to all servers. Returns ``state``.

        Raises:
            ServerLostError: a server does not answer within ``connect_timeout_s``.
            ServerRefusedError: the job has another rule ("rule_mismatch"), the rank is taken ("duplicate_rank"), this
                run of the job has ended ("ended"), ...
            AuthenticationError: a CURVE key is wrong or missing.
        """
        try:
            self.state = self._run(join.start(self.job_connection))
        except BaseException:
            self.close(failed=True)
            raise
        return self.state

    def enter(self, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor]) -> str:
        """Take part in the job with this model.

        Args:
            layout: the model's chunks, keys 0, 1, ...
            initial: a chunk's first values, 1-D on the CPU; called only where this worker gives the job its values.

        Returns:
            "initialised" (the servers have this worker's values), "ready" (pull the servers' values) or "joined" (pull
            them, and the donor's state).

        Raises:
            ReplicaMismatchError: the job's model is another one; names the first parameter that differs.
            ConfigurationError: the job's other workers have other servers, or another order of them.
            ServerLostError: see ``start``; or the job got no values, or no state, within ``timeout_s``.
            ServerRefusedError: see ``start``.
        """
        return self._run(join.take_part(self.job_connection, layout, initial))

    def rejoin(self) -> str:
        """After FencedError: take part again with another worker's state; pull it as after "joined".

        Returns:
            "joined", or "ready" where this worker's own state is still the job's.

        Raises:
            ServerLostError, ServerRefusedError: see ``start``.
        """
        state = self._run(join.rejoin(self.job_connection))
        self.reset_codecs()
        return state

    def layout(self) -> list[ChunkSpec]:
        """The job's chunks by key, from the servers; afterwards this session knows their shards.

        Raises:
            ServerRefusedError: the job has no values yet ("not_ready").
        """
        return self._run(join.fetch_layout(self.job_connection))

    def _run(self, flow: Flow[T]) -> T:
        return run(flow, self.job_connection.closing)

    def serve_joiner(self, deposit: Callable[[], None]) -> None:
        """Where a worker waits for this worker's state: deposit it, and let that worker take part.

        Args:
            deposit: STOREs the state and waits. An error is raised on; the joiner asks again.

        Raises:
            ServerLostError, ServerRefusedError: the joiner could not be admitted; it asks again.
        """
        job = self.job_connection
        request = job.state_request
        if request is None:
            return
        try:
            deposit()
            self._run(join.donate(job, request))
        except ServerRefusedError as error:
            if error.code not in (ErrorCode.NOT_READY, ErrorCode.STALE):
                raise
            logger.debug("worker %d asks for state again: %s", request.rank, error)
        finally:
            job.state_request = None  # who still waits is named again

    def await_stores(self, stores: Sequence[Request]) -> None:
        """Wait for the STOREs of a deposit. Where one fails none is sent again: it could come after a later deposit's.

        Raises:
            ServerLostError, ServerRefusedError: as of the first that failed.
        """
        try:
            wait_all(stores)
        except BaseException:
            for store in stores:
                store.abandon()
            raise

    def close(self, *, failed: bool = False) -> None:
        """Leave, and end the thread; everything under way fails.

        Where servers average, this waits until every other live worker has the averages of this worker's last step: a
        server that dies meanwhile may need them from here. ``timeout_s`` bounds the wait. A worker whose training has
        ``failed`` waits for nobody, and its job is not over.
        """
        self.job_connection.has_failed = self.job_connection.has_failed or failed
        self._finalizer()

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker; 0xFFFFFFFF for readers."""
        return self.job_connection.identity.worker

    @property
    def job(self) -> str:
        """Name of the job."""
        return self.options.job

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers that take part, by the view."""
        view = self.job_connection.view
        return () if view is None else tuple(member.rank for member in view.members)

    @property
    def shard_count(self) -> int:
        """Shards of all servers together."""
        return len(self.job_connection.links)

    @property
    def fenced(self) -> FencedError | None:
        """Why exchanges need a ``rejoin`` first; None where they go on."""
        return self.job_connection.fenced

    @property
    def telemetry(self) -> Telemetry:
        """The counters in this worker's heartbeats; strategies fill them."""
        return self.job_connection.telemetry

    # ---- for people --------------------------------------------------------------------------------------------

    def echo(self, size_bytes: int, shard: int = 0) -> float:
        """Seconds that ``size_bytes`` random bytes take to a shard and back.

        Raises:
            ConfigurationError: there is no such shard, or the size is out of bounds.
            ServerLostError: nothing came back in time.
            ProtocolError: the answer has other bytes.
        """
        links = self.job_connection.links
        if not 0 <= shard < len(links):
            raise ConfigurationError(f"there is no shard {shard} (expected 0 to {len(links) - 1})")
        link = links[shard]
        if not 1 <= size_bytes <= MAX_PAYLOAD_BYTES:
            raise ConfigurationError(
                f"size_bytes is out of bounds (expected 1 to {MAX_PAYLOAD_BYTES}, got {size_bytes})"
            )
        payload = torch.frombuffer(bytearray(os.urandom(size_bytes)), dtype=torch.uint8)
        what = f"ECHO of {size_bytes} bytes"
        request = self.job_connection.ask(link, Message(MessageType.ECHO, payload=payload), what=what)
        answer = request.wait()
        if answer.values is None or not torch.equal(answer.values, payload):
            raise ProtocolError(f"{link.address} sent other bytes back than it got ({what})")
        return request.seconds

    def status(self) -> list[dict[str, Any]]:
        """Every shard's status report."""
        links = self.job_connection.links
        requests = [self.job_connection.ask(link, Message(MessageType.STATUS)) for link in links]
        reports = [json.loads(bytes(request.reply().payload)) for request in requests]
        return [{"address": link.address, **report} for link, report in zip(links, reports, strict=True)]

    def snapshot(self) -> list[int]:
        """Let every server write a snapshot now; their generations, once they are durable.

        Raises:
            ServerRefusedError: a server could not ("snapshot_failed").
        """
        return [int(answer.get("generation", 0)) for answer in self._order({"action": "snapshot"})]

    def administer(self, order: dict[str, Any]) -> list[str]:
        """Give every server an order, the body of an ADMIN; their answers.

        Raises:
            ServerRefusedError: a server does not obey this client ("not_allowed"), or could not do it.
        """
        return [str(answer.get("text", "")) for answer in self._order(order)]

    def _order(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        job = self.job_connection
        requests = [job.ask(link, Message(MessageType.ADMIN, body=dict(body))) for link in job.first_links()]
        return [request.wait().body for request in requests]


def _say_goodbye(job: JobConnection, process_id: int) -> None:
    """LEAVE where the coordinator hears it, then end the I/O thread."""
    if os.getpid() != process_id:
        job.closing.set()
        return
    failed = job.has_failed or getattr(sys, "last_value", None) is not None  # at exit
    try:
        if not job.transport.is_own_thread:
            run(join.leave(job, failed=failed), job.closing)
        elif job.control is not None:
            # The garbage collector may close a forgotten session on the I/O thread, which must not wait.
            job.control.send(Message(MessageType.LEAVE, body={"completed": job.steps.completed}))
    finally:
        job.closing.set()
        job.transport.close()
