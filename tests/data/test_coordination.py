"""What workers do together besides gradients: real ranks over gloo and over shared memory, and independent workers."""

import enum
import io
import math
import os
import pickle
import time
from collections import OrderedDict, namedtuple

import pytest
import torch
from support.expectations import assert_identical, raises
from support.processes import run_ranks
from support.table_training import warnings_of

import psengine
from psengine.errors import (
    ArgumentTypeError,
    ConfigurationError,
    NonFiniteLossError,
    ReplicaMismatchError,
)
from psengine.tensors.objects import from_bytes, to_bytes

Point = namedtuple("Point", ["x", "y"])


class Colour(enum.Enum):
    RED = 1


class Attack:
    def __reduce__(self):
        return os._exit, (3,)


class Unreadable(dict):
    def __reduce__(self):
        raise RuntimeError("of a subclass")


VALUE = {
    "text": "naïve",
    "numbers": [0, -1, 2**70, 1e-308, -0.0, math.inf, True, None],
    "pair": (1, [2.5, ()]),
    7: {"state": {}},
    None: "none",
}
TENSORS = [
    torch.arange(6).view(2, 3).t(),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.tensor([1 + 2j, 3j]).conj(),
    torch.tensor([True, False]),
    torch.nn.Parameter(torch.ones(3, dtype=torch.float64)),
]


@pytest.mark.parametrize("value", [VALUE, math.nan, OrderedDict(a=1), {(1, 2): b"bytes"}], ids=str)
def test_values_come_back_as_they_went(value):
    assert_identical(psengine.broadcast_object(value), value)


def test_tensors_come_back_as_they_went():
    row = torch.ones(1000, 3)[0]
    for sent, got in zip([*TENSORS, row], psengine.broadcast_object([*TENSORS, row]), strict=True):
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        torch.testing.assert_close(got, sent.detach(), rtol=0, atol=0)
        assert got.data_ptr() != sent.data_ptr() or not sent.numel()
    assert len(to_bytes(row)) < 2000, "its own elements alone"


@pytest.mark.parametrize(
    "value",
    [{"a": [object()]}, Point(1, 2), Colour.RED, Unreadable(a=1), print],
    ids=["object", "named tuple", "enum", "dict subclass", "function"],
)
def test_what_would_run_code_is_refused(value):
    with raises(ArgumentTypeError, "torch.load(weights_only=True)", "Fix: "):
        psengine.broadcast_object(value)


def test_bytes_that_would_run_code_are_not_loaded():
    file = io.BytesIO()
    torch.save(Attack(), file)
    with pytest.raises(pickle.UnpicklingError):
        from_bytes(file.getvalue())


def exchange(rank: int, world_size: int, collective: str) -> None:
    os.environ["PSENGINE_COLLECTIVE"] = collective
    for source in range(world_size):
        value = {"from": rank, "weights": torch.full((1000, 3), float(rank)), "plain": VALUE}
        got = psengine.broadcast_object(value if rank == source else None, from_rank=source)
        assert got["from"] == source
        assert torch.equal(got["weights"], torch.full((1000, 3), float(source)))
        assert_identical(got["plain"], VALUE)
        got["weights"].zero_()
        assert value["weights"].sum() == 3000 * rank, "a copy, at the source too"
    # Nothing that one rank cannot send keeps the others waiting, and the group goes on.
    refused = ArgumentTypeError if rank == 1 else ReplicaMismatchError
    with raises(refused, "got list" if rank == 1 else "got unfit"):
        psengine.broadcast_object([object()], from_rank=1)
    with raises(ConfigurationError, "from_rank is a rank of the group", f"got {world_size}"):
        psengine.broadcast_object(1, from_rank=world_size)
    with raises(ReplicaMismatchError, "the call"):
        psengine.broadcast_object(1, from_rank=rank)
    with raises(ReplicaMismatchError, "the call"):
        psengine.broadcast_object(1) if rank == 0 else psengine.mean(1.0)

    if rank == 1:
        time.sleep(0.3)
    came_s = time.monotonic()  # of one clock on all of a machine's processes
    psengine.barrier()
    left_s = time.monotonic()
    assert left_s >= max(psengine.gather(came_s)), "it waits for the late one"


@pytest.mark.parametrize(("collective", "world_size"), [("auto", 2), ("c10d", 3)])
def test_ranks_share_values_and_wait_for_each_other(collective, world_size):
    run_ranks(exchange, world_size, collective)


@pytest.mark.parametrize(
    "call",
    [
        psengine.barrier,
        *(lambda: psengine.broadcast_object(1), lambda: psengine.mean(1.0)),
        *(lambda: psengine.sum({"n": 1}), lambda: psengine.gather([1, 2])),
    ],
)
def test_ranks_that_have_not_met_are_told(call, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with raises(ConfigurationError, "expected psengine.init() before it", "one of 2"):
        call()


def of_the_job(rank: int, world_size: int, is_independent: bool) -> None:
    if is_independent:
        os.environ.update(PSENGINE_WORKER=str(rank), PSENGINE_WORKERS=str(world_size))
        started_s = time.monotonic()
        psengine.barrier()
        assert psengine.broadcast_object({"mine": rank}) == {"mine": rank}
        assert time.monotonic() - started_s < 30, "it waits for nobody"
        with raises(ConfigurationError, "expected 0 to 0, got 1"):
            psengine.broadcast_object(1, from_rank=1)
        warnings = warnings_of("psengine.data.metrics")
        assert [psengine.sum(2), psengine.sum(3), psengine.mean(4.0)] == [2, 3, 4.0]
        said = [f"psengine.{verb}() counts the value of worker {rank} alone" for verb in ("sum", "mean")]
        assert [line.partition(":")[0] for line in warnings] == said
    with open(os.devnull if rank else os.environ["PRINTED"], "a") as file:
        psengine.print("worker", rank, sep="=", end=";", file=file, flush=True)
    with open(os.environ["PRINTED"], "a") as file:
        psengine.print("once", file=file)
    psengine.stop_if_not_finite(torch.tensor([2.0], requires_grad=True))
    with pytest.raises(NonFiniteLossError) as caught:
        psengine.stop_if_not_finite(torch.tensor(-math.inf))
    assert (caught.value.worker, caught.value.loss) == (rank, -math.inf)
    assert f"loss of worker {rank} is -inf" in str(caught.value)
    with pytest.raises(NonFiniteLossError):
        psengine.stop_if_not_finite(math.nan)


@pytest.mark.parametrize("is_independent", [False, True], ids=["in a group", "independent"])
def test_printing_and_stopping_are_of_the_job(is_independent, tmp_path, monkeypatch):
    printed = tmp_path / "printed"
    monkeypatch.setenv("PRINTED", str(printed))
    run_ranks(of_the_job, 2, is_independent, init_group=not is_independent)
    assert sorted(printed.read_text().replace(";", "\n").split()) == ["once", "worker=0"]


@pytest.mark.parametrize("loss", ["nan", None, torch.ones(2)], ids=str)
def test_the_stop_rule_takes_one_real_number(loss):
    with raises(ArgumentTypeError, "one real number", "Fix: "):
        psengine.stop_if_not_finite(loss)
