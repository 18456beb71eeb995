"""Finds a worker's parameter servers: the argument, else PSENGINE_SERVERS, else one that rank 0 starts here."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psengine.collectives.base import Collective
from psengine.collectives.solo import SoloCollective
from psengine.environment.context import shutdown_count
from psengine.environment.launchers import detect, read_worker
from psengine.environment.variables import inherited_variables, read_variable
from psengine.errors import ConfigurationError, PSEngineError, ServerError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.parameter_server.client.embedded import EmbeddedServer
from psengine.parameter_server.client.identity import DEFAULT_JOB

# The jobs of the models that this process has wrapped since the last ``shutdown()``: one name, and the lowest number
# that is free. A number becomes free when its strategy is closed, which scripts do alike on all ranks; garbage
# collection does not free it. A name that a strategy's argument gave is used unchanged; only copies of that strategy
# are numbered.
_taken_jobs: Counter[tuple[int, str]] = Counter()


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A worker's servers, and its identity there.

    Attributes:
        addresses: of the servers, the lead first.
        job: name of the job at the servers.
        rank: this worker's; None lets the servers give one.
        world_size: how many workers the first exchange waits for.
        embedded: the server this process started, and has to stop.
        is_embedded: whether a process of the group started the server.
        shutdowns: how often ``shutdown()`` had been called.
    """

    addresses: tuple[str, ...]
    job: str
    rank: int | None
    world_size: int
    embedded: EmbeddedServer | None
    is_embedded: bool
    shutdowns: int


def meet(
    servers: str | Sequence[str] | None,
    job: str | None,
    collective: Collective,
    device: torch.device,
    *,
    is_copy: bool = False,
) -> Rendezvous:
    """Find or start the servers; every rank of ``collective`` calls it. ``is_copy``: another model may be ``job``.

    Raises:
        ConfigurationError: no servers are named, and the ranks are on several hosts.
        EnvironmentVariableError: PSENGINE_WORKER is no rank, or the launcher's variables are incomplete.
        ServerError: the embedded server did not start.
    """
    addresses = parse_addresses(servers)
    rank, world_size = _place(collective)
    embedded, is_embedded = None, not addresses
    if is_embedded:
        if world_size != collective.world_size:
            raise ConfigurationError(
                f"one of {world_size} processes finds rank 0's server through the process group (expected one, got"
                " none). Fix: call psengine.init() before wrapping the model, or name a server in"
                " PSENGINE_SERVERS (psengine run --server-address)."
            )
        embedded, addresses = _embed(collective, device)
    name = name_of_job(job, is_copy=is_copy)
    _taken_jobs[shutdown_count(), name] += 1
    return Rendezvous(
        addresses=addresses,
        job=name,
        rank=rank,
        world_size=world_size,
        embedded=embedded,
        is_embedded=is_embedded,
        shutdowns=shutdown_count(),
    )


def name_of_job(job: str | None, *, is_copy: bool) -> str:
    """The name at the servers of the next model; ``job`` and ``is_copy`` as for ``meet``."""
    if job and not is_copy:
        return job
    name = job or read_variable("PSENGINE_JOB") or DEFAULT_JOB
    candidates = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
    return next(candidate for candidate in candidates if _taken_jobs[shutdown_count(), candidate] < 1)


def leave(rendezvous: Rendezvous) -> None:
    """The strategy was closed, or could not connect: free its job's name."""
    _taken_jobs[rendezvous.shutdowns, rendezvous.job] -= 1


def _place(collective: Collective) -> tuple[int | None, int]:
    """(rank, workers the job begins with): the process group's, else the launcher's, else an independent worker's.

    An independent worker without PSENGINE_WORKER gets its rank from the servers.
    """
    placement = (
        collective if not isinstance(collective, SoloCollective) else detect(inherited_variables(), needs_master=False)
    )
    if placement.world_size > 1:
        return placement.rank, placement.world_size
    worker, workers = read_worker(inherited_variables())
    return worker, workers or 1


def _embed(collective: Collective, device: torch.device) -> tuple[EmbeddedServer | None, tuple[str, ...]]:
    """Rank 0 starts a server on loopback and tells the others where."""
    _check_one_host(collective, device)
    embedded, text = None, b""
    error: Exception | None = None
    if collective.rank == 0:
        try:
            embedded = EmbeddedServer.start()
            text = ",".join(embedded.addresses).encode()
        except (PSEngineError, OSError) as failure:
            error = failure  # raised after the others were told
    text = collective.broadcast_bytes(text, 0, device, what="address of the embedded server")
    if error is not None:
        raise error
    addresses = parse_addresses(text.decode())
    if not addresses:
        raise ServerError("rank 0 could not start the embedded parameter server; its error says why")
    return embedded, addresses


def _check_one_host(collective: Collective, device: torch.device) -> None:
    if collective.world_size == 1:
        return
    hosts = set(collective.gather_bytes(socket.gethostname().encode(), device, what="host names"))
    if len(hosts) > 1:
        raise ConfigurationError(
            f"no parameter server is named, and the workers are on {len(hosts)} hosts (expected one, where rank 0"
            " starts one). Fix: start psengine-server where all reach it, and set PSENGINE_SERVERS=tcp://host:port,"
            " or psengine run --server-address tcp://host:port."
        )
