"""What tables refuse, and what people do with their rows: read, load, export, serve, save."""

import copy
import io
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.expectations import raises
from support.processes import in_ranks
from support.server_training import at_servers
from support.table_training import warnings_of
from torch import nn

import psengine
from psengine.errors import (
    ArgumentTypeError,
    ConfigurationError,
    ModuleError,
    ReductionError,
    ReplicaMismatchError,
    RowIdError,
    ServerRefusedError,
)


def model_of(**tables: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"head": nn.Linear(4, 1), **tables})


def wrapped_model(job: str, strategy: str = "sync-server", **tables: nn.Module) -> Any:
    os.environ.update(PSENGINE_WORKER="0", PSENGINE_JOB=job)
    return psengine.DistributedDataParallel(model_of(**tables), strategy=strategy)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_embeddings": 0}, "num_embeddings: (expected int >= 1, got 0)"),
        ({"embedding_dim": 0}, "embedding_dim"),
        ({"optimizer": "adam"}, "one of sgd|adagrad|rowwise_adagrad"),
        ({"rule": "sync"}, "one of async|average"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"padding_idx": 10}, "`padding_idx` (expected -10 to 9, got 10)"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"num_embeddings": 2**62}, "too many elements"),
        ({"dtype": torch.bfloat16}, "expected dtype=torch.float32, got torch.bfloat16"),
    ],
)
def test_other_options_are_refused_by_name(options, text):
    given = {"num_embeddings": 10, "embedding_dim": 4, "lr": 0.1, **options}
    with raises(ConfigurationError, text):
        psengine.ServerEmbedding(given.pop("num_embeddings"), given.pop("embedding_dim"), **given)
    table = psengine.ServerEmbedding(10, 4, lr=0.1)
    with raises(ConfigurationError, "ServerEmbedding.lr"):
        table.lr = "fast"
    with raises(ConfigurationError, "mode"):
        psengine.ServerEmbeddingBag(10, 4, lr=0.1, mode="median")


@at_servers(1)
def test_what_a_model_with_tables_cannot_do_is_said(rank, world_size):
    table = psengine.ServerEmbedding(10, 4, lr=0.1)
    with raises(ModuleError, "wrap the model first"):
        table(torch.tensor([1]))
    with raises(ConfigurationError, "two tables of the model have one name", "'t'"):
        wrapped_model("twice", **{name: psengine.ServerEmbedding(9, 4, name="t", lr=1) for name in "ab"})
    with raises(ConfigurationError, "expected one max_staleness"):
        bounds = {"a": 1, "b": None}
        wrapped_model(
            "bounds",
            **{name: psengine.ServerEmbedding(9, 4, lr=1, max_staleness=bound) for name, bound in bounds.items()},
        )
    wrapped = wrapped_model("refusals", "async", table=table)
    for ids, error, text in (
        (torch.tensor([3, 10]), RowIdError, "table 'table' has no row 10 (expected ids from 0 to 9)"),
        (torch.tensor([3, -1]), RowIdError, "has no row -1"),
        (torch.tensor([0.5]), ArgumentTypeError, "int64 or int32 (got torch.float32)"),
        ([3], ArgumentTypeError, "got list"),
    ):
        with raises(error, text):
            table(ids)
    assert issubclass(RowIdError, IndexError)
    assert table(torch.empty(0, 3, dtype=torch.int32)).shape == (0, 3, 4)
    with raises(ReductionError, "second derivative"):
        table(torch.tensor([1])).sum().backward(create_graph=True)
    table(torch.tensor([1])).sum().backward()
    with raises(ReductionError, "nobody pushes", "psengine.DistributedOptimizer"):
        table(torch.tensor([2]))
    with raises(ModuleError, "cannot be copied"):
        copy.deepcopy(wrapped)
    for rows in (torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.float64)):
        with raises(ConfigurationError, "rows of float32 [n, 4]"):
            table.load(torch.tensor([1, 2]), rows)
    with raises(ConfigurationError, "got 2 twice"):
        table.load(torch.tensor([2, 2]), torch.zeros(2, 4))
    for bad in (float("nan"), -float("inf")):
        rows = torch.zeros(3, 4)
        rows[1, 2] = bad
        with raises(ConfigurationError, "must be finite", f"{bad}, 0.0] for row 5)", "Fix: leave that row out"):
            table.load(torch.tensor([9, 5, 2]), rows)
    with raises(RowIdError, "no row 11"):
        table.load(torch.tensor([11, 2]), torch.zeros(2, 4))
    wrapped.leave()
    with raises(ModuleError, "before model.leave()"):
        table(torch.tensor([1]))


@at_servers(2)
def test_workers_have_the_same_tables(rank, world_size):
    os.environ["PSENGINE_JOB"] = "same"
    with raises(ReplicaMismatchError, "embedding_dim of table 'table'=4"):
        psengine.DistributedDataParallel(model_of(**({"table": psengine.ServerEmbedding(10, 4, lr=1)} if rank else {})))
    for other in ({"embedding_dim": 5}, {"rule": "average"}, {"optimizer": "adagrad"}):
        options = {"embedding_dim": 4, "lr": 1.0, **(other if rank else {})}
        table = psengine.ServerEmbedding(10, options.pop("embedding_dim"), **options)
        ((option, value),) = other.items()
        with raises(ReplicaMismatchError, f"{option} of table 'table'={value}"):
            psengine.DistributedDataParallel(model_of(table=table))


@at_servers(1)
def test_an_independent_worker_with_another_rule_is_refused(rank, world_size):
    os.environ["PSENGINE_WORKERS"] = "2"
    first = wrapped_model("rules", "async:job=rules", table=psengine.ServerEmbedding(10, 4, lr=1.0))
    os.environ["PSENGINE_WORKER"] = "1"
    with raises(ServerRefusedError, "'async tables:max_staleness=8', got 'average of tables'"):
        table = psengine.ServerEmbedding(10, 4, lr=1.0, rule="average")
        psengine.DistributedDataParallel(model_of(table=table), strategy="async:job=rules")
    first.leave()


@at_servers(1)
def test_rows_are_read_loaded_exported_and_served(rank, world_size):
    table = psengine.ServerEmbedding(1_000, 4, lr=1.0, padding_idx=-1)
    bag = psengine.ServerEmbeddingBag(1_000, 4, name="bags", lr=1.0, rule="average", optimizer="adagrad")
    wrapped = wrapped_model("served", "async", table=table, bag=bag)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.module.head.parameters(), lr=0.1), wrapped)
    ids = torch.tensor([[999, 4], [70, 4]])
    rows = table.rows(ids)
    assert rows.shape == (2, 2, 4)
    assert torch.equal(rows[0, 1], rows[1, 1])
    assert not rows[0, 0].any()
    (wrapped.module.head(table(ids)).sum() + bag(ids).sum()).backward()
    optimizer.step()
    loaded = torch.randn(300, 4)
    assert not torch.equal(table(torch.arange(100, 400)), loaded.flip(0))
    table.load(torch.arange(300).flip(0) + 100, loaded)
    assert torch.equal(table.rows(torch.arange(100, 400)), loaded.flip(0))
    assert torch.equal(table(torch.arange(100, 400)), loaded.flip(0))  # not what the forward before has read
    table.export("rows.safetensors")
    found = load_file("rows.safetensors")
    os.remove("rows.safetensors")
    assert found["ids"].tolist() == [4, 70, *range(100, 400)]
    assert torch.equal(found["rows"], table.rows(found["ids"]))
    with tempfile.TemporaryDirectory() as directory:
        with raises(OSError):
            table.export(directory)
        assert not os.path.exists(f"{directory}.part")
    with psengine.connect(role="reader") as reader:
        assert torch.equal(reader.rows("table", ids), table.rows(ids))
        assert torch.equal(reader.rows("bags", ids), bag.rows(ids))
        with raises(ConfigurationError, "no table 'users' (expected one of ['bags', 'table'])"):
            reader.rows("users", ids)
    # A copy reads the same rows, and trains none; one that travelled has to be wrapped.
    copied = copy.deepcopy(wrapped.module)["table"]
    assert torch.equal(copied(ids), table.rows(ids))
    with raises(ReductionError, "a copy of a table", "copy.requires_grad_(False)"):
        copied(ids).sum().backward()
    assert pickle.loads(pickle.dumps(wrapped.module))["table"].table is None
    wrapped.leave()


def without_gradients(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.requires_grad = False


def dropped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


# What is done to a model with a table, or with a torch.nn.Embedding in its place: before the model is wrapped, after,
# after a forward, and after its backward.
ACTS: dict[str, tuple[int, Callable[[Any], object]]] = {
    "nothing": (0, lambda model: None),
    "freeze the table": (0, lambda model: model.table.requires_grad_(False)),
    "freeze the table later": (1, lambda model: model.table.requires_grad_(False)),
    "freeze the model": (1, lambda model: model.requires_grad_(False).head.requires_grad_(True)),
    "freeze parameters": (0, lambda model: without_gradients(*model.table.parameters())),
    "thaw": (1, lambda model: model.table.requires_grad_(False).requires_grad_(True)),
    "zero_grad": (3, lambda model: model.zero_grad()),
    "zero_grad to zeros": (3, lambda model: model.zero_grad(set_to_none=False)),
    "zero_grad of the table": (3, lambda model: model.table.zero_grad()),
    "drop": (3, dropped),
    "backward, then zero_grad": (2, lambda model: (loss_of(model).backward(), model.zero_grad())),
    "backward, then to zeros": (2, lambda model: (loss_of(model).backward(), model.zero_grad(set_to_none=False))),
    "backward, and nothing": (2, lambda model: loss_of(model).backward()),
    "eval": (1, lambda model: model.eval()),
    "half": (0, lambda model: model.half()),
    "bfloat16": (0, lambda model: model.to(torch.bfloat16)),
    "double": (0, lambda model: model.double()),
    "float": (1, lambda model: model.half().float()),
    "cpu": (1, lambda model: model.cpu().to("cpu")),
    "share_memory": (1, lambda model: model.share_memory()),
    "apply": (1, lambda model: model.apply(lambda module: module.train(False).train())),
    "state": (1, lambda model: model.load_state_dict(model.state_dict())),
    "copy": (3, lambda model: copy.deepcopy(model).requires_grad_(False).zero_grad()),
}


def loss_of(model: Any) -> torch.Tensor:
    return (model.table(torch.tensor([1, 2, 2])) * 0.5).sum() + model.head.weight.sum()


@at_servers(1)
def test_methods_of_modules_act_as_on_an_embedding(rank, world_size):
    """Whether and how far rows move, and the dtype of what a forward returns."""
    for name, (when, act) in ACTS.items():
        ours = psengine.ServerEmbedding(10, 4, lr=1.0, std=0.0)
        models: list[Any] = [model_of(table=ours), model_of(table=nn.Embedding(10, 4, _weight=torch.zeros(10, 4)))]
        acts = [lambda model, at=at, when=when, act=act: act(model) if at == when else None for at in range(4)]
        for model in models:
            acts[0](model)
        os.environ.update(PSENGINE_WORKER="0", PSENGINE_JOB=name)
        wrapped = psengine.DistributedDataParallel(models[0], strategy="sync-server")
        # A table is trained with all of the model's parameters, or with those that its optimizer steps.
        stepping = psengine.DistributedOptimizer(torch.optim.SGD(models[0].parameters(), lr=1.0), wrapped)
        for model, optimizer in zip(models, (stepping, torch.optim.SGD(models[1].parameters(), lr=1.0)), strict=True):
            acts[1](model)
            loss = loss_of(model)
            acts[2](model)
            loss.backward()
            acts[3](model)
            optimizer.step()
        ids = torch.arange(10)
        assert torch.equal(ours.rows(ids), models[1].table.weight.detach().float()), name
        assert ours(ids).dtype == models[1].table(ids).dtype, name
        assert ours(ids).requires_grad == models[1].table(ids).requires_grad, name
        wrapped.leave()


@at_servers(1)
def test_a_checkpoint_names_its_tables_and_the_version_of_their_rows(rank, world_size):
    def new_table(rows: int = 10) -> psengine.ServerEmbedding:
        return psengine.ServerEmbedding(rows, 4, lr=1.0)

    wrapped = wrapped_model("saved", table=new_table())
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0), wrapped)
    file = io.BytesIO()
    torch.save(wrapped.module.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    named = {"name": "table", "num_embeddings": 10, "embedding_dim": 4, "version": 0}
    assert state["table._extra_state"] == named
    found = warnings_of("psengine.tables")
    wrapped.module.load_state_dict(state)
    for strict in (True, False):
        with raises(RuntimeError, "table.weight: rows live on servers", "torch.nn.Embedding", ".load(ids, rows)"):
            wrapped.module.load_state_dict(model_of(table=nn.Embedding(10, 4)).state_dict(), strict=strict)
    with raises(ConfigurationError, "another table", "'num_embeddings': 11"):
        model_of(table=new_table(11)).load_state_dict(state)
    assert not found
    loss_of(wrapped.module).backward()
    optimizer.step()
    wrapped.module.table.load(torch.tensor([1]), torch.zeros(1, 4))
    later = wrapped.module.state_dict()
    version = later["table._extra_state"]["version"]
    assert version > 1
    wrapped.module.load_state_dict(later)
    assert not found
    wrapped.module.load_state_dict(state)
    wrapped.leave()
    # Before the model is wrapped, too, as most scripts do.
    resumed = model_of(table=new_table())
    resumed.load_state_dict(state)
    psengine.DistributedDataParallel(resumed, strategy="sync-server").leave()
    assert len(found) == 2
    for text in found:
        assert "table 'table'" in text
        assert f"(expected version 0, got {version} at the servers). Fix: start the servers" in text


@in_ranks(2)
def test_tables_have_a_server_where_none_is_named(rank: int, world_size: int) -> None:
    os.environ.pop("PSENGINE_SERVERS", None)
    wrapped = psengine.DistributedDataParallel(model_of(table=psengine.ServerEmbedding(10, 4, lr=1.0, rule="average")))
    with raises(ConfigurationError, "table 'table' belongs to another wrapped model"):
        psengine.DistributedDataParallel(wrapped.module)
    with raises(ConfigurationError, "without tables on servers"), wrapped.join():
        pass
    first = wrapped.module.table.rows(torch.arange(10))
    assert first.std() > 0.5
    wrapped.leave()
    with raises(ConfigurationError, "expected a model without tables on servers ('table')"):
        psengine.DistributedDataParallel(wrapped.module, strategy="sync:virtual_workers=2")
    table = psengine.ServerEmbedding(10, 4, lr=1.0)
    switched = psengine.DistributedDataParallel(model_of(table=table), strategy="async")
    with raises(ConfigurationError, "tables on a server that the strategy has started"):
        switched.switch_strategy("sync")
    switched.leave()
