"""One run from start to end: servers, workers, what they leave behind; for ``psengine run`` and ``psengine advise``.

servers       start ─── started again where they die ──────────────────── end in order
workers              start ─── output shown, deaths noted ─── end
left behind                                                   └─ ended, where the run failed

The main thread starts everything, then looks at all of it ten times a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from psengine.cli.launching.elastic import ElasticWorkers
from psengine.cli.launching.failure import RankEnd, first_failure, shell_status
from psengine.cli.launching.independent import IndependentWorkers
from psengine.cli.launching.interruption import Interruption
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.processes import MARK, end_left_behind
from psengine.cli.launching.servers import ServerGroup
from psengine.environment.variables import read_variable

_POLL_S = 0.1
# The launcher kills the workers this long after torchrun's agent should have.
_MARGIN_S = 1.0
# How long to wait, after a signal, for a pager that reads our output. Without a signal the wait has no limit.
_CLOSE_S = 5.0

Workers = ElasticWorkers | IndependentWorkers


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
    is_enough: Callable[[], bool] = lambda: False,
    launched: list[subprocess.Popen[str]] | None = None,
) -> Outcome:
    """Start what ``plan`` says, wait for its end, end the rest.

    The workers' output is shown on ``stdout`` and ``stderr``; ``report`` takes a line about what the launcher does. The
    run ends well once ``is_enough``, asked ten times a second, says so. ``launched_servers`` made the processes
    ``launched``, for the servers of this run.

    Raises:
        PSEngineError: something could not be started.
    """
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="psengine-run-", ignore_cleanup_errors=True))
        )
        interruption = stack.enter_context(Interruption(plan.signals))
        output = WorkerOutput(
            directory,
            stdout,
            stderr,
            title="worker" if plan.options.independent else "rank",
            plain_ranks=plan.plain_ranks,
            is_coloured=is_coloured,
        )
        stack.callback(_close, output, interruption)
        variables = {**_worker_defaults(plan), **plan.variables, MARK: mark}
        servers: ServerGroup | None = None
        if plan.servers:
            servers = stack.enter_context(
                ServerGroup(
                    plan,
                    directory / "snapshots",
                    launched=launched,
                    report=report,
                    is_hurried=lambda: interruption.is_forced,
                )
            )
            variables["PSENGINE_SERVERS"] = ",".join(servers.addresses)
        if plan.torchrun.log_dir is None and plan.torchrun.redirects == plan.torchrun.tee == "0":
            # torchrun would leave an empty folder behind.
            plan.torchrun.log_dir = str(directory / "torchrun")
        workers: Workers
        if plan.options.independent:
            workers = IndependentWorkers(
                plan, variables=variables, output=output, report=report, interruption=interruption
            )
        else:
            workers = ElasticWorkers(plan, variables=variables, output=output, interruption=interruption)
        interruption.on_force = workers.kill
        failure, has_enough = "", False
        try:
            workers.start()
            while workers.is_running() and interruption.received is None:
                failure = "" if servers is None else servers.revive()
                has_enough = is_enough()
                if failure or has_enough or workers.lost_node():
                    break
                time.sleep(_POLL_S)
            if interruption.received is not None:
                _announce(interruption.received, report, output)
            _stop(workers, interruption, float(plan.torchrun.shutdown_timeout))
            workers.finish()
        finally:
            workers.kill()
            is_well = not failure and interruption.received is None and first_failure(workers.ends) is None
            left = 0 if is_well and not has_enough else end_left_behind(mark, lambda: interruption.is_forced)
        if has_enough and interruption.received is None:
            return Outcome(exit_code=0)
        if left:
            report(f"ended {left} more {'process' if left == 1 else 'processes'} that the workers had started")
        if is_well and plan.uses_servers and servers is not None and not servers.had_workers():
            # A script that chooses its strategy itself ignores --strategy, and trains well.
            report(
                "no worker joined the servers: does the script name its own strategy, or not use"
                " psengine.DistributedDataParallel?"
            )
        return _outcome(failure, workers, interruption.received)


def _outcome(failure: str, workers: Workers, signal_number: int | None) -> Outcome:
    if failure:
        return Outcome(exit_code=1, failure=failure)
    first = first_failure(workers.ends)
    if signal_number is not None:
        # A rank that had failed before the signal came is reported, too.
        ends = tuple(workers.ends) if first is not None else ()
        return Outcome(exit_code=128 + signal_number, ends=ends, signal_number=signal_number)
    return Outcome(exit_code=0 if first is None else shell_status(first.exit_code), ends=tuple(workers.ends))


def _stop(workers: Workers, interruption: Interruption, shutdown_s: float) -> None:
    """Have the workers that still run end; after ``shutdown_s`` seconds, or at a second signal, by force."""
    if not workers.is_running():
        return
    workers.stop(interruption.received or signal.SIGTERM)
    deadline_s = time.monotonic() + shutdown_s + _MARGIN_S
    while workers.is_running() and not interruption.is_forced and time.monotonic() < deadline_s:
        time.sleep(_POLL_S / 2)
    workers.kill()


def _worker_defaults(plan: Plan) -> dict[str, str]:
    """Variables that workers get unless the user says otherwise."""
    defaults = {
        # A segmentation fault says where.
        "PYTHONFAULTHANDLER": "1",
        # As many threads as cores, shared out; torchrun gives each worker one.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // plan.workers)),
    }
    return {name: read_variable(name) or value for name, value in defaults.items()}


def _announce(number: int, report: Callable[[str], None], output: WorkerOutput) -> None:
    output.hides_interrupts = number == signal.SIGINT
    again = " (again: at once)" if number == signal.SIGINT else ""
    report(f"{signal.Signals(number).name}: ending the workers{again}")


def _close(output: WorkerOutput, interruption: Interruption) -> None:
    begun_s = time.monotonic()

    def is_hurried() -> bool:
        is_late = interruption.received is not None and time.monotonic() - begun_s > _CLOSE_S
        return interruption.is_forced or is_late

    output.close(is_hurried)
