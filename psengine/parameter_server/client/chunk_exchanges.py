"""Exchanges of a job's chunks, by number: push, pull, store. Each returns at once an operation to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psengine.parameter_server.chunk_codecs import WEIGHT_RULES, gradient_codec
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.parameter_server.client.chunk_map import check_tensors
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Push, Request
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import Message, MessageType


class ChunkExchanges:
    """The exchanges of one client; any thread.

    They raise ConfigurationError for tensors that do not fit the chunk, and ServerError once the session failed or is
    closed.
    """

    def __init__(self, job: JobConnection) -> None:
        self.job_connection = job
        self._segments = job.transport.segments or WorkerSegments(is_wanted=False)
        # By chunk, where the job has a codec: its encoder, and its last push.
        self._encoders: dict[int, ChunkEncoder] = {}
        self._encoded: dict[int, Push] = {}

    def version(self, key: int) -> int:
        """The version of the chunk's values that came last, by push or pull; 0 before."""
        self.job_connection.chunks.spec(key)
        return self._link(key).versions.get(key, 0)

    def end_step(self) -> None:
        """Later pushes belong to the next step. The first wait for a push of a step ends it too."""
        self.job_connection.steps.end()

    def configure(self, key: int, body: Mapping[str, Any]) -> Request:
        """Attach the server-side optimizer to a chunk; ``body`` as in CONFIGURE: optimizer, groups, runs."""
        job = self.job_connection
        spec = job.chunks.spec(key)
        job.configured[key] = dict(body)
        message = Message(MessageType.CONFIGURE, key=key, body=dict(body))
        return job.ask(self._link(key), message, what=f"CONFIGURE of {spec.describe()}")

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
    ) -> Push:
        """Begin the chunk's next exchange.

        Args:
            key: the chunk.
            payload: contiguous on the CPU, the chunk's dtype and numel: the gradient, or a buffer's values; must stay
                unchanged until the answer came. None takes part without contributing (averaging jobs). The job's codec
                encodes it.
            destinations: contiguous CPU tensors that together have the chunk's numel: overwritten, one after the other,
                by the answer (weights or average), at the latest when it was waited for. Empty drops the answer. They
                may share the payload's memory.
            groups: the optimizer's hyperparameters now, per group.
            absent: indices of the chunk's segments without a gradient this time.
            weight: what the gradient counts in an average, up to 1e12: every worker gives one, or none does. 0 needs
                no payload; such a worker takes part and counts nothing.
            reads_in_place: an answer in the server's memory stays there, and does not land: see ``Push.lent``. Without
                destinations every answer stays where it came, which is for chunks that are not ``encoded``: see
                ``Push.take``.

        Raises:
            FencedError: see ``rejoin``.
        """
        job = self.job_connection
        spec = job.chunks.spec(key)
        if job.fenced is not None:
            raise job.fenced.with_traceback(None)
        if destinations:
            check_tensors(destinations, spec, "memory for the answer")
        if payload is not None:
            check_tensors([payload], spec, "payload")
        link, step = self._link(key), job.steps.step_for(key)
        step.note(is_trained=spec.kind is ChunkKind.PARAMETER, has_values=payload is not None)
        groups = None if groups is None else [dict(group) for group in groups]
        body = _given(groups=groups, absent=list(absent) or None, weight=weight)
        message = Message(MessageType.PUSH, key=key, sequence=step.number, version=link.versions.get(key, 0), body=body)
        encoder, segments = self._encoder(spec), self._segments
        if encoder is not None and encoder.held is not None:
            body["held"] = encoder.held
        if payload is not None:
            payload = payload.detach() if encoder is None else encoder.encode(payload)
            if encoder is None:
                payload = segments.stage(link.address, key, payload, job.chunks, job.parking.now_s)
            message.dtype, message.numel, message.payload = payload.dtype, payload.numel(), payload
        averages = job.options.averages
        push = Push(
            message,
            job.parking,
            job.options.timeout_s,
            destinations,
            spec.dtype,
            encoder,
            spec=spec,
            step=step,
            link=link,
            is_shared=averages,
            lands_late=averages and encoder is None and payload is not None and _overlaps(payload, destinations),
            reads_in_place=reads_in_place,
            size_bytes=spec.size_bytes if payload is None else max(spec.size_bytes, payload.nbytes),
        )
        if encoder is not None:
            self._encoded[key] = push
        elif reads_in_place and not destinations:
            push.numel = spec.numel
        if encoder is None and payload is not None:
            segments.note(link.address, push)
        job.submit(push)
        return push

    def encoded(self, spec: ChunkSpec) -> bool:
        """Whether the job's codec encodes the chunk's payloads."""
        codec = self.job_connection.options.codec
        return not (codec.is_identity or gradient_codec(codec, spec).is_identity)

    def _encoder(self, spec: ChunkSpec) -> ChunkEncoder | None:
        """The chunk's encoder, told how its last push ended; None where values travel as they are."""
        if not self.encoded(spec):
            return None
        if (last := self._encoded.pop(spec.key, None)) is not None:
            last.conclude()  # perhaps nobody has waited for it
        if spec.key not in self._encoders:
            options = self.job_connection.options
            are_weights = options.rule is not None and options.rule["name"] in WEIGHT_RULES
            self._encoders[spec.key] = ChunkEncoder(spec, options.codec, are_weights=are_weights)
        return self._encoders[spec.key]

    # ---- memory shared with servers of this host -------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Make memory of this size that servers of this host can share; before ``allocate``."""
        self._segments.reserve(size_bytes)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised flat memory for gradients, shared where ``reserve`` made enough."""
        shared = self._segments.allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype) if shared is None else shared

    def adopt(self, key: int, gradient: torch.Tensor, answer: torch.Tensor | None = None) -> None:
        """The chunk's gradients are always packed into ``gradient``; before its first push.

        ``answer`` is the destination of all its pushes. Its values may be overwritten as soon as the next exchange has
        ended at the server, even if that answer is lost.
        """
        self._segments.adopt(key, gradient, answer)

    def withdraw_memory(self) -> None:
        """After a wait that failed: servers no longer see what this process writes to shared memory, which stays valid.

        They may need the gradients of that step for the other workers' averages.
        """
        self._segments.withdraw()

    def residual(self, key: int) -> torch.Tensor | None:
        """What earlier payloads of a chunk left out, for the next one; None where the codec keeps nothing."""
        encoder = self._encoder(self.job_connection.chunks.spec(key))
        return None if encoder is None or encoder.state is None else encoder.state.residual

    def reset_codecs(self) -> None:
        """The worker takes part anew, with the values of others: its residuals are zeros."""
        for key, encoder in self._encoders.items():
            if (push := self._encoded.pop(key, None)) is not None:
                push.conclude()
            encoder.reset()

    def pull(
        self, key: int, destinations: Sequence[torch.Tensor] = (), slot: str | None = None, blob: str | None = None
    ) -> Request:
        """Begin to read a chunk's values, a slot of its optimizer's state, or piece ``key`` of a blob.

        Args:
            key: the chunk, or the piece of the blob.
            destinations: as in ``push``; empty leaves the values in the answer.
            slot: name of the optimizer's state, as CONFIGURE's answer lists them.
            blob: name of the blob.

        The Answer has version, body (slot: "steps", blob: "pieces") and, without destinations, values.
        """
        message = Message(MessageType.PULL, key=key, body=_given(slot=slot, blob=blob))
        job = self.job_connection
        if blob is not None:
            return job.ask(job.links[0], message, what=f"PULL of piece {key} of {blob!r}")
        spec = job.chunks.spec(key)
        if destinations:
            check_tensors(destinations, spec, "memory for the answer")
        landing: dict[str, Any] = {"destinations": destinations, "dtype": spec.dtype, "size_bytes": spec.size_bytes}
        return job.ask(self._link(key), message, what=f"PULL of {_slot_of(slot)}{spec.describe()}", **landing)

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
        """Begin to overwrite a chunk's values, a slot, or a piece of a blob; see ``pull``.

        Args:
            key: the chunk, or the piece of the blob.
            payload: contiguous, on the CPU; must stay unchanged until the answer came.
            slot: name of the optimizer's state.
            steps: its step count per run.
            blob: name of the blob.
            pieces: how many the blob has.
            version: of the stored values; by default that of the values this session saw last.
        """
        fields = _given(slot=slot, steps=None if steps is None else list(steps), blob=blob, pieces=pieces)
        message = Message(MessageType.STORE, key=key, version=version or 0, body=fields, payload=payload.detach())
        job = self.job_connection
        link, what = job.links[0], f"piece {key} of {blob!r}"
        if blob is None:
            spec = job.chunks.spec(key)
            check_tensors([payload], spec, "payload")
            link, what = self._link(key), f"{_slot_of(slot)}{spec.describe()}"
            if version is None:
                message.version = self.version(key)
        return job.ask(link, message, what=f"STORE of {what}", size_bytes=payload.nbytes)

    def _link(self, key: int) -> Link:
        return self.job_connection.links[self.job_connection.chunks.shard_of[key]]


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _slot_of(slot: str | None) -> str:
    return f"slot {slot!r} of " if slot else ""


def _overlaps(payload: torch.Tensor, destinations: Sequence[torch.Tensor]) -> bool:
    """Whether an answer would overwrite the payload, which may be needed once more."""
    begin, end = payload.data_ptr(), payload.data_ptr() + payload.nbytes
    return any(one.data_ptr() < end and begin < one.data_ptr() + one.nbytes for one in destinations)
