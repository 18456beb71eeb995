"""One run from start to end: servers, workers, what they leave behind; for ``psengine run`` and ``psengine advise``.

::

    main thread     start the servers ─── torchrun's agent, or independent workers ─── end what is left, the servers
    second thread                         └─ start servers again that died; ask whether the run is over

Signals and the second thread end the workers by torchelastic's SignalException in the main thread.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from typing_extensions import override

from psengine.cli.launching.plan import Plan
from psengine.cli.launching.processes import GRACE_S, end_left_behind, is_forced
from psengine.cli.launching.servers import ServerGroup
from psengine.cli.main import EXIT_USAGE
from psengine.environment.launchers import PLACEMENT_VARIABLES, WORKER, WORKERS
from psengine.environment.processes import SAME_STOP_S, share_of_cores
from psengine.environment.variables import RUN_ID, RUN_THREADS, has_chosen_threads, read_variable, set_variables
from psengine.errors import CollectiveError, ConfigurationError, FencedError

_POLL_S = 0.1
# Why the second thread ended a run that was not at fault.
_ENOUGH = "enough"
_HEADER = re.compile(r"Traceback \(most recent call last\):|Fatal Python error: |terminate called ")
# Of a rank whose peer is gone; its own message comes later than the cause, and often at the same moment as its end.
_PEER_LOST = re.compile(r"PeerLostError|Connection (closed|reset) by peer|ncclRemoteError|Broken pipe|recvValue failed")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
# A program that cannot be read, or lacks a module or a name.
_UNREADABLE = re.compile(r"(Syntax|Indentation|Tab|Import|ModuleNotFound|Name)Error: ")
# Of a rank's stderr, which may be long, the part that is searched for a traceback.
_LAST_BYTES = 256 << 10
_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass
class Run:
    """What the parts of a run share.

    Attributes:
        mark: PSENGINE_RUN_ID of every process of it.
        report: takes a line about what the launcher does.
        reasons: why the second thread ended the run; empty where it did not.
        directory: for the workers' output and error files; removed at the end.
        ends: how the ranks failed in the last attempt; independent workers that failed for good.
        is_interrupted: a signal from outside ends the run, and that was said.
    """

    plan: Plan
    mark: str
    report: Callable[[str], None]
    reasons: list[str] = field(default_factory=list)
    directory: Path = Path()
    ends: list[RankEnd] = field(default_factory=list)
    is_interrupted: bool = False

    def announce(self, number: signal.Signals) -> None:
        """Say that the workers are being ended, unless the launcher does that by itself, and has said why."""
        if not self.reasons and not self.is_interrupted:
            self.is_interrupted = True
            again = f" (again after {SAME_STOP_S:g} s: at once)" if number == signal.SIGINT else ""
            self.report(f"{number.name}: ending the workers{again}")

    def announce_killed(self, ranks: Sequence[int], *, is_forced: bool = False) -> None:
        """Say which workers were killed, and why: they did not end in order."""
        if ranks:
            within = f"after {self.plan.torchrun.shutdown_timeout} s (--shutdown-timeout)"
            why = "at the second signal" if is_forced else within
            self.report(f"killed {_ranks(ranks)} {why}: what they have not saved is lost")


def run_training(
    plan: Plan,
    *,
    report: Callable[[str], None],
    launched: list[subprocess.Popen[str]] | None = None,
    is_enough: Callable[[], bool] = lambda: False,
) -> int:
    """Start what ``plan`` says, wait for its end, end the rest; return the exit code for the shell.

    The workers' output is shown on ``sys.stdout`` and ``sys.stderr``, a failure by ``report``. The run ends well once
    ``is_enough``, asked ten times a second, says so. ``launched_servers`` made the processes ``launched``, for the
    servers of this run.

    Raises:
        PSEngineError: something could not be started.
    """
    run = Run(plan, uuid.uuid4().hex, report)
    _silence_torch()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="psengine-run-", ignore_cleanup_errors=True) as directory,
            _signals_raise(plan.signals),
        ):
            run.directory = Path(directory)
            group = ServerGroup(plan, run.directory / "snapshots", report=report, launched=launched)
            with group if plan.servers else nullcontext() as servers:
                set_variables(_workers_variables(run, [] if servers is None else servers.addresses))
                try:
                    with _watched(lambda: servers.revive() if servers else "", is_enough, run):
                        (_run_independent if plan.options.independent else _run_agent)(run)
                finally:
                    grace_s = 0.0 if is_forced(sys.exc_info()[1]) else GRACE_S
                    if (left := end_left_behind(run.mark, grace_s)) and run.ends:
                        report(f"ended {left} more {'process' if left == 1 else 'processes'} of the workers")
    except SignalException as error:
        if _ENOUGH in run.reasons:
            return 0
        if not run.reasons:
            if not run.is_interrupted:
                report(f"{error.sigval.name}: the run ends")
            return 128 + error.sigval
    if run.reasons and _ENOUGH not in run.reasons:
        return 1
    first = first_failure(run.ends)
    code = 0 if first is None else first.exit_code
    return code if code >= 0 else 128 - code  # as a shell: 128 + the signal's number


class _Agent(LocalElasticAgent):
    """torchrun's agent, with an end by force at a second signal, and our words about failures."""

    def __init__(self, run: Run, **options: Any) -> None:
        super().__init__(**options)
        self._run = run

    @override
    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        # Children of a worker that died may hold its addresses, its shared memory, its GPU.
        end_left_behind(self._run.mark)
        self._run.ends = []
        spec, store = worker_group.spec, worker_group.store
        attempt = str(spec.max_restarts - self._remaining_restarts)
        if spec.rdzv_handler.get_backend() != "static":
            # This store is new in every rendezvous; only one node's agent counts a restart.
            if worker_group.group_rank == 0:
                store.set("psengine/attempt", uuid.uuid4().hex)
            attempt = store.get("psengine/attempt").decode()
        set_variables({"PSENGINE_ATTEMPT": attempt})
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context: Any = self._pcontext
        processes = {} if context is None else context.subprocess_handlers
        # Before the agent ends the others, of which some may then end in order.
        codes = {local_rank: handler.proc.poll() for local_rank, handler in processes.items()}
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and context is not None:
            ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
            self._run.ends = [
                rank_end(rank, failure, context.stderrs[ranks[rank]], was_running=codes[ranks[rank]] is None)
                for rank, failure in result.failures.items()
            ]
            left = [rank for rank, local_rank in ranks.items() if codes.get(local_rank) == 0]
            if (first := first_failure(self._run.ends)) is not None and first.is_final:
                self._remaining_restarts = 0
            _report_failure(self._run, left, self._remaining_restarts)
        return result

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        is_signalled, is_forced = isinstance(sys.exc_info()[1], SignalException), False
        context: Any = self._pcontext
        processes = {} if context is None else context.subprocess_handlers
        running = {
            worker.global_rank: processes[worker.local_rank].proc
            for worker in self._worker_group.workers
            if worker.local_rank in processes and processes[worker.local_rank].proc.poll() is None
        }
        try:
            if is_signalled:
                self._run.announce(death_sig)
            super()._shutdown(death_sig, self._shutdown_timeout)  # before a restart, too, where torch takes 30 s
        except SignalException:
            is_forced = True
            super()._shutdown(signal.SIGKILL, 0)
            raise
        finally:
            killed = [rank for rank, process in running.items() if process.poll() in (None, -signal.SIGKILL)]
            self._run.announce_killed(killed, is_forced=is_forced)


def _run_agent(run: Run) -> None:
    """Run the workers of this node, which live and die together, and meet those of other nodes."""
    options = run.plan.torchrun
    is_default = not options.log_dir and not options.logs_specs and not options.local_ranks_filter
    is_default &= options.redirects == options.tee == "0"
    options.log_dir = options.log_dir or str(run.directory / "logs")
    # elastic_launch has no argument for its agent.
    launcher.LocalElasticAgent = functools.partial(_Agent, run)  # type: ignore[assignment, misc]
    try:
        config, program, arguments = torchrun.config_from_args(options)
        config.log_line_prefix_template = config.log_line_prefix_template or "[rank ${rank}] "
        if is_default:
            tee = dict.fromkeys(range(run.plan.workers), Std.ALL)
            if run.plan.first_is_plain:
                tee[0] = Std.NONE
            config.logs_specs = DefaultLogsSpecs(log_dir=options.log_dir, tee=tee)
        launcher.elastic_launch(config, program)(*arguments)
    except ChildFailedError:
        return  # reported by the agent
    except (RendezvousError, dist.DistError) as error:
        raise CollectiveError(
            f"this node could not meet the others at {options.rdzv_endpoint}, or lost them ({type(error).__name__}:"
            f" {error}). Fix: look at what psengine run says on the other nodes; give each the same --nnodes and the"
            " same --rdzv-endpoint HOST:PORT, with a HOST of theirs and a free PORT"
        ) from error
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"torchrun could not start the workers: {error}") from error


def _run_independent(run: Run) -> None:
    """Run workers that meet at the servers alone: one that dies is started again, and the others go on."""
    plan, options = run.plan, run.plan.torchrun
    running: dict[int, PContext] = {rank: _start_independent(run, rank) for rank in plan.ranks}
    restarts = dict.fromkeys(plan.ranks, 0)
    started_s = dict.fromkeys(plan.ranks, time.monotonic())
    try:
        while running:
            for rank, context in list(running.items()):
                result = context.wait(0)
                if result is None:
                    continue
                del running[rank]
                if not result.is_failed():
                    continue
                end = rank_end(rank, result.failures[0], context.stderrs[0])
                for line in (f"worker {rank} failed: {end.how}", *(f"  {word}" for word in end.words)):
                    run.report(line)
                if time.monotonic() - started_s[rank] >= plan.forgiven_s:
                    restarts[rank] = 0
                if restarts[rank] < options.max_restarts and not end.is_final:
                    restarts[rank], started_s[rank] = restarts[rank] + 1, time.monotonic()
                    run.report(f"starting worker {rank} again ({restarts[rank]} of {options.max_restarts})")
                    running[rank] = _start_independent(run, rank)
                else:
                    run.ends.append(end)
                    run.report(f"worker {rank} is not started again{_why(end)}; {len(running)} others go on")
            time.sleep(_POLL_S)
    except SignalException as error:
        run.announce(error.sigval)
        for context in running.values():
            with suppress(ProcessLookupError):
                os.killpg(context.pids()[0], error.sigval)
        deadline_s = time.monotonic() + options.shutdown_timeout
        while any(context.wait(0) is None for context in running.values()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 2)
        raise
    finally:
        if isinstance(ended_by := sys.exc_info()[1], SignalException):
            left = [rank for rank, context in running.items() if context.wait(0) is None]
            run.announce_killed(left, is_forced=is_forced(ended_by))
        for context in running.values():
            context.close(signal.SIGKILL, 0)


def _start_independent(run: Run, rank: int) -> PContext:
    plan = run.plan
    local_rank = rank - plan.ranks.start
    variables = {WORKER: str(rank)}
    devices = read_variable("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    if named := [device.strip() for device in devices.split(",") if device.strip()]:
        variables["CUDA_VISIBLE_DEVICES"] = named[local_rank % len(named)]
    # Unbuffered, as under torchrun.
    python = [] if plan.torchrun.no_python else [sys.executable, "-u", *(["-m"] if plan.torchrun.module else [])]
    program, *arguments = [*python, *plan.script]
    tee = Std.NONE if plan.first_is_plain and not local_rank else Std.ALL
    logs = DefaultLogsSpecs(log_dir=str(run.directory / "logs"), tee=tee)
    try:
        return start_processes("worker", program, {0: tuple(arguments)}, {0: variables}, logs, {0: f"[worker {rank}] "})
    except OSError as error:
        raise ConfigurationError(f"{program} could not be started: {error}") from error


def _report_failure(run: Run, left: list[int], remaining_restarts: int) -> None:
    for line in describe(run.ends, left):
        run.report(line)
    first = first_failure(run.ends)
    if remaining_restarts:
        most = run.plan.torchrun.max_restarts
        run.report(f"starting all workers again ({most - remaining_restarts + 1} of {most})")
        return
    if first is None or first.is_final:
        if first is not None and run.plan.torchrun.max_restarts:
            run.report(f"the workers are not started again{_why(first)}")
        return
    if run.plan.is_multi_node and first.lost_peer:
        run.report("the lost rank may be another node's: look at what psengine run says there")
    if run.plan.uses_servers:
        run.report("with --independent --max-restarts N a worker that dies is started again alone; the others go on")


def _why(end: RankEnd) -> str:
    return ": the same program would fail so again" if end.is_final else ""


def _workers_variables(run: Run, servers: list[str]) -> dict[str, str | None]:
    """What workers inherit from this process."""
    plan = run.plan
    # A segmentation fault says where.
    variables: dict[str, str | None] = {"PYTHONFAULTHANDLER": read_variable("PYTHONFAULTHANDLER") or "1"}
    variables[RUN_THREADS] = None
    if not has_chosen_threads():  # torchrun gives each worker one
        variables["OMP_NUM_THREADS"] = variables[RUN_THREADS] = str(share_of_cores(plan.workers))
    variables |= {**plan.variables, RUN_ID: run.mark, "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(plan.signals)}
    if servers:
        variables["PSENGINE_SERVERS"] = ",".join(servers)
    if plan.options.independent:
        # A process that another launcher (srun, mpirun) placed would believe that it is one of that world.
        variables |= {**dict.fromkeys(PLACEMENT_VARIABLES), WORKERS: str(plan.total_workers)}
    else:
        variables[WORKER] = None
        plan.torchrun.signals_to_handle = ",".join(plan.signals)
    return variables


def _silence_torch() -> None:
    """Hide the agent's log, whose news our report says better. LOGLEVEL brings it back."""
    if not read_variable("LOGLEVEL"):
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.startswith("torch.distributed") and isinstance(logger, logging.Logger):
                logger.setLevel(logging.CRITICAL + 1)


@contextmanager
def _watched(revive: Callable[[], str], is_enough: Callable[[], bool], run: Run) -> Iterator[None]:
    """Have a second thread look after the servers while the block runs; its reason to end the run ends the block."""
    over, lock = threading.Event(), threading.Lock()

    def watch() -> None:
        while not over.wait(_POLL_S):
            reason = revive() or (_ENOUGH if is_enough() else "")
            with lock:
                if reason and not over.is_set() and not run.is_interrupted:
                    run.reasons.append(reason)
                    if reason != _ENOUGH:
                        run.report(reason)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    thread = threading.Thread(target=watch, name="psengine-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        thread.join()


@contextmanager
def _signals_raise(names: tuple[str, ...]) -> Iterator[None]:
    """Have the signals raise torchelastic's SignalException, but once for a stop that comes twice."""
    first_s: float | None = None

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal first_s
        first_s, is_first = first_s or time.monotonic(), first_s is None
        if is_first or time.monotonic() - first_s >= SAME_STOP_S:
            raise SignalException(f"got {signal.Signals(signum).name}", sigval=signal.Signals(signum))

    # What torchelastic installs once the workers have started.
    multiprocessing._terminate_process_handler = on_signal
    previous = {name: signal.signal(signal.Signals[name], on_signal) for name in names}
    try:
        yield
    finally:
        for name, handler in previous.items():
            signal.signal(signal.Signals[name], handler)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank, or an independent worker, failed.

    Attributes:
        exit_code: negative for a signal.
        failed_s: when it raised its error, else when its end was noticed; ``time.time()``.
        was_ended: the launcher ended it.
        words: what it said of its error: the user's line and the sentence, or the last traceback.
        hint: how to learn more than ``words``.
        is_refused: psengine refused what the program asks for.
    """

    rank: int
    exit_code: int
    failed_s: float
    was_ended: bool = False
    words: tuple[str, ...] = ()
    hint: str = ""
    is_refused: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the same program would fail so again. Exit code 2 is that of a wrong command line."""
        return self.is_refused or self.exit_code == EXIT_USAGE or bool(_UNREADABLE.match(_last(self)))

    @property
    def lost_peer(self) -> bool:
        """Whether its error is that another rank is gone."""
        return any(_PEER_LOST.search(line) for line in self.words[-8:])

    @property
    def how(self) -> str:
        """Its exit code in words."""
        if self.exit_code >= 0:
            is_evicted = self.exit_code == FencedError.EXIT_CODE
            return f"exit code {self.exit_code}{' (evicted: the others went on without it)' if is_evicted else ''}"
        why = " (by someone, or by the kernel for lack of memory: see its log, dmesg)"
        name = _NAMES.get(-self.exit_code, f"signal {-self.exit_code}")
        return f"killed by {name}{why if self.exit_code == -signal.SIGKILL else ''}"


def rank_end(rank: int, failure: ProcessFailure, stderr: str, *, was_running: bool = False) -> RankEnd:
    """Describe a failure by its error file, else by the end of its file ``stderr`` ("": there is none).

    ``was_running``: until the launcher ended the workers.
    """
    error_file, words, hint, failed_s, is_refused = Path(failure.error_file), "", "", time.time(), False
    if error_file.is_file():
        details = json.loads(error_file.read_text())["message"]["extraInfo"]
        words, hint, is_refused = details["py_callstack"], details.get("hint", ""), details.get("is_refused", False)
        failed_s = error_file.stat().st_mtime
    elif stderr:
        with open(stderr, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            words = file.read().decode(errors="replace")
    lines = [line.removeprefix(f"[rank{rank}]: ") for line in words.splitlines()]
    headers = [index for index, line in enumerate(lines) if _HEADER.match(line)]
    if not error_file.is_file():
        lines = lines[headers[-1] if headers else -10 :]
    return RankEnd(
        rank=rank,
        exit_code=failure.exitcode,
        failed_s=failed_s,
        was_ended=was_running and -failure.exitcode in (signal.SIGTERM, signal.SIGKILL),
        words=tuple(lines),
        hint=hint,
        is_refused=is_refused,
    )


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first: neither ended by the launcher nor, where another one failed, for want of a peer."""
    return min(ends, key=lambda end: (end.was_ended, end.lost_peer, end.failed_s), default=None)


def describe(ends: Sequence[RankEnd], left: Sequence[int] = ()) -> list[str]:
    """The report on ranks that failed together, of which those in ``left`` had ended with exit code 0 before."""
    first = first_failure(ends)
    if first is None:
        return []
    if first.lost_peer and left:
        last = f"{_ranks(left)} left in order (exit code 0), in the middle of a step; the others lost it:"
        return [last, *(f"  {_ranks([end.rank])}: {_last(end)}" for end in ends if end.lost_peer)]
    same = [end.rank for end in ends if first.words and _unnumbered(end) == _unnumbered(first)]
    who = f"{_ranks(same or [first.rank])} on {socket.gethostname()}"
    when = time.strftime("%H:%M:%S", time.localtime(first.failed_s))
    lines = [f"{who} failed{'' if len(same) > 1 else ' first'}, at {when}: {first.how}"]
    lines += [f"  {line}" for line in (*first.words, first.hint) if line]
    fates: dict[str, list[int]] = {}
    for end in ends:
        if end is not first and end.rank not in same:
            fate = "ended because of it" if end.was_ended else f"failed after it ({end.how}): {_last(end)}"
            fates.setdefault(fate, []).append(end.rank)
    return lines + [f"{_ranks(ranks)} {fate}" for fate, ranks in fates.items()]


def _unnumbered(end: RankEnd) -> list[str]:
    """Its words without its own number, which messages have; one that lists all ranks says on which it was seen."""
    own = rf"rank {end.rank}\b"
    seen_on = rf"seen on {own}"
    return [re.sub(seen_on if re.search(seen_on, line) else own, "this rank", line) for line in end.words]


def _last(end: RankEnd) -> str:
    """Its error in one line."""
    said = [line.strip() for line in end.words if line.strip()]
    return next((line for line in reversed(said) if _ERROR.match(line)), said[-1] if said else end.how)


def _ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"
