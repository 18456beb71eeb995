"""One run from start to end: servers, workers, what they leave behind; for ``psengine run`` and ``psengine advise``.

servers   start ─── watched, started again ──────────────────────────── end in order
workers            start ─── output shown, deaths noted ─── end
left behind                                                └─ ended, where the run failed
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from psengine.cli.launching.elastic import SHUTDOWN_S, ElasticWorkers, Interrupted
from psengine.cli.launching.failure import RankEnd, first_failure, shell_status
from psengine.cli.launching.independent import IndependentWorkers, python_command, visible_devices
from psengine.cli.launching.interruption import Interruption
from psengine.cli.launching.left_behind import MARK, end_left_behind
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.run_directory import run_directory
from psengine.cli.launching.servers import ServerGroup
from psengine.environment.context import inherited_variables, read_variable

_UNTIL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: for the shell.
        ends: how each worker ended, where one ended badly, and of independent ones always.
        failure: why the launcher itself ended the run; "" otherwise.
        signal_number: that the launcher got; None.
    """

    exit_code: int
    ends: tuple[RankEnd, ...] = ()
    failure: str = ""
    signal_number: int | None = None

    @property
    def first(self) -> RankEnd | None:
        """The rank that failed first."""
        return first_failure(self.ends)


def run_training(
    plan: Plan,
    *,
    report: Callable[[str], None],
    stdout: BinaryIO,
    stderr: BinaryIO,
    is_coloured: bool = False,
    is_enough: Callable[[], bool] | None = None,
) -> Outcome:
    """Start what ``plan`` says, wait for its end, end the rest.

    Args:
        plan: see ``Plan``.
        report: takes a line about what the launcher does.
        stdout: where workers' standard output is shown.
        stderr: the same for their standard error.
        is_coloured: each rank's name in its colour.
        is_enough: asked now and then; the run is ended, well, once it says so.

    Raises:
        PSEngineError: something could not be started.
    """
    names = [name.strip() for name in str(plan.torchrun.signals_to_handle).split(",") if name.strip()]
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        directory = stack.enter_context(run_directory())
        interruption = stack.enter_context(Interruption(Interrupted, names))
        plan.torchrun.signals_to_handle = ",".join(interruption.names)
        try:
            return _run(plan, directory, mark, interruption, report, (stdout, stderr), is_coloured, is_enough)
        except Interrupted:
            return _interrupted(interruption, ())


def _interrupted(interruption: Interruption, ends: Sequence[RankEnd]) -> Outcome:
    if interruption.reason is not None:
        return Outcome(exit_code=0)
    # Who had failed before the signal came is what a user wants to know then, too.
    kept = tuple(ends) if first_failure(ends) is not None else ()
    return Outcome(exit_code=128 + int(interruption.received or 0), ends=kept, signal_number=interruption.received)


def _run(
    plan: Plan,
    directory: Path,
    mark: str,
    interruption: Interruption,
    report: Callable[[str], None],
    targets: tuple[BinaryIO, BinaryIO],
    is_coloured: bool,
    is_enough: Callable[[], bool] | None,
) -> Outcome:
    servers: ServerGroup | None = None
    workers: ElasticWorkers | IndependentWorkers | None = None
    with ExitStack() as stack:
        variables = {**_worker_defaults(plan), **plan.variables, MARK: mark}
        output = stack.enter_context(
            WorkerOutput(directory, *targets, plain_ranks=_plain_ranks(plan), is_coloured=is_coloured)
        )
        interruption.on_first(lambda number: _announce(number, report, output, interruption))
        interruption.on_force(output.abandon)
        if plan.servers:
            servers = ServerGroup(
                plan.servers,
                snapshot_dir=plan.snapshot_dir or directory / "snapshots",
                status_port=plan.status_port,
                options=plan.server_options,
                report=report,
                give_up=interruption.request,
            )
            interruption.on_force(servers.kill)
            stack.enter_context(servers)
            variables["PSENGINE_SERVERS"] = ",".join(servers.addresses)
            where = f"; dashboard at {servers.dashboard_url}" if servers.dashboard_url else ""
            count = "1 server" if plan.servers == 1 else f"{plan.servers} servers"
            report(f"{count} at {variables['PSENGINE_SERVERS']}{where}")
        if plan.torchrun.log_dir is None and plan.torchrun.redirects == plan.torchrun.tee == "0":
            # torchrun would leave an empty folder behind.
            plan.torchrun.log_dir = str(directory / "torchrun")
        workers = _make_workers(plan, variables, output, interruption, report)
        interruption.on_force(workers.kill)
        if is_enough is not None:
            stack.enter_context(_Until(is_enough, interruption))
        is_over = False
        try:
            workers.run()
            is_over = True
        except Interrupted:
            if servers is not None and servers.failure:
                return Outcome(exit_code=1, failure=servers.failure)
            return _interrupted(interruption, workers.ends)
        finally:
            interruption.end()
            failed = not is_over or first_failure(workers.ends) is not None
            if (
                failed
                and (count_left := end_left_behind(mark, is_forced=lambda: interruption.is_forced))
                and interruption.reason is None
            ):
                processes = "1 more process" if count_left == 1 else f"{count_left} more processes"
                report(f"ended {processes} that the workers had started")
        if servers is not None and plan.uses_servers and not failed and interruption.received is None:
            _say_if_unused(servers, report)
    first = first_failure(workers.ends)
    if first is None and interruption.received is not None:
        return _interrupted(interruption, workers.ends)
    exit_code = 0 if first is None else shell_status(first.exit_code)
    return Outcome(exit_code=exit_code, ends=tuple(workers.ends))


def _say_if_unused(servers: ServerGroup, report: Callable[[str], None]) -> None:
    """A script that decides by itself how replicas agree may ignore --strategy, and trains well without servers."""
    if servers.has_joined_workers() is False:
        report(
            "no worker joined the servers: does the script name its own strategy, or not use"
            " psengine.DistributedDataParallel?"
        )


def _plain_ranks(plan: Plan) -> Container[int]:
    """Ranks whose output is shown as it is."""
    own = range(plan.first_worker, plan.first_worker + plan.workers)
    if plan.is_prefixed is None:
        return () if plan.workers > 1 or plan.independent or plan.is_multi_node else own
    return () if plan.is_prefixed else own[:1] if plan.independent else range(1)


def _make_workers(
    plan: Plan,
    variables: dict[str, str],
    output: WorkerOutput,
    interruption: Interruption,
    report: Callable[[str], None],
) -> ElasticWorkers | IndependentWorkers:
    options = plan.torchrun
    if options.shutdown_timeout is None and not read_variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        options.shutdown_timeout = SHUTDOWN_S
    if not plan.independent:
        return ElasticWorkers(options, variables=variables, output=output, interruption=interruption)
    return IndependentWorkers(
        python_command(plan.script, is_module=options.module, has_python=not options.no_python),
        range(plan.first_worker, plan.first_worker + plan.workers),
        environment=inherited_variables(),
        variables=variables,
        devices=visible_devices(torch.cuda.device_count(), read_variable("CUDA_VISIBLE_DEVICES")),
        max_restarts=options.max_restarts,
        shutdown_s=float(options.shutdown_timeout or SHUTDOWN_S),
        output=output,
        report=report,
    )


def _worker_defaults(plan: Plan) -> dict[str, str]:
    """Variables that workers get unless the user says otherwise."""
    defaults = {
        # A segmentation fault says where.
        "PYTHONFAULTHANDLER": "1",
        # As many threads as cores, shared out; torchrun gives each worker one.
        "OMP_NUM_THREADS": str(max(1, _core_count() // plan.workers)),
    }
    return {name: read_variable(name) or value for name, value in defaults.items()}


def _core_count() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _announce(number: int, report: Callable[[str], None], output: WorkerOutput, interruption: Interruption) -> None:
    output.hurry()
    again = ""
    if number == signal.SIGINT:
        output.expect_interrupts()
        again = " (again: at once)"
    what = "the run is ending already" if interruption.is_ending else "ending the workers"
    report(f"{signal.Signals(number).name}: {what}{again}")


class _Until:
    """Asks for the end of the run once a condition holds. A context manager."""

    def __init__(self, is_enough: Callable[[], bool], interruption: Interruption) -> None:
        self._is_enough = is_enough
        self._interruption = interruption
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="psengine-until", daemon=True)

    def __enter__(self) -> _Until:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._is_over.wait(_UNTIL_S):
            if self._is_enough():
                self._interruption.request("enough")
                return
