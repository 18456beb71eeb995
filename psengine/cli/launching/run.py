"""One run from start to end: servers, workers, what they leave behind; for ``psengine run`` and ``psengine advise``.

servers       start ─── started again where they die ──────────────────── end in order
workers              start ─── output shown, deaths noted ─── end
left behind                                                   └─ ended, where the run failed

The main thread starts everything, then looks at all of it ten times a second.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from psengine.cli.launching.elastic import ElasticWorkers
from psengine.cli.launching.failure import RankEnd, first_failure, shell_status
from psengine.cli.launching.independent import IndependentWorkers, python_command, visible_devices
from psengine.cli.launching.interruption import Interruption
from psengine.cli.launching.left_behind import MARK, end_left_behind
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.servers import ServerGroup
from psengine.environment.variables import inherited_variables, read_variable

_POLL_S = 0.1
# torchrun's agent kills workers after its --shutdown-timeout; so long after that the launcher does.
_MARGIN_S = 1.0
# After a signal, whoever reads our output (a pager) is waited for so long. Without one it has all the time it wants.
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
) -> Outcome:
    """Start what ``plan`` says, wait for its end, end the rest.

    Args:
        plan: see ``Plan``.
        report: takes a line about what the launcher does.
        stdout: where workers' standard output is shown.
        stderr: the same for their standard error.
        is_coloured: each rank's name in its colour.
        is_enough: asked ten times a second; the run is ended, well, once it says so.

    Raises:
        PSEngineError: something could not be started.
    """
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="psengine-run-", ignore_cleanup_errors=True))
        interruption = stack.enter_context(Interruption(plan.signals))
        output = WorkerOutput(
            Path(name), stdout, stderr, plain_ranks=_plain_ranks(plan), is_coloured=is_coloured
        )  # fmt: skip
        stack.callback(_close, output, interruption)
        servers = _start_servers(plan, Path(name), report, interruption, stack)
        variables = {**_worker_defaults(plan), **plan.variables, MARK: mark}
        if servers is not None:
            variables["PSENGINE_SERVERS"] = ",".join(servers.addresses)
        if plan.torchrun.log_dir is None and plan.torchrun.redirects == plan.torchrun.tee == "0":
            # torchrun would leave an empty folder behind.
            plan.torchrun.log_dir = str(Path(name) / "torchrun")
        workers = _make_workers(plan, variables, output, interruption, report)
        interruption.on_force = workers.kill
        failure, is_enough_now = "", False
        try:
            workers.start()
            while workers.is_running() and interruption.received is None:
                failure = "" if servers is None else servers.revive()
                is_enough_now = is_enough()
                if failure or is_enough_now or workers.lost_node():
                    break
                time.sleep(_POLL_S)
            if interruption.received is not None:
                _announce(interruption.received, report, output)
            _stop(workers, interruption, float(plan.torchrun.shutdown_timeout))
            workers.finish()
        finally:
            workers.kill()
            is_well = not failure and interruption.received is None and first_failure(workers.ends) is None
            left = 0 if is_well and not is_enough_now else end_left_behind(mark, lambda: interruption.is_forced)
        if is_enough_now and interruption.received is None:
            return Outcome(exit_code=0)
        if left:
            report(f"ended {left} more {'process' if left == 1 else 'processes'} that the workers had started")
        if is_well and plan.uses_servers and servers is not None and not servers.had_workers():
            # A script that decides by itself how replicas agree may ignore --strategy, and trains well.
            report(
                "no worker joined the servers: does the script name its own strategy, or not use"
                " psengine.DistributedDataParallel?"
            )
        return _outcome(failure, workers, interruption)


def _outcome(failure: str, workers: Workers, interruption: Interruption) -> Outcome:
    if failure:
        return Outcome(exit_code=1, failure=failure)
    first = first_failure(workers.ends)
    if interruption.received is not None:
        # A rank that had failed before the signal came is what a user wants to know of, too.
        ends = tuple(workers.ends) if first is not None else ()
        return Outcome(exit_code=128 + interruption.received, ends=ends, signal_number=interruption.received)
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


def _start_servers(
    plan: Plan, directory: Path, report: Callable[[str], None], interruption: Interruption, stack: ExitStack
) -> ServerGroup | None:
    if not plan.servers:
        return None
    servers = stack.enter_context(
        ServerGroup(
            plan.servers,
            snapshot_dir=plan.options.snapshot_dir or directory / "snapshots",
            status_port=plan.options.status_port,
            options=plan.options.server_options,
            report=report,
            is_hurried=lambda: interruption.is_forced,
        )
    )
    count = "1 server" if plan.servers == 1 else f"{plan.servers} servers"
    report(f"{count} at {','.join(servers.addresses)}; dashboard at {servers.dashboard_url}")
    return servers


def _make_workers(
    plan: Plan,
    variables: dict[str, str],
    output: WorkerOutput,
    interruption: Interruption,
    report: Callable[[str], None],
) -> Workers:
    options = plan.torchrun
    if not plan.options.independent:
        return ElasticWorkers(options, variables=variables, output=output, interruption=interruption)
    return IndependentWorkers(
        python_command(plan.script, is_module=options.module, has_python=not options.no_python),
        range(plan.options.first_worker, plan.options.first_worker + plan.workers),
        environment=inherited_variables(),
        variables=variables,
        devices=visible_devices(torch.cuda.device_count(), read_variable("CUDA_VISIBLE_DEVICES")),
        max_restarts=options.max_restarts,
        output=output,
        report=report,
    )


def _plain_ranks(plan: Plan) -> Container[int]:
    """Ranks whose output is shown as it is."""
    own = range(plan.options.first_worker, plan.options.first_worker + plan.workers)
    if plan.options.prefix is None:
        return () if plan.workers > 1 or plan.options.independent or plan.is_multi_node else own
    return () if plan.options.prefix else own[:1] if plan.options.independent else range(1)


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
