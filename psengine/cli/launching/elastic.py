"""Workers that live and die together, under torchrun's own agent.

The agent meets the other nodes, starts the workers, ends them all when one fails and starts them again. It runs in a
thread of its own, because its calls to another node's store may hang for minutes while the main thread has to answer
Ctrl-C. The rest is added from outside: the agent's ``LogsSpecs`` gives each worker's variables and pipes, and its START
events tell which process is which rank.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch
from typing_extensions import override

from psengine.cli.launching.failure import LAUNCHER, UNHANDLED, RankEnd, failure_time, first_failure, last_traceback
from psengine.cli.launching.interruption import Interruption
from psengine.cli.launching.memory_kills import MemoryKills
from psengine.cli.launching.nodes import NodeFailures
from psengine.cli.launching.output import KEPT_LINES, WorkerOutput
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.processes import DeathWatch, kill_group
from psengine.cli.launching.torchrun_options import node_counts
from psengine.environment.variables import read_variable
from psengine.errors import CollectiveError, ConfigurationError

_JOIN_S = 2.0


class ElasticWorkers:
    """The workers of this node. They get ``variables`` besides this process's own, and write to ``output``.

    Attributes:
        ends: how each worker of the last attempt ended, after ``finish``; [] where all ended well.
    """

    def __init__(
        self, plan: Plan, *, variables: Mapping[str, str], output: WorkerOutput, interruption: Interruption
    ) -> None:
        self.ends: list[RankEnd] = []
        self._options = plan.torchrun
        self._variables = variables
        self._output = output
        self._interruption = interruption
        self._watch = DeathWatch()
        # Of this attempt, by rank.
        self._pids: dict[int, int] = {}
        self._local_ranks: dict[int, int] = {}
        self._log_files: dict[int, str] = {}  # stderr, where torchrun writes it to a file
        self._restarts = 0
        self._memory_kills = MemoryKills()
        fewest, most = node_counts(self._options)
        self._is_elastic = fewest < most
        self._nodes = NodeFailures() if most > 1 else None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="psengine-agent", daemon=True)

    def start(self) -> None:
        """Start the agent, which starts the workers."""
        self._thread.start()

    def is_running(self) -> bool:
        """Whether the agent runs."""
        return self._thread.is_alive()

    def lost_node(self) -> bool:
        """Whether another node has failed, and this one is to end with it; a node of an elastic run may go."""
        return self._nodes is not None and self._nodes.first is not None and not self._is_elastic

    def stop(self, number: int) -> None:
        """Have the agent pass a signal on to the workers and end; it kills them after ``--shutdown-timeout``."""
        if self._nodes is not None and (own := self._own_signal()):
            self._nodes.tell(own)
        _raise_in(self._thread, number)

    def kill(self) -> None:
        """End all workers at once."""
        for pid in list(self._pids.values()):
            if pid not in self._watch.ended_s:
                kill_group(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Describe how the workers ended, once the agent has ended or is no longer waited for.

        Raises:
            ConfigurationError: torchrun refuses an option, or cannot start the program.
            CollectiveError: the other nodes could not be met.
        """
        self._thread.join(_JOIN_S)
        error, signalled = self._error, self._interruption.received is not None
        if signalled or isinstance(error, ChildFailedError):
            ends = self._describe(getattr(error, "failures", {}))
            # After a signal, a failure counts only where it was there before.
            had_failed = any(end.exit_code and not end.was_ended for end in ends)
            self.ends = ends if had_failed or not signalled else []
        if self._nodes is not None:
            with closing(self._nodes) as nodes:
                own = first_failure(self.ends) or self._own_signal()
                if own is not None:
                    nodes.settle(own, lambda: self._interruption.is_forced)
            if nodes.first is not None:
                if not signalled and all(nodes.first.rank != end.rank for end in self.ends):
                    self.ends.append(nodes.first)
                return
        if error is not None and not isinstance(error, (ChildFailedError, SignalException)):
            raise self._explain(error) from error

    def _run(self) -> None:
        try:
            if not read_variable("LOGLEVEL"):
                _silence_torch()
            config, program, arguments = torchrun.config_from_args(self._options)
            assert config.logs_specs is not None
            config.logs_specs = _Pipes(config.logs_specs, self._prepare)
            # The agent sends its events to this logger.
            logger = logging.getLogger(f"torchelastic-events-{config.event_log_handler}")
            events = _StartEvents(self._started)
            logger.addHandler(events)
            try:
                elastic_launch(config=config, entrypoint=program)(*arguments)
            finally:
                logger.removeHandler(events)
        except BaseException as error:
            # Its frames hold the agent, and that holds the store at which the other nodes learn of this end.
            self._error = error

    def _prepare(self, envs: dict[int, dict[str, str]], destinations: LogsDest) -> None:
        """Complete the workers' variables, and where they write, before the agent starts an attempt."""
        self._pids.clear()
        self._log_files.clear()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            self._local_ranks[rank] = local_rank
            self._restarts = int(env["TORCHELASTIC_RESTART_COUNT"])
            if self._nodes is not None and env["TORCHELASTIC_USE_AGENT_STORE"] == "True":
                self._nodes.watch(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
            for name, value in self._variables.items():
                if name == "OMP_NUM_THREADS" or name not in env:
                    env[name] = value
            for paths, is_stderr in ((destinations.stdouts, False), (destinations.stderrs, True)):
                path = paths[local_rank]
                if path in ("", os.devnull):
                    paths[local_rank] = self._output.pipe(rank, is_stderr=is_stderr, is_shown=path == "")
                elif is_stderr:
                    self._log_files[rank] = path

    def _started(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        self._watch.add(pid)

    def _own_signal(self) -> RankEnd | None:
        """The end of this launcher by a signal, for the other nodes, which end with it unless the run is elastic."""
        number = self._interruption.received
        if number is None or self._is_elastic:
            return None
        return RankEnd(
            rank=LAUNCHER,
            local_rank=LAUNCHER,
            pid=os.getpid(),
            exit_code=-number,
            failed_s=self._interruption.received_s,
            traceback=(f"{signal.Signals(number).name} came to that launcher, which ended its workers",),
        )

    def _describe(self, failures: Mapping[int, object]) -> list[RankEnd]:
        """How each worker ended; ``failures`` are the agent's, of ranks that it reaped before we saw them."""
        for pid in self._pids.values():
            self._watch.settle(pid)
        ended_s = {rank: self._watch.ended_s.get(pid) for rank, pid in self._pids.items()}
        first_s = min((s for s in ended_s.values() if s is not None), default=None)
        signal_s = self._interruption.received_s if self._interruption.received is not None else float("inf")
        ends = []
        for rank, pid in sorted(self._pids.items()):
            spoke_s, traceback = last_traceback(self._stderr_of(rank))
            # After a signal the agent does not tell the exit codes of ranks that it reaped first.
            unseen = UNHANDLED if not failures and ended_s[rank] is not None and spoke_s is not None else 0
            code = self._watch.exit_codes.get(pid, getattr(failures.get(rank), "exitcode", unseen))
            failed_s = failure_time(code, spoke_s, ended_s[rank])
            # The agent ends the others with SIGTERM, later with SIGKILL; the first was not ended by it.
            is_agents_doing = ended_s[rank] != first_s and -code in (signal.SIGTERM, signal.SIGKILL)
            ends.append(
                RankEnd(
                    rank=rank,
                    local_rank=self._local_ranks[rank],
                    pid=pid,
                    exit_code=code,
                    failed_s=failed_s,
                    was_ended=is_agents_doing or (failed_s or 0.0) > signal_s,
                    traceback=traceback,
                    restarts=self._restarts,
                    was_short_of_memory=self._memory_kills.have_grown(),
                )
            )
        return ends

    def _stderr_of(self, rank: int) -> list[tuple[float, str]]:
        if rank not in self._log_files:
            return self._output.last_lines(rank)
        file = Path(self._log_files[rank])
        lines = file.read_text(errors="replace").splitlines()[-KEPT_LINES:]
        return [(file.stat().st_mtime, line.removeprefix(f"[rank{rank}]: ")) for line in lines]

    def _explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of the agent's own."""
        if isinstance(error, (RendezvousError, dist.DistError)) and self._nodes is not None:
            return CollectiveError(
                f"this node could not meet the others at {self._options.rdzv_endpoint}, or lost them"
                f" ({type(error).__name__}: {error}). Fix: give every node the same --rdzv-endpoint HOST:PORT with a"
                " HOST of theirs and a free PORT, the same --nnodes, and start them within the rendezvous's timeout;"
                " look at what psengine run says on the other nodes"
            )
        if not self._pids:
            return ConfigurationError(f"torchrun could not start the workers: {error or type(error).__name__}")
        return error


class _Pipes(LogsSpecs):
    """torchrun's log files where the user asked for some; our pipes for what would go to the terminal."""

    def __init__(self, inner: LogsSpecs, prepare: Callable[[dict[int, dict[str, str]], LogsDest], None]) -> None:
        super().__init__()
        self._inner = inner
        self._prepare = prepare

    @property
    @override
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = self._inner.reify(envs)
        self._prepare(envs, destinations)
        return destinations


class _StartEvents(logging.Handler):
    """Tells which process is which rank."""

    def __init__(self, started: Callable[[int, int], None]) -> None:
        super().__init__(logging.INFO)
        self._started = started

    @override
    def emit(self, record: logging.LogRecord) -> None:
        metadata = json.loads(record.getMessage())["metadata"]
        if metadata["state"] == "START":
            self._started(int(metadata["global_rank"]), int(metadata["worker_id"]))


def _raise_in(thread: threading.Thread, number: int) -> None:
    """Raise the exception that torchrun's own signal handler would raise, were the agent in the main thread."""

    class Interrupted(SignalException):
        def __init__(self) -> None:
            super().__init__(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted))


def _silence_torch() -> None:
    """Hide the agent's log, whose news the report at the end says better. LOGLEVEL brings it back."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("torch.distributed") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL + 1)
