"""Steps of strategy "async" over parameters of another job's model, and refused ones."""

import copy
from typing import Any

import torch
from support.expectations import raises
from support.server_training import assert_equal, at_servers, network, state_of
from torch import nn

import psengine


def backward(model: nn.Module, step: int = 0) -> None:
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def start(module: nn.Module, job: str) -> tuple[Any, torch.optim.Optimizer]:
    wrapped = psengine.DistributedDataParallel(module, strategy=psengine.AsyncServer(job=job, timeout_s=20))
    return wrapped, psengine.DistributedOptimizer(momentum(module), wrapped)


def two_models() -> tuple[nn.Module, nn.Module]:
    """With a trunk in common."""
    torch.manual_seed(0)
    trunk = nn.Linear(5, 7)
    return nn.Sequential(trunk, nn.Linear(7, 3)), nn.Sequential(trunk, nn.Linear(7, 2))


@at_servers(1)
def test_a_trunk_that_another_job_trained_is_written_when_its_model_is_wrapped(rank, world_size):
    plain, other = two_models()
    earlier = copy.deepcopy(other)
    optimizer = momentum(earlier)
    backward(earlier)
    optimizer.step()
    other.load_state_dict(earlier.state_dict())
    optimizer = momentum(plain)
    backward(plain, 1)
    optimizer.step()

    left, right = two_models()
    model, optimizer = start(copy.deepcopy(right), "known")
    backward(model)
    optimizer.step()
    model.leave()
    model, optimizer = start(left, "left")
    again, _ = start(right, "known")
    backward(model, 1)
    optimizer.step()
    assert_equal(state_of(nn.ModuleList([left, right])), state_of(nn.ModuleList([plain, other])))
    model.leave()
    again.leave()


@at_servers(1)
def test_a_gradient_of_an_ignored_parameter_is_refused(rank, world_size):
    module = network()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    model, optimizer = start(module, "ignored")
    backward(model)
    texts = ["parameter 0 of group 0 (shape (7, 5)) has a gradient", "an optimizer of its own"]
    with raises(psengine.ConfigurationError, *texts):
        optimizer.step()
    # The way out that it names.
    other = torch.optim.SGD([module[0].weight], lr=0.1)
    other.step()
    other.zero_grad()
    optimizer.step()
    model.leave()


@at_servers(1)
def test_a_hook_that_returns_nonsense_is_refused(rank, world_size):
    model, optimizer = start(network(), "nonsense")
    backward(model)
    optimizer.register_step_pre_hook(lambda *_: "nonsense")
    with raises(RuntimeError, "must return None or a tuple of (new_args, new_kwargs), but got nonsense"):
        optimizer.step()
    model.leave()
