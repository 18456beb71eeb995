"""How workers of the server strategies meet: without a group, late, ahead of others, where no server is."""

import copy
import io
import logging
import os
import re
from typing import Any

import pytest
import torch
from support import table_training
from support.expectations import raises
from support.processes import run_ranks
from support.server_process import running_server
from support.server_training import at_servers, batches, build, train, use, wrap
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import psengine
from psengine.environment.uncaught import describe
from psengine.errors import ConfigurationError, ServerLostError, ServerRefusedError


def trained_once(rank: int, world_size: int, address: str, calls_init: bool) -> str:
    use(address)
    os.environ.update({"PSENGINE_JOB": f"once-{calls_init}", "PSENGINE_RUN_ID": "this launch"})
    try:
        if calls_init:
            psengine.init()
        wrapped = psengine.DistributedDataParallel(build(seed=rank), strategy="sync-server")
    except SystemExit as ended:
        return f"ended with {ended.code}"
    for batch in batches(rank)[:2]:
        F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
    wrapped.leave()
    # The same process may train again.
    again = psengine.DistributedDataParallel(build(seed=rank), strategy="sync-server")
    again.leave()
    return "trained"


@pytest.mark.parametrize("calls_init", [False, True])
def test_a_worker_that_is_started_again_after_its_job_has_ended_ends_at_once(server, calls_init):
    outcomes = [run_ranks(trained_once, 1, server.addresses[0], calls_init, init_group=False) for _ in range(2)]
    assert outcomes == [["trained"], ["ended with 0"]]


def trained_at(rank: int, world_size: int, address: str, strategy: str, variables: dict[str, str]) -> tuple[str, Any]:
    """What the log and the error say, and the head's bias after a step."""
    use(address)
    os.environ.update({"PSENGINE_RUN_ID": "", **variables})
    model = table_training.at_servers() if strategy == "sync" else build(seed=rank)
    data = table_training.batch(0, 0) if strategy == "sync" else batches(rank)[0][:1]
    log = io.StringIO()
    logging.getLogger("psengine").addHandler(logging.StreamHandler(log))
    try:
        wrapped = psengine.DistributedDataParallel(model, strategy=strategy)
    except ConfigurationError as error:
        return describe(error), None
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    found = table_training.rows_of(model)[0] if strategy == "sync" else model.wide.weight.detach().clone()
    wrapped(*data).sum().backward()
    optimizer.step()
    wrapped.leave()
    return log.getvalue(), found


@pytest.mark.parametrize("strategy", ["async", "diloco-server:every=1", "sync"])  # sync: its tables
def test_another_run_does_not_go_on_from_a_kept_servers_values_unasked(strategy, tmp_path):
    kept = {"snapshot_dir": tmp_path / "kept", "durability": "log"}
    with running_server(**kept) as server:
        [address] = server.addresses

        def run(**variables: str) -> tuple[str, Any]:
            return run_ranks(trained_at, 1, address, strategy, variables)[0]

        _, begun = run(PSENGINE_RUN_NAME="first")
        server.kill()
        with running_server(bind=address, **kept):
            refused, _ = run(PSENGINE_RUN_NAME="second")
            assert refused.startswith(__file__)  # the user's line, and no library's
            assert "were trained by first" in refused
            assert "psengine run --continue" in refused
            said, found = run(PSENGINE_RUN_NAME="second", PSENGINE_CONTINUE="1")
            assert ("trained by" in said, torch.equal(found, begun)) == (False, False)
            said, _ = run()  # nobody names a run on Kubernetes
            assert said.count("PSENGINE_CONTINUE=1") == said.count("PSENGINE_RUN_NAME") == 1


@at_servers(1)
def test_a_training_after_shutdown_is_the_same_job_again(rank, world_size):
    os.environ.update({"PSENGINE_JOB": "notebook", "PSENGINE_RUN_ID": ""})
    psengine.init()
    kept, table = wrap(psengine.AsyncServer()), psengine.DistributedDataParallel(table_training.at_servers())
    assert kept.strategy.session.options.job == "notebook"
    psengine.shutdown()
    psengine.init()
    again = wrap(psengine.AsyncServer())
    assert again.strategy.session.options.job == "notebook"
    assert again.strategy.session.rank == 0
    assert table.module.users.table is None  # it has left too
    kept.leave()
    other = wrap(psengine.AsyncServer())
    assert other.strategy.session.options.job == "notebook.1"


def embedded(rank: int, world_size: int) -> Any:
    os.environ.pop("PSENGINE_SERVERS", None)
    wrapped = psengine.DistributedDataParallel(build(seed=rank), strategy=psengine.AsyncServer())
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.01), wrapped)
    train(wrapped, optimizer, batches(rank))
    [status] = wrapped.strategy.session.status()
    process = wrapped.strategy.rendezvous.embedded
    wrapped.leave()
    return status["jobs"]["default"]["applied"] > 0, process is not None


class _FailsToLayOut(psengine.SyncServer):
    def lay_out(self, buckets: Any) -> None:
        self.close()
        raise MemoryError("sabotage of rank 0")


def embedded_and_abandoned(rank: int, world_size: int) -> Any:
    found = embedded(rank, world_size)
    try:
        wrap(_FailsToLayOut() if rank == 0 else psengine.SyncServer())
    except (MemoryError, ServerLostError) as error:
        return found, f"{type(error).__name__}: {error}"
    return found, ""


def test_without_servers_rank_zero_starts_one_and_who_waits_there_learns_that_it_is_gone():
    (first, failed), (second, told) = run_ranks(embedded_and_abandoned, 2, deadline_s=60)
    assert [first, second] == [(True, True), (True, False)]
    assert failed == "MemoryError: sabotage of rank 0"
    assert re.search(r"ServerLostError: the embedded parameter server at ipc://.*rank 0", told)


@at_servers(2)
def test_join_over_servers_is_refused_where_zeros_would_count(rank, world_size):
    wrapped = wrap(psengine.AsyncServer(job="join-async"))
    with raises(ConfigurationError, "join is for strategies over collectives"), Join([wrapped]):
        wrapped(batches(0)[0][0])  # a rank without data would have the servers apply zeros
    wrapped.leave()
    wrapped = wrap(psengine.SyncServer(job="join-by-live-ranks"))
    with (
        raises(ConfigurationError, "expected divide_by_initial_world_size=True, got False"),
        Join([wrapped], divide_by_initial_world_size=False),
    ):
        wrapped(batches(0)[0][0])
    wrapped.leave()


@at_servers(1)
def test_copies_of_a_model_whose_job_is_named_are_jobs_of_their_own(rank, world_size):
    os.environ["PSENGINE_WORKER"] = "0"
    for strategy in (psengine.AsyncServer(job="copied"), psengine.SyncServer(job="averaged")):
        job = strategy.options["job"]
        wrapped = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy)
        averaged = torch.optim.swa_utils.AveragedModel(wrapped)
        again = copy.deepcopy(averaged.module)
        jobs = [model.strategy.session.options.job for model in (wrapped, averaged.module, again)]
        assert jobs == [job, f"{job}.1", f"{job}.2"]
        # Two models that are both given the name are a mistake, after which the first still has it.
        with raises(ServerRefusedError, "duplicate_rank"):
            psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=type(strategy)(job=job))
        averaged.module.leave()
        third = copy.deepcopy(wrapped)
        assert third.strategy.session.options.job == f"{job}.1"
        for model in (wrapped, again, third):
            model.leave()
        # As where a pickled model comes back in a later process.
        restored = copy.deepcopy(wrapped)
        assert restored.strategy.session.options.job == job
        restored.leave()


def launched_without_a_group(rank: int, world_size: int, address: str) -> Any:
    # torchrun's variables, without MASTER_ADDR: those who meet at servers need none.
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)})
    with raises(ConfigurationError, "psengine.init()", "PSENGINE_SERVERS"):
        psengine.DistributedDataParallel(nn.Linear(2, 2), strategy="async")
    use(address)
    os.environ["PSENGINE_JOB"] = "launched"
    wrapped = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy="async")
    second = psengine.DistributedDataParallel(nn.Linear(3, 2), strategy="async")
    found = wrapped.strategy.session.rank, wrapped.strategy.session.options.job, second.strategy.session.options.job
    wrapped.leave()
    second.leave()
    return found


def test_ranks_of_a_launcher_without_a_group(server):
    results = run_ranks(launched_without_a_group, 2, server.addresses[0], init_group=False)
    assert results == [(0, "launched", "launched.1"), (1, "launched", "launched.1")]
