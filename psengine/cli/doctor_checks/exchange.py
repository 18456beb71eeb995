"""A trial: two processes sum tensors, over gloo and in shared memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from psengine.cli.bench_worker import GLOO, IN_PLACE, measure_all_reduce
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
        small, large, refusal = run_ranks(run, world_size=2, timeout_s=DEADLINE_S)[0]
    except RankFailedError as error:
        last = (error.rank_traceback.strip().splitlines() or [""])[-1]
        yield problem(
            f"two processes of this host could not sum a tensor over gloo: {error} {last}".rstrip(),
            "see hostname, or set GLOO_SOCKET_IFNAME to an interface that is up (lo will do on one host)",
        )
        return
    for transport, candidate in (("gloo", GLOO), ("shared memory", IN_PLACE)):
        if candidate in small:
            yield _judge(transport, small[candidate], large[candidate], context)
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
    collective: Collective | None = None
    refusal = ""
    try:
        shared = collective_for(default_group(), "shared_memory")
        shared.connect()
        collective = shared
    except PSEngineError as error:
        refusal = str(error)
    small, large = (
        {
            name: statistics.median(seconds)
            for name, seconds in measure_all_reduce(place, collective, size, ROUNDS).items()
        }
        for size in (SMALL_BYTES, LARGE_BYTES)
    )
    return small, large, refusal
