"""Gather everybody's gradients, step once with the average, hand weights back: two halves of other rules, paired."""

from __future__ import annotations

import random

import pytest
import torch
from support.shard_world import SGD, ErrorCode, Worker, World, rule_of, spec

from psengine.parameter_server.server.rules import registry
from psengine.parameter_server.server.rules.step import StepOutcome
from psengine.parameter_server.server.rules.together import Together
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import MessageType

OUTER = {"name": "outer", "quorum": None}
NESTEROV = SGD | {"lr": 0.7, "momentum": 0.9, "nesterov": True}
NUMEL = 6


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(registry.RULES, "outer", registry.RuleKind(Together, StepOutcome))


def start(size, rule=OUTER, dtype=torch.float64, **configuration):
    """Workers of a job with one chunk, all in."""
    world = World(codec=False)
    workers = [Worker(world, rank, rule=rule, world_size=size) for rank in range(size)]
    chunk = spec(0, NUMEL, dtype)
    workers[0].initialise([chunk], {0: torch.ones(NUMEL, dtype=dtype)})
    workers[0].configure(0, NUMEL, **({"groups": [NESTEROV]} | configuration))
    for worker in workers[1:]:
        assert worker.hello() == "ready"
        worker.take()
    return world, workers


class Oracle:
    """One process and ``torch.optim``."""

    def __init__(self, dtype=torch.float64):
        self.weights = torch.nn.Parameter(torch.ones(NUMEL, dtype=dtype))
        self.optimizer = torch.optim.SGD([self.weights], lr=0.7, momentum=0.9, nesterov=True)

    def step(self, gradients):
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        self.weights.grad = total / len(gradients)
        self.optimizer.step()
        return self.weights.detach()


def gradient_of(rank, sequence, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * sequence + rank)
    return torch.randn(NUMEL, generator=generator, dtype=dtype)


def answers(workers):
    """(sequence, version, weights) of the answers that came, one for each worker that got one."""
    found = [message for worker in workers for message in worker.take(MessageType.UPDATED)]
    return [(message.sequence, message.version, payload_tensor(message)) for message in found]


def exchange(world, workers, sequence, oracle, order=None):
    """Everybody contributes, in some order; all get the weights that the oracle has."""
    gradients = [gradient_of(worker.rank, sequence) for worker in workers]
    for index in order or range(len(workers)):
        assert not answers(workers)
        workers[index].push(0, sequence, gradients[index], version=sequence - 1)
    expected = oracle.step(gradients)
    found = answers(workers)
    assert [(number, version) for number, version, _ in found] == [(sequence, sequence)] * len(workers)
    assert all(torch.equal(weights, expected) for _, _, weights in found)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_everybodys_average_is_one_step_of_torch_whatever_the_order_of_arrival(size):
    world, workers = start(size)
    oracle = Oracle()
    for sequence in range(1, 8):
        exchange(world, workers, sequence, oracle, random.Random(sequence).sample(range(size), size))
    status = world.shard.status(world.now_s).jobs["demo"]
    assert (status.averaged, status.applied, status.version_max) == (7, 7 * size, 7)


def test_a_quorum_steps_and_who_is_late_gets_the_weights_of_now():
    world, workers = start(3, OUTER | {"quorum": 2})
    oracle = Oracle()
    # The first exchange waits for all that are expected, and are here; afterwards two are enough.
    exchange(world, workers[:2], 1, oracle)
    exchange(world, workers[:2], 2, oracle)
    before = rule_of(world).outcome.values.clone()
    workers[2].push(0, 1, gradient_of(2, 1))
    ((sequence, version, weights),) = answers(workers)
    assert (sequence, version) == (1, 2)
    assert torch.equal(weights, oracle.weights.detach())
    assert torch.equal(rule_of(world).outcome.values, before)
    assert world.shard.status(world.now_s).jobs["demo"].late == 1


def test_a_joiner_needs_no_donor_it_pulls_the_weights_and_goes_on_behind_them():
    world, workers = start(2)
    oracle = Oracle()
    for sequence in (1, 2):
        exchange(world, workers, sequence, oracle)
    joiner = Worker(world, 2, rule=OUTER, world_size=2)
    assert joiner.hello() == "ready"
    joiner.take()
    values = joiner.pull(0)
    assert values.version == 2
    assert torch.equal(payload_tensor(values), oracle.weights.detach())
    exchange(world, [*workers, joiner], 3, oracle)
    assert joiner.ask(MessageType.JOIN).type is not MessageType.OK


def test_after_a_restart_weights_and_momentum_go_on_from_the_snapshot():
    world, workers = start(2)
    oracle = Oracle()
    for sequence in (1, 2, 3):
        exchange(world, workers, sequence, oracle)
    world.advance(1, *workers)
    world.start(8, world.shard.durable.capture())
    for worker in workers:
        assert worker.hello() == "ready"
        worker.take()
        body = {"chunks": [[0, 3, 3, 0]], "more": False}
        assert worker.ask(MessageType.PROGRESS, body=body).body["lost"] == [0, 0, 0]
    exchange(world, workers, 4, oracle)


def test_a_gradient_that_is_not_finite_is_left_out_and_its_worker_is_told():
    _, workers = start(2)
    workers[0].push(0, 1, torch.full((NUMEL,), torch.nan, dtype=torch.float64))
    workers[1].push(0, 1, gradient_of(1, 1))
    first, second = (worker.take(MessageType.UPDATED)[0] for worker in workers)
    assert (first.body.get("refused"), second.body.get("refused")) == ("non_finite", None)
    assert torch.equal(payload_tensor(first), Oracle().step([gradient_of(1, 1)]))


def test_hyperparameters_that_make_no_sense_are_refused_before_anything_is_gathered():
    world, workers = start(2)
    before = world.state_hash()
    (error,) = workers[0].push(0, 1, gradient_of(0, 1), body={"groups": [NESTEROV, NESTEROV]})
    assert error.body["code"] == ErrorCode.BAD_VALUE
    assert world.state_hash() == before
    workers[0].take()
    exchange(world, workers, 1, Oracle())
