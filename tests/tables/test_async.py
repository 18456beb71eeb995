"""Rule "async": the bits of a plain process where one worker trains; what prefetched rows lack; who is refused."""

import itertools
import os
from typing import Any

import torch
from support.expectations import raises
from support.server_training import at_servers
from support.table_training import at_servers as model_at_servers
from support.table_training import batch, native_optimizers, native_twin, rows_of, warnings_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import psengine
from psengine.errors import ConfigurationError


@at_servers(1)
def test_one_worker_has_the_bits_of_a_plain_process(rank, world_size):
    os.environ["PSENGINE_WORKER"] = "0"
    for optimizer, mode, strategy in (("sgd", "mean", "sync-server"), ("adagrad", "sum", "async")):
        os.environ["PSENGINE_JOB"] = f"plain {optimizer}"
        ours = model_at_servers(optimizer, rule="async", mode=mode)
        wrapped = psengine.DistributedDataParallel(ours, strategy=strategy)
        twin = native_twin(ours)
        distributed = psengine.DistributedOptimizer(torch.optim.Adam(ours.head.parameters(), lr=0.01), wrapped)
        native = native_optimizers(twin, optimizer)
        for step in range(4):
            for model, optimizers in ((wrapped, [distributed]), (twin, native)):
                # Activations are computed anew in backward, from the same rows.
                checkpoint(model, *batch(0, step), use_reentrant=False).backward()
                if model is twin:  # which DDP's all-reduce does, and a plain step does not
                    twin.users.weight.grad = twin.users.weight.grad.coalesce()
                    twin.items.weight.grad = twin.items.weight.grad.coalesce()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
            for got, wanted in zip(rows_of(ours), (twin.users.weight, twin.items.weight), strict=True):
                assert torch.equal(got, wanted), (step, (got - wanted).abs().max())
        for got, wanted in zip(ours.head.parameters(), twin.head.parameters(), strict=True):
            # The servers' Adam is not torch's to the last bit.
            torch.testing.assert_close(got, wanted)
        wrapped.leave()


class OneTable(nn.Module):
    def __init__(self, rows: int = 1000, dim: int = 4, **options: Any) -> None:
        super().__init__()
        self.table = psengine.ServerEmbedding(rows, dim, lr=1.0, **options)
        self.head = nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).sum()


@at_servers(1)
def test_prefetched_rows_are_those_of_the_time_they_were_read_at(rank, world_size):
    os.environ["PSENGINE_WORKER"] = "0"
    for rule in ("async", "average"):
        os.environ["PSENGINE_JOB"] = f"prefetched {rule}"
        model = OneTable(rule=rule)
        wrapped = psengine.DistributedDataParallel(model, strategy="sync-server")
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.0), wrapped)
        ids = torch.tensor([7, 7, 2])
        before = model.table.rows(ids)
        model.table.prefetch(ids)
        wrapped(torch.tensor([7])).backward()
        optimizer.step()
        after = model.table.rows(ids)
        assert not torch.equal(before, after)
        read = model.table(ids).detach()
        assert torch.equal(read, before if rule == "async" else after)
        optimizer.step()  # a prefetched row is of one step
        assert torch.equal(model.table(ids).detach(), after)
        wrapped.leave()
    os.environ["PSENGINE_JOB"] = "never ahead"
    wrapped = psengine.DistributedDataParallel(OneTable(max_staleness=0), strategy="sync-server")
    with raises(ConfigurationError, "'table'", "max_staleness", "leave out prefetch"):
        wrapped.module.table.prefetch(ids)
    wrapped.leave()


@at_servers(1)
def test_rows_that_one_mode_has_read_train_in_another(rank, world_size):
    """Forwards of a step share what was read for equal ids, whatever was switched on when it was read."""
    os.environ.update(PSENGINE_WORKER="0", PSENGINE_JOB="modes")
    model = OneTable(std=0.0)
    nn.init.constant_(model.head.weight, 0.5)  # so that sums of steps are exact
    wrapped = psengine.DistributedDataParallel(model, strategy="sync-server")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.0), wrapped)
    ids = torch.tensor([1, 2])
    modes = {
        "inference": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "device": torch.device("meta"),
    }
    reads = {"forward": lambda: model.table(ids), "prefetch": lambda: model.table.prefetch(ids)}

    def recomputed() -> torch.Tensor:
        # The first forward is one of no_grad, the second one of backward.
        return checkpoint(lambda _: wrapped(ids), torch.ones(1, requires_grad=True), use_reentrant=True)

    ways = itertools.product(modes, reads, (True, False), (lambda: wrapped(ids), recomputed))
    for number, (mode, read, is_training, trained) in enumerate(ways):
        with modes[mode]:
            reads[read]() if is_training else model.table.eval()(ids)
        model.table.train()
        trained().backward()
        optimizer.step()
        assert torch.equal(model.table.rows(ids), -(number + 1) * model.head.weight.expand(2, -1)), (mode, read)
    wrapped.leave()


@at_servers(1)
def test_a_step_moves_the_rows_that_it_touches_once(rank, world_size):
    os.environ.update(PSENGINE_WORKER="0", PSENGINE_JOB="bytes")
    model = OneTable(dim=32, rows=10**8)
    wrapped = psengine.DistributedDataParallel(model, strategy="sync-server")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.0), wrapped)
    ids = torch.randint(0, 10**8, (500,)).repeat(3)
    (model.table(ids).sum() + model.table(ids).sum()).backward()
    optimizer.step()
    jobs = [shard["jobs"]["bytes.tables"] for shard in model.table.bound().parts.session.status()]
    for direction in ("bytes_in", "bytes_out"):
        moved_bytes = sum(job[direction] for job in jobs)
        assert 500 * 32 * 4 <= moved_bytes <= 1.1 * 500 * (32 * 4 + 8)
    assert sum(job["table_rows"]["table"] for job in jobs) == 500
    wrapped.leave()


@at_servers(1)
def test_a_gradient_that_is_not_finite_is_refused_by_its_row(rank, world_size):
    os.environ.update(PSENGINE_WORKER="0", PSENGINE_JOB="not finite")
    model = OneTable()
    wrapped = psengine.DistributedDataParallel(model, strategy="sync-server")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.0), wrapped)
    ids = torch.tensor([400, 17, 23])
    before = model.table.rows(ids)
    found = warnings_of("psengine.tables")
    (model.table(ids) * torch.tensor([[1.0], [float("nan")], [1.0]])).sum().backward()
    optimizer.step()
    assert "table 'table' (non_finite in row 17)" in found[0]
    after = model.table.rows(ids)
    assert torch.equal(before[1], after[1])
    wrapped.leave()


@at_servers(1)
def test_bags_of_weighted_rows_and_of_the_largest_are_torch_s(rank, world_size):
    os.environ.update(PSENGINE_WORKER="0", PSENGINE_JOB="bags")
    ids, offsets, weights = torch.tensor([5, 1, 5, 9, 1, 0]), torch.tensor([0, 2, 5]), torch.rand(6)
    for mode in ("sum", "max"):
        # Torch sums otherwise where there may be padding, whether or not a batch has it.
        bag = psengine.ServerEmbeddingBag(10, 4, mode=mode, padding_idx=7, lr=0.5)
        model = nn.ModuleDict({"bag": bag, "head": nn.Linear(4, 1)})
        wrapped = psengine.DistributedDataParallel(model, strategy="sync-server")
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.0), wrapped)
        twin = nn.EmbeddingBag(10, 4, mode=mode, padding_idx=7)
        twin.load_state_dict({"weight": model.bag.rows(torch.arange(10))})
        of_samples = [weights.clone().requires_grad_() if mode == "sum" else None for _ in range(2)]
        results = [bag(ids, offsets, own) for bag, own in zip((model.bag, twin), of_samples, strict=True)]
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
        if mode == "sum":
            assert torch.equal(of_samples[0].grad, of_samples[1].grad)
        optimizer.step()
        torch.optim.SGD(twin.parameters(), lr=0.5).step()
        torch.testing.assert_close(model.bag.rows(torch.arange(10)), twin.weight.detach())
        wrapped.leave()
