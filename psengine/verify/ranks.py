"""Run a function on several ranks of this machine, each a process of its own, and name the rank that failed first.

launcher   store on a free loopback port ─ starts ranks ─ reads notes and reports ─ ends ranks
rank       joins the group ─ notes what it does ─ reports a result or an error ─ waits until it is ended

A pipe connects each rank with the launcher, so that each notices when the other dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from psengine.environment.devices import choose_device
from psengine.errors import CollectiveError, ConfigurationError, PSEngineError
from psengine.verify.target import RefusedError, TargetError

MAX_RANKS = 64
_HERE = str(Path(__file__).parent)
_POLL_S = 0.05
# After the first error: how long an earlier one may take to be reported.
_GRACE_S = 0.3
# After an error that another rank's failure caused: how long the error of that rank may take to be reported.
_CAUSE_GRACE_S = 10.0
_KILL_S = 10.0


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


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What a rank is told. Both ends of the pipe are our own processes, so that setups and reports may be pickled."""

    rank: int
    world_size: int
    port: int
    timeout_s: float
    device: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """How a rank failed; ``is_consequence`` where another rank's failure seems to be the cause."""

    unix_s: float
    is_consequence: bool
    error: PSEngineError


@dataclass
class _Rank:
    """A rank as the launcher knows it; the rank sends new values of ``note``, then of ``result`` or ``failure``."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    note: str = "its start, importing torch"
    result: tuple[Any] | None = None
    failure: _Failure | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None or self.failure is not None

    def read(self) -> None:
        """Read the rank's messages. A rank that ended without a report counts as the first that failed."""
        code = self.process.poll()
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                setattr(self, *self.connection.recv())
        if code is not None and not self.is_done:
            name = next((known.name for known in signal.Signals if known == -code), str(-code))
            fate = f"was ended by signal {name}" if code < 0 else f"ended with exit code {code}"
            text = f"rank {self.number} (process {self.process.pid}) {fate}, without an exception, at {self.note}"
            self.failure = _Failure(unix_s=0.0, is_consequence=False, error=RankFailedError(text, self.number))


def run_ranks(
    work: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    timeout_s: float,
    device: str = "cpu",
    on_note: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Call ``work(place, *arguments)`` on ranks that share this machine's cores; return the results in rank order.

    Args:
        work: a function at the top level of a module that ranks can import.
        arguments: these and the results are pickled.
        world_size: number of ranks.
        timeout_s: deadline for everything, and of every operation between the ranks.
        device: "cpu" or "cuda".
        on_note: told what rank 0 is doing.

    Raises:
        ConfigurationError: the target is wrong, or a strategy refused it.
        RankFailedError: a rank raised, died, or was not done in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            setup = _Setup(
                rank=rank,
                world_size=world_size,
                port=store.port,
                timeout_s=timeout_s,
                device=device,
                work=work,
                arguments=arguments,
            )
            ranks.append(_start(setup))
        return _wait(ranks, timeout_s, on_note)
    finally:
        for one in ranks:
            one.process.kill()
        for one in ranks:
            one.process.wait(_KILL_S)
            one.connection.close()


def _start(setup: _Setup) -> _Rank:
    ours, theirs = Pipe()
    with theirs:
        # Its own session: a Ctrl-C is for the launcher, which ends the ranks.
        process = subprocess.Popen(
            [sys.executable, "-c", f"from psengine.verify.ranks import serve; serve({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
    ours.send(setup)
    return _Rank(setup.rank, process, ours)


def _wait(ranks: Sequence[_Rank], timeout_s: float, on_note: Callable[[str], None]) -> list[Any]:
    """Return every rank's result; raise the error of the first that failed."""
    deadline_s = time.monotonic() + timeout_s
    failed_s, noted = math.inf, ""
    while not all(rank.result is not None for rank in ranks):
        wait([rank.connection for rank in ranks if not rank.is_done], _POLL_S)
        for rank in ranks:
            rank.read()
        if ranks[0].note != noted:
            noted = ranks[0].note
            on_note(noted)
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        if failures:
            failed_s = min(failed_s, time.monotonic())
            # A rank closes its connections before it reports its error, so its peers may report the lost peer first.
            grace_s = _CAUSE_GRACE_S if all(failure.is_consequence for failure in failures) else _GRACE_S
            if len(failures) == len(ranks) or time.monotonic() > failed_s + grace_s:
                raise min(failures, key=lambda failure: (failure.is_consequence, failure.unix_s)).error
        elif time.monotonic() > deadline_s:
            places = "; ".join(f"rank {rank.number} was at {rank.note}" for rank in ranks if not rank.is_done)
            raise RankFailedError(
                f"the ranks were not done in time (expected within {timeout_s:g} s, got {places}). Fix: if they were"
                " only slow, give them more time (--timeout-s) or fewer steps."
            )
    return [rank.result[0] for rank in ranks if rank.result is not None]


def serve(descriptor: int) -> None:
    """Be the rank at the other end of the pipe ``descriptor``, until the launcher ends this process, or ends itself."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    faulthandler.enable()
    # The command's own stdout may be read by a program: what the user's code prints goes to stderr.
    os.dup2(2, 1)
    setup: _Setup = connection.recv()
    watch = threading.Thread(target=_end_with_launcher, args=(connection,), name="psengine-launcher-watch", daemon=True)
    watch.start()
    noted = ""

    def note(text: str) -> None:
        nonlocal noted
        noted = text
        connection.send(("note", text))

    report: tuple[str, Any]
    try:
        note("joining the group")
        result = setup.work(_join(setup, note), *setup.arguments)
        note("waiting for the other ranks at the end")
        dist.barrier()
        report = "result", (result,)
    except BaseException as error:  # the user's code may also end with SystemExit
        report = "failure", _failure(error, setup, noted)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(report)
    # The launcher ends all ranks together, without the interpreter's shutdown, in which other libraries' threads hang.
    watch.join()


def _end_with_launcher(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


def _join(setup: _Setup, note: Callable[[str], None]) -> Place:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // setup.world_size))
    device, backend = torch.device("cpu"), "gloo"
    if setup.device == "cuda":
        count = torch.cuda.device_count()
        device = choose_device(setup.rank, count)
        torch.cuda.set_device(device)
        # nccl does not support two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if count >= setup.world_size and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=setup.timeout_s)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout)
    return Place(rank=setup.rank, world_size=setup.world_size, device=device, note=note)


def _failure(error: BaseException, setup: _Setup, where: str) -> _Failure:
    unix_s = time.time()  # first, because str(error) may take long
    described: PSEngineError
    if isinstance(error, TargetError | RefusedError):
        described = ConfigurationError(str(error))
    else:
        described = RankFailedError(
            f"rank {setup.rank} of {setup.world_size} raised {type(error).__name__} at {where}",
            setup.rank,
            "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))),
        )
    return _Failure(unix_s=unix_s, is_consequence=_is_consequence(error), error=described)


def _is_consequence(error: BaseException) -> bool:
    """Whether ``error`` or a cause of it is a failed collective, which mostly means that another rank is gone."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, CollectiveError):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the leading frames of this package; the whole traceback if it has no others."""
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen importlib")):
        inner = inner.tb_next
    return inner or frames
