"""How a worker takes part, and leaves: it gives the job its values, compares models, or joins a job under way.

lead says     what follows
initialise    REGISTER every chunk at its shard, SEAL every shard, the lead last
ready         LIST every shard, compare the model
join          JOIN every shard; answered once another worker has deposited its state; then as ready
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch

from psengine.errors import PSEngineError, ReplicaMismatchError, ServerRefusedError
from psengine.parameter_server.client.chunk_map import check_tensors
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.handshake import WAIT_S, enter
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.membership import Membership
from psengine.parameter_server.client.operation import Request
from psengine.parameter_server.client.state_requests import StateRequest
from psengine.protocol.layout import ChunkSpec, balance, first_difference, layout_fingerprint
from psengine.protocol.messages import ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# Chunks in flight while a job is registered: enough to keep the servers busy, few enough to be answered soon.
REGISTERS_UNDER_WAY = 16
# An embedded server ends with its training: who leaves does not wait longer for it.
EMBEDDED_LEAVE_S = 10.0
# A worker that waits longer than this before it may leave logs that.
QUIET_LEAVE_S = 2.0
LEAVE_POLL_S = 0.002
JOIN_POLL_S = 0.02


def take_part(
    membership: Membership,
    state: str,
    layout: Sequence[ChunkSpec],
    initial: Callable[[ChunkSpec], torch.Tensor],
) -> Flow[str]:
    """Do what the lead's ``state`` asks for; see ``WorkerSession.enter``."""
    layout = sorted(layout, key=lambda spec: spec.key)
    if state == "join":
        state = yield from join(membership)
    if state == "initialise":
        yield from initialise(membership, layout, initial)
        membership.takes_part = True
        return "initialised"
    compare(membership, layout, (yield from fetch_layout(membership)))
    return state


def rejoin(membership: Membership) -> Flow[str]:
    """Take part again with another worker's state; see ``WorkerSession.rejoin``."""
    state = "join"
    if membership.fenced is None:
        membership.pause()
        state = (yield from enter(membership)).state
    if state == "join":
        state = yield from join(membership)
    if state == "initialise":
        raise ServerRefusedError(
            f"job {membership.options.job!r} begins anew: no worker with its state was left. Fix: start this worker"
            " again, from a checkpoint.",
            ErrorCode.STATE_LOST,
        )
    membership.fenced = None
    yield from fetch_layout(membership)
    membership.takes_part = state != "joined"
    return state


def initialise(
    membership: Membership, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor]
) -> Flow[None]:
    """Give the job its values."""
    membership.chunks.place(layout, balance([spec.size_bytes for spec in layout], len(membership.links)))
    under_way: deque[Request] = deque()
    for spec in layout:
        values = initial(spec)
        check_tensors([values], spec, "tensor of initial values")
        link = membership.links[membership.chunks.shard_of[spec.key]]
        under_way.append(membership.register(link, spec, values.detach()))
        if len(under_way) >= REGISTERS_UNDER_WAY:
            yield [under_way.popleft()]
    yield under_way
    # The lead last: it tells other workers that the job has values.
    yield [membership.seal(link) for link in membership.links[1:]]
    yield [membership.seal(membership.links[0])]


def fetch_layout(membership: Membership) -> Flow[list[ChunkSpec]]:
    """The job's chunks by key, as the servers list them; also placed in ``membership.chunks``."""
    found: list[tuple[ChunkSpec, int]] = []
    for link in membership.links:
        after, more = -1, True
        while more:
            request = membership.ask(link, Message(MessageType.LIST, body={"after": after}))
            yield [request]
            reply = request.reply()
            page = [ChunkSpec.from_body(entry) for entry in reply.body["chunks"]]
            found.extend((spec, link.index) for spec in page)
            more = reply.body["more"] and bool(page)
            after = max([after, *(spec.key for spec in page)])
    found.sort(key=lambda place: place[0].key)
    specs = [spec for spec, _ in found]
    membership.chunks.place(specs, [index for _, index in found])
    return specs


def compare(membership: Membership, mine: Sequence[ChunkSpec], theirs: Sequence[ChunkSpec]) -> None:
    """Raise ReplicaMismatchError, naming the first parameter that differs, unless the models are the same."""
    if layout_fingerprint(mine) == layout_fingerprint(theirs):
        return
    raise ReplicaMismatchError(
        f"job {membership.options.job!r} holds another model than this worker's: {first_difference(mine, theirs)}."
        " Every worker of a job needs the same model; another model needs another job (PSENGINE_JOB), or servers that"
        " were started anew."
    )


def join(membership: Membership) -> Flow[str]:
    """Wait until another worker has deposited its state, and every shard lets us take part.

    Returns:
        "joined", or "ready" or "initialise" where all others went away meanwhile.
    """
    options, now_s = membership.options, membership.runtime.now_s
    deadline_s = now_s() + options.timeout_s
    while True:
        what = f"JOIN of worker {membership.identity.worker} to job {options.job!r}"
        timeout_s = deadline_s - now_s()
        requests = [
            membership.ask(link, Message(MessageType.JOIN), what=what, timeout_s=timeout_s, handles_refusal=True)
            for link in membership.links
        ]
        try:
            if (yield from _await_all_or_none(membership, requests)):
                for link in membership.links:
                    link.ledger.forget()
                return "joined"
            logger.warning("joining job %r again: some shards have let this worker in, others have not", options.job)
        except ServerRefusedError as error:
            lost_meanwhile = error.code in (ErrorCode.NOT_MEMBER, ErrorCode.FENCED)
            if not lost_meanwhile or now_s() >= deadline_s:
                raise
            logger.warning("joining job %r again: %s", options.job, error)
        for request in requests:
            request.abandon()  # a shard that takes it after the next JOIN would answer it, and not that one
        membership.pause()
        yield WAIT_S
        welcome = yield from enter(membership)
        if "join" not in welcome.states:
            return welcome.state


def _await_all_or_none(membership: Membership, requests: Sequence[Request]) -> Flow[bool]:
    """Wait for the answers to JOIN; False where a lease after the first of them others are missing.

    A shard that did not know this worker when ADMIT came does not let it in. At the shards that did, the donor's step
    waits for this worker; and the donor lets nobody in before its next step.
    """
    first_s: float | None = None
    while not _have_ended(requests):
        if first_s is None and any(request.is_done for request in requests):
            first_s = membership.runtime.now_s()
        if first_s is not None and membership.runtime.now_s() - first_s > membership.lease_s:
            return False
        yield JOIN_POLL_S
    yield requests
    return True


def admit(membership: Membership, joiner: StateRequest) -> Flow[None]:
    """The joiner's state is deposited: let it take part from this worker's next exchange on."""
    body = {"rank": joiner.rank, "incarnation": joiner.incarnation}

    def ask(link: Link) -> Request:
        return membership.ask(link, Message(MessageType.ADMIT, body=body), what=f"ADMIT of worker {joiner.rank}")

    yield [ask(link) for link in membership.links[1:]]
    yield [ask(membership.links[0])]  # the lead last


def leave(membership: Membership) -> Flow[None]:
    """Where servers average: wait until every live worker has the averages that this one has.

    Until then this worker may be the only one with the average of its last step. A server that dies and comes back
    would let the others average that step without this worker, to another result. A worker that is in the middle of a
    step, or failed in one, has no such average and leaves at once.
    """
    options, links = membership.options, membership.links
    takes_part = membership.takes_part and membership.fenced is None and membership.fatal is None
    if not options.averages or not takes_part or max(len(membership.members), membership.contributors) < 2:
        return
    if not all(link.is_level or not membership.chunks.at(link.index) for link in links):
        return
    timeout_s = min(options.timeout_s, EMBEDDED_LEAVE_S) if options.is_embedded else options.timeout_s
    try:
        asked = []
        for link in links:
            membership.connection.do(link.tell_progress)
            asked.append(membership.ask(link, Message(MessageType.LEAVE), timeout_s=timeout_s))
        quiet_s = membership.runtime.now_s() + QUIET_LEAVE_S
        while not _have_ended(asked) and membership.runtime.now_s() < quiet_s:
            yield LEAVE_POLL_S
        if not _have_ended(asked):
            logger.warning(
                "%s waits to leave, for %g s at most, until every other worker has the averages of its last step",
                membership,
                timeout_s,
            )
        yield asked
    except ServerRefusedError as error:
        logger.debug("%s leaves at once: %s", membership, error)
    except PSEngineError as error:
        logger.error("%s leaves, and other workers may lack the averages of its last step: %s", membership, error)


def _have_ended(requests: Sequence[Request]) -> bool:
    """Whether all have an answer, or one has failed."""
    return all(request.is_done for request in requests) or any(request.error for request in requests)
