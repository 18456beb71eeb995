"""Where batches come from, and how large they are."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn import functional as F
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import apart_from, left_out, refused, row

ALONE = left_out("one worker has nobody whose data could end earlier or later")
VIEWS_MOVE = apart_from("gradient", reason="native's buckets, which gradients are views of, take part to the end")


@row
def batch_without_samples(run: Run) -> None:
    """A batch of size zero on one rank, under a summed loss."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(4)):
        size = 0 if step == 1 and run.rank == 0 else 4
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:size]), y[:size], reduction="sum") / 4
        loss.backward()
        optimizer.step()
        run.note(loss)


@row(views=VIEWS_MOVE, one_worker=ALONE)
def uneven_inputs(run: Run) -> None:
    """join: rank 1 has two batches more."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    with model.join():
        for x, y in run.training(optimizer, 2 + 2 * run.rank):
            classify(model, x, y).backward()


@row(views=VIEWS_MOVE, sync_server=refused("divides by all ranks inside join"), one_worker=ALONE)
def uneven_inputs_divided_by_who_is_there(run: Run) -> None:
    """join with divide_by_initial_world_size=False; rank 0 has a batch more."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    with model.join(divide_by_initial_world_size=False):
        for x, y in run.training(optimizer, 4 - run.rank):
            classify(model, x, y).backward()


@row(one_worker=ALONE)
def uneven_inputs_end_together(run: Run) -> None:
    """join with throw_on_early_termination: everybody stops with the first."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    try:
        with model.join(throw_on_early_termination=True):
            for x, y in run.training(optimizer, 2 + run.rank):
                classify(model, x, y).backward()
    except RuntimeError:
        run.note(1.0)
    dist.barrier()
