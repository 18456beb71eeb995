"""Which gradients count under the server strategies: unused, sparse, not finite, from hooks; of a common trunk."""

import copy
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.processes import run_ranks
from support.server_training import assert_equal, at_servers, batches, network, state_of, use, wrap
from torch import nn
from torch.nn import functional as F

import psengine
from psengine.errors import ConfigurationError


def test_sparse_gradients_are_refused_before_any_server_is_met():
    """Else the others would meet there, and wait."""
    for strategy in (
        psengine.AsyncServer(servers="tcp://127.0.0.1:1"),
        psengine.SyncServer(servers="tcp://127.0.0.1:1"),
    ):
        advice = r"sparse gradients of 'tokens\.weight'.* Fix: psengine\.ServerEmbedding or ServerEmbeddingBag"
        with pytest.raises(ConfigurationError, match=advice):
            psengine.DistributedDataParallel(
                nn.ModuleDict({"tokens": nn.Embedding(5, 3, sparse=True)}), strategy=strategy
            )


class LeftOrRight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(300, 300), nn.Linear(300, 300)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, use_left: bool = True) -> torch.Tensor:
        self.seen += 1
        return self.left(x) if use_left else self.right(x)


def branches(rank: int, world_size: int, address: str, name: str, options: dict[str, Any]) -> Any:
    use(address)
    torch.manual_seed(0)
    model = LeftOrRight()
    strategies = {"sync": psengine.SyncAllReduce, "sync-server": psengine.SyncServer, "async": psengine.AsyncServer}
    wrapped = psengine.DistributedDataParallel(
        model,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.1,
        strategy=strategies[name](**options),
    )
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), wrapped)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        # On both ranks the same branch, then one each: nobody may wait for a gradient that never comes.
        wrapped(torch.randn(4, 300, generator=generator), step % 2 == (rank if step > 3 else 0)).sum().backward()
        optimizer.step()
    state = state_of(model)
    wrapped.leave()
    return state


def test_buckets_that_nobody_uses_are_skipped_alike(server):
    ours = run_ranks(branches, 2, server.addresses[0], "sync-server", {"job": "skip"})
    # Native DDP itself aborts where ranks use different branches.
    oracle = run_ranks(branches, 2, "", "sync", {})
    for name, tensor in oracle[0].items():
        if name != "seen":  # on rank 1 the last forward's, until the next begins
            assert torch.equal(ours[0][name], tensor)
            assert torch.equal(ours[1][name], tensor)


def test_a_bound_does_not_wait_for_branches_that_a_worker_does_not_use(server):
    options = {"job": "heads", "max_staleness": 0, "timeout_s": 20}
    first, second = run_ranks(branches, 2, server.addresses[0], "async", options)
    # Infinite buffers are nobody's mistake, and every worker keeps its own, from what it found when it came.
    assert first["seen"].item() == 6
    assert second["seen"].item() >= 6
    assert first["mask"].isinf().sum() == second["mask"].isinf().sum() == 10


@at_servers(1)
def test_servers_refuse_a_scale_that_only_a_fused_kernel_divides_by(rank, world_size):
    wrapped = wrap(psengine.AsyncServer(job="own scale"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1, fused=True), wrapped)
    before = state_of(wrapped.module)
    wrapped.eval()  # its buffers stay
    x, y = batches(0)[0]
    F.cross_entropy(wrapped(x), y).backward()
    optimizer.grad_scale = torch.tensor(8.0)
    with raises(ConfigurationError, "optimizer.grad_scale (expected it unset, got 8.0)"):
        optimizer.step()
    assert_equal(state_of(wrapped.module), before)
    wrapped.leave()


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
