"""Links on which a result takes seconds: nothing is sent twice, and nobody is evicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from attacks.throttled_relay import ThrottledRelay, throttled_relay
from support.server_process import ServerProcess, running_server
from support.shard_world import APPLY, AVERAGE, SGD
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind

CHUNKS, CHUNK_NUMEL = 16, 32 * 1024
SPECS = cut(
    ChunkKind.PARAMETER,
    [("weight", (CHUNKS * CHUNK_NUMEL,), (1,), CHUNKS * CHUNK_NUMEL)],
    torch.float32,
    0,
    4 * CHUNK_NUMEL,
)
# What a payload comes with: header, routing of frames, ZMTP's own flags and sizes.
ENVELOPE_BYTES = 120
# What a step sends each way, and the bound of the promise.
LEAST_BYTES = CHUNKS * (4 * CHUNK_NUMEL + ENVELOPE_BYTES)
EXCESS = 1.02
BYTES_PER_S = 700_000


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    # The relay comes by TCP, in the clear.
    with running_server(lease_s=3.0, insecure=True) as running:
        yield running


def enter(relay: ThrottledRelay, rule: dict[str, object], rank: int, size: int) -> WorkerSession:
    # A deadline much shorter than the step: it runs only while nothing moves.
    options = {"job": rule["name"], "rule": rule, "world_size": size, "timeout_s": 2.0, "uses_segments": False}
    session = entered(relay.address, rank, SPECS, **options)
    if rule is APPLY:
        body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, CHUNK_NUMEL, 0]]}
        wait_all([session.configure(spec.key, body) for spec in SPECS])
    return session


def push_ones(session: WorkerSession) -> torch.Tensor:
    """All chunks at once, as a strategy does at the end of a backward; what comes back."""
    values = torch.zeros(CHUNKS * CHUNK_NUMEL)
    parts = values.split(CHUNK_NUMEL)
    wait_all([session.push(spec.key, torch.ones(CHUNK_NUMEL), [parts[spec.key]]) for spec in SPECS])
    return values


def carried(relays: Sequence[ThrottledRelay]) -> list[tuple[int, int]]:
    """Per relay the bytes up and down, once nothing but heartbeats moves."""
    counts = [[(math.inf, math.inf)] * len(relays)]

    def is_quiet() -> bool:
        counts.append([(relay.up.carried_bytes, relay.down.carried_bytes) for relay in relays])
        pairs = zip(*counts[-2:], strict=True)
        return all(abs(b - a) < 2000 for old, new in pairs for a, b in zip(old, new, strict=True))

    eventually(is_quiet, "rest of the links", timeout_s=60.0, interval_s=0.3)
    return counts[-1]


def bytes_of_a_step(server: ServerProcess, rule: dict[str, object], size: int) -> list[int]:
    """Each worker's bytes up and down, behind a link of its own that is fast until all have come."""
    with ExitStack() as context, ThreadPoolExecutor(size) as pool:
        relays = [context.enter_context(throttled_relay(server.addresses[0])) for _ in range(size)]
        sessions = list(pool.map(lambda rank: enter(relays[rank], rule, rank, size), range(size)))
        for session, relay in zip(sessions, relays, strict=True):
            context.callback(session.close)
            relay.up.bytes_per_s = relay.down.bytes_per_s = BYTES_PER_S
        before = carried(relays)
        for values in pool.map(push_ones, sessions):
            assert values.eq(1.0 if rule is AVERAGE else -1.0).all()
        after = carried(relays)
    return [new - old for one, other in zip(after, before, strict=True) for new, old in zip(one, other, strict=True)]


def test_a_step_sends_its_bytes_once(server):
    """Both rules at once, each behind links of their own; a result takes three seconds."""
    with ThreadPoolExecutor(2) as pool:
        averaged = pool.submit(bytes_of_a_step, server, AVERAGE, 2)
        applied = pool.submit(bytes_of_a_step, server, APPLY, 1)
        most_bytes = max(averaged.result() + applied.result())
    assert most_bytes < EXCESS * LEAST_BYTES
    assert [server.coordinated(name)["evicted"] for name in ("average", "apply")] == [0, 0]
