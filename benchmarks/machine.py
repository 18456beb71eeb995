"""On what a benchmark was measured, and the ranks that it starts; each ``run.py`` puts this folder on its path."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from psengine.cli import bench

GROUP_TIMEOUT_S = 60


def describe_machine(*circumstances: str) -> str:
    """Describe CPU, cores, load, versions and what else the figures depend on in one line."""
    machine = bench.describe_machine()
    software = ", ".join([f"Python {machine['python']}", f"torch {machine['torch']}", *circumstances])
    return f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} at the start; {software}"


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, deadline_s: float) -> list[Any]:
    """Call ``function(rank, *arguments)`` in the processes of a gloo group; return the results in rank order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = [(rank, world_size, store.port, function, arguments) for rank in range(world_size)]
    with multiprocessing.get_context("spawn").Pool(world_size) as pool:
        return pool.starmap_async(_run_rank, calls, chunksize=1).get(deadline_s)


def _run_rank(rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = function(rank, *arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
