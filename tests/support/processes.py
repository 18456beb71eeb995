"""The one way tests start ranks: real processes, a store on port 0, a deadline, exit codes, nothing left behind."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 60.0

# Ranks, servers and commands fork from one process that has imported what any of them imports (dynamo is what native
# DDP's constructor loads): a start costs 50 ms instead of seconds.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed", "torch.testing", "hypothesis", "pytest"),
        *(
            "psengine.strategies.registry",
            "psengine.strategies.servers.asynchronous",
            "psengine.strategies.servers.sync",
        ),
        *("psengine.parameter_server.server.daemon", "psengine.cli.main", "psengine.cli.server", "psengine.cli.run"),
        *("psengine.cli.advise", "psengine.cli.launching.elastic", "psengine.cli.launching.run"),
    ]
)


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: its function's return value, or its traceback, and its exit code (negative: a signal)."""

    rank: int
    exit_code: int | None
    value: Any = None
    error: str | None = None


class RanksFailedError(AssertionError):
    """A rank raised, died or hung; the message holds every rank's traceback."""


def free_port() -> int:
    """A port of loopback at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline_s: float = 90.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    init_group: bool = True,
    may_have_children: bool = False,
) -> list[Any]:
    """Run ``function(rank, world_size, *arguments)`` in ``world_size`` processes; return their values in rank order.

    Each rank has one thread, a gloo default group (unless ``init_group`` is False) and this environment.

    Raises:
        RanksFailedError: a rank raised, exited with another code than 0, or outlived ``deadline_s``.
    """
    results = run_ranks_to_any_end(
        function,
        world_size,
        *arguments,
        deadline_s=deadline_s,
        group_timeout_s=group_timeout_s,
        init_group=init_group,
        leave_together=True,
        may_have_children=may_have_children,
    )
    failed = [r for r in results if r.error is not None or r.exit_code != 0]
    if failed:
        report = "\n".join(f"--- rank {r.rank}, exit code {r.exit_code} ---\n{r.error or ''}" for r in failed)
        raise RanksFailedError(f"{len(failed)} of {world_size} ranks failed\n{report}")
    return [r.value for r in results]


def in_ranks(world_size: int) -> Callable[[Callable[[int, int], None]], Callable[[], None]]:
    """For a test whose body runs in ``world_size`` ranks: ``def test_something(rank, world_size)``."""

    def decorate(body: Callable[[int, int], None]) -> Callable[[], None]:
        def test() -> None:
            run_ranks(_run_body, world_size, body.__module__, body.__name__)

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(rank: int, world_size: int, module: str, name: str) -> None:
    getattr(importlib.import_module(module), name).body(rank, world_size)


def run_ranks_to_any_end(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline_s: float = 90.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    init_group: bool = True,
    leave_together: bool = False,
    may_have_children: bool = False,
) -> list[RankResult]:
    """Like ``run_ranks``, for tests in which ranks are meant to raise or be killed; raises only for a hang.

    ``leave_together`` makes ranks wait for each other before they close their connections; ``may_have_children`` lets
    them start processes through multiprocessing, which they must end themselves.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, receivers = [], []
    try:
        for rank in range(world_size):
            receiver, sender = forkserver.Pipe(duplex=False)
            setup = _Setup(rank, world_size, store.port, group_timeout_s, init_group, leave_together, dict(os.environ))
            process = forkserver.Process(
                target=_rank_main, args=(setup, sender, function, arguments), daemon=not may_have_children
            )
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        messages = _receive(receivers, time.monotonic() + deadline_s)
        for process in processes:
            process.join(timeout=10)
        if any(process.is_alive() for process in processes):
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
            raise RanksFailedError(f"ranks {hung} still ran after {deadline_s:g} s; the others said {messages}")
        return [
            RankResult(rank, process.exitcode, *messages.get(rank, (None, None)))
            for rank, process in enumerate(processes)
        ]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(timeout=10)
            process.close()
        for receiver in receivers:
            receiver.close()


@dataclass(frozen=True)
class _Setup:
    rank: int
    world_size: int
    port: int
    group_timeout_s: float
    init_group: bool
    leave_together: bool
    environment: dict[str, str]


def _receive(receivers: list[Connection], deadline: float) -> dict[int, tuple[Any, str | None]]:
    open_receivers = {receiver: rank for rank, receiver in enumerate(receivers)}
    messages: dict[int, tuple[Any, str | None]] = {}
    while open_receivers:
        ready = wait(list(open_receivers), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(open_receivers.values())
            raise RanksFailedError(f"ranks {late} had not finished at the deadline; the others said {messages}")
        for receiver in ready:
            rank = open_receivers.pop(receiver)  # type: ignore[index]
            try:
                messages[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                continue  # died without a word
    return messages


def _rank_main(setup: _Setup, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(setup.environment)
    torch.set_num_threads(1)
    exit_code = 0
    try:
        if setup.init_group:
            store = dist.TCPStore("127.0.0.1", setup.port, is_master=False)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=setup.rank,
                world_size=setup.world_size,
                timeout=timedelta(seconds=setup.group_timeout_s),
            )
        message = (function(setup.rank, setup.world_size, *arguments), None)
        if setup.init_group and setup.leave_together:
            dist.barrier()
    except BaseException:
        message = (None, traceback.format_exc())
        exit_code = 1
    # Plain pickle: multiprocessing's own would share tensors through descriptors of a process that is about to end.
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    if dist.is_initialized() and exit_code == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
