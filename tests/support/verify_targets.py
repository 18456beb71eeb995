"""Targets for psengine verify: some that train alike under both wrappers, some made to differ, some that are wrong."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn
from torch.nn import functional as F

import psengine

WIDTH = 6


def network():
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))


def batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randint(3, (4,), generator=generator)


def batch_of_rank(step, rank):
    return batch(step, rank, 1)


def loss_of(model, rows):
    inputs, targets = rows
    return F.cross_entropy(model(inputs), targets)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain():
    return network(), batch_of_rank, loss_of, sgd


def is_ours(model):
    return isinstance(model, psengine.DistributedDataParallel)


class StepCount:
    """Forwards of one training; loss functions are made anew for each."""

    def __init__(self):
        self.steps = -1


def wrong_gradient():
    """At step 3, under psengine alone, one number of one parameter's gradient is half a percent too large."""
    count = StepCount()

    def loss(model, rows):
        count.steps += 1
        inputs, targets = rows
        value = F.cross_entropy(model(inputs), targets)
        if count.steps == 3 and is_ours(model):

            def spoil(parameter):
                parameter.grad[1, 2] *= 1.005
                handle.remove()

            handle = model.module[3].weight.register_post_accumulate_grad_hook(spoil)
        return value

    return network(), batch, loss, sgd


def wrong_buffer():
    """From step 2 on a running mean is another one under psengine."""
    count = StepCount()

    def loss(model, rows):
        count.steps += 1
        value = loss_of(model, rows)
        if count.steps == 2 and is_ours(model):
            model.module[1].running_mean.data[4] += 0.5
        return value

    return network(), batch, loss, sgd


def unreproducible():
    """Its noise comes from the operating system."""

    def loss(model, rows):
        noise = 1 + int.from_bytes(os.urandom(2), "big") / 2**17
        return loss_of(model, rows) * noise

    return network(), batch, loss, sgd


_calls = 0


def counts_calls():
    """State at module level: the second training of a process has another loss."""
    global _calls
    _calls += 1
    scale = 1.0 + 0.01 * (_calls == 2)
    return network(), batch, lambda model, rows: loss_of(model, rows) * scale, sgd


class Awkward(nn.Module):
    """Integers, NaN, complex numbers, sparse gradients, an unused parameter, several precisions."""

    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(10, WIDTH, sparse=True, mode="sum")
        self.brief = nn.Linear(WIDTH, 3, dtype=torch.bfloat16)
        self.exact = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hole", torch.tensor([1.0, float("nan"), float("-inf")]))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, inputs):
        self.count += 1
        self.phase *= 1j
        hidden = self.rows((inputs.abs() * 3).long().clamp(0, 9))
        return self.brief(hidden.bfloat16()).float() + self.exact(hidden.double()).float()


def awkward():
    return Awkward(), batch, loss_of, lambda p: torch.optim.SGD(p, lr=0.01), {"find_unused_parameters": True}


def lbfgs():
    return network(), batch, loss_of, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)


def adadelta():
    return network(), batch, loss_of, torch.optim.Adadelta


class NoColumnError(KeyError):
    """Looks into its data for words, and meanwhile other ranks see this one gone."""

    def __str__(self):
        time.sleep(0.4)
        return super().__str__()


def crashing():
    """Under psengine, in a backward after the first: other ranks notice at once that this one left."""
    count = StepCount()

    def fail(gradient):
        raise NoColumnError("no such column: price")

    def loss(model, rows):
        count.steps += 1
        value = loss_of(model, rows)
        if count.steps == 1 and torch.distributed.get_rank() == 1 and is_ours(model):
            value.register_hook(fail)
        return value

    return network(), batch, loss, sgd


def net_from_outside():
    net = network()
    return net, batch, lambda model, rows: loss_of(net, rows), sgd


def inner_module():
    return network(), batch, lambda model, rows: loss_of(model.module, rows), sgd


def called_without_graph():
    def loss(model, rows):
        with torch.no_grad():
            model(rows[0])
        return loss_of(model.module, rows)

    return network(), batch, loss, sgd


def never_finite():
    net = network()
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    return net, batch, loss_of, sgd


def no_finite_gradient():
    """The first loss is a number, its gradients are not."""

    def loss(model, rows):
        return (model(rows[0]) * 0).sum().sqrt()

    return network(), batch, loss, sgd


def finite_for_two_steps():
    count = StepCount()

    def loss(model, rows):
        count.steps += 1
        return loss_of(model, rows) * (1.0 if count.steps < 2 else float("nan"))

    return network(), batch, loss, sgd


class Trap(nn.Module):
    """The untaken side of a ``where`` has a gradient of NaN, of which the loss knows nothing."""

    def __init__(self):
        super().__init__()
        self.trap = nn.Parameter(torch.zeros(1))
        self.net = network()

    def forward(self, inputs):
        return self.net(inputs) + torch.where(torch.tensor(True), 0.0, self.trap.log())


def one_nan_gradient():
    return Trap(), batch, loss_of, sgd


def dying():
    def loss(model, rows):
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_of(model, rows)

    return network(), batch, loss, sgd


def hanging():
    def slow(step, rank):
        if rank == 1:
            time.sleep(600)
        return batch_of_rank(step, rank)

    return network(), slow, loss_of, sgd


_shared = network()


def one_model():
    return _shared, batch, loss_of, sgd


def with_arguments(width):
    return plain()


def three_parts():
    return plain()[:3]


def a_dict():
    return {"model": network()}


def no_module():
    return network, batch, loss_of, sgd


def wrapped_already():
    return psengine.DistributedDataParallel(network()), batch, loss_of, sgd


def odd_batch():
    return network(), lambda step: None, loss_of, sgd


def odd_options():
    return network(), batch, loss_of, sgd, {"bucket_size": 3}


def vector_loss():
    return network(), batch, lambda model, rows: model(rows[0]), sgd


def detached_loss():
    return network(), batch, lambda model, rows: loss_of(model, rows).detach(), sgd


def no_optimizer():
    return network(), batch, loss_of, lambda parameters: list(parameters)


not_a_function = 3
