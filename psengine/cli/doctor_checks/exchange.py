"""A trial: two processes sum tensors, over gloo and in shared memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, warning
from psengine.collectives.registry import collective_for, default_group
from psengine.errors import PSEngineError
from psengine.verify.ranks import Place, RankFailedError, run_ranks

DEADLINE_S = 35.0
# Ranks leave a barrier microseconds apart, so small tensors are summed many times between two barriers.
SMALL_BYTES, SMALL_REPEATS, LARGE_BYTES = 4096, 20, 4 << 20
WARM_UP_ROUNDS, ROUNDS = 3, 7
# Below this speed something is wrong with the machine, not just with the transport.
SLOW_BYTES_PER_S = {"gloo": 0.05e9, "shared memory": 0.2e9}
SHARE_MEMORY = (
    "let processes of one user see each other: mount /proc without hidepid, no seccomp filter on memfd_create, all"
    " ranks in one container; see native-extension too"
)


def exchange(context: CheckContext) -> Iterator[Finding]:
    """Two processes connect here and sum 4 KiB and 4 MiB, over gloo and in shared memory."""
    try:
        small, large, refusal = run_ranks(run, world_size=2, timeout_s=DEADLINE_S)[0]
    except RankFailedError as error:
        last = (error.rank_traceback.strip().splitlines() or [""])[-1]
        yield problem(
            f"two processes of this host could not sum a tensor over gloo: {error} {last}".rstrip(),
            "see hostname, or set GLOO_SOCKET_IFNAME to an interface that is up (lo will do on one host)",
        )
        return
    for transport in SLOW_BYTES_PER_S:
        if transport in small:
            yield _judge(transport, small[transport], large[transport], context)
        else:
            text = f"an all-reduce between two processes over {transport} failed: {refusal}"
            yield note(f"{text}; ranks of one host exchange over gloo", SHARE_MEMORY, transport=transport)


def _judge(transport: str, small_s: float, large_s: float, context: CheckContext) -> Finding:
    speed = LARGE_BYTES / large_s
    text = f"two processes over {transport}: 4 KiB in {small_s * 1e6:.0f} µs, 4 MiB in {large_s * 1e3:.2f} ms"
    text += f" ({speed / 1e9:.2f} GB/s)"
    if context.model_bytes is not None:
        text += f"; {context.model_bytes / 1e6:g} MB of gradients: {context.model_bytes / speed * 1e3:.0f} ms a step"
    facts = {"transport": transport, "small_s": small_s, "large_s": large_s, "bytes_per_s": speed}
    if speed < SLOW_BYTES_PER_S[transport]:
        return warning(f"{text}: slow", "end other programs, or give this container whole cores", **facts)
    return ok(text, **facts)


def run(place: Place) -> tuple[dict[str, float], dict[str, float], str]:
    """A rank of the trial: the median seconds of each size, by transport; and why there is no shared memory."""
    torch.set_num_threads(1)
    shared, refusal = None, ""
    try:
        shared = collective_for(default_group(), "shared_memory")
        shared.connect()
    except PSEngineError as error:
        shared, refusal = None, str(error)
    small: dict[str, float] = {}
    large: dict[str, float] = {}
    for seconds, size_bytes, repeats in ((small, SMALL_BYTES, SMALL_REPEATS), (large, LARGE_BYTES, 1)):
        numel = size_bytes // 4
        own = torch.empty(numel)
        seconds["gloo"] = _median_s(place, own, lambda own=own: dist.all_reduce(own), repeats)  # type: ignore[misc]
        if shared is not None:
            own = shared.allocate(numel, torch.float32, place.device)
            seconds["shared memory"] = _median_s(place, own, lambda own=own: shared.sum(own), repeats)  # type: ignore[misc]
    return small, large, refusal


def _median_s(place: Place, own: torch.Tensor, add: Callable[[], object], repeats: int) -> float:
    """Median seconds of ``add``, which sums ``own`` of all ranks.

    Raises:
        RuntimeError: the sum is wrong.
    """
    durations_s = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        own.fill_(0.0)
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(repeats):
            add()
        durations_s.append((time.perf_counter() - begin_s) / repeats)
    own.fill_(place.rank + 1.0)
    add()
    if not bool((own == place.world_size * (place.world_size + 1) / 2).all()):
        raise RuntimeError(f"rank {place.rank}: the sum of a tensor of {own.numel()} elements is wrong")
    return statistics.median(durations_s[WARM_UP_ROUNDS:])
