"""HELLO to every shard, and what may come of it. Blocking: for the thread that starts, or a recovery thread.

lead          HELLO ─► WELCOME: rank, incarnation, state, the server's shards      "wait": ask again
other shards           HELLO with that rank and incarnation ─► WELCOME
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from psengine.environment import local_sockets
from psengine.errors import ConfigurationError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.link import Link
from psengine.protocol.messages import CODEC_VERSION, NOBODY, ErrorCode, Message, MessageType
from psengine.version import __version__

if TYPE_CHECKING:
    from psengine.parameter_server.client.own_membership import OwnMembership

logger = logging.getLogger(__name__)

# How long to wait before asking again whether values are there yet.
WAIT_S = 0.1
# An embedded server that is silent for so long is looked for.
EMBEDDED_SILENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the lead said, and every shard's state: "initialise", "wait", "ready" or "join"."""

    states: tuple[str, ...]
    members: tuple[int, ...]
    started: bool

    @property
    def state(self) -> str:
        """The lead's."""
        return self.states[0]

    @property
    def lost(self) -> list[int]:
        """Shards that have no values of this job."""
        return [index for index, state in enumerate(self.states) if state in ("initialise", "wait")]


class Handshake:
    """How a client introduces itself; one object for its whole life.

    Args:
        membership: whose; its identity and links are set.
    """

    def __init__(self, membership: OwnMembership) -> None:
        self._membership = membership
        self._options = membership.options
        self._nonce = random.SystemRandom().getrandbits(64)
        # Shards per server, in the order of addresses.
        self._server_sizes: list[int] = []

    def first_links(self) -> list[Link]:
        """Each server's first shard."""
        links, sizes = self._membership.links, self._server_sizes
        return [links[sum(sizes[:server])] for server in range(len(sizes))]

    def greet(self) -> Welcome:
        """Say HELLO to every shard; connects to them the first time.

        Raises:
            ServerLostError: no answer, or no values before the deadline.
            ServerRefusedError: the job's rule is another, or the rank is taken.
            AuthenticationError: the CURVE handshake failed.
            ConfigurationError: two addresses name the same server.
        """
        membership, identity = self._membership, self._membership.identity
        deadline_s = time.monotonic() + self._options.timeout_s
        if not membership.links:
            membership.open(self._options.addresses[0])
        lead = self._hello(membership.links[0], deadline_s)
        identity.worker, identity.incarnation = lead.worker, lead.incarnation
        if not self._server_sizes:
            self._open_others(lead, deadline_s)
        firsts = [link.index for link in self.first_links()]
        states = [lead.body["state"]]
        self._check_shards(lead, 0)
        for link in membership.links[1:]:
            answer = self._hello(link, deadline_s)
            states.append(answer.body["state"])
            if link.index in firsts:
                self._check_shards(answer, firsts.index(link.index))
        return Welcome(tuple(states), tuple(lead.body["members"]), lead.body["started"])

    def _open_others(self, lead: Message, deadline_s: float) -> None:
        """Connect to all shards of all servers: each server's first shard knows the others."""
        membership = self._membership
        epochs = {lead.epoch: membership.links[0].address}
        for address in shard_addresses(membership.links[0].address, lead.body["shards"]):
            membership.open(address)
        sizes = [len(membership.links)]
        for address in self._options.addresses[1:]:
            answer = self._hello(membership.open(address), deadline_s)
            if answer.epoch in epochs:
                raise ConfigurationError(
                    f"server addresses must name different servers (got {epochs[answer.epoch]} and {address} of the"
                    " same process). Name each server's first address once."
                )
            epochs[answer.epoch] = address
            for other in shard_addresses(address, answer.body["shards"]):
                membership.open(other)
            sizes.append(len(membership.links) - sum(sizes))
        self._server_sizes = sizes

    def _check_shards(self, welcome: Message, server: int) -> None:
        expected, got = self._server_sizes[server], len(welcome.body["shards"]) or 1
        if expected != got:
            raise ServerRefusedError(
                f"{self._options.addresses[server]} came back with another number of shards (expected {expected}, got"
                f" {got}). Start it with --shards {expected}, or start the workers again.",
                ErrorCode.STATE_LOST,
            )

    def _hello(self, link: Link, deadline_s: float) -> Message:
        """One shard's WELCOME; where its values are not there yet, and may come, after waiting for them."""
        membership, options = self._membership, self._options
        connect_deadline_s = time.monotonic() + options.connect_timeout_s
        while True:
            last_s = deadline_s if link.last_heard_s is not None else min(deadline_s, connect_deadline_s)
            timeout_s = last_s - time.monotonic()
            message = Message(
                MessageType.HELLO,
                job=membership.identity.job,
                worker=membership.identity.worker,
                # The lead gives incarnations, the others hear which it was.
                incarnation=0 if link.index == 0 else membership.identity.incarnation,
                body=self._hello_body(),
            )
            answer = self._answer(link, message, timeout_s)
            if answer is None:
                continue
            self._check_version(link)
            if answer.body["state"] != "wait" or not self._may_come():
                return answer
            if time.monotonic() >= deadline_s:
                raise ServerLostError(
                    f"job {options.job!r} has no values at {link.address} after {options.timeout_s:g} s: worker 0"
                    " registers the model, and has not yet. Is it running, and does it use the same job and servers?"
                )
            if membership.closing.wait(WAIT_S):
                raise ServerLostError(f"the session was closed while it waited for the values of job {options.job!r}")

    def _check_version(self, link: Link) -> None:
        codec = self._options.codec
        if codec.is_identity or link.server_version >= CODEC_VERSION:
            return
        raise ServerRefusedError(
            f"{link.address} knows no codecs (expected protocol version {CODEC_VERSION} or later for compress={codec},"
            f" got {link.server_version}). Update psengine where the servers run, or leave out compress=.",
            ErrorCode.VERSION,
        )

    def _answer(self, link: Link, message: Message, timeout_s: float) -> Message | None:
        """The answer to a HELLO; None where an embedded server has yet to give it."""
        options = self._options
        wait_s = min(timeout_s, EMBEDDED_SILENCE_S) if options.is_embedded else timeout_s
        # A reader's question is about the server, whatever its jobs.
        what = "HELLO" if options.role == "reader" else f"HELLO to job {options.job!r}"
        try:
            return self._membership.ask(link, message, what=what, timeout_s=wait_s, is_urgent=True).reply()
        except ServerLostError as error:
            if options.is_embedded and not is_listening(link.address):
                raise ServerLostError(
                    f"the embedded parameter server at {link.address} is gone (expected an answer to {what}, got none):"
                    " rank 0, which had started it, has failed or closed its strategy. Its output says why."
                ) from error
            if wait_s >= timeout_s:
                raise
            return None

    def _may_come(self) -> bool:
        """Whether a "wait" is worth waiting through: weights that a server had and lost do not come back by it."""
        if self._options.role == "reader":
            return False  # it may want to know no more than that
        return self._options.averages or not self._membership.is_welcome

    def _hello_body(self) -> dict[str, Any]:
        options, membership = self._options, self._membership
        body: dict[str, Any] = {
            "job": options.job,
            "role": options.role,
            "nonce": self._nonce,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "software": options.software or __version__,
            "world_size": options.world_size,
            "rule": options.whole_rule,
        }
        if options.role == "reader":
            return body
        rank = options.rank if membership.identity.worker == NOBODY else membership.identity.worker
        if rank is not None:
            body["rank"] = rank
        # A restarted server waits for these. Who is still to be given the others' state has nothing to go on from.
        members = {*membership.members} - {membership.identity.worker}
        if membership.takes_part:
            members.add(membership.identity.worker)
            if options.averages and not membership.has_roll:
                members.update(range(options.world_size))  # without whom there is no first average
        if membership.is_welcome and members:
            body["members"] = sorted(members)
        return body

    def restore(self, lost: Sequence[int]) -> None:
        """Servers came back without the job: tell an averaging one its layout again.

        Raises:
            ServerRefusedError: they held the job's weights ("state_lost").
        """
        membership = self._membership
        if not self._options.averages:
            where = ", ".join(membership.links[index].address for index in lost)
            raise ServerRefusedError(
                f"{where} restarted without a snapshot of job {self._options.job!r}, so the weights and optimizer state"
                " it held are lost. Start the servers with --snapshot-dir, and the workers again from a checkpoint.",
                ErrorCode.STATE_LOST,
            )
        logger.warning("registering %d shards of job %r again", len(lost), self._options.job)
        for index in sorted(lost, reverse=True):  # the lead last: others wait for it
            link = membership.links[index]
            for spec in membership.chunks.at(index):
                # Weights live in the workers; a joiner gets them from one of those.
                membership.register(link, spec, torch.zeros(spec.numel, dtype=spec.dtype), is_urgent=True).wait()
            membership.seal(link, is_urgent=True).wait()


def is_listening(address: str) -> bool:
    """Whether anything listens at an address of this machine."""
    if address.startswith("ipc://"):
        return local_sockets.is_listening(address)
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # busy


def shard_addresses(known: str, listed: Sequence[str]) -> list[str]:
    """The addresses of a server's other shards; a wildcard host stands for the one the server was reached by."""
    host = urlsplit(known).hostname or ""
    addresses = []
    for address in listed[1:]:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname in ("*", "0.0.0.0", "::"):
            addresses.append(f"tcp://[{host}]:{parts.port}" if ":" in host else f"tcp://{host}:{parts.port}")
        else:
            addresses.append(address)
    return addresses
