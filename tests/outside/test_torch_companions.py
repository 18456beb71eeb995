"""ZeroRedundancyOptimizer, Join, replicate, hooks and checkpoints of torch: psengine ends with native DDP's bits."""

from __future__ import annotations

import functools
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outside.torch_companions import NOT_OVER_SERVERS, PROGRAMS
from support.native_extension import needs_shared_memory
from support.processes import run_ranks
from support.server_process import running_server
from torch.nn.parallel import DistributedDataParallel as NativeDistributedDataParallel

import psengine

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="native DDP's ranks on the CPU speak gloo")

OVER = {
    "sync-c10d": {"collective": "c10d"},
    "sync-shared_memory": {"collective": "shared_memory"},
    "sync-server": {"strategy": "sync-server"},
}


def run_all(rank: int, world_size: int, over: str, address: str, directory: Path) -> dict[str, Any]:
    """By program, the names of what differs from native DDP, or the traceback: one pair of ranks runs them all."""
    wrap = functools.partial(psengine.DistributedDataParallel, **OVER[over])
    differences: dict[str, Any] = {}
    for number, (name, program) in enumerate(PROGRAMS.items()):
        if over == "sync-server" and name in NOT_OVER_SERVERS:
            continue
        os.environ.update(PSENGINE_SERVERS=address, PSENGINE_JOB=f"companion-{number}")
        try:
            native = program(NativeDistributedDataParallel, rank, directory / f"{number}-native")
            ours = program(wrap, rank, directory / f"{number}-ours")
        except Exception:
            # A rank that went on alone would keep the other one waiting.
            differences[name] = traceback.format_exc()
            return differences
        different = {key for key in native.keys() & ours.keys() if not torch.equal(native[key], ours[key])}
        differences[name] = different | (native.keys() ^ ours.keys())
    return differences


@pytest.mark.parametrize(
    "over",
    [
        pytest.param("sync-c10d", marks=pytest.mark.slow),
        pytest.param("sync-shared_memory", marks=needs_shared_memory),
        "sync-server",
    ],
)
def test_companions_end_with_the_bits_of_native(over: str, tmp_path: Path) -> None:
    with running_server(shards=2) as server:
        for found in run_ranks(run_all, 2, over, server.addresses[0], tmp_path):
            different = {name: difference for name, difference in found.items() if difference}
            assert not different, "\n".join(f"{name}: {difference}" for name, difference in different.items())
            assert len(found) == len(PROGRAMS) - len(NOT_OVER_SERVERS) * (over == "sync-server")
