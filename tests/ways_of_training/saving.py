"""Saving, loading, copying, and going on."""

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import Run
from ways_of_training.table import refused, row

DEFAULT_GROUP = refused("only supported when using DDP with the default process group")


def steps(run: Run, model: Any, optimizer: torch.optim.Optimizer, first: int = 0, count: int = 2) -> None:
    train(run, model, optimizer=optimizer, batches=list(run.batches(first + count))[first:])


def adam(run: Run, model: Any) -> torch.optim.Optimizer:
    return run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)


@row
def state_round_trip(run: Run) -> None:
    """The wrapped model's and the optimizer's state_dict go to a file and back, in mid-run."""
    model = run.wrap(mlp())
    optimizer = adam(run, model)
    steps(run, model, optimizer)
    file = run.directory / f"{run.rank}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(run, model, optimizer, 2)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(run, model, optimizer, 2)


@row
def resumed_in_a_new_wrapper(run: Run) -> None:
    """Rank 0 saves; everybody loads into a new model, a new wrapper and a new optimizer."""
    model = run.wrap(mlp())
    optimizer = adam(run, model)
    steps(run, model, optimizer)
    saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    if run.rank == 0:
        torch.save(saved, run.directory / "checkpoint.pt")
    dist.barrier()
    saved = torch.load(run.directory / "checkpoint.pt", weights_only=True)
    module = mlp()
    module.load_state_dict(saved["model"])
    again = run.wrap(module)
    optimizer = adam(run, again)
    optimizer.load_state_dict(saved["optimizer"])
    steps(run, again, optimizer, 2)


@row(backend=DEFAULT_GROUP)
def deep_copy_of_the_wrapper(run: Run) -> None:
    """copy.deepcopy of the wrapped model, evaluated while the original is trained."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    steps(run, model, optimizer)
    kept = copy.deepcopy(model)
    steps(run, model, optimizer, 2)
    with torch.no_grad():
        for x, y in run.batches(1):
            run.note(classify(kept, x, y))
    run.compare(kept)


@row(backend=DEFAULT_GROUP)
def pickled_wrapper(run: Run) -> None:
    """torch.save and pickle of the wrapped model, evaluated after loading."""
    model = run.wrap(mlp())
    steps(run, model, run.sgd(model))
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for x, y in run.batches(1):
            run.note(classify(again, x, y))
    run.compare(again)


@row
def wrapped_twice_in_turn(run: Run) -> None:
    """A model is wrapped, trained, unwrapped and wrapped again with other options."""
    module = mlp()
    model = run.wrap(module)
    steps(run, model, run.sgd(model))
    del model
    again = run.wrap(module, gradient_as_bucket_view=True)
    steps(run, again, run.sgd(again), 2)


@row(one_worker=refused("optimizer"))
def optimizer_made_before_wrapping(run: Run) -> None:
    """The optimizer is made from the module, wrapped afterwards, and used as it is."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = run.wrap(module)
    steps(run, model, optimizer)


@row
def momentum_switched_off_and_saved(run: Run) -> None:
    """Momentum is 0 when a training is saved, and on again where it is loaded."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    steps(run, model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.0
    steps(run, model, optimizer, 2)
    module = mlp()
    module.load_state_dict(copy.deepcopy(model.module.state_dict()))
    again = run.wrap(module)
    resumed = run.sgd(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.param_groups[0]["momentum"] = 0.9
    steps(run, again, resumed, 4)
