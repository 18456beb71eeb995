"""The messages that a shard sends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.durable_state import DurableState
from psengine.parameter_server.server.core.envelope import Outgoing
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.shard_settings import ShardSettings
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.bodies import MAX_TEXT_CHARS
from psengine.protocol.messages import ErrorCode, Message, MessageType

# What somebody measures or watches the server with is no traffic of a job.
_NOT_OF_THE_JOB = frozenset({MessageType.STATUS_REPORT, MessageType.ECHO, MessageType.ECHOED})


class Answers:
    """See the module's text.

    Args:
        index: of the shard.
        epoch: of the server process.
        settings: of the shard.
        durable: of the shard.
        addresses: of all shards of the process.
    """

    def __init__(
        self,
        index: int,
        epoch: int,
        settings: ShardSettings,
        durable: DurableState,
        addresses: Callable[[], list[str]],
    ) -> None:
        self._index = index
        self._epoch = epoch
        self._settings = settings
        self._durable = durable
        self._addresses = addresses

    def outgoing(self, job: Job, replies: Iterable[Reply], now_s: float) -> list[Outgoing]:
        """What a job's replies become; a worker that is fenced by one leaves, which may lead to more."""
        outgoing: list[Outgoing] = []
        for reply in replies:
            member = job.membership.members.get(reply.rank)
            if member is None or not (route := member.route_of(reply.type)):
                continue  # it will ask again when it is back
            payload = reply.payload
            if reply.type is MessageType.UPDATED:
                member.telemetry.release(reply.key, reply.sequence, now_s)
            message = Message(
                reply.type,
                job=job.number,
                epoch=self._epoch,
                worker=reply.rank,
                incarnation=member.incarnation,
                key=reply.key,
                sequence=reply.sequence,
                version=reply.version,
                dtype=None if payload is None else payload.dtype,
                numel=0 if payload is None else payload.numel(),
                body=reply.body,
                payload=payload,
            )
            job.statistics.bytes_out += traffic_bytes(message)
            outgoing.append(Outgoing(route, message, reply.pins))
            if reply.type is MessageType.ERROR and reply.body["code"] == ErrorCode.FENCED:
                outgoing.extend(self.outgoing(job, job.fence(reply.rank, reply.body["text"], now_s), now_s))
        return outgoing

    def message(
        self,
        type: MessageType,
        request: Message,
        *,
        version: int = 0,
        payload: torch.Tensor | None = None,
        body: dict[str, Any] | None = None,
    ) -> Message:
        """An answer to ``request``, to whoever sent it."""
        return Message(
            type,
            job=request.job,
            epoch=self._epoch,
            worker=request.worker,
            incarnation=request.incarnation,
            key=request.key,
            sequence=request.sequence,
            version=version,
            dtype=None if payload is None else payload.dtype,
            numel=0 if payload is None else payload.numel(),
            body=body or {},
            payload=payload,
        )

    def error(self, request: Message, error: ProtocolError) -> Message:
        """A message was refused."""
        return self.message(MessageType.ERROR, request, body={"code": error.code, "text": str(error)[:MAX_TEXT_CHARS]})

    def welcome(self, job: Job | None, request: Message, state: str) -> Message:
        """HELLO was accepted; ``state``: see WELCOME."""
        return self.message(
            MessageType.WELCOME,
            request,
            body={
                "state": state,
                "shards": self._addresses(),
                "shard_index": self._index,
                "lease_s": self._settings.lease_s,
                "heartbeat_s": self._settings.heartbeat_s,
                "credit_bytes": self._settings.credit_bytes,
                "members": list(job.membership.live_ranks) if job is not None else [],
                "fingerprint": job.fingerprint if job is not None else None,
                "chunks": len(job.chunks) if job is not None else 0,
                "started": job is not None and job.has_started,
                "durable_version": self._durable.version_of(request.job),
                "rule": job.rule.body if job is not None else None,
                "software": self._settings.software,
            },
        )

    def heartbeat_body(self, job: Job, message: Message) -> dict[str, Any]:
        """Of HEARTBEAT_ACK."""
        return {
            "members": list(job.membership.live_ranks),
            "durable_version": self._durable.version_of(message.job),
        }


def traffic_bytes(message: Message) -> int:
    """What a message adds to the traffic of its job."""
    if message.payload is None or message.dtype is None or message.type in _NOT_OF_THE_JOB:
        return 0
    return message.numel * message.dtype.itemsize
