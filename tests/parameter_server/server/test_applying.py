"""Rule "apply" through a whole shard: torch's arithmetic, bounded staleness, and that nothing is applied twice."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import APPLY, Worker, World, codes, push_all, rule_of, spec, team

from psengine.parameter_server.server.interfaces import Sender
from psengine.protocol.frames import encode, payload_tensor
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.layout import ChunkKind, job_number
from psengine.protocol.messages import ErrorCode, Message, MessageType


def fleet(size, numel=6, *, values=None, kind=ChunkKind.PARAMETER, optimizer=None, **options):
    world = World()
    values = torch.zeros(numel) if values is None else values
    chunks = [spec(0, numel, kind=kind)]
    return world, team(world, size, chunks, values={0: values}, rule=APPLY | options, optimizer=optimizer)


def gradient(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def whole(world):
    """All that the shard would keep."""
    chunks = [chunk for job in world.shard.capture() for chunk in job.chunks]
    return [(chunk.meta, {name: tensor.tolist() for name, tensor in chunk.tensors.items()}) for chunk in chunks]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        ("Adam", {"lr": 0.01, "amsgrad": True}),
    ],
)
def test_steps_like_torch(kind, options):
    parameter = torch.nn.Parameter(gradient(40, 99))
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    configured = {"name": kind, "groups": wire_groups(optimizer)}
    world, workers = fleet(2, 40, values=parameter.detach().clone(), optimizer=configured)
    version, counts = 0, [0, 0]
    for step, rank in enumerate([0, 1, 1, 0, 0, 1, 0]):
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 0.5
        parameter.grad = gradient(40, step)
        counts[rank] += 1
        body = {"groups": wire_groups(optimizer)}
        (answer,) = workers[rank].push(0, counts[rank], parameter.grad, version, body=body)
        optimizer.step()
        version = answer.version
        assert torch.equal(payload_tensor(answer), parameter.detach())
    assert version == 7
    assert rule_of(world).version == 7


def test_a_buffer_takes_the_newest_values():
    _, workers = fleet(2, kind=ChunkKind.BUFFER)
    workers[0].push(0, 1, torch.ones(6))
    (answer,) = workers[1].push(0, 1, torch.full((6,), 2.0))
    assert payload_tensor(answer).tolist() == [2.0] * 6


def test_parameters_need_configure_first():
    world = World()
    worker = Worker(world, 0, rule=APPLY)
    worker.begin()
    worker.register(spec())
    world.publish([worker])
    before = whole(world)
    assert codes(worker.push(0, 1, torch.ones(4))) == [ErrorCode.NOT_READY]
    assert whole(world) == before


class TestRefusals:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_gradients_change_nothing(self, bad):
        world, workers = fleet(1)
        workers[0].push(0, 1, torch.ones(6))
        values = rule_of(world).values.clone()
        poison = torch.ones(6)
        poison[3] = bad
        (answer,) = workers[0].push(0, 2, poison, 1)
        assert answer.body == {"refused": "non_finite"}
        assert answer.version == rule_of(world).version == 1
        assert torch.equal(payload_tensor(answer), values)
        assert world.shard.status().jobs["demo"].refused == {"non_finite": 1}
        (after,) = workers[0].push(0, 3, torch.ones(6), 1)
        assert after.body == {}

    def test_what_was_computed_before_an_eviction_is_stale_under_a_bound(self):
        world, workers = fleet(2, max_staleness=1)
        push_all(workers, 1, torch.ones(6))
        world.publish(workers[:1])
        workers[0].push(0, 2, torch.ones(6), 2)
        world.publish(workers)
        workers[1].resume()
        world.release(workers, 2)
        (answer,) = workers[1].push(0, 2, torch.ones(6), 2)
        assert answer.body == {"refused": "stale"}
        assert answer.version == 3
        (answer,) = workers[1].push(0, 3, torch.ones(6), 3)
        assert answer.body == {}

    def test_a_gradient_that_the_optimizer_refuses_leaves_the_compensation_as_it_was(self):
        options = {"delay_compensation": 1.0, "compensation_decay": 0.9}
        world, (worker,) = fleet(1, **options)
        worker.push(0, 1, torch.ones(6))
        before = whole(world)
        wrong = {"groups": [{"lr": -1.0}]}
        assert codes(worker.push(0, 2, torch.ones(6), 1, body=wrong)) != []
        assert whole(world) == before


class TestLoans:
    """Weights that a socket still reads; tests/parameter_server/server/test_sending.py has a real one."""

    @pytest.mark.parametrize("how", ["push", "store", "buffer"])
    def test_lent_weights_stay_as_they_are(self, how):
        kind = ChunkKind.BUFFER if how == "buffer" else ChunkKind.PARAMETER
        world, (first, second) = fleet(2, kind=kind)
        lent = self.lend(world, first)
        before = bytes(lent)
        if how == "store":
            second.ask(MessageType.STORE, key=0, payload=torch.full((6,), 9.0))
        else:
            second.push(0, 1, torch.full((6,), 9.0))
        assert bytes(lent) == before
        assert bytes(encode(second.ask(MessageType.PULL, key=0))[-1]) != before

    @staticmethod
    def lend(world, worker):
        fields = {"job": job_number(worker.job), "worker": worker.worker, "incarnation": worker.incarnation}
        values = {"dtype": torch.float32, "numel": 6, "payload": torch.ones(6)}
        message = Message(MessageType.PUSH, key=0, sequence=1, view=worker.view, **fields, **values)
        (answer,) = world.shard.apply(message, Sender(worker.route, ""))
        lent = encode(answer.message)[-1]
        answer.place.hold(lent)
        return lent
