"""A worker's life with its servers: enter, exchange chunks, leave. Strategies and ``Client`` are built on it.

with WorkerSession(options) as session:                      HELLO
    session.enter(layout, initial)                           REGISTER and SEAL | LIST and compare | JOIN
    push = session.push(key, gradient, [weights])            PUSH ─► UPDATED
    push.wait()
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from psengine.errors import ConfigurationError, FencedError, ProtocolError, PSEngineError, ServerRefusedError
from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.chunk_exchanges import ChunkExchanges
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.flow import Flow, run
from psengine.parameter_server.client.membership import Membership
from psengine.parameter_server.client.operation import Answer, Push, PushResult, Request, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.recovery import recover
from psengine.parameter_server.client.runtime import Runtime
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, ErrorCode, Message, MessageType
from psengine.tracing.telemetry import Telemetry

__all__ = ["Answer", "Push", "PushResult", "Request", "SessionOptions", "WorkerSession", "wait_all"]

logger = logging.getLogger(__name__)
GOODBYE_S = 1.0

T = TypeVar("T")


class WorkerSession(ChunkExchanges):
    """A worker (or a reader) of one job. Methods may be called from any thread; the sockets have a thread of their own.

    Args:
        options: see there.
        runtime: the clock, randomness and sockets; a simulation has its own.

    Attributes:
        state: what the servers first said: "initialise" (give the job its values), "ready", or "join" (an averaging job
            is under way); for a reader also "wait" (the job has no values yet).

    A context manager; ``close`` is idempotent, and is called at interpreter exit for sessions left open.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime = PROCESS) -> None:
        options.check()
        self.options = options
        self.state = ""
        super().__init__(Membership(options, runtime, recover))
        # Called at exit too; it holds no reference to this object, so that a forgotten session is collected.
        self._finalizer = weakref.finalize(self, _say_goodbye, self._membership, os.getpid())

    def __enter__(self) -> WorkerSession:
        if not self.state:
            self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- entering and leaving ----------------------------------------------------------------------------------

    def start(self) -> str:
        """Say HELLO to all servers; wait until the job has values, or this worker is to give them. Returns ``state``.

        Raises:
            ServerLostError: a server does not answer within ``connect_timeout_s``, or the job got no values within
                ``timeout_s``.
            ServerRefusedError: the job has another rule ("rule_mismatch"), the rank is taken ("duplicate_rank"), ...
            AuthenticationError: a CURVE key is wrong or missing.
        """
        try:
            self.state = self._run(handshake.enter(self._membership)).state
        except BaseException:
            self.close()
            raise
        return self.state

    def enter(self, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor]) -> str:
        """Take part in the job with this model.

        Args:
            layout: the model's chunks, keys 0, 1, ...
            initial: a chunk's first values, 1-D on the CPU; called only where this worker gives the job its values.

        Returns:
            "initialised" (the servers have this worker's values), "ready" (pull the servers' values) or "joined" (pull
            them, and the depositor's state, and go on from its exchange numbers).

        Raises:
            ReplicaMismatchError: the job's model is another one; names the first parameter that differs.
            ServerLostError, ServerRefusedError: see ``start``.
        """
        return self._run(join.take_part(self._membership, self.state, layout, initial))

    def rejoin(self) -> str:
        """After FencedError: take part again with another worker's state; pull it as after "joined".

        Returns:
            "joined", or "ready" where all other workers went away: then this worker's own state is the job's.

        Raises:
            ServerLostError, ServerRefusedError: see ``start``.
        """
        state = self._run(join.rejoin(self._membership))
        self.reset_codecs()
        return state

    def layout(self) -> list[ChunkSpec]:
        """The job's chunks by key, from the servers; afterwards this session knows their shards.

        Raises:
            ServerRefusedError: the job has no values yet ("not_ready").
        """
        return self._run(join.fetch_layout(self._membership))

    def _run(self, flow: Flow[T]) -> T:
        return run(flow, self._membership.closing)

    def serve_joiner(self, deposit: Callable[[], None]) -> None:
        """Where a worker waits for this worker's state: deposit it, and let that worker take part.

        Args:
            deposit: STOREs the state and waits. An error is raised on; the joiner asks again.

        Raises:
            ServerLostError, ServerRefusedError: the joiner could not be admitted; it asks again.
        """
        request = self._membership.state_requests.take()
        if request is None:
            return
        try:
            deposit()
            self._run(join.admit(self._membership, request))
        except ServerRefusedError as error:
            if error.code != ErrorCode.NOT_READY:
                raise
            logger.debug("worker %d asks for state again: %s", request.rank, error)
        finally:
            self._membership.state_requests.forget(request)  # the same worker may come back and ask again

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

    def close(self) -> None:
        """Leave, and end the thread; everything under way fails.

        Where servers average, this waits until every other live worker has the averages of this worker's last step: a
        server that dies meanwhile may need them from here. ``timeout_s`` bounds the wait.
        """
        self._finalizer()

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker; 0xFFFFFFFF for readers."""
        return self._membership.identity.worker

    @property
    def job(self) -> str:
        """Name of the job."""
        return self.options.job

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the live workers, as of the last heartbeat."""
        return self._membership.members

    @property
    def shard_count(self) -> int:
        """Shards of all servers together."""
        return len(self._membership.links)

    @property
    def fenced(self) -> FencedError | None:
        """Why exchanges need a ``rejoin`` first; None where they go on."""
        return self._membership.fenced

    @property
    def telemetry(self) -> Telemetry:
        """The counters in this worker's heartbeats; strategies fill them."""
        return self._membership.telemetry

    # ---- for people --------------------------------------------------------------------------------------------

    def echo(self, size_bytes: int, shard: int = 0) -> float:
        """Seconds that ``size_bytes`` random bytes take to a shard and back.

        Raises:
            ConfigurationError: there is no such shard, or the size is out of bounds.
            ServerLostError: nothing came back in time.
            ProtocolError: the answer has other bytes.
        """
        links = self._membership.links
        if not 0 <= shard < len(links):
            raise ConfigurationError(f"there is no shard {shard} (expected 0 to {len(links) - 1})")
        link = links[shard]
        most_bytes = min(MAX_PAYLOAD_BYTES, link.pushes.credit_bytes)
        if not 1 <= size_bytes <= most_bytes:
            raise ConfigurationError(f"size_bytes is out of bounds (expected 1 to {most_bytes}, got {size_bytes})")
        payload = torch.frombuffer(bytearray(os.urandom(size_bytes)), dtype=torch.uint8)
        what = f"ECHO of {size_bytes} bytes"
        request = self._membership.ask(link, Message(MessageType.ECHO, payload=payload), what=what)
        answer = request.wait()
        if answer.values is None or not torch.equal(answer.values, payload):
            raise ProtocolError(f"{link.address} sent other bytes back than it got ({what})")
        return request.seconds

    def status(self) -> list[dict[str, Any]]:
        """Every shard's status report."""
        links = self._membership.links
        requests = [self._membership.ask(link, Message(MessageType.STATUS)) for link in links]
        reports = [json.loads(bytes(request.reply().payload)) for request in requests]
        return [{"address": link.address, **report} for link, report in zip(links, reports, strict=True)]

    def snapshot(self) -> list[int]:
        """Let every server write a snapshot now; their generations, once they are durable.

        Raises:
            ServerRefusedError: a server could not ("snapshot_failed").
        """
        membership = self._membership
        requests = [membership.ask(link, Message(MessageType.SNAPSHOT)) for link in membership.first_links()]
        return [int(request.wait().body.get("generation", 0)) for request in requests]

    def administer(self, order: dict[str, Any]) -> list[str]:
        """Give every server an order, the body of an ADMIN; their answers.

        Raises:
            ServerRefusedError: a server does not obey this client ("not_allowed"), or could not do it.
        """
        membership = self._membership
        requests = [membership.ask(link, Message(MessageType.ADMIN, body=order)) for link in membership.first_links()]
        return [str(request.wait().body.get("text", "")) for request in requests]


def _say_goodbye(membership: Membership, process_id: int) -> None:
    """LEAVE and BYE where a server hears them, then end the I/O thread."""
    if os.getpid() != process_id:
        membership.closing.set()
        return
    connection = membership.connection
    # The garbage collector may close a forgotten session on the I/O thread, which must not wait.
    may_wait = not connection.is_own_thread
    try:
        if may_wait:
            run(join.leave(membership), membership.closing)
    finally:
        membership.closing.set()
        try:
            goodbyes = [
                membership.ask(link, Message(MessageType.BYE), timeout_s=GOODBYE_S, handles_refusal=True)
                for link in membership.links
                if link.last_heard_s is not None and not link.is_paused and membership.fatal is None
            ]
            if may_wait:
                wait_all(goodbyes)
        except PSEngineError as error:
            logger.debug("no answer to BYE: %s", error)
        finally:
            connection.close()
