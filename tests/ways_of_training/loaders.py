"""Where batches come from, and how large they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)
from ways_of_training.networks import classify, mlp
from ways_of_training.run import CLASSES, WIDTH, Batch, Run
from ways_of_training.table import apart_from, left_out, refused, row

import psengine

ALONE = left_out("one worker has nobody whose data could end earlier or later")
VIEWS_MOVE = apart_from("gradient", reason="native's buckets, which gradients are views of, take part to the end")


def samples(count: int = 13) -> TensorDataset:
    generator = torch.Generator().manual_seed(21)
    return TensorDataset(
        torch.randn(count, WIDTH, generator=generator), torch.randint(CLASSES, (count,), generator=generator)
    )


def train(run: Run, epochs: list[list[Batch]] | Iterator[DataLoader[Batch]]) -> None:
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for loader in epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = classify(model, x, y)
            loss.backward()
            optimizer.step()
            run.note(loss)


@row
def distributed_sampler(run: Run) -> None:
    """DistributedSampler with set_epoch; the last batch is smaller."""

    def epochs() -> Iterator[DataLoader[Batch]]:
        data = samples()
        sampler = DistributedSampler(data, run.world_size, run.rank, seed=3)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            yield DataLoader(data, batch_size=3, sampler=sampler)

    train(run, epochs())


@row
def changing_batch_sizes(run: Run) -> None:
    """Batches that grow, differently on each rank."""
    train(run, [[next(run.batches(1, 1 + step * (1 + run.rank)))] for step in range(4)])


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


@row
def samplers_of_psengine(run: Run) -> None:
    """psengine.EvaluationSampler: every sample once, the metric is exact."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    data = samples()
    for x, y in run.batches():
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for inputs, labels in DataLoader(
                data, batch_size=4, sampler=psengine.EvaluationSampler(data, run.world_size, run.rank)
            ):
                right += (model.module(inputs).argmax(1) == labels).sum()
        dist.all_reduce(right)
        run.note(right / len(data))
        model.train()
