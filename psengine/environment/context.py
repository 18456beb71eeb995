"""Where this process stands: rank, world, host, device.

``init()`` reads the launcher's variables, meets the other ranks and makes the default process group, or adopts the one
that the user made.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# Its default arguments hold the default group. Imported later, by torch._dynamo for an optimizer, it would keep our
# group and gloo's threads until the interpreter's teardown, which then sometimes aborts the process.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from psengine.environment.launchers import Placement
from psengine.environment.rendezvous import MasterUnresolvedError, Wait
from psengine.environment.variables import launched_as, read_variable
from psengine.errors import (
    CollectiveError,
    ConfigurationError,
    EnvironmentVariableError,
    SharedMemoryUnavailableError,
)

logger = logging.getLogger(__name__)

_LONGEST_TIMEOUT_S = 366 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where this process stands.

    Attributes:
        rank: this process in the world, 0 <= rank < world_size.
        local_rank: this process among those of its host, 0 <= local_rank < local_world_size.
        world_size: number of processes.
        local_world_size: number of processes on this host.
        device: where this process keeps its model: ``cuda:<index>``, else ``cpu``.
        hostname: this host's name.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    hostname: str

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the one that logs and saves."""
        return self.rank == 0


@dataclass(frozen=True)
class _Session:
    context: Context
    group: dist.ProcessGroup
    is_ours: bool
    process_id: int


_session: _Session | None = None
# Kept after shutdown(), so that ranks that call init() again do not meet at a store that is about to close.
_meeting_point: tuple[Placement, Store] | None = None
_generation = 0
_before_shutdown: list[Callable[[], None]] = []


def init(backend: str | None = None, *, timeout_s: float = 600.0) -> Context:
    """Join the default process group, making it if there is none, and select this process's CUDA device.

    Reads the variables of torchrun, Open MPI or Slurm. A process that none of them started is a world of its own, with
    a store in memory. An existing default group is adopted as it is. A second call returns an equal context.

    Args:
        backend: torch.distributed backend; default nccl where there is a CUDA device, else gloo. It says how tensors
            travel, not where they live: with ``"gloo"`` on a CUDA machine the device is CUDA.
        timeout_s: deadline for meeting the other ranks and, in a group made here, for its operations. From the fifth
            second on, the log says what init() waits for. If an address derived from Slurm's list of hosts does not
            resolve, init() fails after ten seconds.

    Returns:
        This process's rank, world, host and device.

    Raises:
        EnvironmentVariableError: the launcher's variables are incomplete or contradict each other.
        ConfigurationError: the backend is unknown, unavailable or not the existing group's; or the timeout is no
            positive finite number.
        CollectiveError: the other ranks could not be reached.
    """
    global _session
    timeout = _checked_timeout(timeout_s)
    if backend is not None:
        _check_backend(backend)
    session = _live_session()
    if session is not None:
        _check_same_backend(backend)
        return session.context
    if dist.is_initialized():
        _check_same_backend(backend)
        context, is_ours = _adopt(timeout), False
    else:
        context, is_ours = _create(backend or _default_backend(), timeout), True
    assert dist.group.WORLD is not None
    _session = _Session(context, dist.group.WORLD, is_ours, os.getpid())
    return context


def before_shutdown(callback: Callable[[], None]) -> None:
    """Register ``callback`` to run at the beginning of every ``shutdown``; it must not raise."""
    _before_shutdown.append(callback)


def shutdown() -> None:
    """Destroy the process group that ``init()`` made; an adopted group stays. ``init()`` may be called again."""
    global _session
    for callback in tuple(_before_shutdown):
        callback()
    atexit.unregister(_shutdown_at_exit)
    session, _session = _live_session(), None
    # A forked child inherits the group without the threads that serve it.
    if session is not None and session.is_ours and session.process_id == os.getpid():
        # A wrapped model may sit in a cycle of references, and whatever holds the group keeps its threads alive.
        gc.collect()
        dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this is rank 0: of the default group if there is one, else of the world the environment describes.

    Raises:
        EnvironmentVariableError: there is no group, and the launcher's variables are incomplete.
    """
    if dist.is_initialized():
        return dist.get_rank() == 0
    return launched_as().rank == 0


def world_place() -> tuple[int, int]:
    """Return this process's rank in the default group and that group's size; (0, 1) where there is no group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def choose_device(local_rank: int, device_count: int) -> torch.device:
    """Return the device of ``local_rank`` where ``device_count`` CUDA devices are visible.

    If exactly one device is visible, every rank gets it: the launcher gave each rank its own, or ranks share it.

    Raises:
        EnvironmentVariableError: more ranks than devices, and more than one device.
    """
    if device_count == 0:
        return torch.device("cpu")
    if device_count == 1:
        return torch.device("cuda", 0)
    if local_rank >= device_count:
        raise EnvironmentVariableError(
            f"Every local rank needs a CUDA device of its own (expected a local rank below {device_count} visible"
            f" devices, got local rank {local_rank}). Fix: start at most {device_count} processes on"
            f" {socket.gethostname()}, or make more devices visible in CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", local_rank)


def _create(backend: str, timeout: timedelta) -> Context:
    global _generation, _meeting_point
    placement = launched_as()
    if placement.note:
        logger.warning("%s", placement.note)
    device = _select_device(placement.local_rank)
    wait = Wait(placement, timeout.total_seconds())
    try:
        with wait.in_the_log():
            store = _meet(placement, timeout, wait)
            # Keys of an earlier group must not be taken for this one's: torchrun's store outlives the group.
            store = PrefixStore(f"psengine/group/{_generation}", store)
            wait.state = "the ranks' store was reached, and not all other ranks have joined the process group"
            dist.init_process_group(
                backend,
                store=store,
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timeout,
                # Ties the group to the device: fails early, and barrier() need not guess (it warns when it does).
                device_id=device if backend.lower() == "nccl" else None,
            )
    except SharedMemoryUnavailableError:
        _meeting_point = None
        raise  # by backend "psengine"; its text has the fix
    except (RuntimeError, ValueError, OSError) as error:
        _meeting_point = None
        raise _unreachable(placement, wait, error) from error
    _generation += 1
    atexit.register(_shutdown_at_exit)
    try:
        return _context(placement, device, store, timeout)
    except BaseException:
        dist.destroy_process_group()
        raise


def _meet(placement: Placement, timeout: timedelta, wait: Wait) -> Store:
    """Return the store all ranks of the world share."""
    global _meeting_point
    if _meeting_point is None or _meeting_point[0] != placement:
        store: Store = HashStore()
        if placement.master is not None:
            # As torch's own rendezvous decides it: torchrun's agent hosts the store, else rank 0.
            listens_here = placement.rank == 0 and read_variable("TORCHELASTIC_USE_AGENT_STORE") != "True"
            wait.reach_master(listens_here=listens_here)
            url, rank, world_size = f"tcp://{placement.master}", placement.rank, placement.world_size
            store, _, _ = wait.meet(
                lambda: next(rendezvous(url, rank, world_size, timeout=timeout)), listens_here=listens_here
            )
        _meeting_point = placement, store
    _meeting_point[1].set_timeout(timeout)
    return _meeting_point[1]


def _unreachable(placement: Placement, wait: Wait, error: Exception) -> CollectiveError:
    first_line = str(error).strip().partition("\n")[0]
    master = placement.master
    if master is None:
        return CollectiveError(f"The process group of a single process could not be made: {first_line}")
    fix = (
        f"make {master.address} known to every host (DNS, /etc/hosts), or set MASTER_ADDR on every rank to an address"
        " of rank 0's host that they all reach"
        if isinstance(error, MasterUnresolvedError)
        else f"check that every rank was started with this address, that rank 0 runs on {master.address}, that port"
        f" {master.port} is free there (MASTER_PORT chooses another) and no firewall closes it, and raise timeout_s"
        " where ranks start late"
    )
    return CollectiveError(
        f"Rank {placement.rank} of {placement.world_size} ({placement.launcher}) on {socket.gethostname()} could not"
        f" join the process group at MASTER_ADDR:MASTER_PORT = {master} (expected all {placement.world_size} ranks to"
        f" meet there with timeout_s={wait.timeout_s:g}, got after {wait.elapsed_s:.1f} s: {first_line};"
        f" {master.sources}). Fix: {fix}."
    )


def _adopt(timeout: timedelta) -> Context:
    """Describe the user's group: from the environment if it describes the same world, else by host names."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    placement = None
    try:
        placement = launched_as(needs_master=False)
    except EnvironmentVariableError:
        logger.debug("the environment is incomplete; placing rank %d by host names", rank)
    if placement is None or (placement.rank, placement.world_size) != (rank, world_size):
        mates = [0] if world_size == 1 else _ranks_of_this_host(store, rank, world_size, timeout)
        placement = Placement(
            launcher="none", rank=rank, local_rank=mates.index(rank), world_size=world_size,
            local_world_size=len(mates), master=None,
        )  # fmt: skip
    assert dist.group.WORLD is not None
    device: torch.device | None = dist.group.WORLD.bound_device_id
    return _context(placement, device or _select_device(placement.local_rank), store, timeout)


def _context(placement: Placement, device: torch.device, store: Store, timeout: timedelta) -> Context:
    local_world_size = placement.local_world_size
    if local_world_size is None:
        local_world_size = len(_ranks_of_this_host(store, placement.rank, placement.world_size, timeout))
    if placement.local_rank >= local_world_size:
        raise EnvironmentVariableError(
            f"A local rank lies below the number of ranks on its host (expected below {local_world_size}, which is how"
            f" many ranks call their host {socket.gethostname()}, got {placement.local_rank} on rank"
            f" {placement.rank}). Fix: set LOCAL_WORLD_SIZE, or give the containers of one host the same host name."
        )
    return Context(
        rank=placement.rank,
        local_rank=placement.local_rank,
        world_size=placement.world_size,
        local_world_size=local_world_size,
        device=device,
        hostname=socket.gethostname(),
    )


def _ranks_of_this_host(store: Store, rank: int, world_size: int, timeout: timedelta) -> list[int]:
    """Exchange host names with all ranks; return the ranks of this host, ascending. All ranks call it."""
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


def _select_device(local_rank: int) -> torch.device:
    device = choose_device(local_rank, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _checked_timeout(timeout_s: float) -> timedelta:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ConfigurationError(
            f"timeout_s must be a positive finite number of seconds (expected above 0 and at most a year, got"
            f" {timeout_s!r})."
        )
    return timedelta(milliseconds=math.ceil(timeout_s * 1000))  # torch counts milliseconds, and 0 would round away


def _default_backend() -> str:
    return "nccl" if _is_available("nccl") else "gloo"


def _is_available(backend: str) -> bool:
    return bool(dist.is_backend_available(backend)) and (backend != "nccl" or torch.cuda.is_available())


def _check_backend(backend: str) -> None:
    if not all(_is_available(part.rpartition(":")[2]) for part in str(backend).lower().split(",")):
        known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        raise ConfigurationError(
            "backend must be one that this torch offers on this machine (expected one of"
            f" {', '.join(filter(_is_available, known))}, or a list such as 'cpu:gloo,cuda:nccl' of them; got"
            f" {backend!r}). Fix: leave it out, for nccl with CUDA and gloo else."
        )


def _check_same_backend(backend: str | None) -> None:
    names: tuple[Callable[[], str], ...] = (dist.get_backend, dist.get_backend_config)
    if backend is not None and backend.lower() not in [str(name()).lower() for name in names]:
        raise ConfigurationError(
            f"The default process group exists and keeps its backend (expected backend={dist.get_backend()!r} or none,"
            f" got {backend!r}). Fix: leave the argument out, or call shutdown() or destroy_process_group() first."
        )


def _live_session() -> _Session | None:
    """The session, unless the user has destroyed its group."""
    if _session is None or not dist.is_initialized() or dist.group.WORLD is not _session.group:
        return None
    return _session


def _shutdown_at_exit() -> None:
    # After an uncaught exception the peers may be inside a collective, and destroying an nccl group would wait for it.
    # Destroying a gloo group does not wait; left to the interpreter's teardown, its threads may abort the process.
    failed = getattr(sys, "last_value", None) is not None
    if not (failed and dist.is_initialized() and "nccl" in dist.get_backend_config()):
        shutdown()
