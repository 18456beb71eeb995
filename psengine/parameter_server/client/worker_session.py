"""A worker's life with its servers: enter, exchange chunks, leave. What strategies build on.

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

from psengine.errors import ConfigurationError, FencedError, ProtocolError, PSEngineError
from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.answers import Answer, PushResult
from psengine.parameter_server.client.chunk_exchanges import ChunkExchanges
from psengine.parameter_server.client.core import ClientCore
from psengine.parameter_server.client.flow import Flow, run
from psengine.parameter_server.client.operation import Operation, Push, Request, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.own_membership import OwnMembership, StateRequest
from psengine.parameter_server.client.process_runtime import PROCESS
from psengine.parameter_server.client.runtime import Runtime
from psengine.parameter_server.client.telemetry import Telemetry
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, Message, MessageType

__all__ = ["Answer", "Push", "PushResult", "Request", "SessionOptions", "StateRequest", "WorkerSession", "wait_all"]

logger = logging.getLogger(__name__)
GOODBYE_S = 1.0

T = TypeVar("T")


class WorkerSession(ChunkExchanges):
    """A worker (or a reader) of one job. Methods may be called from any thread; sockets live on a thread of its own.

    Args:
        options: see there.
        runtime: the clock, randomness and sockets; a simulation gives others than the process's.

    Attributes:
        state: what the lead said first: "initialise" (give the job its values), "ready", or "join" (an averaging job
            is under way); for a reader also "wait" (the job has no values yet).
        started: whether the job has ended an exchange before this worker came.

    A context manager; ``close`` is idempotent, and is called at interpreter exit for sessions left open.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime = PROCESS) -> None:
        options.check()
        self.options = options
        self.state = ""
        self.started = False
        core = ClientCore(options, runtime)
        super().__init__(core, core.membership)
        # Called at exit too; holds no reference to this object, so that a forgotten session can go.
        self._finalizer = weakref.finalize(self, _say_goodbye, self._membership, os.getpid())

    def __enter__(self) -> WorkerSession:
        if not self.state:
            self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- coming and going --------------------------------------------------------------------------------------

    def start(self) -> str:
        """Say HELLO to all servers, and wait until the job has values or this worker is to give them.

        Returns:
            ``state``.

        Raises:
            ServerLostError: a server does not answer within ``connect_timeout_s``, or the job got no values within
                ``timeout_s``.
            ServerRefusedError: the job has another rule ("rule_mismatch"), the rank is taken ("duplicate_rank"), ...
            AuthenticationError: a CURVE key is wrong or missing.
        """
        try:
            welcome = self._run(handshake.enter(self._membership))
        except BaseException:
            self.close()
            raise
        self.state, self.started = welcome.state, welcome.started
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
        """After FencedError: take part again, beginning with another worker's state; pull it as after "joined".

        Returns:
            "joined", or "ready" where all other workers went away: then this worker's own state is the job's.

        Raises:
            ServerLostError, ServerRefusedError: see ``start``.
        """
        return self._run(join.rejoin(self._membership))

    def layout(self) -> list[ChunkSpec]:
        """The job's chunks by key, from the servers; afterwards this session knows where they are.

        Raises:
            ServerRefusedError: the job has no values yet ("not_ready").
        """
        return self._run(join.fetch_layout(self._membership))

    def _run(self, flow: Flow[T]) -> T:
        return run(flow, self._membership.closing)

    def close(self) -> None:
        """Leave, and end the thread; whatever still waits fails.

        Where servers average it waits until every other live worker has the averages of this one's last step: a server
        that dies meanwhile may need this one's. That takes as long as an answer of theirs, and ``timeout_s`` at most.
        """
        self._finalizer()

    # ---- where we stand ----------------------------------------------------------------------------------------

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
    def lease_s(self) -> float:
        """Silence after which the servers evict a worker."""
        return self._core.lease_s

    @property
    def shard_count(self) -> int:
        """Shards of all servers together."""
        return len(self._membership.links)

    @property
    def fenced(self) -> FencedError | None:
        """Why exchanges need a ``rejoin`` first; None where they go on."""
        return self._membership.fenced

    # ---- joiners -----------------------------------------------------------------------------------------------

    def serve_joiner(self, deposit: Callable[[], None]) -> None:
        """Give this worker's state to a worker that waits for it, and let it take part; nothing where none waits.

        Args:
            deposit: STOREs the state, and returns once it is there. What it raises is raised; the joiner asks again.

        Raises:
            ServerLostError, ServerRefusedError: the joiner could not be admitted; it asks again.
        """
        request = self.take_state_request()
        if request is None:
            return
        try:
            deposit()
        except BaseException:
            self.decline(request)
            raise
        self.admit(request)

    def take_state_request(self) -> StateRequest | None:
        """A worker that waits for this worker's state (STORE it, then ``admit``), each once; None without one."""
        return self._core.take_state_request()

    def decline(self, request: StateRequest) -> None:
        """The state could not be deposited; the joiner may ask again."""
        self._core.forget_state_request(request)

    def admit(self, request: StateRequest) -> None:
        """The state is deposited: the joiner takes part from this worker's next exchange on; waits for all shards."""
        try:
            self._run(join.admit(self._membership, request))
        finally:
            self._core.forget_state_request(request)  # the same worker may come back and ask again

    # ---- for people --------------------------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """What this worker's heartbeats say of it; strategies fill it."""
        return self._core.telemetry

    def echo(self, size_bytes: int, shard: int = 0) -> float:
        """Seconds that ``size_bytes`` random bytes take to a shard and back; for measuring the way there.

        Raises:
            ConfigurationError: there is no such shard, or the size is out of bounds.
            ServerLostError: nothing came back in time.
            ProtocolError: something else came back.
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
        """What every shard says of itself."""
        requests = [self._membership.ask(link, Message(MessageType.STATUS)) for link in self._membership.links]
        reports = []
        for request, link in zip(requests, self._membership.links, strict=True):
            report = json.loads(bytes(request.reply().payload))
            reports.append({"address": link.address, **report})
        return reports

    def snapshot(self) -> list[int]:
        """Let every server write a snapshot now; their generations, once they are durable.

        Raises:
            ServerRefusedError: a server could not ("snapshot_failed").
        """
        membership = self._membership
        requests = [membership.ask(link, Message(MessageType.SNAPSHOT)) for link in membership.first_links()]
        return [int(request.wait().body.get("generation", 0)) for request in requests]


def _say_goodbye(membership: OwnMembership, process_id: int) -> None:
    """Leave: BYE where there is somebody to hear it, then end the I/O thread."""
    if os.getpid() != process_id:
        membership.closing.set()
        return
    try:
        if not membership.connection.is_own_thread:  # where a forgotten session is collected is anybody's guess
            run(join.leave(membership), membership.closing)
    finally:
        _end(membership)


def _end(membership: OwnMembership) -> None:
    membership.closing.set()
    goodbyes: list[Operation] = []
    try:
        for link in membership.links:
            if link.last_heard_s is not None and not link.is_paused and membership.fatal is None:
                goodbyes.append(
                    membership.ask(link, Message(MessageType.BYE), timeout_s=GOODBYE_S, handles_refusal=True)
                )
        if not membership.connection.is_own_thread:
            wait_all(goodbyes)
    except PSEngineError as error:
        logger.debug("no answer to BYE: %s", error)
    finally:
        membership.connection.close()
