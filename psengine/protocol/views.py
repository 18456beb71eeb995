"""Views and releases: what the coordinator tells all shards of a job, signed with the job's key.

A view names who takes part; a release decides one step. Workers forward both, so each carries a digest: a keyed
BLAKE2b (RFC 7693) with a key that only the coordinator, the shards and the members of the job know.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from psengine.errors import ProtocolError
from psengine.protocol.bounds import (
    DIGEST_BYTES,
    Counted,
    Host,
    Positive,
    Rank,
    ServerName,
    Unsigned,
    Unsigned64,
    UserId,
    ViewNumber,
    Workers,
)
from psengine.protocol.messages import MAX_SHARDS, MAX_WORKERS, Message, MessageType

_OfWorkers, _OfShards = Meta(max_length=MAX_WORKERS), Meta(max_length=MAX_SHARDS)


class ViewMember(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A worker in a view.

    Attributes:
        rank: its number.
        incarnation: which process has that number.
        user_id: its CURVE key; "" without CURVE.
        first_step: the first step that it takes part in.
    """

    rank: Rank
    incarnation: Unsigned64
    user_id: UserId
    first_step: Positive


class MemberState(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How far a member of an "elastic" job is.

    Attributes:
        completed: the last step of which it has the averages; None: it has no state.
        checkpoint: the step of the newest checkpoint that it can load; 0 none.
        host, pid, processes: where it runs, as its HELLO said.
    """

    completed: Counted | None
    checkpoint: Counted
    host: Host = ""
    pid: Unsigned = 0
    processes: Host = ""


class Release(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A decision of the coordinator; releases are taken in the order of their numbers, each once.

    Attributes:
        number: 1 first in a job; grows.
        step: what it decides: the number of the merge (merge), or the floor: the step that every worker has committed
            (bound).
        contributors: (rank, step) of each contribution that is used (merge); None for a floor.
    """

    number: Positive
    step: Unsigned
    contributors: Annotated[tuple[tuple[Rank, Positive], ...], _OfWorkers] | None = None


class View(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Who takes part in a job.

    Attributes:
        number: grows.
        epoch: of the coordinator that published it.
        members: by rank.
        shards: the epoch of each shard of the job, the lead's first.
        from_step: averaging jobs: shards forget what they have of this step and later ones; none without members.
        world_size: workers that the job was begun with.
        donor: averaging jobs: the rank that returns the averages of ``from_step - 1`` to shards that lack them.
        chunks: how many chunks each shard of the job has; () where the coordinator does not know.
        releases: those that some shard may not have, in order.
        servers: the names of the job's servers, in order; () of "elastic" jobs.
        states: "elastic" jobs: by member.
    """

    number: ViewNumber
    epoch: Unsigned64
    members: Annotated[tuple[ViewMember, ...], _OfWorkers]
    shards: Annotated[tuple[Unsigned64, ...], _OfShards]
    from_step: Positive = 1
    world_size: Workers = 1
    donor: Rank | None = None
    chunks: Annotated[tuple[Unsigned, ...], _OfShards] = ()
    releases: tuple[Release, ...] = ()
    servers: Annotated[tuple[ServerName, ...], _OfShards] = ()
    states: Annotated[tuple[MemberState, ...], _OfWorkers] = ()

    def __post_init__(self) -> None:
        """Check that every shard, and every member, is there."""
        if self.chunks and len(self.chunks) != len(self.shards):
            raise ValueError("chunks must be counted of every shard")
        if self.states and len(self.states) != len(self.members):
            raise ValueError("states must be those of every member")

    def member(self, rank: int) -> ViewMember | None:
        """The member with this rank."""
        return next((member for member in self.members if member.rank == rank), None)


def sign(key: bytes, job: int, value: View | Release) -> bytes:
    """The digest of a view or release of the job with this number."""
    said = msgspec.msgpack.encode((type(value).__name__, job, value))
    return hashlib.blake2b(said, key=key, digest_size=DIGEST_BYTES).digest()


def message_of(value: View | Release, key: bytes, job: int) -> Message:
    """The signed VIEW or RELEASE; the header's epoch, worker and incarnation are the sender's to fill."""
    kind = MessageType.VIEW if isinstance(value, View) else MessageType.RELEASE
    body = {kind.name.lower(): msgspec.to_builtins(value), "digest": sign(key, job, value)}
    return Message(kind, job, body=body)


def view_of(body: dict[str, Any]) -> View:
    """The view in the body of a VIEW."""
    return msgspec.convert(body["view"], View)


def release_of(body: dict[str, Any]) -> Release:
    """The release in the body of a RELEASE."""
    return msgspec.convert(body["release"], Release)


def check_digest(message: Message, key: bytes, value: View | Release) -> None:
    """Raise ProtocolError unless a VIEW or RELEASE was signed with this key for its job."""
    if not hmac.compare_digest(message.body["digest"], sign(key, message.job, value)):
        raise ProtocolError(
            f"{message.type.name} {value.number} is not of this job's coordinator (expected another digest)"
        )


def other_servers(job: str, view: View, servers: int | None = None, shards: int = 0, why: str = "") -> str:
    """Why a worker that names so many servers, with so many shards, cannot use a job's values; "" where it can.

    Args:
        job: its name.
        view: of the job.
        servers: None: as many, in another order, or ``why``.
        shards: 0: not known.
        why: what else is wrong.
    """
    expected = len(view.servers)
    if servers is None:
        why = why or "in another order"
    elif servers != expected and expected:
        count = abs(servers - expected)
        why = f"{count} {'server' if count == 1 else 'servers'} {'more' if servers > expected else 'less'}"
    elif shards not in (0, len(view.shards)):
        why = f"with another number of shards (expected {len(view.shards)}, got {shards}; see --shards)"
    else:
        return ""
    return (
        f"the values of job {job!r} are with {', '.join(view.servers) or 'other servers'}; this worker names them {why}"
        f". Fix: name the same servers in the same order, or drop the values by psengine admin forget --job {job} at"
        " each of them."
    )
