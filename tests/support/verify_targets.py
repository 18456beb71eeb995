"""Targets for psengine verify: some that train alike under both wrappers, some made to differ, some that are wrong."""

import functools
import itertools
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


def made(**parts):
    """A target's parts; those that are not named are as in ``plain``."""
    return tuple({"model": network(), "batch": batch, "loss": loss_of, "optimizer": sgd, **parts}.values())


def counted(loss):
    """``loss(step, model, rows)`` as a loss function; each training makes its own."""
    steps = itertools.count()
    return lambda model, rows: loss(next(steps), model, rows)


def is_ours(model):
    return isinstance(model, psengine.DistributedDataParallel)


def plain():
    return made(batch=batch_of_rank)


def wrong_gradient():
    """At step 3, under psengine alone, one number of one parameter's gradient is half a percent too large."""

    def loss(step, model, rows):
        value = loss_of(model, rows)
        if step == 3 and is_ours(model):

            def spoil(parameter):
                parameter.grad[1, 2] *= 1.005
                handle.remove()

            handle = model.module[3].weight.register_post_accumulate_grad_hook(spoil)
        return value

    return made(loss=counted(loss))


def wrong_buffer():
    """From step 2 on a running mean is another one under psengine."""

    def loss(step, model, rows):
        value = loss_of(model, rows)
        if step == 2 and is_ours(model):
            model.module[1].running_mean.data[4] += 0.5
        return value

    return made(loss=counted(loss))


_calls = itertools.count(1)


def counts_calls():
    """State at module level: the second training of a process has another loss."""
    scale = 1.0 + 0.01 * (next(_calls) == 2)
    return made(loss=lambda model, rows: loss_of(model, rows) * scale)


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
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    return made(model=Awkward(), optimizer=optimizer, options={"find_unused_parameters": True})


def thawed():
    model, batch_fn, loss_fn, optimizer_fn = made()[:4]
    first = next(model.children())
    first.requires_grad_(False)

    def thawing_loss(model, batch):
        first.requires_grad_(True)
        return loss_fn(model, batch)

    return model, batch_fn, thawing_loss, optimizer_fn


def lbfgs():
    return made(optimizer=functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2))


class NoColumnError(KeyError):
    """Looks into its data for words, and meanwhile other ranks see this one gone."""

    def __str__(self):
        time.sleep(0.4)
        return super().__str__()


def crashing():
    """Under psengine, in a backward after the first: other ranks notice at once that this one left."""

    def fail(gradient):
        raise NoColumnError("no such column: price")

    def loss(step, model, rows):
        value = loss_of(model, rows)
        if step == 1 and torch.distributed.get_rank() == 1 and is_ours(model):
            value.register_hook(fail)
        return value

    return made(loss=counted(loss))


def net_from_outside():
    net = network()
    return made(model=net, loss=lambda model, rows: loss_of(net, rows))


def called_without_graph():
    def loss(model, rows):
        with torch.no_grad():
            model(rows[0])
        return loss_of(model.module, rows)

    return made(loss=loss)


def never_finite():
    net = network()
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    return made(model=net)


def finite_for_two_steps():
    return made(loss=counted(lambda step, model, rows: loss_of(model, rows) * (1.0 if step < 2 else float("nan"))))


def dying():
    def loss(model, rows):
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_of(model, rows)

    return made(loss=loss)


def hanging():
    def slow(step, rank):
        if rank == 1:
            time.sleep(600)
        return batch_of_rank(step, rank)

    return made(batch=slow)


_shared = network()


def one_model():
    return made(model=_shared)


def with_arguments(width):
    return plain()


def three_parts():
    return plain()[:3]


def wrapped_already():
    return made(model=psengine.DistributedDataParallel(network()))


def odd_batch():
    return made(batch=lambda step: None)


def detached_loss():
    return made(loss=lambda model, rows: loss_of(model, rows).detach())


def no_optimizer():
    return made(optimizer=list)


not_a_function = 3
