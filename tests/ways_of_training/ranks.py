"""Processes that run one cell of the table after the other; after a cell that hangs, dies or fails, new ones."""

import contextlib
import gc
import hashlib
import os
import random
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support.fault_workers import Reports, Worker, WorkerFailedError, worker_processes
from support.processes import GROUP_TIMEOUT_S
from torch import Tensor
from ways_of_training.run import Run
from ways_of_training.table import SYNC, Expected, Program, oracle_of

from psengine.parameter_server.client import connection as connection_module
from psengine.verify.differences import Tolerance, find_difference

CELL_DEADLINE_S = 30.0
# How long the others may take to fail too, once one rank has.
FAILED_DEADLINE_S = 3.0

State = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """One program in one column."""

    program: Program
    column: str
    expected: Expected
    oracle: Expected


class Ranks:
    """``world_size`` processes with a default group, for as long as cells end as they should."""

    def __init__(self, world_size: int, servers: str) -> None:
        self._world_size = world_size
        self._servers = servers
        self._workers: list[Worker] = []
        self._stack = contextlib.ExitStack()
        self._cells = 0

    def run(self, cell: Cell) -> str:
        """What is wrong with a cell, in words; empty: nothing."""
        self._cells += 1
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.go((self._cells, cell))
        deadline_s = time.monotonic() + CELL_DEADLINE_S
        wrong = ""
        for rank, worker in enumerate(self._workers):
            try:
                found, _ = worker.wait_for(str(self._cells), max(0.0, deadline_s - time.monotonic()))
            except WorkerFailedError as error:
                found = str(error)
            if found:
                wrong += f"rank {rank}: {found}\n"
                deadline_s = min(deadline_s, time.monotonic() + FAILED_DEADLINE_S)
        if wrong:
            self.stop()  # one rank may be in another exchange than the others
        return wrong

    def stop(self) -> None:
        """End the processes."""
        self._workers = []
        self._stack.close()

    def _start(self) -> None:
        workers = self._stack.enter_context(worker_processes())
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="psengine-ways-"))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stack.callback(lambda: store)  # it lives as long as they do
        for rank in range(self._world_size):
            workers.start(serve, rank, self._world_size, store.port, self._servers, directory)
        self._workers = workers.workers


def serve(reports: Reports, rank: int, world_size: int, port: int, servers: str, directory: str) -> None:
    """Run the cells that this process is given, and say what is wrong with each."""
    os.environ["PSENGINE_SERVERS"] = servers
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    warnings.simplefilter("ignore")
    # What a new connection waits for is looked at with each tick: a tenth of a second, for hundreds of jobs.
    connection_module.TICK_S = 0.005
    known: tuple[Program, str, object] | None = None
    oracle: State | str = ""
    gc.collect()
    gc.freeze()  # what stays anyway need not be looked at after each cell
    while True:
        number, cell = reports.await_go(timeout_s=3600.0)
        options = SYNC.get(cell.column, {})

        def train(column: str, number: int = number, cell: Cell = cell, options: dict = options) -> State | str:
            job = hashlib.sha256(f"{os.getppid()} {directory} {number} {column}".encode()).hexdigest()[:16]
            files = Path(directory) / f"{number}-{column}"
            files.mkdir(exist_ok=True)
            return state_after(cell.program, Run(column, job, rank, world_size, files, options))

        name = oracle_of(cell.column)
        if known != (cell.program, name, options):
            known, oracle = (cell.program, name, options), train(name)
        wrong = what_is_wrong(cell.oracle, oracle)
        reports.say(str(number), f"the oracle: {wrong}" if wrong else judged(cell, oracle, train(cell.column)))


def state_after(program: Program, run: Run) -> State | str:
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


def what_is_wrong(expected: Expected, trained: State | str) -> str:
    """Whether a run ended as it should; what it computed is not looked at."""
    if expected.refused is None:
        return trained if isinstance(trained, str) else ""
    if isinstance(trained, str):
        return "" if expected.refused in trained else f"refused with other words:\n{trained}"
    return f"nothing was refused (expected an error with {expected.refused!r})"


def judged(cell: Cell, oracle: State | str, trained: State | str) -> str:
    wrong = what_is_wrong(cell.expected, trained)
    if wrong or isinstance(trained, str) or isinstance(oracle, str):
        return wrong
    names, others = (
        [name for name in state if not name.startswith(cell.expected.apart_from)] for state in (oracle, trained)
    )
    if not names or set(names) != set(others):
        return f"expected something to compare, with the same names, got {names} and {others}"
    return next(filter(None, (difference(trained[name], oracle[name], name) for name in names)), "")


def difference(trained: Tensor, oracle: Tensor, name: str) -> str:
    with torch.no_grad():
        found = find_difference(trained, oracle, Tolerance(), step=0, rank=0, kind="parameter", name=name, place=0)
    if found is None:
        return ""
    at = list(found.index)
    said = found.note or f"{found.differing} of {found.numel} numbers differ, by up to {found.absolute:.3g} at {at}"
    return f"{name}: {said}"
