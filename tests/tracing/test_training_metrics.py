"""A training's own metrics: of rank 0 alone, on a port that was asked for, and never training's end."""

import os
import re
import socket
import urllib.request

import pytest
import torch
from support.processes import in_ranks
from support.table_training import warnings_of

import psengine
from psengine.errors import EnvironmentVariableError
from psengine.tracing.telemetry import Telemetry
from psengine.tracing.training_metrics import TrainingMetrics, watch


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("METRICS_PORT", "METRICS_BIND"):
        monkeypatch.delenv(f"PSENGINE_{name}", raising=False)


def values(text):
    """By name; of one model."""
    found = re.findall(r"^(psengine_\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def fetch(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("strategy", ["sync", "sync-server"])
@in_ranks(2)
def test_rank_0_tells_of_its_steps(rank, world_size, strategy):
    os.environ["PSENGINE_METRICS_PORT"] = "0"
    said = warnings_of("psengine.tracing.training_metrics")
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(torch.nn.Linear(4, 2), strategy=strategy)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.ones(8, 4)).sum().backward()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        model.report(loss=float("nan") if step == 2 else 1.0, samples=16)
    assert len(said) == (rank == 0), "rank 0 alone has a port"
    if rank == 0:
        found = values(fetch(re.search(r"http://\S+:\d+", said[0])[0]))
        assert found["psengine_training_steps_total"] == 3
        assert found["psengine_training_samples_total"] == 48
        assert found["psengine_training_exchanged_bytes_total"] == 3 * 10 * 4
        assert found["psengine_training_step_seconds_total"] > found["psengine_training_wait_seconds_total"] > 0
        assert found["psengine_training_loss"] != found["psengine_training_loss"]
        assert found["psengine_training_stalls_total"] == 0
        assert found["psengine_training_world_size"] == 2


def test_without_the_variable_there_is_nothing():
    assert watch("sync", 0, 1) is None


@pytest.mark.parametrize("text", ["http", "-1", "65536", "\u0663"])
def test_what_is_no_port_is_refused_on_every_rank(monkeypatch, text):
    monkeypatch.setenv("PSENGINE_METRICS_PORT", text)
    for rank in range(2):
        with pytest.raises(EnvironmentVariableError, match="expected 0 to 65535"):
            watch("sync", rank, 2)


def test_a_port_that_is_taken_does_not_end_training(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        TrainingMetrics().serve(taken.getsockname()[1])
    assert caplog.text.count("training goes on") == 1


def test_models_have_labels_of_their_own():
    found = TrainingMetrics()
    for _ in range(2):
        telemetry = Telemetry()
        telemetry.step_ended()
        found.models.append(("sync", 2, telemetry))
    text = found.render()[2].decode()
    for model in range(2):
        assert f'psengine_training_steps_total{{model="{model}",strategy="sync"}} 1.0' in text
