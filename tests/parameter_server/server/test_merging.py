"""The rule "merge": a quorum of workers at their own pace, a grace window, weights by samples, an outer step."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import SGD, ErrorCode, Worker, World, codes, rule_of, spec

from psengine.parameter_server.server.rules.grace import GraceWindow
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


def test_a_quorum_is_merged_by_samples_and_who_comes_later_is_part_of_the_next_merge():
    _, workers = start(3, grace=0)
    oracle = Oracle()
    push(workers[0], 1, weight=8)
    assert not answers(*workers)
    push(workers[1], 1, weight=24)
    merged = oracle.merge((difference(0, 1), 8.0), (difference(1, 1), 24.0)).clone()
    found = answers(*workers)
    assert [(rank, version) for rank, version, _ in found] == [(0, 1), (1, 1)]
    for _, _, values in found:
        torch.testing.assert_close(values, merged)
    push(workers[2], 1, weight=8)  # slow: from the first version of all
    assert not answers(*workers)
    push(workers[1], 2, weight=8, version=1)
    merged = oracle.merge((difference(1, 2), 8.0), (difference(2, 1), 8.0))
    for _, version, values in answers(*workers):
        assert version == 2
        torch.testing.assert_close(values, merged)


def test_nobody_waits_for_a_worker_that_abstained_until_it_brings_something():
    _, workers = start(3, quorum=3)
    oracle = Oracle()
    push(workers[0], 1)
    push(workers[1], 1)
    assert not answers(*workers)
    abstain = {"weight": 0.0}
    workers[2].push(0, 1, None, version=0, body=abstain)
    assert [rank for rank, _, _ in answers(workers[2])] == [2], "answered at once"
    merged = oracle.merge((difference(0, 1), 8.0), (difference(1, 1), 8.0)).clone()
    for rank, version, values in answers(*workers):
        assert (rank < 2, version) == (True, 1)
        torch.testing.assert_close(values, merged)
    push(workers[2], 2, version=1)
    push(workers[0], 2, version=1)
    assert not answers(*workers), "it counts again"
    push(workers[1], 2, version=1)
    assert [rank for rank, _, _ in answers(*workers)] == [0, 1, 2]


def test_the_grace_window():
    window = GraceWindow(0.25)
    for now_s in (0.0, 8.0):
        window.arrived(0, now_s)
        window.arrived(1, now_s)
        window.arrived(2, now_s + 1)  # a second later than the others
        window.arrived(3, now_s + 5)  # too late for a window of two seconds
    window.open([0, 1], [2, 3], 16.0)
    assert not window.is_over([2, 3], 16.9)
    assert window.is_over([3], 16.9), "all who were expected are here, or do not come"
    assert window.is_over([2, 3], 18.0), "the window has ended"
    window.forget(2)
    assert window.is_over([2, 3], 16.9), "a new process is not expected"
    window.open([0, 1], [3], 16.0)
    assert window.is_over([2, 3], 16.0), "nobody is expected within the window"
    never = GraceWindow(0.0)
    never.open([0], [1], 5.0)
    assert never.is_over([1], 5.0)


def test_repeats_count_once_and_what_was_not_merged_is_sent_again():
    world, workers = start(2)
    push(workers[0], 1)
    push(workers[0], 1)
    assert [m.type for m in workers[0].probe(0, 1)] == [MessageType.PENDING]
    push(workers[0], 2)
    assert codes(workers[0].take()) == [ErrorCode.CREDIT]
    # The server starts anew from a snapshot: the contribution was under way.
    world.start(8, world.shard.durable.capture())
    for worker in workers:
        assert worker.hello() == "ready"
        worker.take()
    assert [m.type for m in workers[0].probe(0, 1)] == [MessageType.MISSING]
    push(workers[0], 1)
    push(workers[1], 1)
    merged = Oracle().merge((difference(0, 1), 1.0), (difference(1, 1), 1.0))
    for _, _, values in answers(*workers):
        torch.testing.assert_close(values, merged)
    push(workers[0], 1)
    assert not answers(*workers)
    assert rule_of(world).version == 1


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
