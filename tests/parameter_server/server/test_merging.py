"""Rule "merge" through a whole shard: the steps that the coordinator names, weights by samples, an outer step."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import MERGE, SGD, rule_of, spec, world_of

from psengine.protocol.frames import payload_tensor
from psengine.protocol.views import Release

NUMEL = 6
NESTEROV = SGD | {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def start(size):
    """Workers of a job with one chunk of ones."""
    options = {"values": {0: torch.ones(NUMEL)}, "rule": MERGE, "optimizer": {"groups": [NESTEROV]}}
    return world_of(size, [spec(0, NUMEL)], **options)


class Oracle:
    """One process and ``torch.optim``."""

    def __init__(self):
        self.values = torch.nn.Parameter(torch.ones(NUMEL))
        self.optimizer = torch.optim.SGD([self.values], lr=0.7, momentum=0.9, nesterov=True)

    def merge(self, *pairs):
        """Of (difference, samples)."""
        self.values.grad = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        self.optimizer.step()
        return self.values.detach().clone()


def difference(rank, step):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def push(worker, step, weight=8.0, version=0, **fields):
    return worker.push(0, step, difference(worker.rank, step), version, body={"weight": weight}, **fields)


def test_a_merge_has_the_named_steps_weighted_by_samples():
    world, workers = start(3)
    oracle = Oracle()
    push(workers[0], 1, 8.0)
    push(workers[1], 1, 2.0)
    push(workers[2], 4, 4.0)
    world.release(workers, 1, contributors=((0, 1), (2, 4)))
    first = oracle.merge((difference(0, 1), 8), (difference(2, 4), 4))
    for worker, step in ((workers[0], 1), (workers[2], 4)):
        torch.testing.assert_close(worker.updates()[step], first)
    assert not workers[1].updates()
    push(workers[0], 2, 1.0, version=1)
    world.release(workers, 2, contributors=((0, 2), (1, 1)))
    second = oracle.merge((difference(0, 2), 1), (difference(1, 1), 2))
    torch.testing.assert_close(workers[1].updates()[1], second)
    assert rule_of(world).version == 2
    assert world.shard.status().jobs["demo"].staleness == {0: 3, 1: 1}


def test_merges_are_applied_in_the_order_of_their_releases_once():
    world, workers = start(2)
    oracle = Oracle()
    push(workers[1], 1)
    world.release(workers, 1, contributors=((0, 1),))
    world.release(workers, 2, contributors=((1, 1),))
    assert workers[1].waits(0, 1) == [0]
    push(workers[0], 1)
    first, second = oracle.merge((difference(0, 1), 1)), oracle.merge((difference(1, 1), 1))
    torch.testing.assert_close(workers[0].updates()[1], first)
    torch.testing.assert_close(workers[1].updates()[1], second)
    world.publish(workers, releases=(Release(1, 1, ((0, 1),)), Release(2, 2, ((1, 1),))))
    assert rule_of(world).version == 2


@pytest.mark.parametrize("keeps_log", [False, True])
def test_without_a_log_a_restart_brings_back_no_contribution_that_may_be_answered(keeps_log):
    world, workers = start(1)
    push(workers[0], 1)
    rule_of(world).begin_life(keeps_log=keeps_log)
    assert rule_of(world).has(0, 1) is keeps_log


def test_what_does_not_count_is_answered_at_once_and_not_waited_for():
    world, workers = start(2)
    (refused,) = workers[0].push(0, 1, torch.full((NUMEL,), torch.nan), body={"weight": 8.0})
    assert refused.body["refused"] == "non_finite"
    assert torch.equal(payload_tensor(refused), torch.ones(NUMEL))
    (idle,) = workers[0].push(0, 2, None)
    assert idle.body["refused"] == "abstained"
    push(workers[1], 1)
    world.release(workers, 1, contributors=((0, 1), (1, 1)))
    assert list(workers[1].updates()) == [1]


class TestViews:
    def test_contributions_of_who_left_are_dropped_unless_a_merge_names_them(self):
        world, workers = start(3)
        oracle = Oracle()
        for worker in workers:
            push(worker, 1)
        named = world.release(workers[:1], 1, contributors=((0, 1), (1, 1)), number=1)
        assert rule_of(world).version == 1
        world, workers = start(3)
        for worker in workers:
            push(worker, 1)
        world.publish(workers[:1], releases=(named,))  # the release comes with the view
        torch.testing.assert_close(workers[0].updates()[1], oracle.merge((difference(0, 1), 1), (difference(1, 1), 1)))
        assert rule_of(world).waits() == {}

    def test_a_merge_does_not_wait_for_who_left(self):
        world, workers = start(2)
        push(workers[0], 1)
        world.release(workers, 1, contributors=((0, 1), (1, 1)))
        assert workers[0].waits(0, 1) == [1]
        world.publish(workers[:1])
        torch.testing.assert_close(workers[0].updates()[1], Oracle().merge((difference(0, 1), 1)))
