"""Timelines: what is in the file, whatever the model does meanwhile; and nothing changes by it."""

import contextlib
import json
import os
import shutil
import time

import pytest
import torch
from support.native_extension import needs_shared_memory
from support.native_twins import assert_same_gradients, pair
from support.processes import in_ranks, run_ranks, run_ranks_to_any_end
from torch import nn
from torch.utils.checkpoint import checkpoint

import psengine
from psengine.tracing.timeline import EXCHANGE, find_parts, merge_parts, part_path, recorder, span

STEPS = 3
MODEL_BYTES = 4 * (8 * 32 + 32 + 32 + 32 + 32 * 4 + 4)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A test before may have wrapped a model at servers in this process."""
    monkeypatch.setattr(recorder, "worker_rank", None)


def _model(**options):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    # Two buckets from the second step on.
    return psengine.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0005, **options)


def _step(model, optimizer, rank, step):
    torch.manual_seed(100 * rank + step)
    optimizer.zero_grad()
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _spans(trace, **wanted):
    found = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    return [e for e in found if all(e[key] == value for key, value in wanted.items())]


def test_exchanges_that_overlap_get_lanes_of_their_own(tmp_path):
    with psengine.timeline(tmp_path / "out.json"):
        first, second = (span("reduce", {"bucket": bucket}, track=EXCHANGE) for bucket in (0, 1))
        with span("pack", {"bucket": 2}, step=7):
            second.close()
        first.close()
        span("reduce", {"bucket": 2}, track=EXCHANGE).close()
    trace = json.loads((tmp_path / "out.json").read_text())
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [(e["name"], e["args"], threads[e["tid"]]) for e in _spans(trace)] == [
        ("reduce", {"step": 0, "bucket": 0}, "exchange"),
        ("reduce", {"step": 0, "bucket": 1}, "exchange 2"),
        ("pack", {"step": 7, "bucket": 2}, "compute"),
        ("reduce", {"step": 0, "bucket": 2}, "exchange"),
    ]
    assert not recorder.is_on


def test_parts_are_merged_in_the_order_of_ranks(tmp_path):
    path = tmp_path / "out.json"
    for rank in (10, 2):
        part = {"traceEvents": [{"ph": "X", "pid": rank}], "otherData": {"processes": [{"rank": rank}]}}
        part_path(path, rank).write_text(json.dumps(part))
    assert find_parts(path) == [part_path(path, 2), part_path(path, 10)]
    merged = merge_parts(find_parts(path)[::-1], path)
    assert json.loads(path.read_text()) == merged
    assert [e["pid"] for e in _spans(merged)] == [2, 10]
    assert [process["rank"] for process in merged["otherData"]["processes"]] == [2, 10]


@pytest.mark.parametrize("content", [None, "{", '{"traceEvents": [1], "otherData": {"processes": []}}'])
def test_what_is_no_part_is_refused_by_name(tmp_path, content):
    path = tmp_path / "out.json.rank0"
    if content is not None:
        path.write_text(content)
    with pytest.raises(psengine.ConfigurationError, match=r"out\.json\.rank0"):
        merge_parts([path], tmp_path / "out.json")
    with pytest.raises(psengine.ConfigurationError, match="at least one"):
        merge_parts([], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_folders_that_do_not_exist_are_refused_before_anything_is_recorded(tmp_path):
    with pytest.raises(psengine.ConfigurationError, match="existing folder"), psengine.timeline(tmp_path / "no" / "f"):
        raise AssertionError("entered")
    with pytest.raises(psengine.ConfigurationError, match="a folder of this name"), psengine.timeline(tmp_path):
        raise AssertionError("entered")
    assert not recorder.is_on


def _train(rank, before_last_step=lambda: None):
    model = _model()
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(STEPS):
        if step == STEPS - 1:
            before_last_step()
        loss = _step(model, optimizer, rank, step)
    return model, loss


def _train_recorded(rank, world_size, path):
    with psengine.timeline(path):
        model, loss = _train(rank, lambda: time.sleep(0.2 * rank))
        values = [parameter.detach().clone() for parameter in model.parameters()]
        psengine.mean(loss)
        with torch.no_grad():
            model(torch.randn(5, 8))
    for value, other in zip(values, _train(rank)[0].parameters(), strict=True):
        assert torch.equal(value, other), "recording changed a result"


def test_a_file_has_every_rank_and_step_in_order(tmp_path):
    path = tmp_path / "out.json"
    run_ranks(_train_recorded, 2, str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    trace = json.loads(path.read_text())
    assert [process["rank"] for process in trace["otherData"]["processes"]] == [0, 1]
    for rank in (0, 1):
        for step in range(1, STEPS + 1):
            of_step = [e for e in _spans(trace, pid=rank) if e["args"]["step"] == step]
            forward, backward, optimizer = (
                next(e for e in of_step if e["name"] == name) for name in ("forward", "backward", "optimizer step")
            )
            assert forward["args"]["samples"] == 6
            assert _end(forward) <= backward["ts"]
            assert _end(backward) <= optimizer["ts"]
            for name in ("pack", "reduce", "wait", "unpack"):
                found = [e for e in of_step if e["name"] == name]
                assert [e["args"]["bucket"] for e in found] == list(range(1 if step == 1 else 2)), (name, step)
                assert sum(e["args"]["bytes"] for e in found) == MODEL_BYTES
            for wait in (e for e in of_step if e["name"] == "wait"):
                assert _end(backward) <= wait["ts"]
                assert _end(wait) <= optimizer["ts"]
        assert _spans(trace, pid=rank, cat="collective", name="broadcast of buffers from rank 0")
        assert any("mean()" in e["name"] for e in _spans(trace, pid=rank, cat="collective"))
        (evaluation,) = _spans(trace, pid=rank, name="forward without gradients")
        assert evaluation["args"]["samples"] == 5
    late = next(e for e in _spans(trace, pid=1, name="backward") if e["args"]["step"] == STEPS)
    waits = [e for e in _spans(trace, pid=0, name="wait") if e["args"]["step"] == STEPS]
    assert max(map(_end, waits)) > late["ts"], "rank 1 slept"


def _end(event):
    return event["ts"] + event["dur"] - 0.1  # floats of microseconds


def _fail_inside(rank, world_size, path):
    model = _model()
    with psengine.timeline(path):
        model(torch.randn(3, 8)).sum().backward()
        if rank == 0:
            raise ValueError("on purpose")
    return "done"


def test_after_an_exception_each_rank_writes_its_own_part(tmp_path):
    path = tmp_path / "out.json"
    results = run_ranks_to_any_end(_fail_inside, 2, str(path))
    assert "on purpose" in results[0].error
    assert results[1].value == "done", results[1].error
    parts = sorted(tmp_path.iterdir())
    assert [p.name for p in parts] == ["out.json.rank0", "out.json.rank1"]
    merge_parts(parts, path)
    merged = json.loads(path.read_text())
    assert [e["pid"] for e in _spans(merged, name="backward")] == [0, 1]


def _train_for_environment(rank, world_size):
    psengine.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        _step(model, optimizer, rank, step)
    psengine.shutdown()
    return recorder.is_on


@pytest.mark.parametrize("steps", ["", "2"])
def test_the_environment_turns_it_on(tmp_path, monkeypatch, steps):
    monkeypatch.setenv("PSENGINE_TIMELINE", str(tmp_path / "out.json"))
    monkeypatch.setenv("PSENGINE_TIMELINE_STEPS", steps)
    assert run_ranks(_train_for_environment, 2) == [False] * 2
    for rank in (0, 1):
        part = json.loads((tmp_path / f"out.json.rank{rank}").read_text())
        assert [e["args"]["step"] for e in _spans(part, name="backward")] == ([1, 2] if steps else [1, 2, 3, 4])


@in_ranks(1)
def test_wrong_values_of_the_environment_are_refused(rank, world_size, tmp_path):
    for name, value in (("PSENGINE_TIMELINE", "/no/such/folder/out.json"), ("PSENGINE_TIMELINE_STEPS", "-1")):
        os.environ.update({"PSENGINE_TIMELINE": str(tmp_path / "out.json"), name: value})
        with pytest.raises(psengine.EnvironmentVariableError):
            _model()


def _train_with_server(rank, world_size, path, strategy):
    model = _model(strategy=strategy())
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with psengine.timeline(path):
        for step in range(2):
            _step(model, optimizer, rank, step)
    model.leave()


@pytest.mark.slow  # each starts a server
@pytest.mark.parametrize("strategy", [psengine.AsyncServer, psengine.SyncServer])
def test_workers_of_servers_show_pushes_and_what_came_back(tmp_path, strategy):
    pytest.importorskip("zmq")
    path = tmp_path / "out.json"
    run_ranks(_train_with_server, 1, str(path), strategy, init_group=False)
    part = json.loads((tmp_path / "out.json.rank0").read_text())
    for step in (1, 2):
        spans = [e for e in _spans(part) if e["args"]["step"] == step]
        found = {e["name"]: e for e in reversed(spans)}
        taken = "unpack" if strategy is psengine.SyncServer else "apply"
        assert {"forward", "backward", "pack", "push", "wait", taken, "optimizer step"} <= found.keys()
        assert sum(e["args"]["bytes"] for e in spans if e["name"] == "push") == MODEL_BYTES
        assert found["push"]["ts"] <= found["wait"]["ts"] < _end(found["wait"]) <= found[taken]["ts"]
        assert _end(found["push"]) == pytest.approx(_end(found["wait"]))


@needs_shared_memory
@in_ranks(2)
def test_torch_profiler_shows_operations_in_shared_memory(rank, world_size):
    model = _model(collective="shared_memory")
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            model(torch.randn(3, 8)).sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {"psengine:all_reduce", "psengine:wait_for_all_reduce", "psengine:broadcast"} <= names


def test_a_full_timeline_stops_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("psengine.tracing.timeline.MAX_SPANS", 3)
    with psengine.timeline(tmp_path / "out.json"):
        for _ in range(5):
            with span("mine"):
                pass
    trace = json.loads((tmp_path / "out.json").read_text())
    assert len(_spans(trace)) == 3
    assert "full after 3 spans" in caplog.text


class Choosy(nn.Module):
    """Raises for a batch with NaN, half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        y = self.layers[0](x)
        if y.isnan().any():
            raise ValueError("a bad batch")
        return self.layers[1:](y)


def _bad_batch_after(model, x):
    """A complete forward, one that raises and is caught, and the backward of the first."""
    output = model(x)
    with contextlib.suppress(ValueError):
        model(torch.full_like(x, torch.nan))
    output.square().sum().backward()


def _checkpointed(model, x):
    checkpoint(model, x.requires_grad_(), use_reentrant=False).square().sum().backward()


@in_ranks(2)
def test_a_forward_that_was_interrupted_fails_no_later_step(rank, world_size, tmp_path):
    programs = (_bad_batch_after, _checkpointed)
    for options in ({}, {"find_unused_parameters": True}):
        ours, native = pair(Choosy, **options)
        ours._set_ddp_runtime_logging_sample_rate(3)
        with psengine.timeline(str(tmp_path / "timeline.json")):
            # All of the first ten iterations are sampled, then every third: programs meet both kinds.
            for step in range(20):
                for program in programs:
                    for model in (ours, native):
                        torch.manual_seed(100 * rank + step)
                        model.zero_grad()
                        program(model, torch.randn(3, 4))
                    assert_same_gradients(ours, native)
        times = ours._get_ddp_logging_data()
        assert times["backward_compute_time_start"] >= times["forward_compute_time_start"] > 0


@in_ranks(2)
def test_a_timeline_that_cannot_be_written_ends_no_training(rank, world_size, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir(exist_ok=True)
    model = _model()
    with psengine.timeline(str(folder / "timeline.json")):
        model(torch.ones(2, 8)).sum().backward()
        if rank == 0:
            shutil.rmtree(folder)
