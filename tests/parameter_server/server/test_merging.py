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


def stuck_in_a_ring() -> tuple[World, list[Worker]]:
    """Three workers, three chunks, merges of two: each worker waits for the merge that only the two others have had."""
    world = World(codec=False)
    rule = {"name": "merge", "quorum": 2, "grace": 0}
    workers = [Worker(world, rank, rule=rule, world_size=3) for rank in range(3)]
    workers[0].initialise([spec(key, NUMEL) for key in range(3)], dict.fromkeys(range(3), torch.ones(NUMEL)))
    for key in range(3):
        workers[0].configure(key, NUMEL, groups=[NESTEROV])
    for worker in workers[1:]:
        assert worker.hello() == "ready"
    for key in range(3):
        for worker in (workers[key], workers[(key + 1) % 3], workers[(key + 2) % 3]):
            worker.push(key, 1, difference(worker.rank, 1), body={"weight": 8.0})
    for worker in workers:
        assert len(worker.take(MessageType.UPDATED)) == 2
    return world, workers


def test_of_workers_that_wait_for_each_other_in_different_merges_one_goes_on_without_a_quorum():
    world, workers = stuck_in_a_ring()
    for worker in (*workers, *workers):
        world.advance(0.2)
        assert not answers(*workers)  # another may bring something to each merge
        worker.heartbeat(waits=1)
    world.advance(0.2)
    assert [(rank, version) for rank, version, _ in answers(*workers)] == [(2, 2)]
    world.advance(0.2)
    assert not answers(*workers)  # they can wait for worker 2 now
    for key in range(3):
        workers[2].push(key, 2, difference(2, 2), body={"weight": 8.0})
    # Workers 0 and 1 go on, and can bring something to the merge that worker 2 waits for.
    assert [(rank, version) for rank, version, _ in answers(*workers)] == [(0, 2), (1, 2), (2, 2), (2, 2)]


def test_a_worker_that_said_before_its_answers_that_it_waits_for_other_shards_is_waited_for():
    world, workers = start(2)
    for worker in (*workers, *workers):
        worker.heartbeat(waits=0)
    push(workers[0], 1)
    world.advance(0.2)
    assert not answers(*workers)  # it has not waited since, and so worker 1 may be on its way
    push(workers[1], 1)
    assert [rank for rank, _, _ in answers(*workers)] == [0, 1]


@pytest.mark.parametrize("waits", [0, 2, 3])
def test_a_worker_whose_push_is_on_its_way_or_was_answered_is_waited_for(waits):
    """Its numbers are not those of the exchanges that are open here."""
    world, workers = stuck_in_a_ring()
    for worker in (*workers, *workers):
        worker.heartbeat(waits=waits)
    world.advance(0.2)
    assert not answers(*workers)


def test_a_window_waits_for_a_worker_that_is_expected():
    world, workers = start(3, quorum=3, grace=0.5)
    for sequence in (1, 2):  # rounds of four seconds, in which worker 2 comes a second after the others
        world.advance(3, *workers)
        push(workers[0], sequence, version=sequence - 1)
        push(workers[1], sequence, version=sequence - 1)
        world.advance(1, *workers)
        push(workers[2], sequence, version=sequence - 1)
        assert len(answers(*workers)) == 3
    rule_of(world)._quorum = 2  # from now on two are enough
    world.advance(3, *workers)
    push(workers[0], 3, version=2)
    push(workers[1], 3, version=2)
    assert not answers(*workers), "worker 2 is expected within the window"
    world.advance(1, *workers)
    push(workers[2], 3, version=2)
    assert [rank for rank, _, _ in answers(*workers)] == [0, 1, 2]
    world.advance(3, *workers)
    push(workers[0], 4, version=3)
    push(workers[1], 4, version=3)
    world.advance(1.5, *workers)
    assert not answers(*workers)
    world.advance(1, *workers)  # it does not come, and the time ends the window
    assert [rank for rank, _, _ in answers(*workers)] == [0, 1]


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


def test_workers_leave_and_come():
    world, workers = start(3, quorum=3, grace=0)
    push(workers[0], 1)
    push(workers[1], 1)
    assert not answers(*workers)
    world.advance(6, workers[0], workers[2])  # worker 1's lease runs out; what it sent counts no more
    assert not answers(*workers)
    push(workers[2], 1)
    merged = Oracle().merge((difference(0, 1), 1.0), (difference(2, 1), 1.0))
    found = answers(*workers)
    assert [rank for rank, _, _ in found] == [0, 2], "those who are left are the quorum"
    torch.testing.assert_close(found[0][2], merged)
    world.advance(6, workers[0])
    push(workers[0], 2, version=1)
    assert [rank for rank, _, _ in answers(*workers)] == [0]


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
