"""What a worker says of itself, what a shard sees of it, and what people are told happened."""

import json
import math
import time
import urllib.request
from fractions import Fraction

import msgspec
import pytest
import torch
from support.processes import run_ranks
from support.server_process import running_server
from support.waiting import eventually
from torch import nn

import psengine
from psengine.status_port.overview import merge_jobs
from psengine.status_port.status_model import ShardStatus
from psengine.tracing.telemetry import Telemetry

STEPS = 6


def body(steps, step_s=0.0, blocked_s=0.0, samples=0, **loss):
    return {"steps": steps, "step_s": step_s, "blocked_s": blocked_s, "samples": samples, **loss}


class TestWhatAWorkerSays:
    def test_totals_change_at_the_end_of_a_step(self):
        now_s = [100.0]
        telemetry = Telemetry(lambda: now_s[0])
        assert telemetry.to_body() == body(0)
        telemetry.step_ended()
        now_s[0] += 1.0
        with telemetry.blocked():
            now_s[0] += 2.0
        assert telemetry.to_body() == body(1)
        telemetry.step_ended()
        assert telemetry.to_body() == body(2, step_s=3.0, blocked_s=2.0)

    @pytest.mark.parametrize(
        ("loss", "said"),
        [
            (0.5, 0.5),
            (2, 2.0),
            (Fraction(1, 2), 0.5),  # as NumPy's scalars, another kind of number
            (torch.tensor(0.25, requires_grad=True), 0.25),
            (torch.tensor([[1.5]], dtype=torch.bfloat16), 1.5),
            (math.nan, None),
            (torch.tensor(math.inf), None),
        ],
    )
    def test_losses(self, loss, said):
        telemetry = Telemetry(time.monotonic)
        telemetry.report(loss=9.0)
        telemetry.report(loss=loss, samples=3)
        telemetry.report(samples=4)
        assert (telemetry.to_body()["loss"], telemetry.to_body()["samples"]) == (said, 7)

    def test_what_cannot_be_read_is_left_out_and_said_once(self, caplog):
        telemetry = Telemetry(time.monotonic)
        for loss in (torch.empty((), device="meta"), torch.empty(2, device="meta"), torch.ones(2), "low"):
            telemetry.report(loss=loss, samples=2)
        telemetry.report(samples=-3)
        assert telemetry.to_body() == body(0, samples=8)
        assert caplog.text.count("loss") == 1


SLOW_S = 0.05


def _status(url):
    with urllib.request.urlopen(f"{url}/status.json", timeout=10) as response:
        return json.load(response)


def _train_and_look(rank, world_size, addresses, url, strategy):
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(
        nn.Linear(4, 3), strategy=strategy(servers=addresses, job=f"job-{strategy.name}")
    )
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.distributed.barrier()  # who comes late to an asynchronous job counts from the slowest on
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if rank == 1:
            time.sleep(SLOW_S)
        optimizer.step()
        model.report(loss=loss, samples=2)
        if step == 2:
            # The first of the two heartbeats with steps that rates take.
            eventually(lambda: _status(url)["jobs"][f"job-{strategy.name}"]["workers"][rank]["loss"])

    def shown():
        view = _status(url)
        workers = view["jobs"][f"job-{strategy.name}"]["workers"]
        known = all(worker["step"] == STEPS and worker["step_s"] is not None for worker in workers)
        return view if known and len(workers) == 2 and workers[rank]["loss"] == loss.item() else None

    view = eventually(shown, "all steps and the last loss are shown")
    torch.distributed.barrier()
    model.leave()
    return view, loss.item()


@pytest.mark.parametrize("strategy", [psengine.SyncServer, psengine.AsyncServer])
def test_a_run_shows_in_the_servers_status(strategy):
    with running_server(shards=2) as server:
        (view, loss), _ = run_ranks(
            _train_and_look, 2, server.addresses[:1], server.status_url, strategy, deadline_s=60
        )
        name = f"job-{strategy.name}"
        shards = [msgspec.convert(one, ShardStatus, str_keys=True) for one in view["shards"]]
        assert msgspec.json.decode(msgspec.json.encode(shards)) == view["shards"]  # what is read is what was written
        assert msgspec.json.decode(msgspec.json.encode(merge_jobs(shards))) == view["jobs"]
        job = view["jobs"][name]
        assert (job["kind"], job["members"]) == (strategy.name, 2)
        fast, slow = job["workers"]
        for worker in (fast, slow):
            assert (worker["state"], worker["step"], worker["lag"]) == ("live", STEPS, 0)
            assert worker["samples_per_s"] > 0
            assert worker["steps_per_s"] > 0
            assert worker["compute_s"] + worker["blocked_s"] == pytest.approx(worker["step_s"], abs=1e-5)
            assert worker["blocked_s"] > 0
        assert slow["compute_s"] >= SLOW_S
        assert fast["loss"] == loss
        if strategy.name == "async":
            assert fast["staleness_p50"] is not None
        kinds = [(event["kind"], event["worker"]) for event in server.status()["events"]]
        kinds = [kind for kind in kinds if kind[0] != "stood_still"]  # a busy machine
        assert sorted(kinds) == sorted(
            [("started", None), ("joined", 0), ("joined", 1), ("left", 0), ("left", 1)]
        )  # two shards, and each worker once
        departed = server.status()["jobs"][name]["departed"]
        assert sorted((gone["rank"], gone["reason"], gone["step"]) for gone in departed) == [
            (0, "left", STEPS),
            (1, "left", STEPS),
        ]
