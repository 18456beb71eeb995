"""Training libraries over psengine: two ranks of the real library, against the same library over native DDP."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch.distributed as dist
from support.integration_ranks import STEPS, lightning_rank, transformers_rank
from support.processes import run_ranks
from support.server_process import running_server

import psengine

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running


def ranks(function, *arguments):
    """Run ``function`` as torchrun would: one store, which the launcher hosts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(function, WORLD_SIZE, store.port, *arguments, init_group=False, deadline_s=150)


def require(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


# Importing these libraries takes seconds: the ranks that have done it try everything.
@pytest.fixture(scope="module")
def lightning(server, tmp_path_factory):
    require("lightning")
    return ranks(lightning_rank, tmp_path_factory.mktemp("lightning"), server.addresses[0])


@pytest.fixture(scope="module")
def transformers(server, tmp_path_factory):
    require("transformers")
    return ranks(transformers_rank, tmp_path_factory.mktemp("transformers"), server.addresses[0])


def assert_equal(pair, *, buffers=True):
    """Bitwise. Running statistics of a server's workers are the lowest rank's after backward, native DDP's before
    the next forward: not compared.
    """
    native, ours = pair
    assert native.keys() == ours.keys()
    compared = [name for name in native if buffers or "running" not in name]
    different = {
        name: (native[name] - ours[name]).abs().max() for name in compared if not native[name].equal(ours[name])
    }
    assert not different


def updates(server, job):
    """How often the servers have updated a chunk of ``job``."""
    with psengine.connect(server.addresses[0], role="reader", job=job) as reader:
        return max(shard["jobs"][job]["version_max"] for shard in reader.status() if job in shard["jobs"])


@pytest.mark.parametrize("case", ["sync", "accumulate", "manual", "again"])
def test_lightning_trains_as_over_native_ddp(lightning, case):
    for found in lightning:
        assert_equal(found["trainer"][case])


@pytest.mark.parametrize("case", ["sync-server", "resumed", "gan"])
def test_lightning_trains_over_servers_as_over_native_ddp(lightning, case):
    for found in lightning:
        assert_equal(found["trainer"][case], buffers=False)


def test_lightning_trains_with_our_wrapper(lightning):
    for found in lightning:
        native, ours = found["trainer"]["wrappers"]
        assert (native, ours) == ({"torch.nn.parallel.distributed"}, {"psengine.wrapper.ddp"})


def test_lightning_steps_through_the_servers(lightning, server):
    assert updates(server, "lightning-async") == WORLD_SIZE * 2 * STEPS
    for found in lightning:
        trainer = found["trainer"]
        assert all(total > 0 for total in trainer["momentum"])  # the servers', in a checkpoint saved after fit
        assert trainer["learning_rate"] == ([0.1 * 0.5**STEPS], 0.1 * 0.5 ** (STEPS - 1))


def test_lightning_says_which_optimizers_servers_run(lightning):
    for found in lightning:
        assert "expected that of SGD" in found["trainer"]["unknown optimizer"]


def test_lightning_says_how_several_optimizers_train_over_servers(lightning):
    for found in lightning:
        assert "strategy 'async' steps one optimizer" in found["trainer"]["gan refused"]
        assert "'sync-server'" in found["trainer"]["gan refused"]


def test_lightning_and_fabric_leave_what_is_dealt_out_to_its_rank(lightning):
    trained = [[[0], [4], [8]], [[1, 2, 3], [5, 6, 7], [9, 10]]]
    evaluated = [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9]]]
    for rank, found in enumerate(lightning):
        for dealt in (found["trainer"]["dealt out"], found["fabric"]["dealt out"]):
            assert dealt["training"] == trained[rank]
            assert dealt["evaluation"] == dealt.get("prediction", evaluated[rank]) == evaluated[rank]
        assert "use_distributed_sampler=False" in found["trainer"]["dealt out"]["as batch_sampler"]


def test_fabric_trains_as_over_native_ddp(lightning, server):
    for found in lightning:
        assert_equal(found["fabric"]["sync"])
        assert_equal(found["fabric"]["sync-server"], buffers=False)
    assert updates(server, "fabric-async") == WORLD_SIZE * STEPS // 2


@pytest.mark.parametrize("case", ["sync", "optimizer first", "accumulate"])
def test_accelerate_trains_as_over_native_ddp(transformers, case):
    for found in transformers:
        assert_equal(found["accelerate"][case])


def test_accelerate_trains_over_servers(transformers, server):
    for found in transformers:
        accelerate = found["accelerate"]
        assert accelerate["wrapper"] == "psengine.wrapper.ddp"
        for case in ("sync-server", "two optimizers", "two models"):
            assert_equal(accelerate[case], buffers=False)
        assert accelerate["steps"] == (STEPS, "DistributedSGD")
        assert "expected that of SGD" in accelerate["unknown optimizer"]
    assert updates(server, "accelerate-async") == WORLD_SIZE * STEPS


def test_accelerate_is_not_given_what_is_dealt_out(transformers):
    for found in transformers:
        evaluation, *shares = found["accelerate"]["dealt out"]
        assert "got EvaluationSampler" in evaluation
        for refusal in shares:
            assert "split among the ranks once (expected a loader without a psengine sampler, got Prop" in refusal
            assert "Fix: do not pass it to accelerator.prepare()" in refusal


def test_a_trainer_takes_a_loader_of_its_own_as_it_is(transformers):
    for found in transformers:
        taken, expected, refusal = found["trainer"]["dealt out"]
        assert taken[: len(expected)] == expected
        assert "a Trainer's get_train_dataloader() may return it" in refusal


@pytest.mark.parametrize("case", ["sync", "again", "accumulate", "resumed"])
def test_transformers_trains_as_over_native_ddp(transformers, case):
    for found in transformers:
        assert_equal(found["trainer"][case])


def test_transformers_evaluates_and_steps_through_the_servers(transformers, server):
    for found in transformers:
        trainer = found["trainer"]
        native, ours = trainer["evaluation"]
        assert native == ours
        assert trainer["loss"] < native  # async takes twice as many steps
        assert "exp_avg" in trainer["state"]
    assert updates(server, "transformers-async") == WORLD_SIZE * STEPS


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    for name in ("lightning", "accelerate", "transformers"):
        monkeypatch.delitem(sys.modules, f"psengine.integrations.{name}", raising=False)
    with pytest.raises(psengine.MissingExtraError, match=rf"{library}.*pip install.*\[integrations\]"):
        importlib.import_module(f"psengine.integrations.{library}")
