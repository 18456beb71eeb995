"""What torch offers to be used with its wrapper, as its documentation uses it. torch's tests of it are in no wheel."""

import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import Run
from ways_of_training.table import apart_from, left_out, refused, row

ALONE = left_out("a plain process has no group")
MOVED = "native's buckets, which gradients are views of, take part to the end"


@row(one_worker=ALONE)
def zero_redundancy_optimizer(run: Run) -> None:
    """ZeroRedundancyOptimizer, whose state comes together on rank 0."""
    for as_view in (False, True):
        model = run.wrap(mlp())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=0.01
        )
        train(run, model, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=0)
        if run.rank == 0:
            for state in optimizer.state_dict()["state"].values():
                for value in state.values():
                    run.note(value)


@row(
    views=left_out("a rank whose data ended steps with its gradients, which native's buckets move"),
    backend=left_out("Join takes one process group"),
    one_worker=ALONE,
)
def zero_redundancy_joined(run: Run) -> None:
    """A model and a ZeroRedundancyOptimizer under Join; rank 1 has two batches more."""
    model = run.wrap(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for x, y in run.training(optimizer, 2 + 2 * run.rank):
            classify(model, x, y).backward()


@row(views=apart_from("model 0, gradient", "model 1, gradient", reason=MOVED), one_worker=ALONE)
def two_models_joined(run: Run) -> None:
    """Two models under one Join; rank 0 has a batch more."""
    models = [run.wrap(mlp()), run.wrap(mlp(8, 8, 8))]
    with Join(models):
        for x, y in run.batches(4 - run.rank):
            for model in models:
                model.zero_grad()
                classify(model, x, y).backward()


def replicate(run: Run, module: nn.Module, **options: Any) -> Any:
    """torch's ``replicate``, which wraps a list of the parameters when the module is first called."""
    replicate_module = importlib.import_module("torch.distributed._composable.replicate")
    replicate_module.DistributedDataParallel = functools.partial(run.wrap)  # it sets an attribute
    return replicate_module.replicate(module, **options)


@row(one_worker=ALONE)
def replicated(run: Run) -> None:
    """replicate, that also finds unused parameters."""
    for options in ({}, {"find_unused_parameters": True}):
        module = replicate(run, mlp(), **options)
        train(run, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))


@row(one_worker=ALONE)
def replicated_parts(run: Run) -> None:
    """Two parts of one model; the layer between them is left alone."""
    torch.manual_seed(5)
    network = mlp(8, 8)
    replicate(run, network[0])
    replicate(run, network[4], ignored_modules=[])
    train(run, network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1))
    run.compare(network)


NO_HOOKS = refused("communication hook")


# Native DDP refuses BF16_COMPRESS without NCCL, and both QUANTIZE hooks raise an IndexError in torch's own code.
HOOKS = [kind for kind in DDPCommHookType if kind.name != "BF16_COMPRESS" and "QUANTIZE" not in kind.name]


@row(sync_server=NO_HOOKS, one_worker=ALONE)
def hooks_by_name(run: Run) -> None:
    """Each communication hook that register_ddp_comm_hook knows by its name."""
    for kind in HOOKS:
        model = run.wrap(mlp(), gradient_as_bucket_view=True)
        register_ddp_comm_hook(kind, model, state=dist.group.WORLD)
        train(run, model, 4)


@row(one_worker=ALONE)
def distributed_checkpoint(run: Run) -> None:
    """Saved halfway by torch.distributed.checkpoint, and loaded into another wrapped model."""
    model = run.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(run, model, optimizer=optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert set(model_state) == set(mlp().state_dict())
    torch.distributed.checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=run.directory)
    other = run.wrap(mlp())
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    torch.distributed.checkpoint.load(state, checkpoint_id=run.directory)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(run, other, optimizer=other_optimizer)
