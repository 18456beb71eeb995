"""Where this process stands: rank and world of its process group, worker of its job, host, device.

``init()`` reads the launcher's variables, meets the other ranks and makes the default process group, or adopts the one
that the user made.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

# Its default arguments hold the default group. Imported later, by torch._dynamo for an optimizer, it would keep our
# group and gloo's threads until the interpreter's teardown, which then sometimes aborts the process.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from psengine.environment import job
from psengine.environment.backends import check_backend, default_backend
from psengine.environment.devices import select_device
from psengine.environment.launchers import Placement
from psengine.environment.placement import place
from psengine.environment.rendezvous import Wait, ranks_of_this_host, unreachable
from psengine.environment.variables import given_worker, launch_attempt, launched_as, read_variable
from psengine.errors import (
    ArgumentTypeError,
    CollectiveError,
    ConfigurationError,
    EnvironmentVariableError,
    SharedMemoryUnavailableError,
)

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LONGEST_TIMEOUT = timedelta(days=366)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where this process stands: in its process group, and in its job.

    Rank and world size are the process group's. An independent worker, which meets the others at parameter servers
    alone, is a world of its own: its rank is 0 and its world size 1. ``worker``, ``workers`` and ``is_main_process``
    are the job's, whatever launched it: deal out data and save by these.

    ``with psengine.init() as context:`` calls ``shutdown()`` at the end of the block; of nested blocks, the outermost.

    Attributes:
        rank: this process in the process group, 0 <= rank < world_size.
        local_rank: this process among those of its group on its host, 0 <= local_rank < local_world_size.
        world_size: number of processes of the group.
        local_world_size: number of them on this host.
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
    def worker(self) -> int:
        """The number of this process among the workers of the job, 0 <= worker < workers.

        In a process group the rank. In an independent worker PSENGINE_WORKER, else the number that the servers assign
        when the model is wrapped; until then 0, and a warning says so.
        """
        return job.worker_of(self.rank, self.world_size)

    @property
    def workers(self) -> int:
        """Number of workers of the job: the world size of a process group, or PSENGINE_WORKERS.

        Raises:
            EnvironmentVariableError: PSENGINE_WORKER is set without PSENGINE_WORKERS.
        """
        return job.workers_of(self.rank, self.world_size)

    @property
    def is_main_process(self) -> bool:
        """Whether this is worker 0 of the job, the one that prints and saves."""
        return self.worker == 0

    def __enter__(self) -> Context:
        global _open_blocks
        _open_blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _open_blocks
        _open_blocks -= 1
        if not _open_blocks:
            _shut_down_after(failed=kind is not None)


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
# Blocks ``with init()`` that this process is inside.
_open_blocks = 0
_before_shutdown: list[Callable[[], None]] = []


def init(
    backend: str | None = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> Context:
    """Join the default process group, making it if there is none, and select this process's CUDA device.

    Reads the variables of torchrun, Open MPI or Slurm. A process that none of them started is a world of its own, with
    a store in memory; so is one with PSENGINE_WORKER, an independent worker. An existing default group is adopted as it
    is. A second call returns an equal context.

    Args:
        backend: torch.distributed backend; default nccl where there is a CUDA device, else gloo. It says how tensors
            travel, not where they live: with ``"gloo"`` on a CUDA machine the device is CUDA.
        timeout: deadline for meeting the other ranks and, in a group made here, for its operations. From the fifth
            second on, the log says what init() waits for. If an address derived from Slurm's list of hosts does not
            resolve, init() fails after ten seconds.
        rank: this process in the group, instead of the launcher's; together with ``world_size``.
        world_size: number of processes, instead of the launcher's.
        init_method: where the ranks meet, as torch spells it: "tcp://HOST:PORT", "file:///PATH", or "env://" for
            MASTER_ADDR and MASTER_PORT. Default: what the launcher says, or "env://" with ``rank``.

    Returns:
        This process's place in the group and in the job, host and device; also a context manager that shuts down.

    Raises:
        EnvironmentVariableError: the launcher's variables are incomplete or contradict each other.
        ConfigurationError, ArgumentTypeError: the backend is unknown, unavailable or not the existing group's; the
            timeout is no positive ``timedelta``; or rank, world size and init method do not fit each other.
        CollectiveError: the other ranks could not be reached.
    """
    global _session
    _check_timeout(timeout)
    if backend is not None:
        check_backend(backend)
    given_worker()  # refuses malformed variables now, not at the first read of ``worker``
    session = _live_session()
    if session is not None or dist.is_initialized():
        _check_same_group(backend, rank, world_size)
    if session is not None:
        return session.context
    if dist.is_initialized():
        context, is_ours = _adopt(timeout), False
    else:
        context, is_ours = _create(backend or default_backend(), timeout, place(rank, world_size, init_method)), True
    assert dist.group.WORLD is not None
    _session = _Session(context, dist.group.WORLD, is_ours, os.getpid())
    return context


def before_shutdown(callback: Callable[[], None]) -> None:
    """Register ``callback`` to run at the beginning of every ``shutdown``; it must not raise."""
    _before_shutdown.append(callback)


def shutdown() -> None:
    """Destroy the process group that ``init()`` made; an adopted group stays. ``init()`` may be called again.

    Workers of parameter servers stay members: ``model.leave()`` says goodbye, as the end of the process does.
    """
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
    """Whether this is worker 0 of the job, as ``Context.is_main_process``; before ``init()`` too.

    Raises:
        EnvironmentVariableError: there is no group, and the launcher's variables are incomplete.
    """
    return this_worker() == 0


def this_worker() -> int:
    """Return this process's number among the workers of the job; see ``Context.worker``, ``is_main_process``."""
    return job.worker_of(*group_place())


def job_place() -> tuple[int, int]:
    """Return ``Context.worker`` and ``Context.workers``; before ``init()`` too.

    Raises:
        EnvironmentVariableError: the launcher's variables are incomplete, or PSENGINE_WORKERS is missing.
    """
    place = group_place()
    return job.worker_of(*place), job.workers_of(*place)


def group_place() -> tuple[int, int]:
    """Return this process's rank and the world size: of the default group, else of the launcher's world."""
    if dist.is_initialized():
        return world_place()
    placement = launched_as(needs_master=False)
    return placement.rank, placement.world_size


def world_place() -> tuple[int, int]:
    """Return this process's rank in the default group and that group's size; (0, 1) where there is no group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _create(backend: str, timeout: timedelta, placement: Placement) -> Context:
    global _generation, _meeting_point
    if placement.note:
        logger.warning("%s", placement.note)
    # Before the others are met, where that is known: what is wrong here ends at once.
    device = None if placement.local_rank is None else _device_of(placement)
    wait = Wait(placement, timeout.total_seconds())
    try:
        with wait.in_the_log():
            store = _meet(placement, timeout, wait)
            # Keys of an earlier group must not be taken for this one's: torchrun's store outlives the group, and the
            # processes of an attempt that failed (gloo would connect to their addresses).
            store = PrefixStore(f"psengine/group/{launch_attempt()}/{_generation}", store)
            wait.state = "the ranks' store was reached, and not all other ranks have joined the process group"
            if device is None:
                placement = _placed_by_hosts(placement, store, timeout)
                device = _device_of(placement)
            dist.init_process_group(
                backend,
                store=store,
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timeout,
                # Ties the group to the device: fails early, and barrier() need not guess (it warns when it does).
                device_id=device if backend.lower() == "nccl" else None,
            )
    except (SharedMemoryUnavailableError, EnvironmentVariableError):
        _meeting_point = None
        raise  # by backend "psengine", or for want of a device; the text has the fix
    except (RuntimeError, ValueError, OSError) as error:
        _meeting_point = None
        cause = error.__cause__ if isinstance(error, CollectiveError) else None
        raise unreachable(wait, cause or error) from error
    _generation += 1
    atexit.register(_shutdown_at_exit)
    try:
        return _context(placement, device, store, timeout)
    except BaseException:
        dist.destroy_process_group()
        raise


def _device_of(placement: Placement) -> torch.device:
    index = placement.local_rank if placement.device_index is None else placement.device_index
    assert index is not None, "its place on the host is known"
    return select_device(index)


def _meet(placement: Placement, timeout: timedelta, wait: Wait) -> Store:
    """Return the store all ranks of the world share."""
    global _meeting_point
    if _meeting_point is None or _meeting_point[0] != placement:
        store: Store = HashStore()
        url, rank, world_size = f"file://{placement.meeting_file}", placement.rank, placement.world_size
        if placement.master is not None:
            # As torch's own rendezvous decides it: torchrun's agent hosts the store, else rank 0.
            listens_here = placement.rank == 0 and read_variable("TORCHELASTIC_USE_AGENT_STORE") != "True"
            wait.reach_master(listens_here=listens_here)
            url = f"tcp://{placement.master}"
            store, _, _ = wait.meet(
                lambda: next(rendezvous(url, rank, world_size, timeout=timeout)), listens_here=listens_here
            )
        elif placement.meeting_file:
            store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
        _meeting_point = placement, store
    _meeting_point[1].set_timeout(timeout)
    return _meeting_point[1]


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
        placement = Placement(
            launcher="none", rank=rank, local_rank=None, world_size=world_size, local_world_size=None, master=None
        )
    if placement.local_rank is None:
        placement = _placed_by_hosts(placement, store, timeout)
    assert dist.group.WORLD is not None
    device: torch.device | None = dist.group.WORLD.bound_device_id
    return _context(placement, device or _device_of(placement), store, timeout)


def _placed_by_hosts(placement: Placement, store: Store, timeout: timedelta) -> Placement:
    """The placement with this rank's place among those that call their host alike. All ranks call it."""
    rank, world_size = placement.rank, placement.world_size
    mates = [0] if world_size == 1 else ranks_of_this_host(store, rank, world_size, timeout)
    return replace(placement, local_rank=mates.index(rank), local_world_size=len(mates))


def _context(placement: Placement, device: torch.device, store: Store, timeout: timedelta) -> Context:
    local_world_size = placement.local_world_size
    if local_world_size is None:
        local_world_size = len(ranks_of_this_host(store, placement.rank, placement.world_size, timeout))
    assert placement.local_rank is not None, "its place on the host is known"
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


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta):
        raise ArgumentTypeError(
            f"timeout is a datetime.timedelta, as torch.distributed has it (expected one, got {timeout!r})."
            " Fix: init(timeout=timedelta(seconds=60))."
        )
    if not timedelta(milliseconds=1) <= timeout <= _LONGEST_TIMEOUT:
        raise ConfigurationError(
            f"timeout is a time to wait (expected at least a millisecond and at most a year, got {timeout})"
        )


def _check_same_group(backend: str | None, rank: int | None, world_size: int | None) -> None:
    names: tuple[Callable[[], str], ...] = (dist.get_backend, dist.get_backend_config)
    if backend is not None and backend.lower() not in [str(name()).lower() for name in names]:
        raise ConfigurationError(
            f"The default process group exists and keeps its backend (expected backend={dist.get_backend()!r} or none,"
            f" got {backend!r}). Fix: leave the argument out, or call shutdown() or destroy_process_group() first."
        )
    for name, value, own in (("rank", rank, dist.get_rank()), ("world_size", world_size, dist.get_world_size())):
        if value is not None and value != own:
            raise ConfigurationError(
                f"The default process group exists and keeps its ranks (expected {name}={own} or none, got {value!r})."
                " Fix: leave the argument out, or call shutdown() or destroy_process_group() first."
            )


def _live_session() -> _Session | None:
    """The session, unless the user has destroyed its group."""
    if _session is None or not dist.is_initialized() or dist.group.WORLD is not _session.group:
        return None
    return _session


def _shutdown_at_exit() -> None:
    _shut_down_after(failed=getattr(sys, "last_value", None) is not None)


def _shut_down_after(*, failed: bool) -> None:
    # After an uncaught exception the peers may be inside a collective, and destroying an nccl group would wait for it.
    # Destroying a gloo group does not wait; left to the interpreter's teardown, its threads may abort the process.
    if not (failed and dist.is_initialized() and "nccl" in dist.get_backend_config()):
        shutdown()
