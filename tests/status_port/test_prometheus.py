"""deploy/prometheus: rules that Prometheus takes, over metrics that exist; and Prometheus itself at a training."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from support.server_process import Peer, running_server
from support.statuses import TIMES, server, shard, worker
from support.waiting import eventually

from psengine.parameter_server.server.status.prometheus import render_metrics
from psengine.parameter_server.status_model import LogStatus, SnapshotStatus
from psengine.tracing.telemetry import Telemetry
from psengine.tracing.training_metrics import TrainingMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "alerts.yml"
RUNBOOK = ROOT / "docs" / "servers" / "runbook.md"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())


def program(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip("needs the package prometheus")
    return path


def run(*command, cwd=FOLDER):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def exposition():
    """What a server and a synchronous training tell Prometheus, before anything was refused."""
    snapshot = SnapshotStatus(interval_s=1.0, generation=1, age_s=2.0, last_seconds=0.1, failures=0, last_error="")
    log = LogStatus(shard=0, waiting_records=1, written_bytes=9, syncs=1, sync_seconds=0.1, is_full=False, free_bytes=7)
    job = shard(worker(0, **TIMES, staleness={1: 2}), staleness={0: 1})
    metrics = TrainingMetrics()
    meter = Telemetry()
    metrics.models.append(("sync", meter))
    meter.step_ended(0.1, 8, world_size=2)
    meter.report(loss=1.0, samples=1)
    return (render_metrics(server(job, snapshot=snapshot, logs=(log,)))[1] + metrics.render()[2]).decode()


def test_alerts_ask_only_for_metrics_there_are():
    rules, exposed = RULES.read_text(), exposition()
    used = set(re.findall(r"\bpsengine_\w+", rules))
    assert len(used) >= 20
    assert used - set(re.findall(r"^(psengine_\w+?)(?:\{| )", exposed, re.MULTILINE)) == set()
    reasons = set(re.findall(r'reason="(\w+)"', rules))
    assert reasons
    assert reasons - set(re.findall(r'reason="(\w+)"', exposed)) == set()


def test_every_alert_is_tested_and_has_its_place_in_the_runbook():
    assert len(set(ALERTS)) == len(ALERTS) >= 20
    tests, runbook = (path.read_text() for path in (FOLDER / "alerts_test.yml", RUNBOOK))
    for alert in ALERTS:
        assert f'alertname="{alert}"' in tests, alert
        assert f"`{alert}`" in runbook, alert


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(tmp_path):
    promtool = program("promtool")
    for path in FOLDER.glob("*.yml"):
        shutil.copy(path, tmp_path)
    checked = run(promtool, "check", "config", "--syntax-only", "prometheus.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert run(promtool, "check", "rules", "alerts.yml", cwd=tmp_path).returncode == 0
    tested = run(promtool, "test", "rules", "alerts_test.yml", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


# ---- the real one ----------------------------------------------------------------------------------------------------

TRAIN = """
import pathlib, sys, time, torch, psengine
context = psengine.init()
model = psengine.DistributedDataParallel(torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60_000):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    is_bad = pathlib.Path(sys.argv[1] + "-nan").exists()
    model.report(loss=float("nan") if is_bad else loss, samples=8)
    stop = torch.tensor([float(pathlib.Path(sys.argv[1]).exists())])
    torch.distributed.all_reduce(stop)
    if stop.item():
        break
    time.sleep(0.01)
psengine.shutdown()
"""
CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: psengine
    static_configs: [{targets: ["127.0.0.1:%d"]}]
  - job_name: psengine-training
    static_configs: [{targets: ["127.0.0.1:%d"]}]
"""


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def started(*command, cwd, environment=None):
    """A program with its log in ``cwd``, ended by SIGTERM."""
    log = cwd / f"{Path(command[0]).name}-{len(list(cwd.iterdir()))}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file, env=environment)
    process.log = log
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prometheus_watches_a_training_and_its_servers(tmp_path):
    prometheus = program("prometheus")
    text = RULES.read_text()
    # Its waits are minutes; here a few seconds have to do.
    (tmp_path / "alerts.yml").write_text(re.sub(r"for: \d+[mh]", "for: 2s", text).replace("[10m]", "[20s]"))
    (tmp_path / "train.py").write_text(TRAIN)
    stop, training_port, own_port = tmp_path / "stop", free_port(), free_port()
    url = f"http://127.0.0.1:{own_port}"

    def query(expression):
        address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return {}
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found}

    def firing():
        return {dict(labels)["alertname"] for labels in query('ALERTS{alertstate="firing"}')}

    with ExitStack() as stack:
        running = stack.enter_context(running_server(lease_s=600.0))
        peer = stack.enter_context(Peer(running.addresses[0]))
        peer.make_job(torch.zeros(10))
        status_port = int(running.status_url.rpartition(":")[2])
        (tmp_path / "prometheus.yml").write_text(CONFIG % (status_port, training_port))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = ("-m", "psengine.cli.main", "run", "--workers", "2", "--metrics-port", str(training_port), "train.py")
        training = stack.enter_context(
            started(sys.executable, *command, str(stop), cwd=tmp_path, environment=environment)
        )
        watching = stack.enter_context(
            started(
                prometheus,
                "--config.file=prometheus.yml",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{own_port}",
                cwd=tmp_path,
            )
        )
        eventually(lambda: query('psengine_healthy{job="psengine"} == 1'), timeout_s=60)
        eventually(lambda: query("rate(psengine_training_steps_total[10s]) > 0"), timeout_s=60)
        assert list(query("psengine_training_world_size").values()) == [2.0]
        assert list(query('psengine_workers{training_job="job"}').values()) == [1.0]
        eventually(lambda: "PSEngineNoSnapshotDirectory" in firing(), timeout_s=30)
        assert "PSEngineServerDown" not in firing()
        (tmp_path / "stop-nan").touch()
        eventually(lambda: "PSEngineTrainingLossNotFinite" in firing(), timeout_s=30)
        running.kill()
        eventually(lambda: "PSEngineServerDown" in firing(), timeout_s=30)
        stop.touch()
        assert training.wait(timeout=60) == 0, training.log.read_text()
        eventually(lambda: "PSEngineTrainingDown" in firing(), timeout_s=30)
        assert watching.poll() is None, watching.log.read_text()
