"""Start the ranks of a comparison on this machine, wait for them, and name the rank that failed first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from psengine.errors import ConfigurationError, PSEngineError
from psengine.verify.rank import NOTE, REPORT, USAGE

MAX_RANKS = 64
_POLL_S = 0.05
# After the first report of an error: how long an earlier error may take to be reported.
_GRACE_S = 0.3
# After a report that a peer is lost: how long the error of that peer may take to be reported.
_CAUSE_GRACE_S = 10.0
# How long the ranks may take to end after their reports.
_LEAVE_S = 10.0


class RankFailedError(PSEngineError, RuntimeError):
    """A rank raised, died, or was not done in time.

    Attributes:
        rank: the first that failed; None where all were merely late.
        rank_traceback: what it raised; "" where it died or was late.
    """

    def __init__(self, message: str, rank: int | None = None, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_traceback = rank_traceback


def run_ranks(
    module: str,
    work: Mapping[str, Any],
    *,
    world_size: int,
    timeout_s: float,
    device: str = "cpu",
    on_note: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Run ``python -m module`` on ``world_size`` ranks that share this machine's cores; return results in rank order.

    Args:
        module: calls ``rank.serve``.
        work: what it is given, in JSON types.
        world_size: number of ranks.
        timeout_s: deadline for everything, and of every operation between the ranks.
        device: "cpu" or "cuda".
        on_note: told what rank 0 is doing.

    Raises:
        ConfigurationError: a rank found fault with what it was asked to do.
        RankFailedError: a rank raised, died, or was not done in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setup = {
        "world_size": world_size,
        "port": store.port,
        "timeout_s": timeout_s,
        "device": device,
        "threads": max(1, cores // world_size),
        "work": dict(work),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            command = [sys.executable, "-m", module, json.dumps({**setup, "rank": rank})]
            # Its own session: a Ctrl-C is for the launcher, which ends the ranks.
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        reports = _wait(store, processes, timeout_s, on_note)
        _leave(processes)
        return [report["result"] for report in reports]
    finally:
        _end(processes)


def _wait(
    store: Any, processes: list[subprocess.Popen[bytes]], timeout_s: float, on_note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Wait until every rank has reported success; return the reports."""
    deadline_s = time.monotonic() + timeout_s
    noted = ""
    while True:
        _check_alive(store, processes)
        reports = [_read(store, f"{REPORT}/{rank}") for rank in range(len(processes))]
        if any(report and "error" in report for report in reports):
            time.sleep(_GRACE_S)
            _raise_first(store, processes)
        if all(report is not None for report in reports):
            return [report for report in reports if report is not None]
        note = _note(store, 0)
        if note != noted:
            noted = note
            on_note(note)
        if time.monotonic() > deadline_s:
            late = [rank for rank, report in enumerate(reports) if report is None]
            places = "; ".join(f"rank {rank} was at {_note(store, rank)}" for rank in late)
            raise RankFailedError(
                f"the ranks were not done in time (expected within {timeout_s:g} s, got {places}). Fix: if they were"
                " only slow, give them more time (--timeout-s) or fewer steps."
            )
        time.sleep(_POLL_S)


def _check_alive(store: Any, processes: list[subprocess.Popen[bytes]]) -> None:
    """Raise for a rank that ended without a report: the other ranks' errors are consequences of that."""
    for rank, process in enumerate(processes):
        code = process.poll()
        if code is not None and _read(store, f"{REPORT}/{rank}") is None:
            fate = f"was ended by signal {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            raise RankFailedError(
                f"rank {rank} of {len(processes)} (process {process.pid}) {fate}, without an exception, at"
                f" {_note(store, rank)}",
                rank,
            )


def _raise_first(store: Any, processes: list[subprocess.Popen[bytes]]) -> None:
    """Raise the earliest error that is not a lost-peer error; a rank that died without a report comes before all."""
    errors = _errors(store, processes)
    deadline_s = time.monotonic() + _CAUSE_GRACE_S
    # A rank closes its connections before it has described its own error: its peers may report the lost peer first.
    while (
        all(error["is_consequence"] for _, error in errors)
        and len(errors) < len(processes)
        and time.monotonic() < deadline_s
    ):
        time.sleep(_POLL_S)
        errors = _errors(store, processes)
    rank, error = min(errors, key=lambda found: (found[1]["is_consequence"], float(found[1]["unix_s"])))
    if error["kind"] == USAGE:
        raise ConfigurationError(error["message"])
    raise RankFailedError(
        f"rank {rank} of {len(processes)} raised {error['type']} at {error['where']}", rank, error["traceback"]
    )


def _errors(store: Any, processes: list[subprocess.Popen[bytes]]) -> list[tuple[int, dict[str, Any]]]:
    """(rank, its error) of each that reported one."""
    _check_alive(store, processes)
    reports = [_read(store, f"{REPORT}/{rank}") for rank in range(len(processes))]
    return [(rank, report["error"]) for rank, report in enumerate(reports) if report and "error" in report]


def _read(store: Any, key: str) -> dict[str, Any] | None:
    return json.loads(store.get(key)) if store.check([key]) else None


def _note(store: Any, rank: int) -> str:
    key = f"{NOTE}/{rank}"
    return store.get(key).decode() if store.check([key]) else "its start, importing torch"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _leave(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline_s = time.monotonic() + _LEAVE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait(_LEAVE_S)
        if process.stdin is not None:
            process.stdin.close()
