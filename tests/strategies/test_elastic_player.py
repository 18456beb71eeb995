"""Deaths and arrivals by a script: at every exchange that matters, the survivors have the bits of native DDP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import psengine
from psengine.collectives.forwarding import Forwarding
from psengine.collectives.registry import collective_for
from psengine.errors import CollectiveError, FencedError
from psengine.strategies.elastic.membership import Group, Member, Membership

V = 3
CPU = torch.device("cpu")


class DiedError(Exception):
    """The script has no other view with this worker."""


class Scripted(Membership):
    """Views and failures by a script.

    Args:
        views: the workers of each; a worker meets the others of the next view that has it.
        faults: of this worker, in order: the step in which an operation fails, whether it is carried out before, and a
            part of its name.
    """

    def __init__(self, views: Sequence[Sequence[int]], faults: Sequence[tuple[int, str, str]]) -> None:
        self.worker, self.step = dist.get_rank(), 0
        self._faults = list(faults)
        groups = [(view, dist.new_group(list(view))) for view in views]
        self._views = iter([(view, group) for view, group in groups if self.worker in view])

    def enter(self, facts: Mapping[str, str], checkpoint: int) -> Group:
        return self._meet(None, checkpoint)

    def regroup(self, completed: int | None, error: BaseException | None) -> Group:
        return self._meet(completed, 0)

    def _meet(self, completed: int | None, checkpoint: int) -> Group:
        _, group = next(self._views, (None, None))
        if group is None:
            raise DiedError
        collective = collective_for(group, "auto", CPU)
        mine = Member(worker=self.worker, completed=completed, checkpoint=checkpoint)
        told = collective.gather_bytes(json.dumps(vars(mine)).encode(), CPU)
        members = tuple(Member(**json.loads(one)) for one in told)
        return Group(members=members, collective=Failing(collective, self))

    def fail(self, when: str, what: str) -> None:
        """Raise where the script says so."""
        for step, moment, name in self._faults[:1]:
            if (step, moment) == (self.step, when) and name in what:
                del self._faults[0]
                raise CollectiveError(f"a rank has died {when} {what}")


class Failing(Forwarding):
    """Its operations fail where the script says so; in a group in which a sum has failed no other may begin."""

    sums_fail = False

    def __init__(self, inner: Any, script: Scripted) -> None:
        super().__init__(inner)
        self._script = script

    def broadcast(self, tensors: Any, source_rank: int = 0, *, what: str = "") -> Any:
        self._script.fail("before", what)
        work = super().broadcast(tensors, source_rank, what=what)
        work.wait()
        self._script.fail("after", what)
        return work

    def all_reduce(self, flat: Any, scale: float = 1.0, *, what: str = "") -> Any:
        work = super().all_reduce(flat, scale, what=what)
        work.wait()
        self._script.fail("after", what)
        return work

    def sum_contributions(self, memory: Any, owners: Any, *, what: str = "") -> Any:
        assert not self.sums_fail, f"a sum has failed, and that of {what} begins"
        self.sums_fail = True
        self._script.fail("before", what)
        self.sums_fail = False
        return super().sum_contributions(memory, owners, what=what)


class Net(nn.Module):
    """Running statistics, dropout, a layer that few batches use, a buffer that the program changes between steps."""

    def __init__(self, *, uses_all: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 21))
        self.head, self.spare = nn.Linear(21, 5), nn.Linear(21, 5)
        self.register_buffer("average", torch.zeros(5))
        self.uses_all = uses_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden) + self.spare(hidden) if self.uses_all or x[0, 0] > 1 else self.head(hidden)


def train(rank: int, world_size: int, script: Any, uses_all: bool, directory: Path | None = None) -> Any:
    """The steps that were done, and a digest of everything; or how it ended. Without a script: of native DDP.

    Checkpoints of each worker are in a folder of ``directory`` of its own.
    """
    views, faults = script or ([[0]], {})
    torch.manual_seed(0 if rank == views[0][0] else 1)  # others' values do not count
    network = Net(uses_all=uses_all)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    options: dict[str, Any] = {"bucket_cap_mb_list": [0.001, 0.002], "find_unused_parameters": not uses_all}
    membership = None
    if script is None:
        model: Any = nn.parallel.DistributedDataParallel(network, **options)
    else:
        model = psengine.DistributedDataParallel(network, strategy=f"sync:virtual_workers={V}", **options)
        optimizer = psengine.DistributedOptimizer(optimizer, model)
        membership = model.strategy.player._membership = Scripted(views, faults.get(rank, ()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    if script is not None:
        model.register_state("scheduler", scheduler)
        if directory is not None:
            model.checkpoint_every(3, directory / str(rank))
    x = torch.randn(69, 8, generator=torch.Generator().manual_seed(1))
    loader = psengine.ElasticLoader(TensorDataset(x, x.argmax(1) % 5), batch_size=3, seed=1, model=model)
    done = []
    try:
        for epoch in loader.epochs(1):
            for step in loader.steps(epoch):
                if membership is not None:
                    membership.step = step.number
                optimizer.zero_grad(set_to_none=uses_all)
                for inputs, labels in step.batches:
                    loss = F.cross_entropy(model(inputs), labels)
                    loss.backward()
                    step.record(loss)
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                network.average.mul_(0.9).add_(network.head.bias.detach(), alpha=0.1)
                done.append(step.number)
    except (DiedError, FencedError) as error:
        return type(error).__name__
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*network.state_dict().values(), *values]
    return done, hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


BUCKET, LAST, STATE = "gradient bucket 0", "numbers of a step", "a worker's state"
SCRIPTS: dict[str, Any] = {
    # Worker 1 lacks the averages of step 3, which worker 2 has; that one is in step 4 already, worker 0 dies there.
    # Then worker 1 plays virtual worker 0, whose buffers remain.
    "averages for who lacks them": (
        [(0, 1, 2), (1, 2)],
        {0: [(4, "before", BUCKET)], 1: [(3, "after", LAST)], 2: [(4, "before", BUCKET)]},
        False,
    ),
    # Worker 2 learns the order of buckets with the averages of step 1, from worker 1, which dies as it gives worker 3
    # its state.
    "the only one that knows the order": (
        [(0, 1, 2), (1, 2, 3), (2, 3)],
        {
            0: [(2, "before", BUCKET)],
            1: [(2, "before", BUCKET), (2, "after", STATE)],
            2: [(1, "after", LAST), (1, "after", STATE)],
            3: [(0, "after", STATE)],
        },
        True,
    ),
    # Worker 2 misses a view, and all that it had computed is dealt to others.
    "nothing of a step stays": (
        [(1, 2), (0, 1), (0, 2)],
        {0: [(3, "before", BUCKET)], 1: [(3, "before", BUCKET)] * 2, 2: [(3, "before", BUCKET)]},
        False,
    ),
    # Worker 1 misses a view in which the others go on.
    "two steps behind": (
        [(0, 1), (0,), (0, 1), (0,)],
        {0: [(2, "before", BUCKET), (4, "before", BUCKET), (4, "before", "owners after")], 1: [(2, "before", BUCKET)]},
        False,
    ),
}


@pytest.fixture(scope="module")
def native() -> dict[bool, Any]:
    return {uses_all: run_ranks(train, V, None, uses_all)[0] for uses_all in (False, True)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_native_bits_through_deaths_and_arrivals(name, native):
    views, faults, uses_all = SCRIPTS[name]
    workers = 1 + max(max(view) for view in views)
    ends = run_ranks(train, workers, (views, faults), uses_all)
    (steps, expected) = native[uses_all]
    for worker, end in enumerate(ends):
        if worker in views[-1]:
            assert end[1] == expected
            assert steps[-len(end[0]) :] == end[0]
        else:
            assert end == ("FencedError" if name == "two steps behind" else "DiedError")


def test_a_newcomers_checkpoint_counts_until_somebody_has_a_state(tmp_path):
    """Worker 0 cannot give worker 1 its initial values; then worker 2 comes, which has a checkpoint of step 6."""
    (whole,) = run_ranks(train, 1, ([[0]], {}), True, tmp_path)
    (tmp_path / "0").rename(tmp_path / "2")
    fault = [(0, "after", STATE)]
    ends = run_ranks(train, 3, ([(0, 1), (0, 2)], {0: fault, 1: fault}), True, tmp_path)
    assert ends == [([7, 8], whole[1]), "DiedError", ([7, 8], whole[1])]


def train_two(rank: int, world_size: int) -> list[Any]:
    """The weights of two models; a batch says which one has its backward first."""
    torch.manual_seed(0)
    models = [psengine.DistributedDataParallel(nn.Linear(8, 5), strategy=f"sync:virtual_workers={V}") for _ in "ab"]
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
