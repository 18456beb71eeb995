"""Workers that live and die together, under torchrun's own agent.

The agent meets the other nodes, starts the workers, ends them all when one fails and starts them again. It runs in a
thread of its own, because its calls to another node's store may hang for minutes while the main thread has to answer
Ctrl-C. What the agent does not do is added from outside: its ``LogsSpecs`` gives each worker's variables and pipes,
its START events say which processes there are.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch

from psengine.cli.launching.agent_hooks import Pipes, StartEvents, quiet_agent, raise_in
from psengine.cli.launching.deaths import DeathWatch
from psengine.cli.launching.failure import LAUNCHER, UNHANDLED, RankEnd, describe_end, first_failure, last_traceback
from psengine.cli.launching.interruption import Interruption, kill_group
from psengine.cli.launching.nodes import NodeFailures
from psengine.cli.launching.output import KEPT_LINES, WorkerOutput
from psengine.cli.launching.torchrun_options import node_counts
from psengine.errors import CollectiveError, ConfigurationError

_JOIN_S = 2.0


class ElasticWorkers:
    """The workers of this node.

    Args:
        options: of ``parse_torchrun``.
        variables: set in each worker, besides this process's own; a worker's torchrun variables count more.
        output: takes what they write.
        interruption: the signals to this launcher.

    Attributes:
        ends: how each worker of the last attempt ended, after ``finish``; [] where all ended well.
    """

    def __init__(
        self, options: Namespace, *, variables: Mapping[str, str], output: WorkerOutput, interruption: Interruption
    ) -> None:
        self.ends: list[RankEnd] = []
        self._options = options
        self._variables = variables
        self._output = output
        self._interruption = interruption
        self._watch = DeathWatch()
        self._pids: dict[int, int] = {}  # of ranks, in this attempt
        self._local_ranks: dict[int, int] = {}
        self._log_files: dict[int, str] = {}  # stderr of ranks, where torchrun writes it to a file
        self._restarts = 0
        fewest, most = node_counts(options)
        self._is_elastic = fewest < most
        self._nodes = NodeFailures() if most > 1 else None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_in_agent = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="psengine-agent", daemon=True)

    def start(self) -> None:
        """Start the agent, which starts the workers."""
        self._thread.start()

    def is_running(self) -> bool:
        """Whether the agent has not come to its end."""
        return self._thread.is_alive()

    def lost_node(self) -> bool:
        """Whether another node has failed, and this one is to end with it; a node of an elastic run may go."""
        return self._nodes is not None and self._nodes.first is not None and not self._is_elastic

    def stop(self, number: int) -> None:
        """Have the agent pass a signal on to the workers and end; it kills them after ``--shutdown-timeout``."""
        if self._nodes is not None and not self._is_elastic and self._interruption.received is not None:
            self._nodes.tell(self._own_signal(self._interruption.received))
        with self._lock:
            self._is_stopped = True
            if self._is_in_agent:
                raise_in(self._thread, number)

    def kill(self) -> None:
        """End all workers at once."""
        for pid in list(self._pids.values()):
            if pid not in self._watch.ended_s:
                kill_group(pid, signal.SIGKILL)

    def finish(self) -> None:
        """The agent has ended, or is not waited for: describe how the workers ended.

        Raises:
            ConfigurationError: torchrun refuses an option, or cannot start the program.
            CollectiveError: the other nodes could not be met.
        """
        self._thread.join(_JOIN_S)
        error = self._error
        if isinstance(error, ChildFailedError):
            self.ends = self._describe({rank: failure.exitcode for rank, failure in error.failures.items()})
        elif self._interruption.received is not None:
            self.ends = self._describe_failed_before(self._interruption.received_s)
        nodes, signalled = self._nodes, self._interruption.received
        try:
            if nodes is not None:
                own = first_failure(self.ends)
                if own is None and signalled is not None and not self._is_elastic:
                    own = self._own_signal(signalled)
                if own is not None:
                    nodes.settle(own, lambda: self._interruption.is_forced)
                if nodes.first is not None:
                    if signalled is None and all(nodes.first.rank != end.rank for end in self.ends):
                        self.ends.append(nodes.first)
                    return
        finally:
            if nodes is not None:
                nodes.close()
        if error is not None and not isinstance(error, (ChildFailedError, SignalException)):
            raise self._explain(error) from error

    def _run(self) -> None:
        try:
            with quiet_agent():
                config, program, arguments = torchrun.config_from_args(self._options)
                assert config.logs_specs is not None
                config.logs_specs = Pipes(config.logs_specs, self._prepare)
                # The agent's events go to this logger.
                logger = logging.getLogger(f"torchelastic-events-{config.event_log_handler}")
                events = StartEvents(self._started)
                logger.addHandler(events)
                try:
                    with self._lock:
                        self._is_in_agent = not self._is_stopped
                    if self._is_in_agent:
                        elastic_launch(config=config, entrypoint=program)(*arguments)
                finally:
                    with self._lock:
                        self._is_in_agent = False
                    logger.removeHandler(events)
        except BaseException as error:
            # Its frames hold the agent, and that holds the store at which the other nodes learn of this end.
            self._error = error

    def _prepare(self, envs: dict[int, dict[str, str]], destinations: LogsDest) -> None:
        """The agent is about to start an attempt: complete its workers' variables, and where they write."""
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

    def _own_signal(self, number: int) -> RankEnd:
        """The end of this launcher by a signal, for the other nodes."""
        return RankEnd(
            rank=LAUNCHER,
            local_rank=LAUNCHER,
            host=socket.gethostname(),
            pid=os.getpid(),
            exit_code=-number,
            failed_s=self._interruption.received_s,
            traceback=(f"{signal.Signals(number).name} came to that launcher, which ended its workers",),
        )

    def _describe_failed_before(self, signal_s: float) -> list[RankEnd]:
        """How the ranks ended, where one had failed by itself before the signal came; else []."""
        codes = {rank: self._seen_exit_code(rank, pid) for rank, pid in self._pids.items()}
        had_failed = any(code and self._watch.ended_s[self._pids[rank]] < signal_s for rank, code in codes.items())
        return self._describe(codes) if had_failed else []

    def _seen_exit_code(self, rank: int, pid: int) -> int:
        if pid in self._watch.ended_s and pid not in self._watch.exit_codes:
            # The agent reaped it first, and does not tell after a signal; its last words do.
            return UNHANDLED if last_traceback(self._stderr_of(rank))[0] is not None else 0
        return self._watch.exit_codes.get(pid, 0)

    def _describe(self, exit_codes: Mapping[int, int]) -> list[RankEnd]:
        for pid in self._pids.values():
            self._watch.settle(pid)
        ended_s = {rank: self._watch.ended_s.get(pid) for rank, pid in self._pids.items()}
        first_s = min((s for s in ended_s.values() if s is not None), default=None)
        return [
            describe_end(
                rank,
                self._local_ranks[rank],
                pid,
                exit_codes.get(rank, 0),
                stderr=self._stderr_of(rank),
                ended_s=ended_s[rank],
                # The agent ends the others with SIGTERM, later with SIGKILL; the first was not ended by it.
                was_ended=ended_s[rank] != first_s and self._is_agents_doing(exit_codes.get(rank, 0), ended_s[rank]),
                restarts=self._restarts,
            )
            for rank, pid in sorted(self._pids.items())
        ]

    def _is_agents_doing(self, exit_code: int, ended_s: float | None) -> bool:
        is_after_signal = self._interruption.received is not None and (ended_s or 0.0) > self._interruption.received_s
        return is_after_signal or -exit_code in (signal.SIGTERM, signal.SIGKILL)

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
