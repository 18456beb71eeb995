"""``model.switch_strategy``: weights stay, optimizers go on, and what cannot be is refused before anything changes."""

import copy
import os
import signal

import torch
from support.expectations import raises
from support.processes import free_port, in_ranks, run_ranks
from support.server_process import running_server
from support.server_training import at_servers
from torch import nn

import psengine
from psengine.errors import ConfigurationError, PSEngineError, ReductionError, ReplicaMismatchError


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 37), nn.BatchNorm1d(37), nn.Tanh(), nn.Linear(37, 2))


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.module.state_dict().values()]


def slots(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[index]["momentum_buffer"].clone() for index in sorted(state)]


ROUTE = (
    *("local:every=4", "sync:shard_optimizer=true", "async", "diloco:every=4", "sync-server"),
    *("diloco-server:every=2", "async", "sync"),
)


@at_servers(2)
def test_a_training_goes_through_the_strategies(rank, world_size):
    os.environ["PSENGINE_JOB"] = "travel"
    model = psengine.DistributedDataParallel(make_model(), strategy="sync")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    step = 0
    for name in ROUTE:
        for _ in range(3):
            step_once(model, optimizer, rank, step)
            scheduler.step()
            step += 1
        former = model.strategy.name
        is_equal_before = model.strategy.name in ("sync", "sync-server")
        before, moved = [p.detach().clone() for p in model.parameters()], slots(optimizer)
        model.switch_strategy(name)
        after = values(model)
        everybodys = [model._collective.gather(tensor) for tensor in after]
        assert all(torch.equal(*of_ranks) for of_ranks in everybodys), f"{name}: equal on all ranks"
        if is_equal_before:
            assert all(map(torch.equal, before, model.parameters())), f"{name}: weights are what they were"
        everybodys = list(zip(*map(model._collective.gather, slots(optimizer)), strict=True))
        if "local" not in name and "diloco" not in name:
            assert all(map(torch.equal, *everybodys)), f"{name}: replicas step alike"
        if former != "async":  # there others' pushes may have come between
            assert all(map(torch.equal, moved, everybodys[rank])) or rank, f"{name}: the optimizer's state goes on"
        assert model.strategy.name == name.partition(":")[0]
    assert model.statistics().steps == step
    # What follows is "sync" with this state: a twin says so.
    twin = psengine.DistributedDataParallel(make_model(), strategy="sync")
    its = psengine.DistributedOptimizer(torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.5), twin)
    twin.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, optimizer_of_one in ((model, optimizer), (twin, its)):
        step_once(one, optimizer_of_one, rank, step)
    assert all(map(torch.equal, values(model), values(twin)))
    model.leave()


@at_servers(2)
def test_thawed_layers_are_taken_up_by_sync_and_by_a_switch(rank, world_size):
    for number, name in enumerate(("sync", "sync:compress=topk", *ROUTE[:6])):
        os.environ["PSENGINE_JOB"] = f"thawed-{number}"
        network = make_model()
        network[0].requires_grad_(False)
        model = psengine.DistributedDataParallel(network, strategy=name)
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        step_once(model, optimizer, rank, 0)
        network[0].requires_grad_(True)
        before = network[0].weight.detach().clone()
        if not model.strategy.capabilities.exchanges_thawed:
            with raises(ReductionError, "'0.weight'", f"Fix: thaw, model.switch_strategy('{model.strategy}')"):
                step_once(model, optimizer, rank, 1)
            model.switch_strategy(name)
        for step in range(4):
            step_once(model, optimizer, rank, step)
        model.strategy.conclude()  # under async too all have what the servers have
        assert not torch.equal(before, network[0].weight), name
        assert all(torch.equal(*model._collective.gather(one.detach())) for one in model.parameters()), name
        model.leave()

    network = make_model().requires_grad_(False)
    network[3].requires_grad_(True)
    model = psengine.DistributedDataParallel(network, strategy="sync")
    network[rank].requires_grad_(True)
    with raises(ReplicaMismatchError, "thaw the same parameters", "'0.weight'", "'1.weight'"):
        model(torch.ones(5, 6)).square().mean().backward()


@in_ranks(2)
def test_what_cannot_take_over_is_refused_on_all_ranks_and_nothing_changes(rank, world_size):
    model = psengine.DistributedDataParallel(make_model(), strategy="local:every=4")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    step_once(model, optimizer, rank, 0)
    strategy, before = model.strategy, values(model)
    nobody = f"tcp://127.0.0.1:{free_port()}"
    for name, texts in {
        "asink": ("Did you mean async?",),
        "async": ("where servers are up", "psengine run --servers 1"),
        f"async:servers={nobody},timeout_s=1": (nobody,),
    }.items():
        with raises(PSEngineError, *texts):
            model.switch_strategy(name)
    # One rank alone has it wrong.
    with raises(
        ConfigurationError, *(("rank 1: unknown", "on all ranks or on none") if rank == 0 else ("unknown strategy",))
    ):
        model.switch_strategy("sync" if rank == 0 else "zink")
    assert model.strategy is strategy
    assert all(map(torch.equal, before, values(model)))
    for step in range(1, 4):
        step_once(model, optimizer, rank, step)
    assert all(torch.equal(*model._collective.gather(tensor)) for tensor in values(model)), "the round went on"
    with model.join(), raises(ConfigurationError, "not switched under join"):
        model.switch_strategy("sync")


def lose_the_server(rank: int, world_size: int, address: str, server: int) -> None:
    """It dies between the checks and the new strategy's start."""
    model = psengine.DistributedDataParallel(make_model(), strategy="local:every=4")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), model)
    step_once(model, optimizer, rank, 0)
    ends_round, following = model.strategy.conclude, psengine.AsyncServer(servers=address, job="dying")

    def die_after_the_round() -> None:
        ends_round()
        following._timeout_s = 2.0
        if rank == 0:
            os.kill(server, signal.SIGKILL)
        model._collective.barrier().wait()

    model.strategy.conclude = die_after_the_round
    with raises(ReductionError, "from 'local' to 'async' failed after the round", address, "has no strategy now"):
        model.switch_strategy(following)
    kept = [p.detach().clone() for p in model.module.parameters()]
    assert all(torch.equal(*model._collective.gather(tensor)) for tensor in kept), "the round has ended"
    with raises(ReductionError, "has no strategy now"):
        model(torch.zeros(5, 6))
    with raises(ReductionError, "has no strategy now"):
        optimizer.step()
    saved = optimizer.state_dict()
    assert len(saved["state"]) == len(kept)
    again = psengine.DistributedDataParallel(model.module, strategy="sync")
    its = psengine.DistributedOptimizer(torch.optim.SGD(again.parameters(), lr=0.01, momentum=0.5), again)
    its.load_state_dict(saved)
    step_once(again, its, rank, 1)
    assert all(torch.equal(*again._collective.gather(tensor)) for tensor in again.module.parameters())


def test_a_server_that_dies_after_the_checks_leaves_an_error_and_what_can_be_saved():
    with running_server() as server:
        run_ranks(lose_the_server, 2, server.addresses[0], server.pid)


@at_servers(1)
def test_a_job_that_has_a_model_is_refused(rank, world_size):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=rank, world_size=world_size)
    other = psengine.DistributedDataParallel(make_model(), strategy="async:job=held")
    model = psengine.DistributedDataParallel(make_model(), strategy="sync")
    from psengine.strategies.servers import discovery

    discovery._taken_jobs.clear()  # as in another process
    with raises(ConfigurationError, "have a model of job 'held' already", "another job="):
        model.switch_strategy("async:job=held")
    other.leave()
