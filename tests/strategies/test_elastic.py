"""Strategy "sync:virtual_workers=V": native DDP's bits with V ranks, whoever plays the virtual workers."""

import hashlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.processes import in_ranks, run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import psengine
from psengine.errors import ConfigurationError, FencedError, ReductionError
from psengine.strategies.elastic.dealing import deal
from psengine.strategies.elastic.membership import Group, Member
from psengine.strategies.elastic.player import Player

EPOCHS = 2


class Net(nn.Module):
    """Convolutions, running statistics, dropout, a layer that some batches do not use, parameters large and small."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Sequential(nn.Linear(216, 301), nn.ReLU(), nn.Dropout(0.2), nn.Linear(301, 211))
        self.head = nn.Linear(211, 5)
        self.spare = nn.Linear(211, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.norm(self.convolution(x)).flatten(1))
        out = self.head(hidden)
        if x[0, 0, 0, 0] > 0.5:
            out = out + self.spare(hidden)
        return (out * self.scale).float()


def digest_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    tensors = [*network.state_dict().values(), *gradients, *states]
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def train(rank: int, world_size: int, strategy: str, options: dict[str, Any], keeps_gradients: bool) -> list[Any]:
    """Digests after each epoch, and the means of what was recorded."""
    torch.manual_seed(3)
    network = Net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    if strategy == "native":
        model: Any = nn.parallel.DistributedDataParallel(network, **options)
    else:
        model = psengine.DistributedDataParallel(network, strategy=strategy, **options)
        optimizer = psengine.DistributedOptimizer(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    if strategy != "native":
        model.register_state("scheduler", scheduler)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(89, 3, 8, 8, generator=generator)
    dataset = TensorDataset(images, torch.randint(5, (89,), generator=generator))
    loader = psengine.ElasticLoader(dataset, batch_size=4, seed=7)
    seen: list[Any] = []
    for epoch in loader.epochs(EPOCHS):
        for step in loader.steps(epoch):
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            for x, y in step.batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.record(loss)
            seen.append((step.mean(), torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()))
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            network.eval()
            model(images[:8])
            network.train()
        seen.append(digest_of(network, optimizer) if rank == 0 else None)
    return seen


CASES = {
    "plain": ({"bucket_cap_mb": 0.1, "find_unused_parameters": True}, False),
    "zeroed gradients": ({"bucket_cap_mb_list": [0.05, 0.2], "find_unused_parameters": True}, True),
}


@pytest.mark.parametrize("virtual_workers", [3, 4])
@pytest.mark.parametrize("case", CASES)
def test_native_bits_with_any_number_of_workers(case, virtual_workers):
    expected = run_ranks(train, virtual_workers, "native", *CASES[case])[0]
    for workers in (1, 2, virtual_workers):
        for seen in run_ranks(train, workers, f"sync:virtual_workers={virtual_workers}", *CASES[case]):
            numbers = [one for one in seen if not isinstance(one, (str, type(None)))]
            assert numbers == [one for one in expected if not isinstance(one, str)], "means and norms, on every worker"
            assert all(one == other for one, other in zip(seen, expected, strict=True) if one is not None)


def train_two(rank: int, world_size: int) -> list[Any]:
    """The weights of two models; a batch says which one has its backward first."""
    torch.manual_seed(0)
    models = [psengine.DistributedDataParallel(nn.Linear(8, 5), strategy="sync:virtual_workers=3") for _ in "ab"]
    optimizers = [psengine.DistributedOptimizer(torch.optim.SGD(one.parameters(), 0.1), one) for one in models]
    x = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    loader = psengine.ElasticLoader(TensorDataset(x, x.argmax(1) % 5), batch_size=3, seed=1)
    for step in loader.steps(next(loader.epochs(1))):
        for inputs, labels in step.batches:
            for model in models if inputs[0, 0] > 0 else models[::-1]:
                F.cross_entropy(model(inputs), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.tolist() for model in models for parameter in model.parameters()]


def test_batches_may_say_which_model_goes_first():
    """Native DDP waits for ever here: a backward waits for the same model's on all ranks."""
    (alone,) = run_ranks(train_two, 1)
    assert run_ranks(train_two, 2) == [alone, alone]


def test_whoever_lives_keeps_what_it_plays():
    owners: dict[int, int] = {}
    for workers in ([0, 1, 2], [0, 2], [0, 2, 5], [5], [1, 5], [0, 1, 2, 3, 4, 5, 6, 7]):
        former, owners = owners, deal(8, workers, owners)
        loads = [list(owners.values()).count(worker) for worker in workers]
        assert sorted(owners) == list(range(8))
        assert max(loads) - min(loads) <= 1
        kept = [v for v in former if owners[v] == former[v]]
        played = list(former.values())
        may_stay = [min(load, played.count(worker)) for worker, load in zip(workers, loads, strict=True)]
        assert len(kept) == sum(may_stay)


def test_who_has_a_state_that_others_do_not_know_does_not_go_on_from_it():
    """It lacks the averages of its step, and nobody gives them to a worker without a state."""
    members = Member(worker=0, completed=5), Member(worker=1, completed=None)
    group = Group(members=members, collective=SimpleNamespace(rank=1))
    player = Player(2, SimpleNamespace(has_news=True, regroup=lambda *_: group))
    player.completed, player._step = 4, 5
    with raises(FencedError, "expected the averages of step 5, got those of step 4"):
        player.begin_step(5)


def wrap(strategy: str = "sync:virtual_workers=2", **options: Any) -> Any:
    return psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy, **options)


@in_ranks(1)
def test_misuse_is_refused(rank: int, world_size: int) -> None:
    """Each refusal, by one worker that plays both virtual workers."""
    for given in ("static_graph", "gradient_as_bucket_view", "check_finite", "skip_all_reduce_unused_params"):
        with raises(ConfigurationError, f"a model without {given}=True"):
            wrap(**{given: True, "find_unused_parameters": True})
    with raises(ConfigurationError, "at least 1, got 0"):
        wrap("sync:virtual_workers=0")
    with raises(ConfigurationError, "got compress beside it"):
        wrap("sync:virtual_workers=2,compress=bf16")
    model = wrap()
    with raises(ReductionError, "got one outside the loop"):
        model(torch.ones(1, 2)).sum().backward()
    for together in (psengine.mean, psengine.sum, psengine.gather):
        with raises(ConfigurationError, f"psengine.{together.__name__}()", "step.record(value)"):
            together(1.0)
    model, batches = begun()
    (x,) = next(batches)
    model(x).sum().backward()
    with raises(ReductionError, "got a second one"):
        model(x).sum().backward()
    model, batches = begun()
    (optimizer,) = model._optimizers
    (x,) = next(batches)
    model(x).sum().backward()
    with raises(ReductionError, "got one before"):
        optimizer.step()
    next(batches)
    with raises(ReductionError, "virtual worker 1 had no backward"):
        next(batches)
    for left in (1.0, -0.0, math.nan):
        model, batches = begun()
        model.module.bias.grad = torch.tensor([0.0, left])
        with raises(ReductionError, "the gradient of 'bias' is left from another step", "optimizer.zero_grad()"):
            next(batches)

    with raises(ConfigurationError, "got no optimizer"):
        next(loader_of(wrap()).epochs(1))
    model = wrap()
    again = psengine.DistributedDataParallel(model.module, strategy="sync:virtual_workers=2")
    with raises(ConfigurationError, "got one that is in two"):
        next(loader_of(again).epochs(1))
    del again
    model = wrap()
    scheduler = torch.optim.lr_scheduler.StepLR(stepped(model), 1)
    with raises(ConfigurationError, "model.register_state('scheduler', scheduler)"):
        next(loader_of(model).epochs(1))
    del scheduler


def stepped(model: Any) -> torch.optim.Optimizer:
    return psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def loader_of(model: Any, seed: int = 0) -> Any:
    return psengine.ElasticLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, seed=seed, model=model)


def begun() -> Any:
    """A model, and the batches of its first step."""
    model = wrap()
    model.optimizer = stepped(model)  # it lives as long as the model
    loader = loader_of(model)
    return model, next(loader.steps(next(loader.epochs(1)))).batches


def differ(rank: int, world_size: int) -> None:
    """Workers that do not fit together, two or three of them."""
    seed, texts = 0, ("at most 2 workers, got 3",)
    if world_size == 2:
        seed, texts = rank, ("rank 1 differs", "seed", "(expected 0, got 1)")
    model = wrap()
    optimizer = stepped(model)
    with raises(ConfigurationError, *texts):
        next(loader_of(model, seed).epochs(1))
    del optimizer


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_do_not_fit_are_refused(workers):
    run_ranks(differ, workers)
