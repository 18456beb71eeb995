"""How a worker comes to take part, and leaves: it gives the job its values, compares models, or joins a job under way.

lead says     what follows
initialise    REGISTER every chunk at its shard, SEAL every shard, the lead last
ready         LIST every shard, compare the model
join          JOIN every shard: held until another worker has deposited its state; then as ready
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from psengine.errors import PSEngineError, ReplicaMismatchError, ServerRefusedError
from psengine.parameter_server.client.chunk_map import check_tensor
from psengine.parameter_server.client.handshake import Welcome
from psengine.parameter_server.client.operation import Request, wait_all
from psengine.parameter_server.client.own_membership import OwnMembership
from psengine.parameter_server.client.partition import assign
from psengine.protocol.layout import ChunkSpec, first_difference, layout_fingerprint
from psengine.protocol.messages import ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# Values on their way while a job is registered: enough to keep the servers busy, little enough to be answered soon.
REGISTERS_UNDER_WAY = 16
# A worker that waits longer than this for others to let it go says so.
QUIET_LEAVE_S = 2.0
LEAVE_POLL_S = 0.002
# An embedded server that died does not come back.
EMBEDDED_LEAVE_S = 10.0


def greet(membership: OwnMembership) -> Welcome:
    """Say HELLO to all servers, and let traffic flow.

    Raises:
        ServerRefusedError: some servers have the job's values and others lost theirs ("state_lost").
        ServerLostError, AuthenticationError, ConfigurationError: see ``Handshake.greet``.
    """
    welcome = membership.greet()
    if welcome.lost and welcome.state in ("ready", "join") and membership.options.role == "worker":
        raise ServerRefusedError(
            f"{membership.links[welcome.lost[0]].address} has lost its part of job {membership.options.job!r}, and"
            " other servers have theirs. Start all of the job's servers with --snapshot-dir, or all of them and the"
            " workers anew.",
            ErrorCode.STATE_LOST,
        )
    membership.resume()
    return welcome


def initialise(
    membership: OwnMembership, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor]
) -> None:
    """Give the job its values."""
    membership.chunks.place(layout, assign(layout, len(membership.links)))
    under_way: deque[Request] = deque()
    for spec in layout:
        values = initial(spec)
        check_tensor(values, spec, "initial values")
        link = membership.links[membership.chunks.shard_of[spec.key]]
        under_way.append(membership.register(link, spec, values.detach()))
        if len(under_way) >= REGISTERS_UNDER_WAY:
            under_way.popleft().wait()
    wait_all(under_way)
    # The lead last: it is the one that tells other workers that values are there.
    wait_all([membership.seal(link) for link in membership.links[1:]])
    membership.seal(membership.links[0]).wait()


def fetch_layout(membership: OwnMembership) -> list[ChunkSpec]:
    """The job's chunks by key, from the servers, which know best where each is; remembered in ``membership.chunks``."""
    found: list[tuple[ChunkSpec, int]] = []
    for link in membership.links:
        after, more = -1, True
        while more:
            reply = membership.ask(link, Message(MessageType.LIST, body={"after": after})).reply()
            page = [ChunkSpec.from_body(entry) for entry in reply.body["chunks"]]
            found.extend((spec, link.index) for spec in page)
            more = reply.body["more"] and bool(page)
            after = max([after, *(spec.key for spec in page)])
    found.sort(key=lambda place: place[0].key)
    specs = [spec for spec, _ in found]
    membership.chunks.place(specs, [index for _, index in found])
    return specs


def compare(membership: OwnMembership, mine: Sequence[ChunkSpec], theirs: Sequence[ChunkSpec]) -> None:
    """Raise ReplicaMismatchError, naming the first parameter that differs, unless the models are the same."""
    if layout_fingerprint(mine) == layout_fingerprint(theirs):
        return
    raise ReplicaMismatchError(
        f"job {membership.options.job!r} holds another model than this worker's: {first_difference(mine, theirs)}."
        " Every worker of a job needs the same model; another model needs another job (PSENGINE_JOB), or servers that"
        " were started anew."
    )


def join(membership: OwnMembership) -> str:
    """Wait until another worker has deposited its state, and every shard lets us take part.

    Returns:
        "joined", or "ready" or "initialise" where all others went away meanwhile.
    """
    options = membership.options
    deadline_s = time.monotonic() + options.timeout_s
    while True:
        what = f"JOIN of worker {membership.identity.worker} to job {options.job!r}"
        timeout_s = deadline_s - time.monotonic()
        requests = [
            membership.ask(link, Message(MessageType.JOIN), what=what, timeout_s=timeout_s, handles_refusal=True)
            for link in membership.links
        ]
        try:
            wait_all(requests)
            for link in membership.links:
                link.ledger.forget()
            return "joined"
        except ServerRefusedError as error:
            lost_meanwhile = error.code in (ErrorCode.NOT_MEMBER, ErrorCode.FENCED)
            if not lost_meanwhile or time.monotonic() >= deadline_s:
                raise
            logger.warning("joining job %r again: %s", options.job, error)
        membership.pause()
        state = greet(membership).state
        if state != "join":
            return state


def await_leave(membership: OwnMembership) -> None:
    """Where servers average: wait until every live worker has the averages that this one has.

    Until then this worker may be the only one that has the average of its last step: a server that dies and comes back
    would let those who lack it average without this worker, to another result. Who is in the middle of a step, or has
    failed in one, has nothing to give, and is not held up.
    """
    options, links = membership.options, membership.links
    takes_part = membership.takes_part and membership.fenced is None and membership.fatal is None
    if not options.averages or not takes_part or max(len(membership.members), membership.contributors) < 2:
        return
    if not all(link.is_level or not membership.chunks.at(link.index) for link in links):
        return
    timeout_s = min(options.timeout_s, EMBEDDED_LEAVE_S) if options.is_embedded else options.timeout_s
    who = f"worker {membership.identity.worker} of job {options.job!r}"
    try:
        asked = []
        for link in links:
            membership.connection.do(link.tell_progress)
            asked.append(membership.ask(link, Message(MessageType.LEAVE), timeout_s=timeout_s))
        if not _end_within(asked, QUIET_LEAVE_S):
            logger.warning(
                "%s waits to leave, for %g s at most, until every other worker has the averages of its last step",
                who,
                timeout_s,
            )
        wait_all(asked)
    except ServerRefusedError as error:
        logger.debug("%s leaves at once: %s", who, error)
    except PSEngineError as error:
        logger.error("%s leaves, and other workers may lack the averages of its last step: %s", who, error)


def _end_within(requests: Sequence[Request], timeout_s: float) -> bool:
    """Whether all have an answer, or one has failed. Starts no thread: Python 3.12 and later cannot while they exit."""
    last_s = time.monotonic() + timeout_s
    while not all(request.is_done for request in requests) and not any(request.error for request in requests):
        if time.monotonic() >= last_s:
            return False
        time.sleep(LEAVE_POLL_S)
    return True
