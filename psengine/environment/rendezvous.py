"""The rendezvous at the master, and log lines about what delays it: torch waits silently, and for some peers for ever.

::

    every rank                 resolve the master's name ── a launcher's own name must resolve within seconds
    ranks that do not listen   connect, again and again until the deadline: rank 0 may start late
    every rank                 torch's rendezvous, in a thread that can be left behind
    meanwhile                  a line in the log after 5, 15, 30, 60, 120 ... seconds
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from psengine.environment.launchers import Placement
from psengine.errors import CollectiveError

logger = logging.getLogger(__name__)

T = TypeVar("T")

WORDS_AFTER_S = (5.0, 15.0, 30.0, 60.0)
WORDS_EVERY_S = 60.0
RETRY_S = 0.5
CONNECT_TIMEOUT_S = 3.0
# The hosts of a running job have names already; a name in MASTER_ADDR may appear later (a Kubernetes service's).
LAUNCHERS_NAME_S = 10.0
# torch's own timeouts end a little late, with better messages than ours.
GRACE_S = 5.0


class MasterUnreachableError(OSError):
    """Nobody was met at the master's address; the text says what was tried last, and how it ended."""


class MasterUnresolvedError(MasterUnreachableError):
    """The master's host name has no address here."""


@dataclass
class Wait:
    """One rank's wait for the others: until when, and what it waits for at present (``state``)."""

    placement: Placement
    timeout_s: float
    state: str = "its process group begins"
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started_s

    @contextmanager
    def in_the_log(self) -> Iterator[None]:
        """Log the state from time to time, as long as the block runs."""
        over = threading.Event()

        def log_state() -> None:
            next_s = words_at_s(0.0)
            while not over.wait(max(0.0, next_s - self.elapsed_s)):
                self.say()
                next_s = words_at_s(next_s)

        thread = threading.Thread(target=log_state, name="psengine-rendezvous-words", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def say(self) -> None:
        """Log the state."""
        at = self.placement
        logger.warning(
            "rank %d of %d (%s) has waited for %.0f s, of at most %g s: %s",
            *(at.rank, at.world_size, at.launcher, self.elapsed_s, self.timeout_s, self.state),
        )

    def reach_master(self, *, listens_here: bool) -> None:
        """Return when the master's name resolves and, unless this rank is to listen there, somebody listens.

        Raises:
            MasterUnresolvedError: the name does not resolve; a launcher's own has seconds to do so.
            MasterUnreachableError: nobody listened before the deadline.
        """
        master = self.placement.master
        assert master is not None
        was_said = False
        while True:
            self.state = f"the name {master.address} ({master.address_source}) is being looked up"
            kind, limit_s = MasterUnreachableError, self.timeout_s
            try:
                found = resolve(master.address, master.port)
            except (OSError, UnicodeError) as error:
                kind = MasterUnresolvedError
                reason = getattr(error, "strerror", None) or str(error)
                self.state = (
                    f"the host name {master.address!r} ({master.address_source}) does not resolve on"
                    f" {socket.gethostname()} ({reason})"
                )
                if not master.is_address_given:
                    limit_s = min(LAUNCHERS_NAME_S, self.timeout_s)
                if not was_said and self.elapsed_s < limit_s:
                    was_said = True
                    self.say()
            else:
                refusals = None if listens_here else connect_to_any(found)
                if refusals is None:
                    return
                self.state = f"nobody can be reached at {master} ({master.sources}): {refusals}"
            if self.elapsed_s + RETRY_S >= limit_s:
                raise kind(self.state)
            time.sleep(RETRY_S)

    def meet(self, rendezvous: Callable[[], T], *, listens_here: bool) -> T:
        """Return the result of ``rendezvous``, torch's own, which does not always keep its deadline.

        Raises:
            MasterUnreachableError: it did not end.
            Exception: what it raised.
        """
        master = self.placement.master
        self.state = (
            f"this rank listens at {master}, and not all other ranks have come"
            if listens_here
            else f"somebody listens at {master}, but has not answered as a store of torch.distributed does: rank 0 is"
            " busy, or another program has this port"
        )
        met: Future[T] = Future()

        def work() -> None:
            try:
                met.set_result(rendezvous())
            except BaseException as error:
                met.set_exception(error)

        # A daemon: torch waits for ever for a listener that accepts and never answers.
        threading.Thread(target=work, name="psengine-rendezvous", daemon=True).start()
        done, _ = wait([met], max(0.0, self.timeout_s - self.elapsed_s) + GRACE_S)
        if not done:
            raise MasterUnreachableError(self.state)
        return met.result()


def ranks_of_this_host(store: Any, rank: int, world_size: int, timeout: timedelta) -> list[int]:
    """Exchange host names with all ranks; return the ranks of this host, ascending. All ranks call it.

    Raises:
        CollectiveError: not all of them did, within the timeout.
    """
    keys = [f"psengine/host/{other}" for other in range(world_size)]
    hostname = socket.gethostname()
    try:
        store.set(keys[rank], hostname)
        store.wait(keys, timeout)
        return [other for other, key in enumerate(keys) if store.get(key).decode() == hostname]
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CollectiveError(
            f"Rank {rank} could not learn who shares its host (expected all {world_size} ranks to call psengine.init()"
            f" within {timeout.total_seconds():g} s and to share a store, got: {first_line})."
            f" Fix: call init() on every rank, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and"
            " MASTER_PORT as torchrun does."
        ) from error


def unreachable(wait: Wait, error: BaseException) -> CollectiveError:
    """The error to raise where the ranks did not meet: it names the place, what ``error`` said, and the fix."""
    placement = wait.placement
    first_line = str(error).strip().partition("\n")[0]
    master = placement.master
    if placement.meeting_file:
        return CollectiveError(
            f"Rank {placement.rank} of {placement.world_size} on {socket.gethostname()} could not join the process"
            f" group through the file {placement.meeting_file} (expected all {placement.world_size} ranks to open it"
            f" within timeout={wait.timeout_s:g} s, got after {wait.elapsed_s:.1f} s: {first_line}). Fix: check that"
            " it is one file for all ranks, on a file system that they share and may write, and that it did not exist"
            " before."
        )
    if master is None:
        return CollectiveError(f"The process group of a single process could not be made: {first_line}")
    is_argument = master.address_source == "init_method"
    place = f"init_method=tcp://{master}" if is_argument else f"MASTER_ADDR:MASTER_PORT = {master}"
    fix = (
        f"make {master.address} known to every host (DNS, /etc/hosts), or set MASTER_ADDR on every rank to an address"
        " of rank 0's host that they all reach"
        if isinstance(error, MasterUnresolvedError)
        else f"check that every rank was started with this address, that rank 0 runs on {master.address}, that port"
        f" {master.port} is free there (MASTER_PORT chooses another) and no firewall closes it, and raise timeout"
        " where ranks start late"
    )
    return CollectiveError(
        f"Rank {placement.rank} of {placement.world_size} ({placement.launcher}) on {socket.gethostname()} could not"
        f" join the process group at {place} (expected all {placement.world_size} ranks to"
        f" meet there within timeout={wait.timeout_s:g} s, got after {wait.elapsed_s:.1f} s: {first_line};"
        f" {master.sources}). Fix: {fix}."
    )


def resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the addresses of ``host``, which may be an IPv6 address in brackets.

    Raises:
        OSError, UnicodeError: it has none, or is no name.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return list(socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM))


def connect_to_any(addresses: Iterable[tuple[Any, ...]]) -> str | None:
    """Try to connect to one after the other: None where somebody listens, else why each refused."""
    refusals = []
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(CONNECT_TIMEOUT_S)
                probe.connect(address)
                # If nobody listens at an ephemeral port, the kernel may give that port to this end, which meets itself.
                if probe.getsockname() != probe.getpeername():
                    return None
                refusals.append(f"{address[0]}: nobody listens")
        except OSError as error:
            refusals.append(f"{address[0]}: {error.strerror or error}")
    return "; ".join(dict.fromkeys(refusals))


def words_at_s(elapsed_s: float) -> float:
    """When to log the state next after ``elapsed_s`` seconds."""
    return next((at_s for at_s in WORDS_AFTER_S if at_s > elapsed_s), elapsed_s + WORDS_EVERY_S)
