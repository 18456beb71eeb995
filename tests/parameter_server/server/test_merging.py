"""The rule "merge": a quorum of workers at their own pace, a grace window, weights by samples, an outer step."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import SGD, Worker, World, rule_of, spec

from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import MessageType

NUMEL = 6
NESTEROV = SGD | {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def start(size: int, quorum: int = 2, grace: float = 0.25):
    """Workers of a job with one chunk of ones, all in."""
    world = World(codec=False)
    rule = {"name": "merge", "quorum": quorum, "grace": grace}
    workers = [Worker(world, rank, rule=rule, world_size=size) for rank in range(size)]
    workers[0].initialise([spec(0, NUMEL)], {0: torch.ones(NUMEL)})
    workers[0].configure(0, NUMEL, groups=[NESTEROV])
    for worker in workers[1:]:
        assert worker.hello() == "ready"
        worker.take()
    return world, workers


class Oracle:
    """One process and ``torch.optim``."""

    def __init__(self) -> None:
        self.values = torch.nn.Parameter(torch.ones(NUMEL))
        self.optimizer = torch.optim.SGD([self.values], lr=0.7, momentum=0.9, nesterov=True)

    def merge(self, *pairs: tuple[torch.Tensor, float]) -> torch.Tensor:
        self.values.grad = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        self.optimizer.step()
        return self.values.detach()


def difference(rank: int, sequence: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * sequence + rank))


def push(worker: Worker, sequence: int, weight: float = 8.0, version: int = 0) -> None:
    worker.push(0, sequence, difference(worker.rank, sequence), version=version, body={"weight": weight})


def answers(*workers: Worker) -> list[tuple[int, int, torch.Tensor]]:
    """(rank, version, values) of the answers that came."""
    return [(w.rank, m.version, payload_tensor(m)) for w in workers for m in w.take(MessageType.UPDATED)]


def test_the_outer_state_goes_on_from_a_snapshot():
    world, workers = start(2)
    oracle = Oracle()
    for sequence in (1, 2, 3, 4):
        if sequence == 3:
            world.start(8, world.shard.durable.capture())
            for worker in workers:
                assert worker.hello() == "ready"
                worker.take()
        for worker in workers:
            push(worker, sequence, version=sequence - 1)
        merged = oracle.merge((difference(0, sequence), 1.0), (difference(1, sequence), 1.0))
        found = answers(*workers)
        assert len(found) == 2
        for _, _, values in found:
            torch.testing.assert_close(values, merged)


def test_a_difference_that_is_not_finite_is_refused_at_once():
    world, workers = start(2)
    workers[0].push(0, 1, torch.full((NUMEL,), torch.nan), body={"weight": 8.0})
    (answer,) = workers[0].take(MessageType.UPDATED)
    assert answer.body["refused"] == "non_finite"
    assert torch.equal(payload_tensor(answer), torch.ones(NUMEL))
    assert rule_of(world).version == 0


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "merge", "quorum": 0, "grace": 0.25},
        {"name": "merge", "quorum": 2, "grace": -1.0},
        {"name": "merge", "quorum": 2},
    ],
)
def test_a_wrong_rule_is_refused(rule):
    worker = Worker(World(), 0, rule=rule)
    with pytest.raises(Exception, match="rule"):
        worker.hello()
