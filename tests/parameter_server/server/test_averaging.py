"""Rule "average" through a whole shard: whose gradients are in an average, and that all get the same one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.shard_world import Worker, World, push_all, spec, team, world_of

from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import MessageType


def gradients(size, numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Of very different sizes, so that another order of summation shows.
    scales = torch.logspace(-3, 3, size).unsqueeze(1)
    return list((torch.randn(size, numel, generator=generator) * scales).to(dtype))


def reference(grads):
    """Added up in the order given, by NumPy, in float32 (float64 for float64)."""
    wide = np.float64 if grads[0].dtype is torch.float64 else np.float32
    total = grads[0].to(torch.float64 if wide is np.float64 else torch.float32).numpy().copy()
    for gradient in grads[1:]:
        total = total + gradient.to(torch.float32 if wide is np.float32 else torch.float64).numpy()
    if len(grads) > 1:
        total = total / wide(len(grads))
    return torch.from_numpy(total).to(grads[0].dtype)


def equal(left, right):
    return left.dtype is right.dtype and torch.equal(left, right)


class TestSums:
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_the_same_bits_for_every_order_of_arrival(self, size):
        workers = team(World(), size, [spec(0, 37)])
        for sequence, order in enumerate(itertools.permutations(range(size)), start=1):
            grads = gradients(size, 37, seed=sequence)
            for rank in order:
                assert not workers[rank].inbox
                workers[rank].push(0, sequence, grads[rank])
            for worker in workers:
                assert equal(worker.updates()[sequence], reference(grads))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
    def test_buffers_become_those_of_the_lowest_rank(self, dtype):
        workers = team(World(), 3, [spec(0, 4, dtype, ChunkKind.BUFFER)])
        values = [torch.tensor([rank, 1, 0, rank]).to(dtype) for rank in range(3)]
        for rank in (2, 0, 1):
            workers[rank].push(0, 1, values[rank])
        assert all(equal(worker.updates()[1], values[0]) for worker in workers)

    def test_non_finite_values_are_passed_on_and_counted(self):
        world, workers = world_of(2, [spec(0, 2)])
        workers[0].push(0, 1, torch.tensor([1.0, float("nan")]))
        workers[1].push(0, 1, torch.tensor([1.0, 1.0]))
        answer = workers[0].updates()[1]
        assert answer[0] == 1
        assert answer[1].isnan()
        assert world.shard.status(0.0).jobs["demo"].non_finite == 1

    def test_who_abstains_is_not_counted(self):
        workers = team(World(), 3, [spec(0, 8)])
        grads = gradients(3, 8)
        workers[0].push(0, 1, grads[0])
        workers[1].push(0, 1, None)
        (answer,) = workers[2].push(0, 1, grads[2])
        assert answer.body == {"contributors": 2}
        assert equal(payload_tensor(answer), reference([grads[0], grads[2]]))

    def test_if_all_abstain_there_are_zeros(self):
        workers = team(World(), 2, [spec(0, 3, torch.bfloat16)])
        workers[0].push(0, 1, None)
        (answer,) = workers[1].push(0, 1, None)
        assert answer.body == {"contributors": 0}
        assert equal(payload_tensor(answer), torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize(("ended_without_it", "reached"), [(1, 1), (1, 0), (2, 1)])
def test_one_that_returns_to_an_empty_job_goes_on_if_the_averages_that_it_lacks_are_here(ended_without_it, reached):
    world, workers = world_of(2, [spec(0, 4)])
    push_all(workers, 1, torch.ones(4))
    world.advance(6, workers[0])
    for sequence in range(2, 2 + ended_without_it):
        assert workers[0].push(0, sequence, torch.full((4,), 3.0))
    world.advance(6)
    if ended_without_it > 1 or not reached:
        assert workers[1].hello(version=reached) == "wait", "the other one may come back, and is ahead"
    else:
        assert workers[1].hello(version=reached) == "ready"
        assert payload_tensor(workers[1].push(0, 2, torch.ones(4))[0]).tolist() == [3.0] * 4


class TestSnapshots:
    """What a worker deposited, and its number, are kept; exchanges are sent again by whoever takes part."""

    def test_deposited_values_come_back(self):
        world, (worker,) = world_of(1, [spec()])
        worker.ask(MessageType.STORE, key=0, payload=torch.full((4,), 3.0), version=6)
        world.start(8, world.shard.durable.capture())
        again = Worker(world, 0, world_size=1, nonce=worker.nonce)
        assert again.hello() == "ready"
        again.take()
        answer = again.pull(0)
        assert (answer.version, payload_tensor(answer).tolist()) == (6, [3.0] * 4)

    def test_a_worker_that_was_entering_when_the_snapshot_was_taken_is_waited_for(self):
        """It has taken part since: the others name it. Else a step would be averaged without it."""
        world = World()
        first = Worker(world, 0, world_size=2)
        first.initialise([spec()])
        second = Worker(world, 1, world_size=2)
        assert second.hello() == "ready"
        second.take()
        world.shard.jobs.find("demo").membership.demote(1)
        world.start(8, world.shard.durable.capture())
        first.members = second.members = [0, 1]
        assert first.hello() == "ready"
        assert first.push(0, 7, torch.ones(4)) == []
        assert second.hello() == "ready"
        second.push(0, 7, torch.full((4,), 3.0))
        (answer,) = first.take(MessageType.UPDATED)
        assert (answer.body["contributors"], payload_tensor(answer).tolist()) == (2, [2.0] * 4)
