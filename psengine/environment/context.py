"""Where this process stands: rank and world of its process group, worker of its job, host, device.

``init()`` reads the launcher's variables, meets the other ranks and makes the default process group, or adopts the one
that the user made.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

# Its default arguments hold the default group. Imported later, by torch._dynamo for an optimizer, it would keep our
# group and gloo's threads until the interpreter's teardown, which then sometimes aborts the process.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import PrefixStore, Store

from psengine.environment.devices import check_backend, default_backend, select_device
from psengine.environment.launchers import WORKER, WORKERS, Placement, detect, master_from, read_worker
from psengine.environment.processes import end_with_parent
from psengine.environment.rendezvous import Wait, ranks_of_this_host
from psengine.environment.uncaught import install_hook
from psengine.environment.variables import RUN_ID, inherited_variables, launch_attempt, read_variable
from psengine.errors import ConfigurationError, EnvironmentVariableError, PSEngineError

DEFAULT_TIMEOUT = timedelta(minutes=10)


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

        In a process group the rank. In an independent worker PSENGINE_WORKER, else the number that the servers of
        PSENGINE_SERVERS give in ``init()``, those of ``servers=`` when the model is wrapped, and 0 until then.
        """
        return _worker_of(self.rank, self.world_size)

    @property
    def workers(self) -> int:
        """Number of workers of the job: the world size of a process group, or PSENGINE_WORKERS.

        Raises:
            EnvironmentVariableError: PSENGINE_WORKER is set without PSENGINE_WORKERS.
        """
        return _workers_of(self.rank, self.world_size)

    @property
    def is_main_process(self) -> bool:
        """Whether this is worker 0 of the job, the one that prints and saves."""
        return self.worker == 0

    def __enter__(self) -> Context:
        global _open_blocks
        _open_blocks += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
_shutdowns = 0
# The number that the servers gave to this process, in ``init`` or for its first model.
_assigned: int | None = None
# Asks them for it; None where no servers are named.
_ask_servers: Callable[[], int | None] | None = None


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
            second on, the log says what init() waits for.
        rank: this process in the group, instead of the launcher's; together with ``world_size``.
        world_size: number of processes, instead of the launcher's.
        init_method: where the ranks meet, as torch spells it: "tcp://HOST:PORT", "file:///PATH", or "env://" for
            MASTER_ADDR and MASTER_PORT. Default: what the launcher says, or "env://" with ``rank``.

    An independent worker without PSENGINE_WORKER asks the servers of PSENGINE_SERVERS for its number. Where its job has
    ended, as for a worker that is started again after all others are done, it ends with exit code 0.

    Returns:
        This process's place in the group and in the job, host and device; also a context manager that shuts down.

    Raises:
        EnvironmentVariableError: the launcher's variables are incomplete or contradict each other.
        ConfigurationError: the backend is unknown or not the existing group's; the timeout is no positive
            ``timedelta``; or rank, world size and init method do not fit each other.
        CollectiveError: the other ranks could not be reached.
        ServerError: the servers could not be reached, or did not let this worker in.
    """
    global _session
    install_hook()
    _check_timeout(timeout)
    if backend is not None:
        check_backend(backend)
    worker, _ = read_worker(inherited_variables())  # refuses malformed ones now, not at the first read of ``worker``
    if worker is not None and read_variable(RUN_ID) and os.getsid(0) == os.getpid():
        # psengine run started it, in a session of its own. A launcher that is started again starts another one.
        end_with_parent()
    if dist.is_initialized():
        _check_same_group(backend, rank, world_size)
        if (session := _live_session()) is not None:
            return session.context
        context, is_ours = _adopt(timeout), False
    else:
        context, is_ours = _create(backend or default_backend(), timeout, _place(rank, world_size, init_method)), True
    assert dist.group.WORLD is not None
    _session = _Session(context, dist.group.WORLD, is_ours, os.getpid())
    install_hook()  # again: torch installs its own in init_process_group
    is_numbered = context.world_size > 1 or _assigned is not None or read_worker(inherited_variables())[0] is not None
    if _ask_servers is not None and not is_numbered:
        assign_worker(_ask_servers())
    return context


def ask_for_number(ask: Callable[[], int | None]) -> None:
    """``init`` calls ``ask`` for the number of an independent worker; it returns None where nobody gives one."""
    global _ask_servers
    _ask_servers = ask


def before_shutdown(callback: Callable[[], None]) -> None:
    """Register ``callback`` to run at the beginning of every ``shutdown``; it must not raise."""
    _before_shutdown.append(callback)


def shutdown() -> None:
    """Destroy the process group that ``init()`` made; an adopted group stays. ``init()`` may be called again.

    Workers of parameter servers stay members: ``model.leave()`` says goodbye, as the end of the process does, or the
    next model that is wrapped.
    """
    global _session, _shutdowns
    _shutdowns += 1
    for callback in tuple(_before_shutdown):
        callback()
    atexit.unregister(_shut_down_after)
    session, _session = _live_session(), None
    # A forked child inherits the group without the threads that serve it.
    if session is not None and session.is_ours and session.process_id == os.getpid():
        # A wrapped model may sit in a cycle of references, and whatever holds the group keeps its threads alive.
        gc.collect()
        dist.destroy_process_group()


def shutdown_count() -> int:
    """Return how often ``shutdown`` was called: what began before the last one is over."""
    return _shutdowns


def is_main_process() -> bool:
    """Whether this is worker 0 of the job, as ``Context.is_main_process``; before ``init()`` too.

    Raises:
        EnvironmentVariableError: there is no group, and the launcher's variables are incomplete.
    """
    return this_worker() == 0


def this_worker() -> int:
    """Return this process's number among the workers of the job; see ``Context.worker``, ``is_main_process``."""
    return _worker_of(*group_place())


def job_place() -> tuple[int, int]:
    """Return ``Context.worker`` and ``Context.workers``; before ``init()`` too.

    Raises:
        EnvironmentVariableError: the launcher's variables are incomplete, or PSENGINE_WORKERS is missing.
    """
    place = group_place()
    return _worker_of(*place), _workers_of(*place)


def group_place() -> tuple[int, int]:
    """Return this process's rank and the world size: of the default group, else of the launcher's world."""
    if dist.is_initialized():
        return world_place()
    placement = detect(inherited_variables(), needs_master=False)
    return placement.rank, placement.world_size


def world_place() -> tuple[int, int]:
    """Return this process's rank in the default group and that group's size; (0, 1) where there is no group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _worker_of(rank: int, world_size: int) -> int:
    """The group's rank, else PSENGINE_WORKER, else the number that the servers gave, else 0."""
    if world_size > 1:
        return rank
    worker, _ = read_worker(inherited_variables())
    return worker if worker is not None else _assigned or 0


def _workers_of(rank: int, world_size: int) -> int:
    if world_size > 1:
        return world_size
    named, workers = read_worker(inherited_variables())
    if named is not None and workers is None:
        raise EnvironmentVariableError(
            f"The number of workers of the job is not known (expected {WORKERS} beside {WORKER}={named}, got none)."
            f" Fix: set {WORKERS} to the number of workers of the whole job, the same on each of them."
        )
    return _worker_of(rank, world_size) + 1 if workers is None else workers


def assign_worker(worker: int | None) -> None:
    """The servers gave this process a number, which its later models do not change; None forgets it."""
    global _assigned
    if _assigned is None or worker is None:
        _assigned = worker


def _place(rank: int | None, world_size: int | None, init_method: str | None) -> Placement:
    """The placement that the arguments of ``init`` describe; what they leave out is the launcher's."""
    placement = None
    if rank is None and world_size is None:
        if init_method is None:
            return detect(inherited_variables())
        launched = detect(inherited_variables(), needs_master=False)
        if launched.launcher != "none" or init_method == "env://":
            placement = launched
    elif rank is not None and world_size is not None and 0 <= rank < world_size:
        placement = _placement_of(rank, world_size, "arguments of init()")
    if placement is None:
        raise ConfigurationError(
            "init(rank=, world_size=) go together, ranks count from 0, and init_method needs both where there is no"
            f" launcher (expected 0 <= rank < world_size, or neither, got rank={rank}, world_size={world_size},"
            f" init_method={init_method!r}). Fix: give both; or neither, to take the launcher's or to train alone."
        )
    if placement.world_size == 1:
        return placement
    return replace(
        placement, init_method=master_from(inherited_variables()) if init_method in (None, "env://") else init_method
    )


def _placement_of(rank: int, world_size: int, launcher: str) -> Placement:
    """A rank's placement without a meeting point: the launcher's, where its variables describe the same world."""
    with contextlib.suppress(EnvironmentVariableError):  # of variables that nobody needs here
        placement = detect(inherited_variables(), needs_master=False)
        if (placement.rank, placement.world_size) == (rank, world_size):
            return replace(placement, launcher=launcher)
    return Placement(launcher=launcher, rank=rank, world_size=world_size, local_rank=None, local_world_size=None)


def _create(backend: str, timeout: timedelta, placement: Placement) -> Context:
    global _generation, _meeting_point
    wait = Wait(placement, timeout)
    try:
        with wait.in_the_log():
            if _meeting_point is None or _meeting_point[0] != placement:
                _meeting_point = placement, wait.meet()
            # Keys of an earlier group must not be taken for this one's: torchrun's store outlives the group, and the
            # processes of an attempt that failed (gloo would connect to their addresses).
            store = PrefixStore(f"psengine/group/{launch_attempt()}/{_generation}", _meeting_point[1])
            store.set_timeout(timeout)
            wait.what = "the other ranks to join the process group"
            context = _context(placement, store, timeout)
            dist.init_process_group(
                backend,
                store=store,
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timeout,
                # Ties the group to the device: fails early, and barrier() need not guess (it warns when it does).
                device_id=context.device if backend.lower() == "nccl" else None,
            )
    except (RuntimeError, ValueError, OSError) as error:
        _meeting_point = None
        if isinstance(error, PSEngineError):
            raise  # its text has the fix
        raise wait.failed(error) from error
    _generation += 1
    atexit.register(_shut_down_after)
    return context


def _adopt(timeout: timedelta) -> Context:
    """Describe the user's group."""
    assert dist.group.WORLD is not None
    store = dist.distributed_c10d._get_default_store()
    return _context(_placement_of(*world_place(), "none"), store, timeout, dist.group.WORLD.bound_device_id)


def _context(placement: Placement, store: Store, timeout: timedelta, device: torch.device | None = None) -> Context:
    """Where nobody says which ranks share this host, those do that give it the same name. All ranks call it."""
    local_rank, local_world_size = placement.local_rank, placement.local_world_size
    if local_world_size is None:
        mates = ranks_of_this_host(store, placement.rank, placement.world_size, timeout)
        local_world_size = len(mates)
        local_rank = mates.index(placement.rank) if local_rank is None else local_rank
    assert local_rank is not None, "a launcher that counts the ranks of a host numbers them"
    return Context(
        rank=placement.rank,
        local_rank=local_rank,
        world_size=placement.world_size,
        local_world_size=local_world_size,
        device=device or select_device(local_rank if placement.device_index is None else placement.device_index),
        hostname=socket.gethostname(),
    )


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta) or not timedelta(milliseconds=1) <= timeout <= timedelta(days=366):
        raise ConfigurationError(
            "timeout is a datetime.timedelta, as torch.distributed has it (expected at least a millisecond and at most"
            f" a year, got {timeout!r}). Fix: init(timeout=timedelta(seconds=60))."
        )


def _check_same_group(backend: str | None, rank: int | None, world_size: int | None) -> None:
    backends = str(dist.get_backend()).lower(), str(dist.get_backend_config()).lower()
    kept = {"backend": backends, "rank": (dist.get_rank(),), "world_size": (dist.get_world_size(),)}
    for (name, known), value in zip(kept.items(), (backend and backend.lower(), rank, world_size), strict=True):
        if value is not None and value not in known:
            raise ConfigurationError(
                f"The default process group exists (expected {name}={known[0]!r} or none, got {value!r})."
                " Fix: leave the argument out, or call shutdown() or destroy_process_group() first."
            )


def _live_session() -> _Session | None:
    """The session, unless the user has destroyed its group."""
    return _session if _session and dist.is_initialized() and dist.group.WORLD is _session.group else None


def _shut_down_after(*, failed: bool | None = None) -> None:
    """``failed`` None: at the interpreter's exit."""
    # After an uncaught exception the peers may be inside a collective, and destroying an nccl group would wait for it.
    # Destroying a gloo group does not wait; left to the interpreter's teardown, its threads may abort the process.
    failed = getattr(sys, "last_value", None) is not None if failed is None else failed
    if not (failed and dist.is_initialized() and "nccl" in dist.get_backend_config()):
        shutdown()
