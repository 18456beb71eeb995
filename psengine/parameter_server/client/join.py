"""How a worker enters a job and leaves it: it gives the job its values, compares models, or joins a job under way.

WELCOME says   what follows
initialise     REGISTER every chunk at its shard, COMMIT "registered", VIEW
wait, ready    VIEW, LIST every shard, compare the model
join           LIST, compare, COMMIT "join"; VIEW once another worker has deposited its state
joined         VIEW has this worker, which has yet to read that state
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from psengine.errors import ConfigurationError, PSEngineError, ReplicaMismatchError, ServerRefusedError
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.job_client import JobClient
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Request
from psengine.protocol.bodies import MAX_TEXT_CHARS
from psengine.protocol.layout import ChunkSpec, balance, first_difference
from psengine.protocol.messages import MAX_SHARDS, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# Chunks in flight while a job is registered: enough to keep the servers busy, few enough to be answered soon.
REGISTERS_UNDER_WAY = 16
# An embedded server ends with its training: who leaves does not wait longer for it.
EMBEDDED_LEAVE_S = 10.0
# How long who leaves waits where nobody needs its averages.
GOODBYE_S = 1.0
LAYOUT_AGAIN_S = 0.1
# Refusals of a COMMIT after which this worker begins again; where it is not known any more, with the next WELCOME.
_BEGIN_AGAIN = (ErrorCode.FENCED, ErrorCode.NOT_MEMBER, ErrorCode.STALE)


def greet(job: JobClient) -> Flow[None]:
    """Say HELLO to the coordinator.

    Raises:
        ServerRefusedError: this worker differs from others ("rule_mismatch"), the job has ended ("ended"), ...
        ServerLostError: the coordinator does not answer.
    """
    options = job.options
    welcome = job.control.expect(f"HELLO to job {options.job!r}", min(options.connect_timeout_s, options.timeout_s))
    job.open(job.control)
    yield [welcome]


def start(job: JobConnection) -> Flow[str]:
    """Say HELLO, and connect to every shard; see ``WorkerSession.start``."""
    if job.options.rule is not None:
        yield from greet(job)
    yield from _connect(job)
    if job.options.rule is None:
        return "ready" if any(link.resumed["chunks"] for link in job.links) else "wait"
    return job.state


def _connect(job: JobConnection) -> Flow[None]:
    """Connect to all shards of all servers: each server's first shard lists the others."""
    first = [job.add_link(server) for server in job.servers]
    yield from _ask_all(job, lambda: [_greeting(job, link) for link in first])
    known: dict[int, str] = {}
    others: list[tuple[KnownServer, int]] = []
    for link in job.first_links():
        if link.epoch in known:
            raise ConfigurationError(
                f"server addresses must name different servers (got {known[link.epoch]} and {link.name} of the"
                " same process). Name each server's first address once."
            )
        known[link.epoch] = link.name
        others += [(link.server, shard) for shard in range(1, len(link.resumed["shards"]))]
    if (shards := len(known) + len(others)) > MAX_SHARDS:
        raise ConfigurationError(f"a job has at most {MAX_SHARDS} shards (got {shards} of {len(known)} servers)")
    rest = [job.add_link(*place) for place in others]
    yield from _ask_all(job, lambda: [_greeting(job, link) for link in rest])
    job.has_all_links = True


def _ask_all(job: JobConnection, ask: Callable[[], list[Request]]) -> Flow[None]:
    """Ask until no server refuses because its disk does not take a job's first snapshot."""
    until_s = job.runtime.now_s() + job.options.timeout_s
    while True:
        try:
            yield ask()
            return
        except ServerRefusedError as error:
            if error.code != ErrorCode.SNAPSHOT_FAILED or job.runtime.now_s() >= until_s:
                raise
            logger.warning("asking again, for no step may come before it: %s", error)
        yield job.heartbeat_s


def _greeting(job: JobConnection, link: Link) -> Request:
    """A question that is answered after the link's greeting."""
    wait_s = min(job.options.connect_timeout_s, job.options.timeout_s)
    return job.ask(link, _echo(), what=f"RESUME of job {job.options.job!r}", timeout_s=wait_s)


def _echo() -> Message:
    return Message(MessageType.ECHO, payload=torch.empty(0, dtype=torch.uint8))


def take_part(
    job: JobConnection, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor | None]
) -> Flow[str]:
    """Do what the coordinator asks for until a view has this worker; see ``WorkerSession.enter``."""
    layout = sorted(layout, key=lambda spec: spec.key)

    def attempt(last_view: int) -> Flow[None]:
        if job.view is not None:
            job.check_servers()
            if not job.is_joining and not job.has_state:
                yield from _compare(job, layout)
        elif job.state == "join":
            yield from _compare(job, layout)
            yield [job.ask_to_join(last_view)]
        elif job.state == "initialise":
            yield from _initialise(job, layout, initial)

    job.is_entering = True
    yield from _become_member(job, f"the values of job {job.options.job!r}", attempt)
    job.is_entering = False
    return "initialised" if job.has_state else "joined" if job.is_joining else "ready"


def _become_member(job: JobConnection, what: str, attempt: Callable[[int], Flow[None]]) -> Flow[None]:
    """Do what the coordinator asks for, with each of its news, until a view has this worker when all is done.

    ``attempt`` is given the number of the last view that had it: a COMMIT that a newer view overtakes tells by it.
    """
    while True:
        seen, last_view, is_member = job.news, job.last_view, job.view is not None
        try:
            yield from attempt(last_view)
            if is_member and job.view is not None:
                return
        except ServerRefusedError as error:
            if error.code not in _BEGIN_AGAIN:
                raise
            logger.warning("entering job %r again: %s", job.options.job, error)
            if error.code == ErrorCode.STALE:
                yield LAYOUT_AGAIN_S
                continue
        yield [job.control.expect(what, job.options.timeout_s, seen)]


def _initialise(
    job: JobConnection, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor | None]
) -> Flow[None]:
    """Give the job its values, unless they are there."""
    yield from _ask_all(job, lambda: [_greeting(job, link) for link in job.links])
    epochs = [link.epoch for link in job.links]
    job.chunks.place(layout, balance([spec.size_bytes for spec in layout], len(job.links)))
    chunks = [len(job.chunks.at(link.index)) for link in job.links]
    facts = {"servers": list(job.options.addresses), "epochs": epochs, "chunks": chunks}
    here, number = [link.resumed for link in job.links], job.registration_number
    others = [one["registration"] for one in here if one["registration"] not in (0, number)]
    if others or any(one["chunks"] or one["view"] for one in here):
        # A view under this key: others have registered the job, which its lead has lost. Else another key is drawn.
        view = 0 if others else max(one["view"] for one in here)
        yield [job.control.commit("registered", registration=max(others, default=number), view=view, **facts)]
        return
    under_way: deque[Request] = deque()
    for spec in layout:
        link = job.links[job.chunks.shard_of[spec.key]]
        under_way.append(job.register(link, spec, initial(spec)))
        if len(under_way) >= REGISTERS_UNDER_WAY:
            yield [under_way.popleft()]
    yield under_way
    # Servers answer once this is durable to them.
    what = f"the first snapshot of job {job.options.job!r}"
    yield from _ask_all(job, lambda: [job.ask(link, _echo(), what=what) for link in job.links])
    if epochs != [link.epoch for link in job.links] or number != job.registration_number:
        raise ServerRefusedError("a server has restarted meanwhile", ErrorCode.STALE)
    yield [job.control.commit("registered", registration=number, **facts)]


def fetch_layout(job: JobConnection) -> Flow[list[ChunkSpec]]:
    """The job's chunks by key, as the servers list them; also placed in ``job.chunks``."""
    found: list[tuple[ChunkSpec, int]] = []
    for link in job.links:
        after, more = -1, True
        while more:
            request = job.ask(link, Message(MessageType.LIST, body={"after": after}))
            yield [request]
            reply = request.wait()
            page = [ChunkSpec.from_body(entry) for entry in reply.body["chunks"]]
            found.extend((spec, link.index) for spec in page)
            more = reply.body["more"] and bool(page)
            after = max([after, *(spec.key for spec in page)])
    found.sort(key=lambda place: place[0].key)
    specs = [spec for spec, _ in found]
    job.chunks.place(specs, [index for _, index in found])
    return specs


def _compare(job: JobConnection, mine: Sequence[ChunkSpec]) -> Flow[None]:
    """Raise ReplicaMismatchError, naming the first parameter that differs, unless the models are the same.

    A shard that has restarted refuses until it has all chunks again. Where servers average, what a member was to read
    there is lost: it needs others' state, and where nobody has any, the job begins anew.
    """
    began_s = job.runtime.now_s()
    while True:
        try:
            theirs = yield from fetch_layout(job)
            break
        except ServerRefusedError as error:
            if error.code != ErrorCode.NOT_READY or job.runtime.now_s() >= began_s + job.options.timeout_s:
                raise
            if job.options.averages and job.view is not None:
                job.transport.do(job.leave_view, job.runtime.now_s())
                yield [job.ask_to_join(job.last_view)]
                raise ServerRefusedError(f"{job} lacks the job's first values: {error}", ErrorCode.STALE) from None
        if job.view is None and job.state == "initialise":
            raise ServerRefusedError(f"job {job.options.job!r} begins anew meanwhile", ErrorCode.STALE)
        yield LAYOUT_AGAIN_S
    if difference := first_difference(mine, theirs):
        raise ReplicaMismatchError(
            f"job {job.options.job!r} holds another model than this worker's: {difference}. Every worker of a job needs"
            " the same model; another model needs another job (PSENGINE_JOB), or servers that were started anew."
        )


def donate(job: JobConnection, deposit: Callable[[], Iterable[Sequence[Request]]]) -> Flow[None]:
    """Where a joiner waits for this worker's state: deposit it; the joiner takes part from this worker's next step on.

    See ``WorkerSession.serve_joiner``.
    """
    wanted = job.state_request
    if wanted is None:
        return
    stores: Sequence[Request] = ()
    try:
        for stores in deposit():
            yield stores
        yield [job.control.commit("donated", **wanted.body, **_facts(job))]
    except ServerRefusedError as error:
        if error.code == ErrorCode.MEMORY:  # the joiner's trouble, not this worker's
            size_bytes = sum(store.size_bytes for store in stores)
            why = f"the servers have no room for the state, {size_bytes} bytes in pieces: {error}"
            logger.warning("%s cannot bring worker %d in: %s", job, wanted.body["rank"], why)
            job.control.commit("donated", **wanted.body, **_facts(job), refused=why[:MAX_TEXT_CHARS])
            return
        if error.code not in (*_BEGIN_AGAIN, ErrorCode.NOT_READY):
            raise
        # The joiner asks again; whether this worker is out too, WELCOME says.
        logger.debug("%s brings nobody in: %s", job, error)
    finally:
        for store in stores:
            store.abandon()  # where one fails, another could come after a later deposit's
        job.state_request = None  # who still waits is named again


def _facts(job: JobConnection) -> dict[str, Any]:
    return {"step": job.steps.completed, "epochs": [link.epoch for link in job.links]}


def leave(job: JobConnection, *, failed: bool = False) -> Flow[None]:
    """Say LEAVE. Where servers average, wait until every live worker has the averages that this one has.

    Until then this worker may be the only one with the average of its last step, and a server that dies needs it from
    here. A worker that is in the middle of a step, or failed in one, has no such average and waits for nobody.
    """
    options, view, steps = job.options, job.view, job.steps
    has_others = options.averages and view is not None and len(view.members) > 1
    is_needed = has_others and not (failed or steps.open or steps.has_failed)
    if job.fatal is not None or not (is_needed or job.control.is_up):
        return
    timeout_s = min(options.timeout_s, EMBEDDED_LEAVE_S if options.is_embedded else math.inf)
    job.is_leaving = True
    body = {"completed": steps.completed, "failed": failed, "untouched": not job.has_changed}
    message = Message(MessageType.LEAVE, body=body)
    try:
        yield [job.ask(job.control, message, what="LEAVE", timeout_s=timeout_s if is_needed else GOODBYE_S)]
    except PSEngineError as error:
        level = logging.ERROR if is_needed and not isinstance(error, ServerRefusedError) else logging.DEBUG
        logger.log(level, "%s leaves, and other workers may lack the averages of its last step: %s", job, error)
