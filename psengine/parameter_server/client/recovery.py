"""How a client recovers that lost its membership, or whose server lost its memory: HELLO, then restore the server."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from psengine.errors import FencedError, ServerRefusedError
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.handshake import Welcome, shake_hands
from psengine.parameter_server.client.membership import Membership
from psengine.protocol.messages import ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# Between two attempts of one recovery.
AGAIN_S = 0.1


def recover(membership: Membership, reason: str, after_s: float) -> Flow[None]:
    """Become a member again; then everything that was held goes on.

    Args:
        membership: is held.
        reason: why it was lost.
        after_s: how long to wait first.

    Raises:
        ServerLostError, ServerRefusedError, ...: see ``handshake.shake_hands``; nothing can go on.
    """
    yield after_s
    ends_s = membership.runtime.now_s() + membership.options.timeout_s
    while True:
        try:
            welcome = yield from _come_back(membership)
            break
        except ServerRefusedError as error:
            # On a bad link a recovery takes longer than a lease.
            is_lost_again = error.code in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)
            if not is_lost_again or membership.runtime.now_s() >= ends_s or membership.closing.is_set():
                raise
            logger.warning("saying HELLO once more to the servers of job %r: %s", membership.options.job, error)
            yield AGAIN_S
    fenced = None
    if "join" in welcome.states:
        fenced = FencedError(
            f"{membership} was away for longer than its lease, and the others went on without it ({reason}). It has to"
            " take over their state first (rejoin). Where that happens often, raise the servers' --lease-s.",
            ErrorCode.FENCED,
        )
    membership.resume(fenced)


def _come_back(membership: Membership) -> Flow[Welcome]:
    """HELLO, and what restarted servers need; raises like ``recover``, and where membership is lost meanwhile."""
    is_worker = membership.options.role == "worker"
    welcome = yield from shake_hands(membership)
    if welcome.lost and is_worker:
        yield from _restore(membership, welcome.lost)
    # A server may come back with a snapshot that is older than its optimizers.
    yield [
        membership.ask(
            membership.links[membership.chunks.shard_of[key]],
            Message(MessageType.CONFIGURE, key=key, body=body),
            what=f"CONFIGURE of chunk {key}",
            is_urgent=True,
        )
        for key, body in membership.configured.items()
    ]
    if is_worker:
        yield from _tell_progress(membership)
    return welcome


def _restore(membership: Membership, lost: Sequence[int]) -> Flow[None]:
    """Servers came back without the job: register its chunks again where they average.

    Raises:
        ServerRefusedError: the servers held the job's weights ("state_lost").
    """
    job = membership.options.job
    if not membership.options.averages:
        where = ", ".join(membership.links[index].address for index in lost)
        raise ServerRefusedError(
            f"{where} does not know job {job!r} any more, so the weights and optimizer state it held are lost: it was"
            " restarted without a snapshot, or all workers had left, or their leases had run out."
            " Start the servers with --snapshot-dir, and the workers again from a checkpoint.",
            ErrorCode.STATE_LOST,
        )
    if not membership.chunks.specs:
        return  # it has yet to learn what the job holds, and asks again what to do once its question is refused
    logger.warning("registering %d shards of job %r again", len(lost), job)
    for index in sorted(lost, reverse=True):  # the lead last: others wait for it
        link = membership.links[index]
        for spec in membership.chunks.at(index):
            # Zeros: the workers hold the weights, and a joiner gets them from a worker.
            yield [membership.register(link, spec, torch.zeros(spec.numel, dtype=spec.dtype), is_urgent=True)]
        yield [membership.seal(link, is_urgent=True)]


def _tell_progress(membership: Membership) -> Flow[None]:
    """Tell servers that restarted how far this worker is; log the updates that they lost."""
    restarted = [link for link in membership.links if link.ledger.epoch != link.epoch]
    asked = {
        link: [
            membership.ask(link, Message(MessageType.PROGRESS, body=body), is_urgent=True)
            for body in link.ledger.to_bodies()
        ]
        for link in restarted
    }
    yield [request for requests in asked.values() for request in requests]
    lossy: list[str] = []
    updates = chunks = 0
    for link, requests in asked.items():
        link.ledger.settle(link.epoch)
        losses = [request.wait().body.get("lost", [0, 0]) for request in requests]
        if any(lost for lost, _ in losses):
            lossy.append(link.address)
            updates, chunks = updates + sum(lost for lost, _ in losses), chunks + sum(count for _, count in losses)
    if lossy:
        logger.warning(
            "%s went back to the last snapshot: up to %d updates that worker %d knew of are lost, over %d chunks",
            ", ".join(lossy),
            updates,
            membership.identity.worker,
            chunks,
        )
