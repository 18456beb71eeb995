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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from psengine.errors import ConfigurationError, FencedError, ProtocolError, PSEngineError
from psengine.parameter_server.chunk_codecs import gradient_codec
from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.parameter_server.client.chunk_map import check_destinations, check_tensor
from psengine.parameter_server.client.core import ClientCore
from psengine.parameter_server.client.flow import Flow, run
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Answer, Operation, Push, PushResult, Request, wait_all
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


class WorkerSession:
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
        self._core = ClientCore(options, runtime)
        self._membership = self._core.membership
        self._sequences: dict[int, int] = {}
        # By chunk, where the job has a codec; and the last push of each.
        self._encoders: dict[int, ChunkEncoder] = {}
        self._encoded: dict[int, Push] = {}
        self._step = 0
        # What the pushes of the step under way carry, by chunk.
        self._step_marks: dict[int, list[Any]] = {}
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

    def version(self, key: int) -> int:
        """The version of the chunk's values that came last, by push or pull; 0 before."""
        self._membership.chunks.spec(key)
        return self._link(key).versions.get(key, 0)

    def sequence(self, key: int) -> int:
        """The number of this worker's last exchange of the chunk; 0 before the first."""
        return self._sequences.get(key, 0)

    def set_sequence(self, key: int, sequence: int) -> None:
        """The next push of this chunk is exchange ``sequence`` + 1; its values are here."""
        self._sequences[key] = sequence
        self._membership.takes_part = True

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def configure(self, key: int, body: Mapping[str, Any]) -> Request:
        """Attach the server-side optimizer to a chunk; ``body`` as in CONFIGURE: optimizer, groups, runs."""
        spec = self._membership.chunks.spec(key)
        self._membership.configured[key] = dict(body)
        message = Message(MessageType.CONFIGURE, key=key, body=dict(body))
        return self._membership.ask(self._link(key), message, what=f"CONFIGURE of {spec.describe()}")

    def begin_step(self, keys: Sequence[int], *, is_whole: bool) -> None:
        """The next pushes of these chunks belong together: a snapshot has all of them, or none.

        Args:
            keys: the chunks, each of which is pushed once.
            is_whole: every step of this worker pushes all chunks that it pushes at all. Then this holds for all shards
                of a server together, else for each by itself.
        """
        self._step += 1
        shard_of = self._membership.chunks.shard_of
        parts = Counter(shard_of[key] for key in keys)
        self._step_marks = {key: [self._step, parts[shard_of[key]], is_whole] for key in keys}

    def push(
        self,
        key: int,
        payload: torch.Tensor | None,
        destinations: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]] | None = None,
        absent: Sequence[int] = (),
        weight: float | None = None,
    ) -> Push:
        """Begin the chunk's next exchange; returns at once.

        Args:
            key: the chunk.
            payload: contiguous on the CPU, the chunk's dtype and numel: the gradient, or a buffer's values. Must stay
                unchanged until the answer came. None takes part without contributing (averaging jobs). What travels is
                what the job's codec makes of it.
            destinations: contiguous CPU tensors that together have the chunk's numel: written, one after the other,
                with the answer (weights or average), at the latest when it was waited for. Empty drops it. They may
                share the payload's memory.
            groups: the optimizer's hyperparameters now, per group.
            absent: indices of the chunk's segments without a gradient this time.
            weight: what the gradient counts in an average, up to 1e12: every worker gives one, or none does. 0, which
                goes without a payload, takes part and counts nothing.

        Raises:
            FencedError: see ``rejoin``.
            ServerError: the session failed or is closed.
            ConfigurationError: a tensor does not fit the chunk.
        """
        membership = self._membership
        spec = membership.chunks.spec(key)
        if membership.fenced is not None:
            raise membership.fenced.with_traceback(None)
        check_destinations(destinations, spec)
        if payload is not None:
            check_tensor(payload, spec, "payload")
        link = self._link(key)
        membership.takes_part = True
        self._sequences[key] = sequence = self._sequences.get(key, 0) + 1
        body: dict[str, Any] = {}
        if groups is not None:
            body["groups"] = [dict(group) for group in groups]
        if absent:
            body["absent"] = list(absent)
        if weight is not None:
            body["weight"] = weight
        if key in self._step_marks:
            body["step"] = self._step_marks[key]
        message = Message(MessageType.PUSH, key=key, sequence=sequence, version=link.versions.get(key, 0), body=body)
        encoder = self._encoder(spec)
        if payload is not None:
            payload = payload.detach() if encoder is None else encoder.encode(payload)
            message.dtype, message.numel, message.payload = payload.dtype, payload.numel(), payload
        push = Push(
            message,
            lambda: f"push {sequence} of {spec.describe()}",
            membership.parking,
            self.options.timeout_s,
            destinations,
            spec.dtype,
            encoder,
            keeps_answer=key in self._core.kept,
        )
        if encoder is not None:
            self._encoded[key] = push
        membership.submit(link, push)
        return push

    def _encoder(self, spec: ChunkSpec) -> ChunkEncoder | None:
        """That of a chunk, which has come to the end of its last push; None where values travel as they are."""
        if gradient_codec(self.options.codec, spec).is_identity:
            return None
        last = self._encoded.pop(spec.key, None)
        if last is not None:
            last.conclude()  # perhaps nobody has waited for it
        if spec.key not in self._encoders:
            self._encoders[spec.key] = ChunkEncoder(spec, self.options.codec)
        return self._encoders[spec.key]

    def keep_result(self, key: int, destinations: Sequence[torch.Tensor] | None = None) -> None:
        """From now on the destinations of this chunk's pushes stay as the answer left them, until the next answer.

        A server that was restarted may then ask for the last average on behalf of a worker that has not got it.

        Args:
            key: the chunk.
            destinations: the next push's, to be checked; they count when that push is answered.
        """
        check_destinations(destinations or (), self._membership.chunks.spec(key))
        self._core.kept.add(key)

    def pull(
        self, key: int, destinations: Sequence[torch.Tensor] = (), slot: str | None = None, blob: str | None = None
    ) -> Request:
        """Begin to read a chunk's values, a slot of its optimizer's state, or piece ``key`` of a blob.

        Args:
            key: the chunk, or the piece of the blob.
            destinations: as in ``push``; empty leaves the values in the answer.
            slot: name of the optimizer's state, as CONFIGURE's answer lists them.
            blob: name of the blob.

        ``wait()`` returns the Answer: version, body (slot: "steps", blob: "pieces") and, without destinations, values.
        """
        message = Message(MessageType.PULL, key=key, body=_named(slot=slot, blob=blob))
        if blob is not None:
            return self._membership.ask(self._membership.links[0], message, what=f"PULL of piece {key} of {blob!r}")
        spec = self._membership.chunks.spec(key)
        check_destinations(destinations, spec)
        what = f"PULL of {_slot_of(slot)}{spec.describe()}"
        return self._membership.ask(self._link(key), message, what=what, destinations=destinations, dtype=spec.dtype)

    def pull_blob(self, name: str) -> list[torch.Tensor]:
        """All pieces of a blob, in order: 1-D uint8 tensors of their own memory.

        Raises:
            ServerRefusedError: there is no such blob ("unknown_key").
        """
        first = self.pull(0, blob=name).wait()
        rest = [self.pull(piece, blob=name) for piece in range(1, first.body.get("pieces", 1))]
        answers = [first, *(request.wait() for request in rest)]
        return [answer.values.clone() for answer in answers if answer.values is not None]

    def store(
        self,
        key: int,
        payload: torch.Tensor,
        slot: str | None = None,
        steps: Sequence[float] | None = None,
        blob: str | None = None,
        pieces: int | None = None,
        version: int | None = None,
    ) -> Request:
        """Begin to overwrite what ``pull`` reads.

        Args:
            key: the chunk, or the piece of the blob.
            payload: contiguous, on the CPU; must stay unchanged until the answer came.
            slot: name of the optimizer's state.
            steps: its step count per run.
            blob: name of the blob.
            pieces: how many the blob has.
            version: what ``pull`` will say; by default that of the values this session saw last.
        """
        counts = None if steps is None else list(steps)
        fields = _named(slot=slot, steps=counts, blob=blob, pieces=pieces)
        message = Message(MessageType.STORE, key=key, version=version or 0, body=fields, payload=payload.detach())
        if blob is not None:
            return self._membership.ask(self._membership.links[0], message, what=f"STORE of piece {key} of {blob!r}")
        spec = self._membership.chunks.spec(key)
        check_tensor(payload, spec, "payload")
        if version is None:
            message.version = self.version(key)
        return self._membership.ask(self._link(key), message, what=f"STORE of {_slot_of(slot)}{spec.describe()}")

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
        most_bytes = min(MAX_PAYLOAD_BYTES, link.credit_bytes)
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

    def _link(self, key: int) -> Link:
        return self._membership.links[self._membership.chunks.shard_of[key]]


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


def _named(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _slot_of(slot: str | None) -> str:
    return f"slot {slot!r} of " if slot else ""
