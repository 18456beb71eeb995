"""How tests start ranks: forks of a process that has imported everything, under the runner of ``psengine.verify``."""

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from psengine.verify import ranks

GROUP_TIMEOUT_S = 60.0

# Ranks, servers and commands fork from one process that has imported what any of them imports (dynamo is what native
# DDP's constructor loads): a start costs 50 ms instead of seconds.
forkserver = multiprocessing.get_context("forkserver")
PRELOADED = """
torch._dynamo torch.distributed torch.testing hypothesis pytest psengine.strategies.registry
psengine.strategies.servers.asynchronous psengine.strategies.servers.sync psengine.verify.ranks
psengine.parameter_server.server.daemon psengine.cli.main psengine.cli.server psengine.cli.run psengine.cli.advise
psengine.cli.launching.run
"""
forkserver.set_forkserver_preload(PRELOADED.split())


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


def set_torchrun_variables(rank: int, world_size: int, port: int, **more: str) -> None:
    """In a rank: the variables of torchrun, whose agent's store at ``port`` is the test's; and ``more``."""
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
        os.environ.pop(name, None)
    ranks_of = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in {**ranks_of, "GROUP_RANK": 0, "MASTER_PORT": port}.items()})
    agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**agent, **more})


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Run ``function(rank, world_size, *arguments)`` in ``world_size`` processes; return their values in rank order.

    Each rank has one thread, a gloo default group (unless ``init_group`` is False) and this environment. ``options``
    are those of ``run_ranks_to_any_end``.

    Raises:
        RanksFailedError: a rank raised, exited with another code than 0, or outlived ``deadline_s``.
    """
    results = run_ranks_to_any_end(function, world_size, *arguments, leave_together=True, **options)
    failed = [r for r in results if r.error is not None or r.exit_code != 0]
    if failed:
        report = "\n".join(f"--- rank {r.rank}, exit code {r.exit_code} ---\n{r.error or ''}" for r in failed)
        raise RanksFailedError(f"{len(failed)} of {world_size} ranks failed\n{report}")
    return [r.value for r in results]


def in_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a test whose body runs in ``world_size`` ranks: ``def test_something(rank, world_size)``.

    What else the body takes are parameters and fixtures of the test. ``options`` are those of ``run_ranks_to_any_end``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            run_ranks(_run_body, world_size, body.__module__, body.__name__, given, **options)

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        _, _, *others = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(rank, world_size, **given)


def run_ranks_to_any_end(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline_s: float = 160.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    init_group: bool = True,
    leave_together: bool = False,
    may_have_children: bool = False,
) -> list[RankResult]:
    """Like ``run_ranks``, for tests in which ranks are meant to raise or be killed; raises only for a hang.

    ``leave_together`` makes ranks wait for each other before they close their connections; ``may_have_children`` lets
    them start processes through multiprocessing, which they must end themselves.
    """
    ends = ranks.run_ranks_to_any_end(
        _call,
        function,
        arguments,
        world_size=world_size,
        timeout_s=deadline_s,
        group_timeout_s=group_timeout_s,
        threads=1,
        start=functools.partial(_fork, daemon=not may_have_children),
        joins=init_group,
        leaves_together=leave_together,
    )
    results = [
        RankResult(
            end.rank,
            end.process.poll(),
            None if end.result is None else pickle.loads(end.result[0]),
            None if end.failure is None else end.failure.full_traceback or None,
        )
        for end in ends
    ]
    for end in ends:
        end.process.close()  # type: ignore[attr-defined]
    late = {end.rank: end.note for end in ends if not end.is_done}
    if late:
        said = {result.rank: result for result in results if result.rank not in late}
        raise RanksFailedError(
            f"ranks {list(late)} had not finished at the deadline of {deadline_s:g} s, at {late}; the others: {said}"
        )
    return results


def _call(place: ranks.Place, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    # Plain pickle: multiprocessing's own would share tensors through descriptors of a process that is about to end.
    return pickle.dumps(function(place.rank, place.world_size, *arguments))


class _Forked(forkserver.Process):  # type: ignore[name-defined, misc]
    """A process as the runner knows it."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float) -> None:
        self.join(timeout)


def _fork(world_size: int, *, daemon: bool) -> list[tuple[ranks.Process, Connection]]:
    started = []
    for _ in range(world_size):
        ours, theirs = forkserver.Pipe()
        process = _Forked(target=_serve, args=(theirs, dict(os.environ)), daemon=daemon)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # As in a script: data loaders of a forkserver's child would start a forkserver each, which imports everything.
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # what is imported already: to look through it takes gc.collect() 0.4 s
    ranks.serve(connection, watches=False)
