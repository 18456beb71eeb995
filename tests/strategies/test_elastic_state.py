"""What a worker with virtual workers has, as it travels to others and lies in checkpoints: equal to the last bit."""

from __future__ import annotations

import copy
import gc
import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.processes import in_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

import psengine
from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for
from psengine.errors import ArgumentTypeError, ConfigurationError, ReplicaMismatchError
from psengine.strategies.elastic import checkpoints, state
from psengine.strategies.elastic.checkpoints import Checkpoints
from psengine.strategies.elastic.state import StateRegistry
from psengine.strategies.elastic.sync import Beginning
from psengine.strategies.life_cycle import Replica
from psengine.tensors.documents import from_file, put_together, take_apart, to_file
from psengine.wrapper.ddp import named_buffers, reducible_parameters, shared_state

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What is imported: to look through it takes gc.collect() 0.4 s, and every snapshot calls it."""
    gc.freeze()
    yield
    gc.unfreeze()


class Wide(torch.optim.Optimizer):
    """Keeps more precision than its parameters have, which ``load_state_dict`` would round away."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1)})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                if not entry:
                    entry["total"] = torch.zeros_like(parameter, dtype=torch.float64)
                    entry["norms"] = []
                entry["total"] += parameter.grad.double() / 3
                entry["norms"].append(parameter.grad.norm())
                parameter.data -= (group["lr"] * entry["total"]).to(parameter.dtype)


class Part:
    """In the place of the strategy: what a registry asks it."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.taken = replica, None

    def beginning(self) -> Beginning:
        return Beginning(gradients=[], buffers=self.replica.buffers())

    def progress(self) -> dict[str, Any]:
        return {"order": [1, 0, 2]}

    def take_progress(self, progress: Any) -> None:
        self.taken = progress


class Training:
    """A model with much that is easily forgotten, and its registry. ``features`` is how wide it is."""

    def __init__(self, seed: int, collective: Collective | None = None, features: int = 8) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(16, features),
            nn.ReLU(),
            nn.Linear(features, 2),
        )
        self.module[5].bias.requires_grad_(False)
        self.averaged = AveragedModel(self.module)
        parameters = reducible_parameters(self.module, set())
        self.replica = Replica(
            parameters=parameters,
            buffers=lambda: named_buffers(self.module, set()),
            state=shared_state(self.module, set(), with_buffers=True),
            collective=collective or collective_for(dist.group.WORLD, "auto", CPU),
            device=CPU,
        )
        self.part = Part(self.replica)
        self.registry = StateRegistry([self.part])  # type: ignore[list-item]
        *most, last = parameters.values()
        self.optimizers = [torch.optim.AdamW(most, lr=0.01, amsgrad=True), Wide([last])]
        for optimizer in self.optimizers:
            self.registry.bind(optimizer)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [2, 2, 5], gamma=0.3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for name in ("averaged", "scheduler", "scaler"):
            self.registry.register(name, getattr(self, name))

    def train(self, steps: range) -> Training:
        for step in steps:
            torch.manual_seed(step)
            inputs = torch.randn(6, 3, 4, 4)
            loss = self.module(inputs).square().sum()
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
                optimizer.zero_grad()
            self.scaler.update()
            self.scheduler.step()
            self.averaged.update_parameters(self.module)
        return self

    def snapshot(self, completed: int) -> state.Snapshot:
        return self.registry.snapshot(completed)

    def transfer(self, source_rank: int, collective: Collective | None = None, *, has_state: bool) -> None:
        self.registry.transfer(collective or self.replica.collective, source_rank, 3, has_state=has_state)

    def everything(self) -> Any:
        """All of it, as plain values; tensors with dtype, shape and strides."""
        parts = take_apart(vars(self.snapshot(0)))
        return parts.document, {name: tensor.tolist() for name, tensor in parts.tensors.items()}


@in_ranks(3)
def test_a_worker_that_joins_goes_on_with_the_bits_of_its_source(rank, world_size):
    """Rank 1 has trained, rank 2 joins and rank 0 only takes part; in pieces of large tensors, and small ones."""
    state.PIECE_BYTES = 256
    training = Training(rank)
    if rank == 1:
        training.train(range(3))
    before = training.everything()
    addresses = [tensor.data_ptr() for tensor in training.replica.state.values()]
    training.transfer(1, has_state=rank != 2)
    assert training.part.taken == ({"order": [1, 0, 2]} if rank == 2 else None)
    if rank == 0:
        assert training.everything() == before
        return
    alone = Training(1).train(range(3))
    assert training.everything() == alone.everything()
    own = training.replica.parameters | training.replica.buffers()
    assert addresses == [(training.replica.state | own)[name].data_ptr() for name in training.replica.state]
    assert training.train(range(3, 6)).everything() == alone.train(range(3, 6)).everything()


OTHERS = {
    "a wider layer": (
        lambda: Training(0, features=9),
        ("expected tensor 4 of the model to be '3.weight' with shape (8, 16)", "got '3.weight' with shape (9, 16)"),
    ),
    "a state less": (
        lambda: _without_scaler(Training(0)),
        ("expected the registered state 'scaler' to be registered, got absent",),
    ),
    "an optimizer more": (
        lambda: _with_another_optimizer(Training(0)),
        ("expected optimizer 2 to be absent, got SGD",),
    ),
}


def _without_scaler(training: Training) -> Training:
    del training.registry._registered["scaler"]
    return training


def _with_another_optimizer(training: Training) -> Training:
    training.optimizers.append(torch.optim.SGD(training.module[0].parameters()))
    training.registry.bind(training.optimizers[-1])
    return training


@in_ranks(2)
def test_a_joiner_that_differs_says_where_and_stays_as_it_is(rank, world_size):
    source = Training(1)
    for build, texts in OTHERS.values():
        training = source if rank == 0 else build()
        before = training.everything()
        if rank == 0:
            training.transfer(0, has_state=True)
        else:
            with raises(ReplicaMismatchError, "the state of the others", *texts, "Fix: "):
                training.transfer(0, has_state=False)
            assert training.everything() == before


def test_what_all_workers_have_alike():
    facts = Training(0).registry.facts()
    assert facts == Training(1).registry.facts()
    assert facts["version of torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert (
        facts["optimizers"] == "AdamW over 6 parameters from '0.weight' on, Wide over 1 parameters from '5.weight' on"
    )
    assert facts["registered states"] == "averaged, scaler, scheduler"
    wider = Training(0, features=9).registry.facts()
    assert [name for name in facts if facts[name] != wider[name]] == ["model"]


def written(directory: Any, steps: int, training: Training) -> Checkpoints:
    """Checkpoints after each of ``steps`` steps."""
    found = Checkpoints(1, directory)
    assert found.newest() == (0, {})
    found.facts = training.registry.facts()
    for step in range(steps):
        training.train(range(step, step + 1))
        assert found.is_due(step + 1)
        found.write(training.snapshot(step + 1))
        found.close()
    return found


def names(directory: Any) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_job_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    """Two are kept; another worker of another job reads them."""
    directory = tmp_path / "made" / "here"
    training = Training(1)
    written(directory, 4, training)
    assert names(directory) == ["checkpoint-000000000003.safetensors", "checkpoint-000000000004.safetensors"]
    resumed = Training(2)
    found = Checkpoints(100, directory)
    assert found.newest() == (4, resumed.registry.facts())
    found.facts = resumed.registry.facts()
    snapshot = found.load(4)
    resumed.registry.install(snapshot, str(found.path(4)))
    assert (snapshot.completed, resumed.part.taken) == (4, {"order": [1, 0, 2]})
    assert resumed.train(range(4, 7)).everything() == training.train(range(4, 7)).everything()


def test_a_checkpoint_is_of_the_moment_in_which_it_was_asked_for(tmp_path):
    training = Training(1).train(range(2))
    found = Checkpoints(2, tmp_path)
    before = copy.deepcopy(training.everything())
    found.write(training.snapshot(2))
    training.train(range(2, 6))  # while it is written
    found.close()
    assert [found.is_due(step) for step in range(5)] == [False, False, True, False, True]
    again = Training(3)
    again.registry.install(found.load(2), "a file")
    assert again.everything() == before


def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, caplog):
    """Then the two that are kept are whole ones."""
    training = Training(1)
    written(tmp_path, 2, training)
    newest = tmp_path / "checkpoint-000000000002.safetensors"
    whole = newest.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", flipped):
        newest.write_bytes(damaged)
        caplog.clear()
        found = Checkpoints(1, tmp_path)
        assert found.newest() == (1, training.registry.facts())
        assert f"checkpoint {newest} is skipped: " in caplog.text
    found.write(training.snapshot(3))
    found.close()
    assert len(names(tmp_path)) == 3
    found.write(training.snapshot(4))
    found.close()
    assert names(tmp_path) == [f"checkpoint-{step:012d}.safetensors" for step in (2, 3, 4)]


def test_what_killed_writers_left_goes_and_others_files_stay(tmp_path):
    (tmp_path / "unfinished-checkpoint-000000000007.safetensors").write_bytes(b"torn")
    (tmp_path / "unfinished-thoughts").write_bytes(b"mine")
    written(tmp_path, 1, Training(0))
    assert names(tmp_path) == ["checkpoint-000000000001.safetensors", "unfinished-thoughts"]


def test_a_checkpoint_that_cannot_be_written_stops_nobody(tmp_path, caplog):
    found = Checkpoints(1, tmp_path / "directory")
    (tmp_path / "directory").rmdir()
    found.write(Training(0).snapshot(1))
    found.close()
    assert "the checkpoint of step 1 was not written to " in caplog.text


def test_a_checkpoint_is_left_out_while_another_is_written(tmp_path, caplog, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(checkpoints, "to_file", lambda parts: may_end.wait(60.0) and to_file(parts))
    found = Checkpoints(1, tmp_path)
    training = Training(0)
    found.write(training.snapshot(1))
    found.write(training.snapshot(2))
    assert "the checkpoint of step 2 is left out" in caplog.text
    may_end.set()
    found.close()
    assert names(tmp_path) == ["checkpoint-000000000001.safetensors"]


def test_another_jobs_checkpoint_is_loaded_with_a_warning_and_another_models_refused(tmp_path, caplog):
    training = Training(1)
    written(tmp_path, 1, training)
    found = Checkpoints(1, tmp_path)
    found.facts = {**training.registry.facts(), "seed": "7"}
    snapshot = found.load(1)
    assert "another seed, so this job's next steps differ (expected None, got 7)" in caplog.text
    wider = Training(0, features=9)
    with raises(ReplicaMismatchError, f"the state of {found.path(1)} does not fit"):
        wider.registry.install(snapshot, str(found.path(1)))


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "10"])
def test_a_number_of_steps_that_is_none_is_refused(steps, tmp_path):
    with raises(ConfigurationError, "expected at least 1"):
        Checkpoints(steps, tmp_path)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def test_what_cannot_travel_is_refused_when_it_is_registered():
    registry = Training(0).registry
    with raises(ArgumentTypeError, "has state_dict and load_state_dict (got int as 'seed')"):
        registry.register("seed", 3)
    with raises(ConfigurationError, "got a second 'scaler'"):
        registry.register("scaler", Holder({}))
    with raises(ArgumentTypeError, "got Holder as 'mine/inner/1'", "Fix: "):
        registry.register("mine", Holder({"inner": [1, Holder(2)]}))
    with raises(ArgumentTypeError, "got Tensor as 'mine'"):
        registry.register("mine", Holder(torch.eye(2).to_sparse()))


VALUES = [
    None,
    [True, 1, -(2**70), 0.1, -0.0, math.inf, "text", None],
    {1: "an int", "1": "a text", (1, "two"): {3, 4}, None: ()},
    {"nested": [{"deep": torch.tensor([[1, 2], [3, 4]])}], 5: torch.tensor(1.5)},
    [torch.ones(2, 0), torch.tensor([1 + 2j]).conj(), torch.randn(4, 3).T, torch.ones(3).expand(2, 3)],
    [torch.tensor([1.5, math.nan]).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex128)],
    [torch.tensor([True, False]), torch.tensor([1, 2], dtype=torch.uint16)],
]


@pytest.mark.parametrize("value", VALUES)
def test_a_state_comes_back_as_it_was(value):
    parts = take_apart(value)
    for got in (
        from_file(to_file(parts.copied())),
        put_together(parts.document, lambda name, form: form.empty("cpu").copy_(parts.tensors[name])),
    ):
        again = take_apart(got)
        assert again.document == parts.document
        assert repr(got) == repr(value) or "tensor" in repr(value)
        for name, tensor in parts.tensors.items():
            assert torch.equal(_bits(again.tensors[name]), _bits(tensor))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@in_ranks(2)
def test_strategies_without_virtual_workers_refuse_both(rank, world_size):
    model = psengine.DistributedDataParallel(nn.Linear(2, 2))
    with raises(ConfigurationError, "register_state and checkpoint_every belong to strategies", "got sync"):
        model.register_state("scheduler", Holder({}))
    with raises(ConfigurationError, "checkpoint_every belong to", "Fix: "):
        model.checkpoint_every(10, "checkpoints")
