"""Rule "apply" through a whole shard: torch's arithmetic, bounded staleness, and that nothing is applied twice."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import APPLY, World, codes, push_all, rule_of, spec, team

from psengine.parameter_server.server.interfaces import Sender
from psengine.protocol.frames import encode, payload_tensor
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.layout import ChunkKind, job_number
from psengine.protocol.messages import ErrorCode, Message, MessageType

OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.05}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
}


def rule(**options):
    return APPLY | options


def fleet(size, numel=6, *, values=None, optimizer=True, kind=ChunkKind.PARAMETER, world=None, **options):
    world = world or World()
    values = torch.zeros(numel) if values is None else values
    workers = team(world, size, [spec(0, numel, kind=kind)], values={0: values}, rule=rule(**options))
    if optimizer:
        for worker in workers:
            assert worker.configure(0, numel).type is MessageType.OK
    return world, workers


def gradient(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_like_torch(name):
    kind, options = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(gradient(40, 99))
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    world, workers = fleet(2, 40, values=parameter.detach().clone(), optimizer=False)
    for worker in workers:
        worker.configure(0, 40, kind, wire_groups(optimizer))
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
    _, workers = fleet(2, kind=ChunkKind.BUFFER, optimizer=False)
    workers[0].push(0, 1, torch.ones(6))
    (answer,) = workers[1].push(0, 1, torch.full((6,), 2.0))
    assert payload_tensor(answer).tolist() == [2.0] * 6


def test_parameters_need_configure_first():
    world, workers = fleet(1, optimizer=False)
    before = world.state_hash()
    assert codes(workers[0].push(0, 1, torch.ones(6))) == [ErrorCode.NOT_READY]
    assert world.state_hash() == before


class TestRefusals:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_gradients_change_nothing(self, bad):
        world, workers = fleet(1)
        workers[0].push(0, 1, torch.ones(6))
        values = rule_of(world).outcome.values.clone()
        poison = torch.ones(6)
        poison[3] = bad
        (answer,) = workers[0].push(0, 2, poison, 1)
        assert answer.body == {"refused": "non_finite"}
        assert answer.version == rule_of(world).version == 1
        assert torch.equal(payload_tensor(answer), values)
        assert world.shard.status(0.0).jobs["demo"].refused == {"non_finite": 1}
        (after,) = workers[0].push(0, 3, torch.ones(6), 1)
        assert after.body == {}

    def test_what_was_computed_before_an_eviction_is_stale_under_a_bound(self):
        world, workers = fleet(2, max_staleness=1)
        for sequence in (1, 2):
            push_all(workers, sequence, torch.ones(6))
        world.advance(6, workers[0])
        workers[0].push(0, 3, torch.ones(6), 4)
        assert workers[1].hello() == "ready"
        (answer,) = workers[1].push(0, 3, torch.ones(6), 4)
        assert answer.body == {"refused": "stale"}
        assert answer.version == 5
        workers[0].push(0, 4, torch.ones(6), 5)
        (answer,) = workers[1].push(0, 4, torch.ones(6), 6)
        assert answer.body == {}


@pytest.mark.parametrize(("weight", "values"), [(2, torch.ones(6)), (0, None)])
def test_an_asynchronous_gradient_has_no_weight(weight, values):
    world, (worker,) = fleet(1)
    before = world.state_hash()
    (refusal,) = worker.push(0, 1, values, body={"weight": weight})
    assert refusal.body["code"] == ErrorCode.BAD_VALUE
    assert "an asynchronous job averages nothing" in refusal.body["text"]
    assert world.state_hash() == before


class TestLoans:
    """Weights that a socket still reads; tests/parameter_server/server/test_sending.py has a real one."""

    @pytest.mark.parametrize("how", ["push", "store", "buffer"])
    def test_lent_weights_stay_as_they_are(self, how):
        kind = ChunkKind.BUFFER if how == "buffer" else ChunkKind.PARAMETER
        world, (first, second) = fleet(2, kind=kind, optimizer=how != "buffer")
        lent = self.lend(world, first, sequence=1)
        before = bytes(lent)
        if how == "store":
            second.ask(MessageType.STORE, key=0, payload=torch.full((6,), 9.0))
        else:
            second.push(0, 1, torch.full((6,), 9.0))
        assert bytes(lent) == before
        assert bytes(encode(second.ask(MessageType.PULL, key=0))[-1]) != before

    @staticmethod
    def lend(world, worker, sequence):
        fields = {"job": job_number(worker.job), "worker": worker.worker, "incarnation": worker.incarnation}
        message = Message(MessageType.PUSH, epoch=worker.epoch, key=0, sequence=sequence, **fields)
        message.dtype, message.numel, message.payload = torch.float32, 6, torch.ones(6)
        (answer,) = world.shard.handle(Sender(worker.route, ""), message, world.now_s)
        lent = encode(answer.message)[-1]
        answer.pins.pin(lent)
        return lent
