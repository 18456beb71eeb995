"""Links on which a result takes seconds: nothing is sent twice, nobody is evicted, what is cut is recovered once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from attacks.throttled_relay import ThrottledRelay, throttled_relay
from support.server_process import ServerProcess, running_server
from support.shard_world import APPLY, AVERAGE, SGD
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.worker_session import Push, wait_all
from psengine.protocol.layout import ChunkKind, ChunkSpec

CHUNK_NUMEL = 32 * 1024
# What a payload comes with: header, routing of frames, ZMTP's own flags and sizes.
ENVELOPE_BYTES = 120
# The bound of the promise: what a step may send beyond its payloads and their headers.
EXCESS = 1.02


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    # The relay comes by TCP, in the clear.
    with running_server(lease_s=3.0, insecure=True) as running:
        yield running


def layout(chunks: int) -> list[ChunkSpec]:
    numel = chunks * CHUNK_NUMEL
    return cut(ChunkKind.PARAMETER, [("weight", (numel,), (1,), numel)], torch.float32, 0, 4 * CHUNK_NUMEL)


def least_bytes(chunks: int) -> int:
    """What a step of so many chunks sends each way."""
    return chunks * (4 * CHUNK_NUMEL + ENVELOPE_BYTES)


class Trainer:
    """One worker that pushes all its chunks at once, as a strategy does at the end of a backward."""

    def __init__(self, address: str, chunks: int, rule: dict[str, object], rank: int, size: int, timeout_s: float):
        self.specs = layout(chunks)
        self.values = torch.zeros(chunks * CHUNK_NUMEL)
        self.parts = list(self.values.split(CHUNK_NUMEL))
        options = {"job": rule["name"], "rule": rule, "world_size": size, "timeout_s": timeout_s}
        self.session = entered(address, rank, self.specs, uses_segments=False, **options)
        if rule["name"] == "apply":
            body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, CHUNK_NUMEL, 0]]}
            wait_all([self.session.configure(spec.key, body) for spec in self.specs])

    def push(self, value: float) -> list[Push]:
        gradient = torch.full((CHUNK_NUMEL,), value)
        return [self.session.push(spec.key, gradient, [self.parts[spec.key]]) for spec in self.specs]


@contextmanager
def slow_crew(
    server: ServerProcess, chunks: int, rule: dict[str, object], size: int, bytes_per_s: float, timeout_s: float = 60.0
) -> Iterator[tuple[list[Trainer], list[ThrottledRelay]]]:
    """Workers, each behind a link of its own, which is fast until all have come."""
    with ExitStack() as context:
        relays = [context.enter_context(throttled_relay(server.addresses[0])) for _ in range(size)]

        def enter(rank: int) -> Trainer:
            return Trainer(relays[rank].address, chunks, rule, rank, size, timeout_s)

        with ThreadPoolExecutor(size) as pool:  # an averaging job begins when all are here
            trainers = list(pool.map(enter, range(size)))
        for trainer, relay in zip(trainers, relays, strict=True):
            context.callback(trainer.session.close)
            relay.up.bytes_per_s = relay.down.bytes_per_s = bytes_per_s
        yield trainers, relays


def carried(relays: Sequence[ThrottledRelay]) -> list[tuple[int, int]]:
    """Per relay the bytes up and down, once nothing but heartbeats moves."""
    counts = [[(math.inf, math.inf)] * len(relays)]

    def is_quiet() -> bool:
        counts.append([(relay.up.carried_bytes, relay.down.carried_bytes) for relay in relays])
        pairs = zip(*counts[-2:], strict=True)
        return all(abs(b - a) < 2000 for old, new in pairs for a, b in zip(old, new, strict=True))

    eventually(is_quiet, "rest of the links", timeout_s=60.0, interval_s=0.3)
    return counts[-1]


def bytes_of_a_step(server: ServerProcess, rule: dict[str, object], size: int, chunks: int, bytes_per_s: float):
    """Each worker's bytes (up, down) of one step; checks what came of it."""
    # A deadline much shorter than the step: it runs only while nothing moves.
    with slow_crew(server, chunks, rule, size, bytes_per_s, timeout_s=2.0) as (trainers, relays):
        before = carried(relays)
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda trainer: wait_all(trainer.push(1.0)), trainers))
        after = carried(relays)
        expected = 1.0 if rule is AVERAGE else -1.0
        for trainer in trainers:
            assert trainer.values.eq(expected).all()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]


def test_a_step_sends_its_bytes_once(server):
    """Both rules at once, each behind links of their own; a result takes three seconds."""
    chunks, bytes_per_s = 16, 700_000
    with ThreadPoolExecutor(2) as pool:
        averaged = pool.submit(bytes_of_a_step, server, AVERAGE, 2, chunks, bytes_per_s)
        applied = pool.submit(bytes_of_a_step, server, APPLY, 1, chunks, bytes_per_s)
        excess = [way / least_bytes(chunks) for worker in averaged.result() + applied.result() for way in worker]
    assert max(excess) < EXCESS
    assert [server.coordinated(name)["evicted"] for name in ("average", "apply")] == [0, 0]


# ---- a link that is cut ----------------------------------------------------------------------------------------------


def test_a_result_cut_on_its_way_is_asked_for_once(server):
    """The pushes are all there and some results too, when every connection ends; the link is there again at once."""
    chunks = 8
    with slow_crew(server, chunks, AVERAGE, 1, 4e6) as ([trainer], [relay]):
        before = carried([relay])[0]
        relay.down.bytes_per_s = 0.7e6
        pushes = trainer.push(1.0)
        eventually(lambda: relay.up.carried_bytes - before[0] >= least_bytes(chunks), "the pushes do not arrive")
        # Averages land once the whole step is there.
        eventually(lambda: sum(push.answer is not None for push in pushes) >= 3, "no result came")
        done = sum(push.answer is not None for push in pushes)
        assert relay.cut() >= 2
        assert done < chunks
        wait_all(pushes)
        up, down = (b - a for a, b in zip(before, carried([relay])[0], strict=True))
        assert trainer.values.eq(1.0).all()
    # What had arrived is not asked for again, nor is any push sent twice; what was in the relay went down with it.
    assert up < EXCESS * least_bytes(chunks)
    assert down < EXCESS * least_bytes(chunks) + 2 * least_bytes(1)
    [job] = server.status()["jobs"].values()
    assert (job["applied"], job["duplicates"], job["evicted"]) == (chunks, 0, 0)


def test_pushes_cut_on_their_way_count_once(server):
    chunks = 8
    with slow_crew(server, chunks, APPLY, 1, 4e6) as ([trainer], [relay]):
        relay.up.bytes_per_s = 1e6
        before = relay.up.carried_bytes
        pushes = trainer.push(1.0)
        eventually(lambda: relay.up.carried_bytes - before > least_bytes(chunks) / 2, "nothing goes up")
        assert relay.cut() >= 2
        wait_all(pushes)
        assert trainer.values.eq(-1.0).all()
    [job] = server.status()["shards"][0]["jobs"].values()
    assert (job["applied"], job["duplicates"]) == (chunks, 0)
    assert relay.up.carried_bytes - before < 1.6 * least_bytes(chunks)
