"""Processes that run one cell of the table after the other; after a cell that hangs, dies or fails, new ones."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.processes import GROUP_TIMEOUT_S, forkserver
from torch import Tensor
from ways_of_training.run import Run
from ways_of_training.table import SYNC, Expected, Program, oracle_of

from psengine.parameter_server.client import connection as connection_module
from psengine.verify.differences import Tolerance, find_difference

CELL_DEADLINE_S = 30.0
# How long the others may take to fail too, once one rank has.
FAILED_DEADLINE_S = 3.0


@dataclass(frozen=True)
class Cell:
    """One program in one column."""

    program: Program
    column: str
    expected: Expected
    oracle: Expected


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a cell.

    Attributes:
        compared: how many tensors.
        difference: the first one that differs, and how; None: none does, or the run raised.
        error: the traceback of the run, or of the oracle's.
    """

    compared: int = 0
    difference: str | None = None
    error: str | None = None


class Ranks:
    """``world_size`` processes with a default group, for as long as cells end as they should."""

    def __init__(self, world_size: int, servers: str) -> None:
        self._world_size = world_size
        self._servers = servers
        self._members: list[tuple[Any, Connection]] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None
        self._cells = 0

    def run(
        self, cell: Cell, *, deadline_s: float = CELL_DEADLINE_S, failed_deadline_s: float = FAILED_DEADLINE_S
    ) -> str | None:
        """What is wrong with a cell, in words; None: nothing."""
        self._cells += 1
        if not self._members:
            self._start()
        for _, connection in self._members:
            connection.send_bytes(pickle.dumps((self._cells, cell)))
        outcomes = self._collect(time.monotonic() + deadline_s, failed_deadline_s)
        wrong = _judge(cell, outcomes)
        # Where one rank was refused all were; else one may be in another exchange than the others.
        are_together = wrong is None and cell.expected.fault is None
        if not are_together and any(isinstance(outcome, str) or outcome.error for outcome in outcomes):
            self.stop(in_order=False)
        return wrong

    def stop(self, *, in_order: bool = True) -> None:
        """End the processes."""
        for _, connection in self._members:
            connection.close()
        for process, _ in self._members:
            process.join(timeout=5 if in_order else 0)
            if process.is_alive():
                process.kill()
            process.join(timeout=10)
            process.close()
        self._members, self._store = [], None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="psengine-ways-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "PSENGINE_SERVERS": self._servers}
        for rank in range(self._world_size):
            ours, theirs = forkserver.Pipe()
            arguments = (rank, self._world_size, self._store.port, environment, theirs, self._directory.name)
            # Not as daemons, which may not have the children that a DataLoader starts; they end when the pipe closes.
            process = forkserver.Process(target=_join_and_serve, args=arguments)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _collect(self, deadline: float, failed_deadline_s: float) -> list[Outcome | str]:
        """Each rank's outcome; of a rank that died or hangs, what it wrote last."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        outcomes: dict[int, Outcome | str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    answer = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answer = f"the process died\n{self._log(rank)}"
                outcomes[rank] = answer
                if not isinstance(answer, Outcome) or answer.error is not None:
                    deadline = min(deadline, time.monotonic() + failed_deadline_s)
        for rank in waiting.values():
            outcomes[rank] = f"it did not end in time\n{self._where(rank)}"
        return [outcomes[rank] for rank in range(self._world_size)]

    def _where(self, rank: int) -> str:
        """The stack of a rank that hangs."""
        before = len(self._log(rank))
        os.kill(self._members[rank][0].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while len(self._log(rank)) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._log(rank)

    def _log(self, rank: int) -> str:
        assert self._directory is not None
        log = Path(self._directory.name) / f"rank-{rank}.log"
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _judge(cell: Cell, outcomes: list[Outcome | str]) -> str | None:
    wrong = [
        f"rank {rank}: {text}"
        for rank, outcome in enumerate(outcomes)
        if (text := _judge_one(cell.expected, outcome)) is not None
    ]
    if cell.expected.fault is None:
        return "\n".join(wrong) or None
    # One rank's failure is enough; others may have waited for it.
    if any(cell.expected.fault in _said(outcome) for outcome in outcomes):
        return None
    return f"the known fault ({cell.expected.fault!r}) is gone, or another: {outcomes}. Fix: edit the row."


def _said(outcome: Outcome | str) -> str:
    return outcome if isinstance(outcome, str) else f"{outcome.error} {outcome.difference}"


def _judge_one(expected: Expected, outcome: Outcome | str) -> str | None:
    if isinstance(outcome, str):
        return outcome
    if expected.refused is not None:
        if outcome.error is None:
            return f"nothing was refused (expected an error with {expected.refused!r})"
        return None if expected.refused in outcome.error else f"refused with other words:\n{outcome.error}"
    if outcome.error is None and outcome.difference is None and outcome.compared == 0:
        return "nothing was compared"
    return outcome.error or outcome.difference


# ---- in a rank -----------------------------------------------------------------------------------------------


def _join_and_serve(
    rank: int, world_size: int, port: int, environment: dict[str, str], connection: Connection, directory: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        serve(rank, world_size, connection, directory)
        dist.destroy_process_group()
    except BaseException:
        # The program went round the loop that serves cells.
        connection.send_bytes(pickle.dumps(f"the process ended: {traceback.format_exc()}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(rank: int, world_size: int, connection: Connection, directory: str) -> None:
    """Run the cells that come through ``connection`` until it is closed."""
    log = os.open(f"{directory}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    warnings.simplefilter("ignore")
    # What a new connection waits for is looked at with each tick: a tenth of a second, for hundreds of jobs.
    connection_module.TICK_S = 0.005
    oracle: tuple[Program, str, dict[str, Any], dict[str, Tensor] | str] | None = None
    gc.collect()
    gc.freeze()  # what stays anyway need not be looked at after each cell
    while True:
        try:
            number, cell = pickle.loads(connection.recv_bytes())
        except EOFError:
            return

        def run(column: str, number: int = number, cell: Cell = cell) -> dict[str, Tensor] | str:
            job = hashlib.sha256(f"{os.getppid()} {directory} {number} {column}".encode()).hexdigest()[:16]
            files = Path(directory) / f"{number}-{column}"
            files.mkdir(exist_ok=True)
            return _run(cell.program, Run(column, job, rank, world_size, files, SYNC.get(cell.column, {})))

        name, options = oracle_of(cell.column), SYNC.get(cell.column, {})
        if oracle is None or oracle[:3] != (cell.program, name, options):
            oracle = (cell.program, name, options, run(name))
        outcome = _compare(cell, oracle[3], lambda cell=cell, run=run: run(cell.column))
        connection.send_bytes(pickle.dumps(outcome))


def _run(program: Program, run: Run) -> dict[str, Tensor] | str:
    """The state that a run left, or its traceback. Everything is as it would be in a process of its own."""
    torch.manual_seed(100 + run.rank)  # models are built unequal; wrapping makes them equal
    random.seed(run.rank)
    try:
        program(run)
        return run.state()
    except Exception:
        return traceback.format_exc()
    finally:
        with contextlib.suppress(Exception):
            run.close()
        gc.collect()


def _compare(cell: Cell, oracle: dict[str, Tensor] | str, train: Any) -> Outcome:
    if isinstance(oracle, str):
        if cell.oracle.refused is None or cell.oracle.refused not in oracle:
            return Outcome(error=f"the oracle failed:\n{oracle}")
    elif cell.oracle.refused is not None:
        return Outcome(error=f"the oracle refused nothing (expected {cell.oracle.refused!r})")
    trained = train()
    if isinstance(trained, str):
        return Outcome(error=trained)
    if isinstance(oracle, str):
        return Outcome(compared=1)
    return _first_difference(cell.expected, oracle, trained)


def _first_difference(expected: Expected, oracle: dict[str, Tensor], trained: dict[str, Tensor]) -> Outcome:
    def counts(name: str) -> bool:
        return not name.startswith(expected.apart_from)

    only_one = sorted(filter(counts, oracle.keys() ^ trained.keys()))
    if only_one:
        return Outcome(difference=f"only one side has {', '.join(only_one)}")
    names = list(filter(counts, oracle))
    for name in names:
        with torch.no_grad():
            if expected.tolerance:
                worst = (oracle[name].double() - trained[name].double()).abs().max().item()
                difference = f"off by {worst:.3g}" if not worst <= expected.tolerance else None
            else:
                difference = _difference(trained[name], oracle[name], name)
        if difference is not None:
            return Outcome(difference=f"{name}: {difference}")
    return Outcome(compared=len(names))


def _difference(trained: Tensor, oracle: Tensor, name: str) -> str | None:
    found = find_difference(trained, oracle, Tolerance(), step=0, rank=0, kind="parameter", name=name, place=0)
    if found is None:
        return None
    at = list(found.index)
    return found.note or f"{found.differing} of {found.numel} numbers differ, by up to {found.absolute:.3g} at {at}"


@contextlib.contextmanager
def ranks_of(world_size: int, servers: str) -> Iterator[Ranks]:
    """Ranks that end with the block."""
    ranks = Ranks(world_size, servers)
    try:
        yield ranks
    finally:
        ranks.stop()
