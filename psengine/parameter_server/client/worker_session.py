"""A worker's life with its servers: enter, exchange chunks, leave. Strategies and ``Client`` are built on it.

with WorkerSession(options) as session:                      HELLO, RESUME
    session.enter(layout, initial)                           REGISTER | LIST and compare | COMMIT "join"; VIEW
    push = session.push(key, gradient, [weights])            PUSH ─► UPDATED
    push.wait()

Chunks go by their keys. Each exchange returns at once a request to wait for.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from psengine.parameter_server.chunk_codecs import gradient_codec
from psengine.parameter_server.client import join
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.flow import Flow, run
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Push, Request, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.protocol.hyperparameters import optimizer_name, wire_groups
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message, MessageType

__all__ = ["Push", "Request", "SessionOptions", "WorkerSession", "wait_all"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerSession:
    """A worker (or a reader) of one job. Methods may be called from any thread; the sockets have a thread of their own.

    Args:
        options: see there.
        runtime: the clock, randomness and sockets; a simulation has its own.

    Attributes:
        state: what the coordinator first said: "initialise" (give the job its values), "wait" (another worker does),
            "ready", "join" or "joined" (an averaging job is under way). For a reader "ready", or "wait": the job has no
            values.
        job_connection: the client's core.
        telemetry: the counters in this worker's heartbeats; strategies fill them.
        segments: the memory that this worker shares with servers of its host.

    A context manager; ``close`` is idempotent, and is called at interpreter exit for sessions left open.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime = PROCESS) -> None:
        self.options = options
        self.state = ""
        self.job_connection = job = JobConnection(options, runtime)
        self.telemetry = job.telemetry
        self.segments = job.transport.segments or WorkerSegments(is_wanted=False)
        self._encoders: dict[int, ChunkEncoder] = {}  # by chunk, where the job's codec encodes its values
        self._copies_payloads = False
        # Called at exit too; it holds no reference to this object, so that a forgotten session is collected.
        self._finalizer = weakref.finalize(self, _say_goodbye, job, os.getpid())

    def __enter__(self) -> WorkerSession:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)

    # ---- entering and leaving ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Say HELLO, and connect to all servers; once, however often it is called.

        Raises:
            ServerLostError: a server does not answer within ``connect_timeout_s``.
            ServerRefusedError: the job has another rule ("rule_mismatch"), the rank is taken ("duplicate_rank"), this
                run of the job has ended ("ended"), ...
            AuthenticationError: a CURVE key is wrong or missing.
        """
        try:
            self.state = self.state or self._run(join.start(self.job_connection))
        except BaseException:
            self.close(failed=True)
            raise

    def enter(self, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor | None]) -> str:
        """Take part in the job with this model.

        Args:
            layout: the model's chunks, keys 0, 1, ...
            initial: a chunk's first values, 1-D on the CPU; called only where this worker gives the job its values.
                None of a table, whose rows come as they are asked for.

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

    def layout(self) -> list[ChunkSpec]:
        """The job's chunks by key, from the servers; afterwards this session knows their shards.

        Raises:
            ServerRefusedError: the job has no values yet ("not_ready").
        """
        return self._run(join.fetch_layout(self.job_connection))

    def _run(self, flow: Flow[T]) -> T:
        return run(flow, self.job_connection.closing)

    def serve_joiner(self, deposit: Callable[[], Iterable[Sequence[Request]]]) -> None:
        """Where a worker waits for this worker's state: deposit it, and let that worker take part.

        Args:
            deposit: begins STOREs; each group is waited for before the next begins.

        Raises:
            ServerLostError, ServerRefusedError: the joiner could not be admitted; it asks again.
        """
        self._run(join.donate(self.job_connection, deposit))

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
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers that take part, by the view."""
        view = self.job_connection.view
        return () if view is None else tuple(member.rank for member in view.members)

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def version(self, key: int) -> int:
        """The version of the chunk's values that came last, by push or pull; 0 before."""
        return self._link(key).versions.get(key, 0)

    def end_step(self) -> None:
        """Later pushes belong to the next step. The first wait for a push of a step ends it too."""
        self.job_connection.steps.end()

    def configure(self, key: int, body: Mapping[str, Any]) -> Request:
        """Attach the server-side optimizer to a chunk; ``body`` as in CONFIGURE: optimizer, groups, runs."""
        self.job_connection.configured[key] = dict(body)
        return self._ask(Message(MessageType.CONFIGURE, key=key, body=dict(body)))

    def attach_optimizer(
        self, specs: Iterable[ChunkSpec], optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> list[ChunkSpec]:
        """Let servers step, as the optimizer does, those of these chunks that it trains; returns them.

        Raises:
            ConfigurationError: the servers cannot run this optimizer.
            ServerRefusedError: the job's other workers use another one.
        """
        names = {id(tensor): name for name, tensor in parameters.items()}
        group_of: dict[str | None, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            group_of |= dict.fromkeys([names.get(id(parameter)) for parameter in group["params"]], index)
        body = {"optimizer": optimizer_name(optimizer), "groups": wire_groups(optimizer)}
        trained, requests = [], []
        for spec in specs:
            runs, start = [], 0
            # Neighbours of one group stay apart: a push leaves out whole runs, and a tensor may lack a gradient alone.
            for segment in spec.segments:
                runs.append([start, start + segment.numel, group_of.get(segment.name, -1)])
                start += segment.numel
            if any(group >= 0 for _, _, group in runs):
                trained.append(spec)
                requests.append(self.configure(spec.key, {**body, "runs": runs}))
        wait_all(requests)
        return trained

    def push(
        self,
        key: int,
        payload: torch.Tensor | None,
        destinations: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]] | None = None,
        absent: Sequence[int] = (),
        weight: float | None = None,
        *,
        reads_in_place: bool = False,
        **of_rows: float | None,
    ) -> Push:
        """Begin the chunk's next exchange.

        Args:
            key: the chunk.
            payload: 1-D, contiguous, on the CPU, of the chunk's dtype and numel: the gradient, or a buffer's values;
                must stay unchanged until the answer came. None takes part without contributing (averaging jobs). The
                job's codec encodes it.
            destinations: contiguous CPU tensors that together have the chunk's elements: overwritten, one after the
                other, by the answer (weights or average), at the latest when it was waited for. Empty drops the answer.
            groups: the optimizer's hyperparameters now, per group; not changed afterwards.
            absent: indices of the chunk's segments without a gradient this time.
            weight: what the gradient counts in an average, up to 1e12: every worker gives one, or none does. With 0
                it is not sent: such a worker takes part and counts nothing.
            reads_in_place: an answer in the server's memory stays there, and does not land; without destinations every
                answer stays. See ``Push.take``.
            **of_rows: of a table's part, whose payload ``protocol/rows.py`` packs: "rows", "lr", "divisor" and "ahead"
                as in PUSH; None is left out.

        Raises:
            ServerError: the session has failed or is closed.
        """
        job, link = self.job_connection, self._link(key)
        payload = None if weight == 0 else payload
        spec, step, averages = job.chunks.specs[key], job.steps.step_for(key), job.options.averages
        step.note(is_trained=spec.kind.is_trained, has_values=payload is not None)
        body = _given(groups=groups, absent=list(absent) or None, weight=weight, **of_rows)
        message = Message(MessageType.PUSH, key=key, sequence=step.number, version=link.versions.get(key, 0), body=body)
        encoder = self._encoder(spec)
        if encoder is not None and encoder.held is not None:
            body["held"] = encoder.held
        if payload is not None:
            payload = payload.detach() if encoder is None else encoder.encode(payload)
            if self._copies_payloads:
                payload = payload.clone()
            message.dtype, message.numel, message.payload = payload.dtype, payload.numel(), payload
        push = Push(
            message,
            job.parking,
            job.options.timeout_s,
            destinations,
            encoder,
            spec=spec,
            step=step,
            link=link,
            is_shared=averages,
            reads_in_place=reads_in_place,
            size_bytes=spec.size_bytes if payload is None else max(spec.size_bytes, payload.nbytes),
        )
        if encoder is not None:
            encoder.last = push
        job.transport.do(job.begin_push, push)
        return push

    def release_payloads(self) -> None:
        """After a wait that failed: let the caller write to the memory of its pushes, whoever may still read them.

        What servers of this host read stays as it is, and later payloads are copied.
        """
        self._copies_payloads = True
        self.segments.withdraw()

    def _encoder(self, spec: ChunkSpec) -> ChunkEncoder | None:
        """The chunk's encoder, told how its last push ended; None where values travel as they are."""
        codec, averages = self.job_connection.options.codec, self.job_connection.options.averages
        if gradient_codec(codec, spec).is_identity:
            return None
        encoder = self._encoders.get(spec.key)
        if encoder is None:
            encoder = self._encoders[spec.key] = ChunkEncoder(spec, codec, are_weights=not averages)
        if encoder.last is not None:
            encoder.last.conclude()  # perhaps nobody has waited for it
        return encoder

    def residual(self, key: int) -> torch.Tensor | None:
        """What earlier payloads of a chunk left out, for the next one; None where the codec keeps nothing."""
        encoder = self._encoder(self.job_connection.chunks.specs[key])
        return None if encoder is None or encoder.state is None else encoder.state.residual

    def pull(
        self,
        key: int,
        destinations: Sequence[torch.Tensor] = (),
        slot: str | None = None,
        *,
        ids: torch.Tensor | None = None,
        **scan: int,
    ) -> Request:
        """Begin to read a chunk's values, or a slot of its optimizer's state, whose body has "steps".

        Of a table's part: the rows of ``ids``, which must stay unchanged until the answer came, or those from the place
        "scan" on, "most" at most. ``destinations`` are as in ``push``; without them the answer has the values as its
        payload.
        """
        size_bytes = sum(tensor.nbytes for tensor in destinations) or self.job_connection.chunks.specs[key].size_bytes
        message = Message(MessageType.PULL, key=key, body=_given(slot=slot, **scan), payload=ids)
        return self._ask(message, destinations=destinations, size_bytes=size_bytes)

    def store(
        self,
        key: int,
        payload: torch.Tensor,
        slot: str | None = None,
        steps: Sequence[float] | None = None,
        rows: int | None = None,
    ) -> Request:
        """Begin to overwrite a chunk's values, or a slot and its step count per run, or so many rows; see ``pull``.

        The ``payload``, contiguous on the CPU, must stay unchanged until the answer came. The stored values have the
        version of those that this session saw last.
        """
        body = _given(slot=slot, steps=None if steps is None else list(steps), rows=rows)
        message = Message(MessageType.STORE, key=key, version=self.version(key), body=body, payload=payload.detach())
        return self._ask(message, size_bytes=payload.nbytes)

    def pull_piece(self, name: str, piece: int) -> Request:
        """Begin to read a piece of a blob, 1-D uint8; the answer's body says of how many "pieces"."""
        return self._ask(Message(MessageType.PULL, key=piece, body={"blob": name}))

    def pull_blob(self, name: str) -> list[torch.Tensor]:
        """All pieces of a blob, bytes by name that are spread over the shards, in order.

        Raises:
            ServerRefusedError: there is no such blob ("unknown_key").
        """
        first = self.pull_piece(name, 0).wait()
        rest = [self.pull_piece(name, piece) for piece in range(1, first.body["pieces"])]
        return [answer.payload.clone() for answer in (first, *(request.wait() for request in rest))]

    def store_blob(self, name: str, pieces: Sequence[torch.Tensor]) -> list[Request]:
        """Begin to store all pieces of a blob, each 1-D uint8."""
        body = {"blob": name, "pieces": len(pieces)}
        messages = [Message(MessageType.STORE, key=key, body=body, payload=piece) for key, piece in enumerate(pieces)]
        return [self._ask(message, size_bytes=message.payload.nbytes) for message in messages]

    def _ask(self, message: Message, **options: Any) -> Request:
        job, body, key = self.job_connection, message.body, message.key
        if "blob" in body:
            link, what = job.links[key % len(job.links)], f"piece {key} of {body['blob']!r}"
        else:
            slot = f"slot {body['slot']!r} of " if "slot" in body else ""
            link, what = self._link(key), slot + job.chunks.specs[key].describe()
        return job.ask(link, message, what=f"{message.type.name} of {what}", **options)

    def _link(self, key: int) -> Link:
        return self.job_connection.links[self.job_connection.chunks.shard_of[key]]

    # ---- for people --------------------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """Every shard's status report."""
        links = self.job_connection.links
        requests = [self.job_connection.ask(link, Message(MessageType.STATUS)) for link in links]
        reports = [json.loads(bytes(request.wait().payload.numpy())) for request in requests]
        return [{"address": link.address, **report} for link, report in zip(links, reports, strict=True)]

    def administer(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give every server an order, the body of an ADMIN; the bodies of their answers.

        Raises:
            ServerRefusedError: a server does not obey this client ("not_allowed"), or could not do it.
        """
        job = self.job_connection
        requests = [job.ask(link, Message(MessageType.ADMIN, body=dict(order))) for link in job.first_links()]
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
        else:
            # The garbage collector may close a forgotten session on the I/O thread, which must not wait.
            job.control.send(Message(MessageType.LEAVE, body={"completed": job.steps.completed}))
    finally:
        job.closing.set()
        job.transport.close()


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
