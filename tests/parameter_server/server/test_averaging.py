"""Rule "average" through a whole shard: whose gradients are in an average, and that all get the same one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.shard_world import Worker, World, push_all, rule_of, spec, team, world_of

from psengine.parameter_server.server.rules.average import HISTORY
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode, MessageType

QUORUM_1 = {"name": "average", "quorum": 1}
QUORUM_2 = {"name": "average", "quorum": 2}


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


def weighted_reference(grads, weights):
    """By NumPy, in float64."""
    total = sum(weight * gradient.double().numpy() for gradient, weight in zip(grads, weights, strict=True))
    return torch.from_numpy(total / sum(weights))


def push_weighted(worker, sequence, gradient, weight, key=0):
    return worker.push(key, sequence, gradient, body={} if weight is None else {"weight": weight})


class TestWeights:
    @pytest.mark.parametrize("weights", [[3, 1], [0.1, 1e12], [1, 2, 4.5], [1e12, 1e12, 1], [2.5]])
    def test_the_mean_is_weighted_and_the_same_for_every_order_of_arrival(self, weights):
        world = World()
        size = len(weights)
        workers = team(world, size, [spec(0, 37)])
        grads = gradients(size, 37)
        found = []
        for sequence, order in enumerate(itertools.permutations(range(size)), start=1):
            for rank in order:
                push_weighted(workers[rank], sequence, grads[rank], weights[rank])
            found += [worker.updates()[sequence] for worker in workers]
        assert all(equal(one, found[0]) for one in found)
        # Terms cancel: what is lost is lost of the largest.
        scale = max(g.abs().max() for g in grads)
        assert torch.allclose(found[0].double(), weighted_reference(grads, weights), rtol=1e-6, atol=1e-7 * scale)

    @pytest.mark.parametrize("weight", [1, 0.3, 7.0, 1e12, 1e-300])
    @pytest.mark.parametrize("size", [1, 3])
    def test_equal_weights_are_the_bits_of_no_weights(self, size, weight):
        workers = team(World(), size, [spec(0, 37)])
        grads = gradients(size, 37)
        for worker in workers:
            push_weighted(worker, 1, grads[worker.rank], weight)
        for worker in workers:
            assert equal(worker.updates()[1], reference(grads))

    def test_weight_0_takes_part_and_counts_nothing(self):
        workers = team(World(), 3, [spec(0, 37)])
        grads = gradients(3, 37)
        push_weighted(workers[1], 1, None, 0)
        push_weighted(workers[0], 1, grads[0], 2)
        assert not workers[1].inbox
        push_weighted(workers[2], 1, grads[2], 6)
        (answer,) = workers[1].take(MessageType.UPDATED)
        assert answer.body == {"contributors": 2}
        expected = weighted_reference([grads[0], grads[2]], [2, 6])
        assert torch.allclose(payload_tensor(answer).double(), expected, rtol=1e-6)

    @pytest.mark.parametrize(("first", "second"), [(2, None), (None, 2), (0, None)])
    def test_weighted_and_unweighted_gradients_do_not_mix(self, first, second):
        world, workers = world_of(2, [spec(0, 5)])
        push_weighted(workers[0], 1, None if first == 0 else torch.ones(5), first)
        before = world.state_hash()
        (refusal,) = push_weighted(workers[1], 1, torch.ones(5), second)
        assert refusal.body["code"] == ErrorCode.BAD_VALUE
        weighs, not_ = (0, 1) if second is None else (1, 0)
        assert f"worker {weighs} weighs its gradient and worker {not_} does not" in refusal.body["text"]
        assert world.state_hash() == before
        # Who mends its ways is taken.
        workers[1].take()
        push_weighted(workers[1], 1, torch.ones(5), None if first is None else 4)
        assert equal(workers[0].updates()[1], torch.ones(5))

    @pytest.mark.parametrize(
        ("values", "weight", "words"),
        [(None, 2, "weight 2 and no gradient"), (torch.ones(5), 0, "weight 0 and a gradient")],
    )
    def test_a_weight_and_its_gradient_come_together(self, values, weight, words):
        (worker,) = team(World(), 1, [spec(0, 5)])
        (refusal,) = push_weighted(worker, 1, values, weight)
        assert (refusal.body["code"], words in refusal.body["text"]) == (ErrorCode.BAD_VALUE, True)


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


class TestQuorum:
    def test_the_first_ones_make_the_average_and_the_late_get_it_too(self):
        world, workers = world_of(3, [spec(0, 8)], rule=QUORUM_2)
        grads = gradients(3, 8)
        workers[2].push(0, 1, grads[2])
        workers[0].push(0, 1, grads[0])
        (late,) = workers[1].push(0, 1, grads[1])
        expected = reference([grads[0], grads[2]])
        assert all(equal(w.updates()[1], expected) for w in workers)
        assert late.body == {"contributors": 2, "late": True}
        assert world.shard.status(0.0).jobs["demo"].late == 1

    def test_quorum_of_more_than_are_left_is_all_that_are_left(self):
        workers = team(World(), 2, [spec(0, 8)], rule=QUORUM_2)
        push_all(workers, 1, torch.ones(8))
        workers[1].ask(MessageType.BYE)
        (answer,) = workers[0].push(0, 2, torch.ones(8))
        assert answer.body == {"contributors": 1}

    @pytest.mark.parametrize("weight", [None, 0])
    def test_who_brings_nothing_does_not_fill_the_quorum(self, weight):
        world, workers = world_of(3, [spec(0, 8)], rule=QUORUM_2)
        for worker in workers[:2]:
            push_weighted(worker, 1, None, weight)
            assert worker.updates() == {}
        push_weighted(workers[2], 1, torch.full((8,), 6.0), None if weight is None else 3)
        assert [worker.updates()[1].tolist() for worker in workers] == [[6.0] * 8] * 3
        assert world.shard.status(0.0).jobs["demo"].late == 0

    def test_the_fastest_is_at_most_history_exchanges_ahead(self):
        world, (fast, slow) = world_of(2, [spec(0, 8)], rule=QUORUM_1)
        for sequence in range(1, HISTORY + 1):
            assert fast.push(0, sequence, torch.full((8,), float(sequence)))
        assert fast.push(0, HISTORY + 1, torch.ones(8)) == []
        fast.take()
        assert len(rule_of(world).outcome._results) <= HISTORY + 1
        for sequence in range(1, HISTORY + 2):
            slow.push(0, sequence, torch.zeros(8))
        averages = slow.updates()
        assert [averages[s][0].item() for s in range(1, HISTORY + 1)] == list(range(1, HISTORY + 1))
        assert equal(averages[HISTORY + 1], fast.updates()[HISTORY + 1]), "released as soon as the slow one moved"
        assert world.shard.status(0.0).jobs["demo"].evicted == 0

    def test_after_a_restart_a_late_worker_does_not_make_a_second_average(self):
        world, (fast, slow) = world_of(2, [spec(0, 8)], rule=QUORUM_1)
        push_all((fast, slow), 1, torch.ones(8))
        fast.push(0, 2, torch.full((8,), 2.0))
        world.restart([fast, slow], [spec(0, 8)])
        assert slow.push(0, 2, torch.full((8,), 9.0)) == []
        slow.take()
        assert fast.push(0, 3, torch.ones(8))[0].type is MessageType.UPDATED
        # Nobody knows whether that average has its gradient: it goes on from another's state.
        (refused,) = slow.take(MessageType.ERROR)
        assert (refused.body["code"], refused.sequence) == (ErrorCode.FENCED, 2)
        assert slow.hello() == "join"


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
