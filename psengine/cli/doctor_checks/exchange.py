"""A trial: two processes sum tensors, over gloo and in shared memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, warning
from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for, default_group
from psengine.errors import PSEngineError
from psengine.verify.ranks import Place, RankFailedError, run_ranks

DEADLINE_S = 35.0
SMALL_BYTES, LARGE_BYTES, ROUNDS = 4096, 4 << 20, 7
# Below this speed something is wrong with the machine, not just with the transport.
SLOW_BYTES_PER_S = {"gloo": 0.05e9, "shared memory": 0.2e9}
SHARE_MEMORY = (
    "let processes of one user see each other: mount /proc without hidepid, no seccomp filter on memfd_create, all"
    " ranks in one container; see native-extension too"
)


def exchange(context: CheckContext) -> Iterator[Finding]:
    """Two processes connect here and sum 4 KiB and 4 MiB, over gloo and in shared memory."""
    try:
        results = run_ranks(run, world_size=2, timeout_s=DEADLINE_S)[0]
    except RankFailedError as error:
        last = (error.rank_traceback.strip().splitlines() or [""])[-1]
        yield problem(
            f"two processes of this host could not sum a tensor over gloo: {error} {last}".rstrip(),
            "see hostname, or set GLOO_SOCKET_IFNAME to an interface that is up (lo will do on one host)",
        )
        return
    for transport, result in results.items():
        yield _judge(transport, result, context)


def _judge(transport: str, result: Mapping[str, Any], context: CheckContext) -> Finding:
    if "error" in result:
        text = f"an all-reduce between two processes over {transport} failed: {result['error']}"
        return note(f"{text}; ranks of one host exchange over gloo", SHARE_MEMORY, transport=transport)
    small_s, large_s = result["small_s"], result["large_s"]
    speed = LARGE_BYTES / large_s
    text = f"two processes over {transport}: 4 KiB in {small_s * 1e6:.0f} µs, 4 MiB in {large_s * 1e3:.2f} ms"
    text += f" ({speed / 1e9:.2f} GB/s)"
    if context.model_bytes is not None:
        text += f"; {context.model_bytes / 1e6:g} MB of gradients: {context.model_bytes / speed * 1e3:.0f} ms a step"
    facts = {"transport": transport, "small_s": small_s, "large_s": large_s, "bytes_per_s": speed}
    if speed < SLOW_BYTES_PER_S[transport]:
        return warning(f"{text}: slow", "end other programs, or give this container whole cores", **facts)
    return ok(text, **facts)


def run(place: Place) -> dict[str, Any]:
    """A rank of the trial: by transport, the median seconds of each size, or what failed."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"gloo": _measure(collective_for(default_group(), "c10d"), place.rank)}
    try:
        found["shared memory"] = _measure(collective_for(default_group(), "shared_memory"), place.rank)
    except PSEngineError as error:
        found["shared memory"] = {"error": str(error)}
    return found


def _measure(collective: Collective, rank: int) -> dict[str, float]:
    seconds = {}
    for name, size_bytes in (("small_s", SMALL_BYTES), ("large_s", LARGE_BYTES)):
        flat = collective.allocate(size_bytes // 4, torch.float32, torch.device("cpu"))
        times = []
        for _ in range(ROUNDS):
            flat.fill_(rank + 1.0)
            collective.barrier().wait()
            started_s = time.perf_counter()
            collective.all_reduce(flat, what="the doctor's tensor").wait()
            times.append(time.perf_counter() - started_s)
            if not bool((flat == 3.0).all()):
                raise ArithmeticError(f"the sum of 1 and 2 is {flat[flat != 3.0][0].item()}")
        seconds[name] = statistics.median(times)
    return seconds
