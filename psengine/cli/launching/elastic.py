"""Workers that live and die together: torchrun's own agent, with our eyes and ears.

torchrun's agent meets the other nodes, starts the workers, ends them all when one fails and starts them again. What it
does not do is added from outside: its ``LogsSpecs`` gives each worker's variables and pipes, its START events say which
processes there are.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from psengine.cli.launching.deaths import DeathWatch
from psengine.cli.launching.failure import LAUNCHER, RankEnd, failure_time, first_failure, last_traceback
from psengine.cli.launching.interruption import Interruption, kill_group
from psengine.cli.launching.nodes import NodeFailures
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.torchrun_options import node_counts
from psengine.environment.context import read_variable
from psengine.errors import CollectiveError, ConfigurationError

# Between the signal that asks workers to end and the one that does not ask; torchrun's 30 s are long after a Ctrl-C.
SHUTDOWN_S = 15
# A scheduler's signal comes to all nodes at once: who gets it needs nobody's word.
_SHARED_SIGNAL_S = 0.5


class Interrupted(SignalException):
    """A signal asked this program to end; torchrun's agent passes it on to the workers."""

    def __init__(self, number: int) -> None:
        sigval = signal.Signals(number)
        super().__init__(f"got {sigval.name}", sigval=sigval)


class ElasticWorkers:
    """The workers of this node; ``run`` is their life.

    Args:
        options: of ``parse_torchrun``.
        variables: set in each worker, besides this process's own; a worker's torchrun variables count more.
        output: takes what they write.
        interruption: ends them.

    Attributes:
        ends: how each worker of the last attempt ended, after ``run``; those that ended well only where others did not.
    """

    def __init__(
        self, options: Namespace, *, variables: Mapping[str, str], output: WorkerOutput, interruption: Interruption
    ) -> None:
        self.ends: list[RankEnd] = []
        self._options = options
        self._variables = dict(variables)
        self._output = output
        self._interruption = interruption
        self._pids: dict[int, int] = {}  # of ranks, in this attempt
        self._local_ranks: dict[int, int] = {}
        self._stderr_files: dict[int, str] = {}
        self._restarts = 0
        self._failure: ChildFailedError | None = None
        self._watch = DeathWatch()
        nodes = node_counts(options)
        self._is_elastic = nodes.minimum < nodes.maximum
        self._nodes = NodeFailures(self._other_failed, self._told_to_end) if nodes.maximum > 1 else None

    def run(self) -> None:
        """Start the workers and wait until all have ended.

        Raises:
            ConfigurationError: torchrun refuses an option.
            CollectiveError: the other nodes could not be met.
            Interrupted: a signal came; the workers have been ended.
        """
        with _quiet_agent():
            config, program, arguments = self._configure()
        events = _StartEvents(self._started)
        # The agent's events go to this logger, by the name of their destination.
        logger = logging.getLogger(f"torchelastic-events-{config.event_log_handler}")
        logger.addHandler(events)
        try:
            with self._watch, self._nodes or nullcontext(), _quiet_agent():
                self._launch_among_nodes(config, program, arguments)
        finally:
            logger.removeHandler(events)

    def kill(self) -> None:
        """End all workers at once."""
        for pid in self._pids.values():
            if pid not in self._watch.ended_s:
                kill_group(pid, signal.SIGKILL)

    def _configure(self) -> tuple[LaunchConfig, Any, list[str]]:
        options = self._options
        try:
            config, program, arguments = torchrun.config_from_args(options)
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            raise ConfigurationError(f"torchrun refuses its options: {error}") from error
        inner = config.logs_specs
        assert inner is not None
        config.logs_specs = _Pipes(inner, self)
        return config, program, arguments

    def _launch_among_nodes(self, config: LaunchConfig, program: Any, arguments: list[str]) -> None:
        nodes = self._nodes
        try:
            self._launch(config, program, arguments)
        except (Interrupted, CollectiveError):
            if nodes is not None and (signalled := self._own_signal()) is not None:
                if not self._is_elastic:
                    nodes.settle(first_failure(self.ends) or signalled, self._is_forced)
                raise
            # Another node's failure ended this one, or took away the store at which the agents meet.
            if nodes is None or nodes.first is None:
                raise
        own = first_failure(self.ends)
        if nodes is not None and own is not None:
            with suppress(Interrupted):  # stop waiting for the others; what is known here is told
                nodes.settle(own, self._is_forced)
        if nodes is not None and nodes.first is not None and all(nodes.first.rank != end.rank for end in self.ends):
            self.ends.append(nodes.first)

    def _is_forced(self) -> bool:
        return self._interruption.is_forced

    def _own_signal(self) -> RankEnd | None:
        """The end of this launcher, where a signal from outside asked for it; None while there was none."""
        interruption = self._interruption
        if interruption.received is None or interruption.received_s is None or interruption.reason is not None:
            return None
        name = signal.Signals(interruption.received).name
        return RankEnd(
            rank=LAUNCHER,
            local_rank=LAUNCHER,
            host=socket.gethostname(),
            pid=os.getpid(),
            exit_code=-interruption.received,
            failed_s=interruption.received_s,
            traceback=(f"{name} came to that launcher, which ended its workers",),
        )

    def _told_to_end(self) -> RankEnd | None:
        """What the other nodes are to know of a signal; where nodes may come and go, one that goes is no end."""
        signalled = None if self._is_elastic else self._own_signal()
        is_young = signalled is not None and time.time() - (signalled.failed_s or 0.0) < _SHARED_SIGNAL_S
        return None if is_young else signalled

    def _other_failed(self, end: RankEnd) -> None:
        if not self._is_elastic:
            self._interruption.request(f"{end.name} failed")

    def _launch(self, config: LaunchConfig, program: Any, arguments: list[str]) -> None:
        try:
            elastic_launch(config=config, entrypoint=program)(*arguments)
        except ChildFailedError as error:
            # Its frames hold the agent, and that holds the store at which the other nodes learn of this end.
            self._failure = error
            self._watch.settle()
            self._output.drain()
            self.ends = self._describe({rank: (f.pid, f.exitcode) for rank, f in error.failures.items()})
        except SignalException as error:
            # Of torchrun's own handlers, which it takes anew whenever it starts workers, or of ours.
            self._interruption.note(error.sigval)
            self._watch.settle()
            self._output.drain()
            self.ends = self._failed_before(self._interruption.received_s or time.time())
            if isinstance(error, Interrupted):
                raise
            raise Interrupted(error.sigval) from None
        except OSError as error:
            raise ConfigurationError(f"{program} could not be started: {error}") from error
        except (ValueError, AssertionError, ImportError) as error:
            if self._pids:
                raise
            raise ConfigurationError(f"torchrun refuses its options: {error or type(error).__name__}") from error
        except (RendezvousError, dist.DistError) as error:
            if self._pids:
                raise CollectiveError(
                    f"this node lost the others, which met at {config.rdzv_endpoint} ({type(error).__name__}). Look at"
                    " what psengine run says on the other nodes"
                ) from error
            if self._nodes is None and "EADDRINUSE" in str(error):
                port = config.rdzv_endpoint.rpartition(":")[2]
                raise ConfigurationError(
                    f"port {port} is in use on this node (expected a free one). Fix: leave --master-port out, and the"
                    " workers meet at a free port, or name another"
                ) from error
            raise CollectiveError(
                f"this node could not meet the others at {config.rdzv_endpoint} ({type(error).__name__}: {error}). Fix:"
                " give every node the same --rdzv-endpoint HOST:PORT with a HOST of theirs and a free PORT, the same"
                " --nnodes, and start them within the rendezvous's timeout"
            ) from error

    def _reify(self, envs: dict[int, dict[str, str]], destinations: LogsDest) -> None:
        """The agent is about to start an attempt: complete its workers' variables, and where they write."""
        self._pids.clear()
        self._stderr_files.clear()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            self._local_ranks[rank] = local_rank
            self._restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
            if self._nodes is not None and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                self._nodes.watch(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
            for name, value in self._variables.items():
                if name == "OMP_NUM_THREADS" or name not in env:
                    env[name] = value
            for paths, is_stderr in ((destinations.stdouts, False), (destinations.stderrs, True)):
                path = paths[local_rank]
                if path in ("", os.devnull):
                    paths[local_rank] = self._output.pipe(rank, is_stderr=is_stderr, is_shown=path == "")
                elif is_stderr:
                    self._stderr_files[rank] = path

    def _started(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        self._watch.add(pid)
        # The agent took the signals when it started its workers.
        self._interruption.install()

    def _failed_before(self, signal_s: float) -> list[RankEnd]:
        """How the ranks ended, where one had failed by itself before the signal came; else []."""
        codes = {rank: (pid, self._watch.exit_codes.get(pid, 0)) for rank, pid in self._pids.items()}
        failed = {rank: end for rank, end in codes.items() if end[1] != 0}
        if not any(self._watch.ended_s.get(pid, math.inf) < signal_s for pid, _ in failed.values()):
            return []
        return self._describe(failed, signal_s)

    def _describe(self, failures: Mapping[int, tuple[int, int]], signal_s: float = math.inf) -> list[RankEnd]:
        host = socket.gethostname()
        known = [s for pid, s in self._watch.ended_s.items() if pid in self._pids.values()]
        first_s = min(known, default=None)
        ends = []
        for rank, pid in {**self._pids, **{rank: pid for rank, (pid, _) in failures.items()}}.items():
            exit_code = failures.get(rank, (pid, 0))[1]
            ended_s = self._watch.ended_s.get(pid)
            spoke_s, traceback = last_traceback(self._stderr_of(rank))
            # The agent ends the others with SIGTERM, later SIGKILL; who was first cannot have been ended by it.
            is_later = ended_s is None or (first_s is not None and ended_s > first_s)
            ends.append(
                RankEnd(
                    rank=rank,
                    local_rank=self._local_ranks.get(rank, rank),
                    host=host,
                    pid=pid,
                    exit_code=exit_code,
                    ended_s=ended_s,
                    was_ended=is_later
                    and (exit_code in (-signal.SIGTERM, -signal.SIGKILL) or (ended_s or math.inf) > signal_s),
                    failed_s=failure_time(exit_code, spoke_s, ended_s),
                    traceback=traceback,
                    restarts=self._restarts,
                )
            )
        return sorted(ends, key=lambda end: end.rank)

    def _stderr_of(self, rank: int) -> list[tuple[float, str]]:
        path = self._stderr_files.get(rank)
        if path is None:
            return self._output.stderr_of(rank)
        try:
            file = Path(path)
            written_s = file.stat().st_mtime
            lines = file.read_text(errors="replace").splitlines()[-400:]
        except OSError:
            return []
        return [(written_s, line.removeprefix(f"[rank{rank}]: ")) for line in lines]


class _Pipes(LogsSpecs):
    """torchrun's log files where the user asked for some; our pipes for what would go to the terminal."""

    def __init__(self, inner: LogsSpecs, workers: ElasticWorkers) -> None:
        super().__init__()
        self._inner = inner
        self._workers = workers

    @property
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = self._inner.reify(envs)
        self._workers._reify(envs, destinations)
        return destinations


class _StartEvents(logging.Handler):
    """Hears from the agent which process is which rank."""

    def __init__(self, started: Any) -> None:
        super().__init__(logging.INFO)
        self._started = started

    def emit(self, record: logging.LogRecord) -> None:
        try:
            metadata = json.loads(record.getMessage())["metadata"]
            if metadata["state"] == "START":
                self._started(int(metadata["global_rank"]), int(metadata["worker_id"]))
        except (KeyError, TypeError, ValueError):
            self.handleError(record)


class _quiet_agent:  # noqa: N801
    """Keep the agent's own log to itself: what it says is said better at the end. LOGLEVEL brings it back."""

    def __enter__(self) -> None:
        self._levels: dict[logging.Logger, int] = {}
        if read_variable("LOGLEVEL"):
            return
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.startswith("torch.distributed") and isinstance(logger, logging.Logger):
                self._levels[logger] = logger.level
                logger.setLevel(logging.CRITICAL + 1)

    def __exit__(self, *exception: object) -> None:
        for logger, level in self._levels.items():
            logger.setLevel(level)
