"""HELLO to every shard.

lead          HELLO ─► WELCOME: rank, incarnation, state, the server's shards      "wait": ask again
other shards           HELLO with that rank and incarnation ─► WELCOME
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from psengine.errors import ConfigurationError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.membership import Membership
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType
from psengine.version import __version__

# How long to wait before asking again whether the job has values.
WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Welcome:
    """Every shard's state, the lead's first: "initialise", "wait", "ready" or "join".

    ``has_started``: an exchange has ended, by what any of them knows.
    """

    states: tuple[str, ...]
    has_started: bool

    @property
    def state(self) -> str:
        """What the lead says; "join" where another shard has gone on without this worker."""
        return "join" if self.states[0] == "ready" and "join" in self.states else self.states[0]

    @property
    def lost(self) -> list[int]:
        """Shards that have no values of this job."""
        return [index for index, state in enumerate(self.states) if state in ("initialise", "wait")]


def enter(membership: Membership) -> Flow[Welcome]:
    """Say HELLO to all servers, and release the operations that were held.

    Raises:
        ServerRefusedError: some servers have the job's values and others lost theirs ("state_lost").
        ServerLostError, AuthenticationError, ConfigurationError: see ``shake_hands``.
    """
    options = membership.options
    welcome = yield from shake_hands(membership)
    if welcome.lost and welcome.state == "ready" and membership.identity.worker == 0 and not welcome.has_started:
        # Nothing is lost yet. An earlier process of this rank, stopped for long, has begun to give values once more.
        # Shards that have let another worker in refuse it.
        welcome = Welcome(("initialise", *welcome.states[1:]), has_started=False)
    if welcome.lost and welcome.state in ("ready", "join") and options.role == "worker":
        raise ServerRefusedError(
            f"{membership.links[welcome.lost[0]].address} has lost its part of job {options.job!r}, and other servers"
            " have theirs. Start all of the job's servers with --snapshot-dir, or all of them and the workers anew.",
            ErrorCode.STATE_LOST,
        )
    if not membership.is_welcome:
        for link in membership.links:
            link.ledger.settle(link.epoch)  # what is acknowledged from here on is of this life of the server
    membership.resume()
    return welcome


def shake_hands(membership: Membership) -> Flow[Welcome]:
    """Say HELLO to every shard; the first time, connect to them. Everything else is held until ``resume``.

    Raises:
        ServerLostError: no answer, or no values before the deadline.
        ServerRefusedError: the job's rule is another, or the rank is taken.
        AuthenticationError: the CURVE handshake failed.
        ConfigurationError: two addresses name the same server.
    """
    identity = membership.identity
    deadline_s = membership.runtime.now_s() + membership.options.timeout_s
    if not membership.links:
        membership.open(membership.options.addresses[0])
    lead = yield from _hello(membership, membership.links[0], deadline_s)
    identity.worker, identity.incarnation = lead.worker, lead.incarnation
    verdict = _verdict(membership, lead)
    if not membership.server_sizes:
        yield from _open_others(membership, lead, deadline_s, verdict)
    firsts = [link.index for link in membership.first_links()]
    states, has_started = [lead.body["state"]], lead.body["started"]
    _check_shards(membership, lead, 0)
    for link in membership.links[1:]:
        answer = yield from _hello(membership, link, deadline_s, verdict)
        states.append(answer.body["state"])
        has_started = has_started or answer.body["started"]
        if link.index in firsts:
            _check_shards(membership, answer, firsts.index(link.index))
    membership.members = tuple(lead.body["members"])
    return Welcome(tuple(states), has_started)


def _verdict(membership: Membership, lead: Message) -> str | None:
    """What the lead has decided where shards have to follow it: "initialise", for a worker without weights, or "alone".

    Connections fail one by one, so that each shard may have put out another worker. Then each of two workers waits for
    the other's state: the one that the lead has, and that is asked for its state, is the one to go on from.
    """
    if not membership.options.averages or membership.options.role == "reader" or lead.worker == NOBODY:
        return None
    state = lead.body["state"]
    if state == "initialise":
        return None if membership.takes_part else state
    is_alone = state == "ready" and lead.body["members"] == [lead.worker] and bool(membership.state_requests)
    return "alone" if is_alone else None


def _open_others(membership: Membership, lead: Message, deadline_s: float, verdict: str | None) -> Flow[None]:
    """Connect to all shards of all servers: each server's first shard lists the others."""
    epochs = {lead.epoch: membership.links[0].address}
    for address in shard_addresses(membership.links[0].address, lead.body["shards"]):
        membership.open(address)
    sizes = [len(membership.links)]
    for address in membership.options.addresses[1:]:
        answer = yield from _hello(membership, membership.open(address), deadline_s, verdict)
        if answer.epoch in epochs:
            raise ConfigurationError(
                f"server addresses must name different servers (got {epochs[answer.epoch]} and {address} of the"
                " same process). Name each server's first address once."
            )
        epochs[answer.epoch] = address
        for other in shard_addresses(address, answer.body["shards"]):
            membership.open(other)
        sizes.append(len(membership.links) - sum(sizes))
    membership.server_sizes = sizes


def _check_shards(membership: Membership, welcome: Message, server: int) -> None:
    expected, got = membership.server_sizes[server], len(welcome.body["shards"]) or 1
    if expected != got:
        raise ServerRefusedError(
            f"{membership.options.addresses[server]} came back with another number of shards (expected {expected}, got"
            f" {got}). Start it with --shards {expected}, or start the workers again.",
            ErrorCode.STATE_LOST,
        )


def _hello(membership: Membership, link: Link, deadline_s: float, verdict: str | None = None) -> Flow[Message]:
    """One shard's WELCOME; asks again while the shard's values are not there yet and may come."""
    options, now_s = membership.options, membership.runtime.now_s
    last_s = deadline_s if link.last_heard_s is not None else min(deadline_s, now_s() + options.connect_timeout_s)
    # A reader asks about the server, whatever its jobs.
    what = "HELLO" if options.role == "reader" else f"HELLO to job {options.job!r}"
    while True:
        message = Message(
            MessageType.HELLO,
            job=membership.identity.job,
            worker=membership.identity.worker,
            # The lead gives incarnations, and the other shards are told.
            incarnation=0 if link.index == 0 else membership.identity.incarnation,
            body=_hello_body(membership, link) | ({} if verdict is None else {"lead": verdict}),
        )
        request = membership.ask(link, message, what=what, timeout_s=last_s - now_s(), is_urgent=True)
        yield [request]
        answer = request.reply()
        last_s = deadline_s
        if answer.body["state"] != "wait" or not _may_come(membership):
            return answer
        if now_s() >= deadline_s:
            raise ServerLostError(
                f"job {options.job!r} has no values at {link.address} after {options.timeout_s:g} s: worker 0"
                " registers the model, and has not yet. Is it running, and does it use the same job and servers?"
            )
        yield WAIT_S
        if membership.closing.is_set():
            raise ServerLostError(f"the session was closed while it waited for the values of job {options.job!r}")


def _may_come(membership: Membership) -> bool:
    """Whether a shard that says "wait" may get values: weights that a server held and lost do not come back."""
    if membership.options.role == "reader":
        return False  # a reader need not know more
    return membership.options.averages or not membership.is_welcome


def _hello_body(membership: Membership, link: Link) -> dict[str, Any]:
    options, own = membership.options, membership.identity.worker
    body: dict[str, Any] = {
        "job": options.job,
        "role": options.role,
        "nonce": membership.nonce,
        "host": membership.runtime.host()[:255],
        "pid": membership.runtime.process_id(),
        "software": __version__,
        "world_size": options.world_size,
        "rule": options.whole_rule,
    }
    if options.role == "reader":
        return body
    rank = options.rank if own == NOBODY else own
    if rank is not None:
        body["rank"] = rank
    # A restarted server waits for these workers. A worker that has yet to get the others' state is none of them.
    members = {*membership.members} - {own}
    if membership.takes_part:
        members.add(own)
        if options.averages and not membership.has_roll:
            members.update(range(options.world_size))  # the first average needs all of them
    if membership.is_welcome and members:
        body["members"] = sorted(members)
    if options.averages and link.ledger.reached is not None:
        body["version"] = link.ledger.reached
    return body


def shard_addresses(known: str, listed: Sequence[str]) -> list[str]:
    """The addresses of a server's other shards; a wildcard host stands for the host in ``known``, its first address."""
    host = urlsplit(known).hostname or ""
    addresses = []
    for address in listed[1:]:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname in ("*", "0.0.0.0", "::"):
            addresses.append(f"tcp://[{host}]:{parts.port}" if ":" in host else f"tcp://{host}:{parts.port}")
        else:
            addresses.append(address)
    return addresses
