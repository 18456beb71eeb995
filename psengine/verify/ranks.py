"""Run a function on several ranks of this machine, each a process of its own, and name the rank that failed first.

launcher   store on a free loopback port ─ starts ranks ─ reads notes and reports ─ ends ranks
rank       joins the group ─ notes what it does ─ reports a result or an error ─ ends

A pipe connects each rank with the launcher, so that each notices when the other dies. How a process is started is a
function: verify, doctor and benchmarks start interpreters, tests fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from psengine.environment.devices import choose_device
from psengine.environment.processes import share_of_cores
from psengine.errors import CollectiveError, ConfigurationError, PSEngineError

MAX_RANKS = 64
_HERE = str(Path(__file__).parent)
# Starts a rank with this psengine, though the folder in which it runs may have another.
_SERVE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from psengine.verify.ranks import serve_at;"
    " del sys.path[0]; serve_at(%d)"
)
_POLL_S = 0.05
# After the first error: how long an earlier one may take to be reported.
_GRACE_S = 0.3
# After an error that another rank's failure caused: how long the error of that rank may take to be reported.
_CAUSE_GRACE_S = 10.0
_END_S = 10.0


class RankFailedError(PSEngineError, RuntimeError):
    """A rank raised, died, or was not done in time.

    Attributes:
        rank: the first that failed; None where all were merely late.
        rank_traceback: what it raised; "" where it died or was late.
    """

    def __init__(self, message: str, rank: int | None = None, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_traceback = rank_traceback


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place.

    Attributes:
        rank, world_size: of the default process group.
        device: where models and batches are.
        note: records what this rank does now; the launcher's error shows it if the rank dies or is late.
    """

    rank: int
    world_size: int
    device: torch.device
    note: Callable[[str], None] = field(default=lambda text: None)


# A rank's process: a ``subprocess.Popen``, or what has its ``pid``, ``poll``, ``kill`` and ``wait``.
Process: TypeAlias = Any
# Starts so many processes that call ``serve``, and returns each with the launcher's end of its pipe.
Start: TypeAlias = Callable[[int], Sequence[tuple[Process, Connection]]]


@dataclass(frozen=True)
class _Setup:
    """What a rank is told. Both ends of the pipe are our own processes, so that setups and reports may be pickled.

    ``group``: port of the store and deadline in seconds of the default process group; None: no group.
    """

    rank: int
    world_size: int
    group: tuple[int, float] | None
    device: str
    threads: int | None
    leaves_together: bool
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        unix_s: when; 0 where it died without a report.
        is_consequence: whether another rank's failure seems to be the cause.
        error: a ``RankFailedError``, or the ``ConfigurationError`` that the rank raised.
        full_traceback: of what it raised; "" where it died.
    """

    unix_s: float
    is_consequence: bool
    error: PSEngineError
    full_traceback: str = ""


@dataclass
class RankEnd:
    """A rank as the launcher knows it.

    Attributes:
        rank: its number.
        process: what was started; it has ended once the launcher returns this.
        note: what it did last.
        result: what the function returned, in a tuple; None where it failed or is not done.
        failure: None where it returned or is not done.
    """

    rank: int
    process: Process
    connection: Connection
    note: str = "its start, importing torch"
    result: tuple[Any] | None = None
    failure: Failure | None = None

    @property
    def is_done(self) -> bool:
        """Whether it reported, or died."""
        return self.result is not None or self.failure is not None

    def read(self) -> None:
        """Read the rank's messages. A rank that ended without a report counts as the first that failed."""
        code = self.process.poll()
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                # The rank sends new values of ``note``, then of ``result`` or ``failure``.
                setattr(self, *self.connection.recv())
        if code is not None and not self.is_done:
            name = next((known.name for known in signal.Signals if known == -code), str(-code))
            fate = f"was ended by signal {name}" if code < 0 else f"ended with exit code {code}"
            text = f"rank {self.rank} (process {self.process.pid}) {fate}, without an exception, at {self.note}"
            self.failure = Failure(0.0, False, RankFailedError(text, self.rank))


def start_interpreters(
    world_size: int, environment: Mapping[str, str] | None = None
) -> list[tuple[Process, Connection]]:
    """Start fresh interpreters, with this process's environment unless another is given.

    The launcher's own stdout may be read by a program, so what ranks print goes to stderr. Each has a session of its
    own: a Ctrl-C is for the launcher, which ends the ranks.
    """
    started: list[tuple[Process, Connection]] = []
    for _ in range(world_size):
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVE % theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        started.append((process, ours))
    return started


def run_ranks(work: Callable[..., Any], *arguments: Any, world_size: int, timeout_s: float, **how: Any) -> list[Any]:
    """Call ``work(place, *arguments)`` on every rank; return the results in rank order.

    Args:
        work: a function at the top level of a module that ranks can import.
        arguments: these and the results are pickled.
        world_size: number of ranks.
        timeout_s: deadline for everything.
        how: see ``run_ranks_to_any_end``.

    Raises:
        ConfigurationError: a rank raised it.
        RankFailedError: a rank raised something else, died, or was not done in time.
    """
    how = {"stops_early": True, "leaves_together": True, **how}
    ends = run_ranks_to_any_end(work, *arguments, world_size=world_size, timeout_s=timeout_s, **how)
    failures = [end.failure for end in ends if end.failure is not None]
    if failures:
        raise min(failures, key=lambda failure: (failure.is_consequence, failure.unix_s)).error
    if not all(end.is_done for end in ends):
        places = "; ".join(f"rank {end.rank} was at {end.note}" for end in ends if not end.is_done)
        raise RankFailedError(
            f"the ranks were not done in time (expected within {timeout_s:g} s, got {places}). Fix: if they were"
            " only slow, give them more time, or fewer steps."
        )
    return [end.result[0] for end in ends if end.result is not None]


def run_ranks_to_any_end(
    work: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    timeout_s: float,
    group_timeout_s: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
    start: Start = start_interpreters,
    on_note: Callable[[str], None] = lambda text: None,
    joins: bool = True,
    leaves_together: bool = False,
    stops_early: bool = False,
) -> list[RankEnd]:
    """Like ``run_ranks``, for ranks that may raise or be killed; at the deadline those that still run are ended.

    Args:
        work: see ``run_ranks``.
        arguments: see ``run_ranks``.
        world_size: number of ranks.
        timeout_s: deadline for everything.
        group_timeout_s: deadline of an operation between the ranks; None: ``timeout_s``.
        device: "cpu" or "cuda".
        threads: of torch in each rank; None shares this machine's cores.
        start: starts the processes.
        on_note: told what rank 0 is doing.
        joins: whether ranks have a default process group.
        leaves_together: whether ranks wait for each other before they end.
        stops_early: end all ranks once it is clear which one failed first.
    """
    store = _loopback_store()
    group = (store.port, timeout_s if group_timeout_s is None else group_timeout_s) if joins else None
    setup = _Setup(0, world_size, group, device, threads, leaves_together and joins, work, arguments)
    ends = [RankEnd(rank, *started) for rank, started in enumerate(start(world_size))]
    try:
        for end in ends:
            # A process that died at once is found by ``read``.
            with contextlib.suppress(OSError):
                end.connection.send(replace(setup, rank=end.rank))
        _wait(ends, timeout_s, stops_early, on_note)
        if all(end.is_done for end in ends) and not stops_early:
            for end in ends:
                end.process.wait(_END_S)
        return ends
    finally:
        for end in ends:
            end.connection.close()
            end.process.kill()
        for end in ends:
            end.process.wait(_END_S)


def _loopback_store() -> dist.TCPStore:
    """A store that only this host reaches; torch's own socket would listen at every address, without a key."""
    with socket.create_server(("127.0.0.1", 0), backlog=MAX_RANKS) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _wait(ends: Sequence[RankEnd], timeout_s: float, stops_early: bool, on_note: Callable[[str], None]) -> None:
    """Until all ranks are done, or the first failure is known, or the deadline."""
    deadline_s = time.monotonic() + timeout_s
    failed_s = 0.0
    while not all(end.is_done for end in ends) and time.monotonic() <= deadline_s:
        wait([end.connection for end in ends if not end.is_done], timeout=_POLL_S)
        for end in ends:
            if not end.is_done:
                end.read()
        on_note(ends[0].note)
        failures = [end.failure for end in ends if end.failure is not None]
        if failures and stops_early:
            failed_s = failed_s or time.monotonic()
            # A rank closes its connections before it reports its error, so its peers may report the lost peer first.
            grace_s = _CAUSE_GRACE_S if all(failure.is_consequence for failure in failures) else _GRACE_S
            if time.monotonic() > failed_s + grace_s:
                return


# ---- on a rank -------------------------------------------------------------------------------------------------------


def serve_at(descriptor: int) -> None:
    """Be the rank at the other end of the pipe ``descriptor``; end with the launcher."""
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    serve(Connection(descriptor), watches=True)


def serve(connection: Connection, *, watches: bool) -> None:
    """Be the rank at the other end of ``connection``: do the work, report, and end this process.

    ``watches``: end with the launcher too, which a thread waits for.
    """
    setup: _Setup | None = None
    noted = ""

    def note(text: str) -> None:
        nonlocal noted
        noted = text
        connection.send(("note", text))

    report: tuple[str, Any]
    try:
        setup = connection.recv()
        if watches:
            threading.Thread(target=_end_with_launcher, args=(connection,), daemon=True).start()
        note("joining the group")
        result = setup.work(_join(setup, note), *setup.arguments)
        if setup.leaves_together:
            note("waiting for the other ranks at the end")
            dist.barrier()
        report = "result", (result,)
    except BaseException as error:  # the user's code may also end with SystemExit
        report = "failure", _failure(error, setup, noted)
    connection.send(report)
    if dist.is_initialized() and report[0] == "result":
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's shutdown, in which other libraries' threads hang.
    os._exit(report[0] == "failure")


def _end_with_launcher(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


def _join(setup: _Setup, note: Callable[[str], None]) -> Place:
    torch.set_num_threads(setup.threads or share_of_cores(setup.world_size))
    device, backend = torch.device("cpu"), "gloo"
    if setup.device == "cuda":
        count = torch.cuda.device_count()
        device = choose_device(setup.rank, count)
        torch.cuda.set_device(device)
        # nccl does not support two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if count >= setup.world_size and dist.is_nccl_available() else "gloo"
    if setup.group is not None:
        port, timeout = setup.group[0], timedelta(seconds=setup.group[1])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout)
    return Place(rank=setup.rank, world_size=setup.world_size, device=device, note=note)


def _failure(error: BaseException, setup: _Setup | None, where: str) -> Failure:
    unix_s = time.time()  # first, because str(error) may take long
    described: PSEngineError
    if isinstance(error, ConfigurationError):
        described = ConfigurationError(str(error))
    else:
        rank, who = (None, "a rank") if setup is None else (setup.rank, f"rank {setup.rank} of {setup.world_size}")
        described = RankFailedError(
            f"{who} raised {type(error).__name__} at {where or 'its start'}",
            rank,
            "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))),
        )
    # A failed collective, as the error or as a cause of it, mostly means that another rank is gone.
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, CollectiveError):
        seen = seen.__cause__ or seen.__context__
    return Failure(unix_s, seen is not None, described, "".join(traceback.format_exception(error)))


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the leading frames of this package; the whole traceback if it has no others."""
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen importlib")):
        inner = inner.tb_next
    return inner or frames
