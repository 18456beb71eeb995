"""What trainings of all libraries have in common: the model, its data, and native DDP's result to compare with."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import psengine

WORLD_SIZE = 2
STEPS, BATCH = 6, 4
SHARES, GLOBAL_BATCH = [1, 3], 4
Values = dict[str, torch.Tensor]


def run(library: str, function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function`` in ranks as torchrun would: one store, which the launcher hosts.

    Importing ``library`` takes seconds: one pair of ranks tries everything.
    """
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(function, WORLD_SIZE, store.port, *arguments, init_group=False, deadline_s=150)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2 * STEPS * BATCH, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.abs().sum(1).long() % 3), batch_size=BATCH, shuffle=False)


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )


def values(module: torch.nn.Module) -> Values:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_equal(native: Values, ours: Values, *, buffers: bool = True) -> None:
    """Bitwise. Running statistics of a server's workers are the lowest rank's after backward, native DDP's before
    the next forward: not compared.
    """
    assert native.keys() == ours.keys()
    compared = [name for name in native if buffers or "running" not in name]
    assert not [name for name in compared if not native[name].equal(ours[name])]


@contextmanager
def job(name: str) -> Iterator[None]:
    """Meet the servers under a name of the case's own."""
    os.environ["PSENGINE_JOB"] = name
    try:
        yield
    finally:
        del os.environ["PSENGINE_JOB"]


def updates(address: str, name: str) -> int:
    """How often the servers have updated a chunk of a job."""
    with psengine.connect(address, role="reader", job=name) as reader:
        return max(shard["jobs"][name]["version_max"] for shard in reader.status() if name in shard["jobs"])


def numbered() -> TensorDataset:
    """Samples that say which they are; too few for whole batches."""
    return TensorDataset(torch.arange(11.0).view(-1, 1))


def proportional_batches() -> Any:
    return psengine.ProportionalSampler(numbered(), SHARES, shuffle=False).batches(GLOBAL_BATCH)


# By rank: what each gets of ``numbered`` where nobody deals it out again.
TRAINED = [[[0], [4], [8]], [[1, 2, 3], [5, 6, 7], [9, 10]]]
EVALUATED = [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9]]]


def training_loader() -> DataLoader[Any]:
    return DataLoader(numbered(), sampler=proportional_batches(), batch_size=None)


def evaluation_loader() -> DataLoader[Any]:
    return DataLoader(numbered(), 2, sampler=psengine.EvaluationSampler(numbered()))


def numbers_in(batches: Any) -> list[list[int]]:
    return [batch[0].flatten().int().tolist() for batch in batches]
