"""The doctor's trial: two processes meet, time all-reduces over gloo and in shared memory, and print what they saw.

Started by ``collectives.py`` as ``python -m psengine.cli.doctor_checks.exchange_ranks TIMEOUT_S``, as a session of its
own. It forks: torch is imported once, and nothing of it has run by then.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.errors import PSEngineError

RANKS = 2
SIZES_BYTES = (4096, 4 << 20)
ROUNDS = 7
TRANSPORTS: tuple[tuple[str, type[C10dCollective | SharedMemoryCollective]], ...] = (
    ("gloo", C10dCollective),
    ("shared_memory", SharedMemoryCollective),
)


def main(timeout_s: float) -> None:
    """Print one JSON object: by transport, either what failed or the seconds that each size took."""
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    other = os.fork()
    rank = 0 if other else 1
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        os.write(writer, store.port.to_bytes(4, "little"))
    else:
        os.close(writer)
        store = dist.TCPStore("127.0.0.1", int.from_bytes(os.read(reader, 4), "little"), timeout=timeout)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
        found = {name: _try(transport, rank) for name, transport in TRANSPORTS}
        dist.barrier()
    except RuntimeError as error:
        found = {"gloo": {"error": str(error).strip().partition("\n")[0]}}
    if rank == 0:
        print(json.dumps(found), flush=True)
        os.waitpid(other, 0)
    # Neither has anything to tidy up that the end of the process does not.
    os._exit(0)


def _try(transport: type[C10dCollective | SharedMemoryCollective], rank: int) -> dict[str, Any]:
    try:
        collective = transport()
        try:
            return _measure(collective, rank)
        finally:
            collective.close()
    except (PSEngineError, RuntimeError) as error:
        return {"error": str(error)}


def _measure(collective: Collective, rank: int) -> dict[str, Any]:
    seconds = {}
    for size_bytes in SIZES_BYTES:
        flat = collective.allocate(size_bytes // 4, torch.float32, torch.device("cpu"))
        times = []
        for _ in range(ROUNDS):
            flat.fill_(rank + 1.0)
            collective.barrier()
            started_s = time.perf_counter()
            collective.all_reduce(flat, what="the doctor's tensor").wait()
            times.append(time.perf_counter() - started_s)
            if not bool((flat == 3.0).all()):
                return {"error": f"the sum of 1 and 2 came out as {flat[flat != 3.0][0].item()}"}
        seconds[str(size_bytes)] = statistics.median(times)
    return {"seconds": seconds}


if __name__ == "__main__":
    main(float(sys.argv[1]))
