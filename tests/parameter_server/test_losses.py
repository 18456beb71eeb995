"""What a server that came back from a snapshot has lost: counted once each, in the workers' logs and at the server."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.server_process import APPLY, SGD, ServerProcess, running_server
from support.shard_world import APPLY as APPLY_RULE
from support.shard_world import Worker, World, spec, team
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.parameter_server.client.worker_session import wait_all
from psengine.protocol.bodies import pack
from psengine.protocol.messages import MAX_COUNTED, MessageType

CHUNKS = 5
LEASE_S = 3.0


# ---- real servers, killed --------------------------------------------------------------------------------------------


class Trainer:
    """A worker of an asynchronous job of ``CHUNKS`` chunks, in this process."""

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        specs = [spec(key, 4) for key in range(CHUNKS)]
        self.session = entered(address, rank, specs, rule=APPLY, world_size=world_size)
        body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, 4, 0]]}
        wait_all([self.session.configure(key, body) for key in range(CHUNKS)])
        self.acknowledged = [0] * CHUNKS

    def step(self, keys=range(CHUNKS), value=1.0) -> None:
        pushes = [(key, self.session.push(key, torch.full((4,), value), [])) for key in keys]
        for key, push in pushes:
            self.acknowledged[key] += push.wait().refused is None


@pytest.fixture
def context() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Trial:
    """A server with snapshots on request, and its workers."""

    def __init__(self, context: ExitStack, directory: Path, workers: int, shards: int = 2) -> None:
        self._servers = context.enter_context(ExitStack())  # they end after the workers
        self._options = {"shards": shards, "lease_s": LEASE_S, "snapshot_dir": directory, "snapshot_interval_s": 0.0}
        address = f"ipc://{directory.parent}/socket"
        self.server: ServerProcess = self._servers.enter_context(running_server(bind=address, **self._options))
        self.workers = [Trainer(address, rank, workers) for rank in range(workers)]
        for worker in self.workers:
            context.callback(worker.session.close)

    def restart(self) -> None:
        address = self.server.addresses[0]
        self.server.kill()
        self.server = self._servers.enter_context(running_server(bind=address, **self._options))

    def lost(self) -> int:
        return sum(shard["lost_updates"] for shard in self.server.job("job"))

    def present(self) -> list[int]:
        reader = self.workers[0].session
        answers = [reader.pull(key) for key in range(CHUNKS)]
        return [answer.wait().version for answer in answers]

    def told(self) -> int:
        """In the server's events."""
        texts = [event["text"] for event in self.server.status()["events"] if event["kind"] == "lost"]
        return sum(int(re.match(r"(\d+) updates", text)[1]) for text in texts)


def told_by(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int]]:
    """(updates, chunks) of what workers logged."""
    found = [
        re.search(r"last snapshot: up to (\d+) updates that worker \d+ knew of are lost, over (\d+) chunks", text)
        for text in caplog.messages
    ]
    return [(int(match[1]), int(match[2])) for match in found if match]


def test_one_lost_update_of_each_chunk_is_told_and_counted(tmp_path, context, caplog):
    caplog.set_level(logging.WARNING)
    trial = Trial(context, tmp_path / "s", workers=1)
    [worker] = trial.workers
    worker.step()
    worker.session.snapshot()
    worker.step()
    trial.restart()
    worker.step()
    assert told_by(caplog) == [(CHUNKS, CHUNKS)]
    assert (trial.lost(), trial.told()) == (CHUNKS, CHUNKS)
    assert trial.present() == [2] * CHUNKS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_shortfall_over_kills_is_what_was_reported(tmp_path, context, caplog, seed):
    """Three workers push whatever they like, some of it refused; the server is killed between pushes."""
    caplog.set_level(logging.WARNING)
    chooser = random.Random(seed)
    trial = Trial(context, tmp_path / "s", workers=3)
    counted = 0
    trial.workers[0].session.snapshot()
    for _ in range(2):
        if chooser.random() < 0.7:
            trial.workers[0].session.snapshot()
        for _ in range(chooser.randrange(1, 20)):
            keys = chooser.sample(range(CHUNKS), chooser.randrange(1, CHUNKS + 1))
            chooser.choice(trial.workers).step(keys, chooser.choice([1.0, 1.0, float("nan")]))
        trial.restart()
        for worker in trial.workers:
            worker.step()
        eventually(lambda: all(len(shard["workers"]) == 3 for shard in trial.server.job("job")))
        assert trial.told() == trial.lost()
        counted += trial.lost()
    acknowledged = sum(sum(worker.acknowledged) for worker in trial.workers)
    assert acknowledged - sum(trial.present()) == counted > 0


# ---- pure ------------------------------------------------------------------------------------------------------------


def tell(worker: Worker, *entries: list[int]) -> list[int]:
    answer = worker.ask(MessageType.PROGRESS, body={"chunks": list(entries), "more": False})
    assert answer.type is MessageType.OK
    return answer.body["lost"]


def test_the_difference_of_versions_is_counted_once():
    world = World()
    first, second = team(world, 2, [spec(0, 4)], rule=APPLY_RULE)
    first.configure(0, 4)
    saved = world.shard.durable.capture()
    first.push(0, 1, torch.ones(4))
    second.push(0, 1, torch.ones(4))
    world.start(8, saved)
    for worker in (first, second):
        worker.epoch = 0
        assert worker.hello() == "ready"
    assert tell(first, [0, 1, 1]) == [1, 1]
    assert tell(first, [0, 1, 1]) == [1, 1]  # its OK was lost
    assert tell(second, [0, 2, 1]) == [2, 1]
    assert world.shard.status(world.now_s).jobs["demo"].lost_updates == 2
    assert [event.text[:9] for event in world.shard.events.events() if event.kind == "lost"] == ["1 updates"] * 2


def test_a_worker_that_claims_too_much_does_not_end_the_status():
    world = World()
    (worker,) = team(world, 1, [spec(key, 4) for key in range(3)], rule=APPLY_RULE)
    lost = tell(worker, *([key, 2**63 - 1, 1] for key in range(3)))
    assert lost == [MAX_COUNTED, 3]
    pack(MessageType.OK, {"lost": lost})
    assert world.shard.status(world.now_s).jobs["demo"].lost_updates == MAX_COUNTED
