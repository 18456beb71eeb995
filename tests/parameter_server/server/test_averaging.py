"""Rule "average" through a whole shard: whose gradients are in an average, and that all get the same one."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.shard_world import AVERAGE, World, codes, push_all, rule_of, spec, team, world_of

from psengine.codecs.int8 import Int8
from psengine.codecs.onebit import OneBit
from psengine.codecs.powersgd import PowerSgd
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import ErrorCode, MessageType

QUORUM = AVERAGE | {"quorum": 2}


def gradients(size, numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Of very different sizes, so that another order of summation shows.
    scales = torch.logspace(-3, 3, size).unsqueeze(1)
    return list(torch.randn(size, numel, generator=generator) * scales)


def reference(grads):
    """Added up in the order given, in float32."""
    total = sum((one.float() for one in grads[1:]), grads[0].float())
    return (total / len(grads)).to(grads[0].dtype)


def named(step, *ranks):
    return tuple((rank, step) for rank in ranks)


class TestSums:
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_the_same_bits_for_every_order_of_arrival(self, size):
        workers = team(World(), size, [spec(0, 37)])
        for step, order in enumerate(itertools.permutations(range(size)), start=1):
            grads = gradients(size, 37, seed=step)
            for rank in order:
                assert not workers[rank].inbox
                workers[rank].push(0, step, grads[rank])
            for worker in workers:
                assert torch.equal(worker.updates()[step], reference(grads))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
    def test_buffers_become_those_of_the_lowest_rank(self, dtype):
        workers = team(World(), 3, [spec(0, 4, dtype, ChunkKind.BUFFER)])
        values = [torch.tensor([rank, 1, 0, rank]).to(dtype) for rank in range(3)]
        for rank in (2, 0, 1):
            workers[rank].push(0, 1, values[rank])
        assert all(torch.equal(worker.updates()[1], values[0]) for worker in workers)

    def test_non_finite_values_are_passed_on_and_counted(self):
        world, workers = world_of(2, [spec(0, 2)])
        workers[0].push(0, 1, torch.tensor([1.0, float("nan")]))
        workers[1].push(0, 1, torch.tensor([1.0, 1.0]))
        answer = workers[0].updates()[1]
        assert answer[0] == 1
        assert answer[1].isnan()
        assert world.shard.status().jobs["demo"].non_finite == 1

    def test_who_abstains_is_not_counted(self):
        workers = team(World(), 3, [spec(0, 8)])
        grads = gradients(3, 8)
        workers[0].push(0, 1, grads[0])
        workers[1].push(0, 1, None)
        (answer,) = workers[2].push(0, 1, grads[2])
        assert answer.body == {"contributors": 2}
        assert torch.equal(payload_tensor(answer), reference([grads[0], grads[2]]))
        *_, answer = [answer for worker in workers for answer in worker.push(0, 2, None)]
        assert answer.body == {"contributors": 0}
        assert torch.equal(payload_tensor(answer), torch.zeros(8))


class TestViews:
    @pytest.mark.parametrize("codec", [Int8(), OneBit(), PowerSgd(rank=1)], ids=repr)
    @pytest.mark.parametrize("is_spoiled", [False, True])
    def test_a_step_that_is_taken_back_leaves_the_residual_as_it_was(self, codec, is_spoiled):
        matrix = ChunkSpec(0, ChunkKind.PARAMETER, torch.float32, 64, (Segment("p0", (8, 8), (8, 1), 0, 64),))
        codec = codec.for_pieces([(64, 8)])
        form = codec.payload_spec(64, torch.float32)

        def payload(seed, scale=1.0):
            one = torch.empty(form.numel, dtype=form.dtype)
            codec.encode(torch.randn(64, generator=torch.Generator().manual_seed(seed)) * scale, one)
            return one

        found = []
        for is_undone in (False, True):
            world, workers = world_of(2, [matrix], rule=AVERAGE | {"compress": repr(codec)})
            push_all(workers, 1, payload(1))
            if is_undone:
                workers[0].push(0, 2, payload(7))
                workers[1].push(0, 2, payload(8, torch.inf if is_spoiled else 1.0))
                assert all(2 in worker.updates() for worker in workers)
                world.publish(workers, from_step=2)
            for step in (2, 3):
                push_all(workers, step, payload(step))
            found.append(workers[0].updates())
        assert all(torch.equal(found[0][step], found[1][step]) for step in (2, 3))

    def test_who_lacks_more_than_the_last_step_has_to_take_state(self):
        world, workers = world_of(2, [spec()])
        world.publish(workers, from_step=5)
        assert codes(workers[0].push(0, 3, torch.ones(4))) == [ErrorCode.FENCED]
        assert workers[0].push(0, 4, torch.ones(4)) == []


class TestQuorum:
    def test_those_named_count_and_others_are_late(self):
        world, workers = world_of(3, [spec(0), spec(1)], rule=QUORUM)
        for key in (0, 1):
            workers[0].push(key, 1, torch.ones(4))
            workers[2].push(key, 1, torch.full((4,), 3.0))
        workers[1].push(0, 1, torch.full((4,), 9.0))  # here in one chunk only
        assert not any(worker.updates() for worker in workers)
        world.release(workers[:1], 1, contributors=named(1, 0, 2))
        late = workers[1].take(MessageType.UPDATED)
        late += workers[1].push(1, 1, torch.full((4,), 9.0))
        assert [answer.body for answer in late] == [{"contributors": 2, "late": True}] * 2
        for worker in (workers[0], workers[2]):
            for answer in worker.take(MessageType.UPDATED):
                assert payload_tensor(answer).tolist() == [2.0] * 4
                assert answer.body == {"contributors": 2}
        assert world.shard.status().jobs["demo"].late == 2

    def test_where_all_abstain_nobody_is_late(self):
        world, workers = world_of(3, [spec()], rule=QUORUM)
        workers[0].push(0, 1, None)
        world.release(workers, 1, contributors=())
        found = workers[0].take(MessageType.UPDATED)
        found += [answer for worker in workers[1:] for answer in worker.push(0, 1, None)]
        assert [answer.body for answer in found] == [{"contributors": 0}] * 3
        assert world.shard.status().jobs["demo"].late == 0

    def test_averages_are_kept_for_who_is_late(self):
        world, workers = world_of(3, [spec()], rule=QUORUM)
        for step in range(1, 9):
            push_all(workers[:2], step, torch.full((4,), float(step)))
            world.release(workers, step, contributors=named(step, 0, 1))
        for step in range(1, 9):
            (answer,) = workers[2].push(0, step, None)
            assert payload_tensor(answer).tolist() == [float(step)] * 4
        assert rule_of(world).size_bytes() == 2 * 16  # the deposited values, and the last average


def test_deposited_values_do_not_come_back():
    world, (worker,) = world_of(1, [spec()])
    worker.ask(MessageType.STORE, key=0, payload=torch.full((4,), 3.0), version=6)
    world.start(8, world.shard.capture())
    world.publish([worker])
    assert worker.pull(0).body["code"] == ErrorCode.NOT_READY  # other shards may have newer ones
