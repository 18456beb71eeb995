"""Where batches come from, and how large they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from ways_of_training.networks import classify, mlp
from ways_of_training.run import CLASSES, WIDTH, Batch, Run
from ways_of_training.table import left_out, refused, row

import psengine

ALONE = left_out("one worker has nobody whose data could end earlier or later")


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


@row(slow=True)
def distributed_sampler_without_the_rest(run: Run) -> None:
    """DistributedSampler with drop_last."""
    data = samples()
    sampler = DistributedSampler(data, run.world_size, run.rank, shuffle=False, drop_last=True)
    train(run, [DataLoader(data, batch_size=2, sampler=sampler, drop_last=True)])


@row(slow=True)
def loader_with_workers(run: Run) -> None:
    """A DataLoader with a worker process, forked while training goes on."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    sampler = DistributedSampler(samples(8), run.world_size, run.rank)
    loader = DataLoader(samples(8), batch_size=2, sampler=sampler, num_workers=1)
    for x, y in chain([next(run.batches(1))], loader):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()


class Stream(IterableDataset[Batch]):
    """Samples that are dealt out to ranks and to loaders' workers."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 6, step):
            yield samples(12)[index * self._world_size + self._rank]


@row
def iterable_dataset(run: Run) -> None:
    """An IterableDataset."""
    train(run, [DataLoader(Stream(run.rank, run.world_size), batch_size=2)])


@row(slow=True)
def iterable_dataset_with_workers(run: Run) -> None:
    """An IterableDataset that is dealt out to two workers, in each of two epochs, which persist."""
    loader = DataLoader(Stream(run.rank, run.world_size), batch_size=3, num_workers=2, persistent_workers=True)
    train(run, [loader, loader])


@row(slow=True)
def generator_of_batches(run: Run) -> None:
    """Batches from a generator that computes under no_grad with a module of its own."""

    def batches() -> Iterator[Batch]:
        with torch.no_grad():
            for x, y in run.batches():
                yield F.normalize(x), y

    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for x, y in batches():
        with torch.enable_grad():
            optimizer.zero_grad()
            classify(model, x, y).backward()
            optimizer.step()


@row(slow=True)
def weighted_sampler(run: Run) -> None:
    """WeightedRandomSampler with a generator of each rank's own."""
    sampler = WeightedRandomSampler([1.0] * 6 + [5.0] * 7, 8, generator=torch.Generator().manual_seed(run.rank))
    train(run, [DataLoader(samples(), batch_size=4, sampler=sampler)])


@row(slow=True)
def collated_by_hand(run: Run) -> None:
    """A collate_fn that pads, and a batch_sampler of unequal batches."""

    class Ragged(Dataset[Tensor]):
        def __getitem__(self, index: int) -> Tensor:
            return torch.full((1 + index % WIDTH,), float(index % 3))

    def pad(parts: list[Tensor]) -> Batch:
        x = torch.stack([F.pad(part, (0, WIDTH - len(part))) for part in parts])
        return x, torch.tensor([len(part) % CLASSES for part in parts])

    train(run, [DataLoader(Ragged(), batch_sampler=[[0, 1], [2, 3, 4 + run.rank], [6]], collate_fn=pad)])


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


@row(one_worker=ALONE)
def uneven_inputs(run: Run) -> None:
    """join: rank 1 has two batches more."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    with model.join():
        for x, y in run.training(optimizer, 2 + 2 * run.rank):
            classify(model, x, y).backward()


@row(sync_server=refused("divides by all ranks inside join"), one_worker=ALONE)
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


@row(slow=True)
def uneven_inputs_by_agreement(run: Run) -> None:
    """Ranks count their batches first, and stop after the smallest number."""
    batches = list(run.batches(3 + run.rank))
    count = torch.tensor(len(batches))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    train(run, [batches[: int(count)]])


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
