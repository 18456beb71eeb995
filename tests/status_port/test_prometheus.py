"""deploy/prometheus: rules that Prometheus takes, and a board, over metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.statuses import TIMES, server, shard, worker

from psengine.status_port.pages import render_metrics
from psengine.status_port.status_model import LogStatus, ReplicaStatus, SnapshotStatus
from psengine.tracing.telemetry import Telemetry
from psengine.tracing.training_metrics import TrainingMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "alerts.yml"
RUNBOOK = ROOT / "docs" / "servers" / "runbook.md"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())


def run(*command, cwd=FOLDER, text=None):
    return subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, timeout=60)


def exposition():
    """What a server and a synchronous training tell Prometheus, before anything was refused."""
    snapshot = SnapshotStatus(interval_s=1.0, generation=1, age_s=2.0, last_seconds=0.1, failures=0, last_error="")
    log = LogStatus(shard=0, waiting_records=1, written_bytes=9, syncs=1, sync_seconds=0.1, is_full=False, free_bytes=7)
    pair = ReplicaStatus(role="leading", term=2, is_in_sync=True, lag_records=0)
    job = shard(worker(0, **TIMES, staleness={1: 2}), staleness={0: 1})
    metrics = TrainingMetrics()
    meter = Telemetry()
    metrics.models.append(("sync", 2, meter))
    meter.step_ended(0.1)
    meter.report(loss=1.0, samples=1)
    return (render_metrics(server(job, snapshot=snapshot, logs=(log,), replica=pair))[1] + metrics.render()[2]).decode()


def names_of(exposed):
    return set(re.findall(r"^(psengine_\w+?)(?:\{| )", exposed, re.MULTILINE))


def test_alerts_ask_only_for_metrics_there_are():
    rules, exposed = RULES.read_text(), exposition()
    used = set(re.findall(r"\bpsengine_\w+", rules))
    assert len(used) >= 20
    assert used - names_of(exposed) == set()
    reasons = set(re.findall(r'reason="(\w+)"', rules))
    assert reasons
    assert reasons - set(re.findall(r'reason="(\w+)"', exposed)) == set()


def test_every_alert_is_tested_and_has_its_place_in_the_runbook():
    assert len(set(ALERTS)) == len(ALERTS) >= 20
    tests, runbook = (path.read_text() for path in (FOLDER / "alerts_test.yml", RUNBOOK))
    for alert in ALERTS:
        assert f'alertname="{alert}"' in tests, alert
        assert f"`{alert}`" in runbook, alert


def test_grafana_asks_only_for_metrics_there_are():
    board = json.loads((FOLDER / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries = [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(expressions) >= 12
    used = {name for text in [*expressions, *queries] for name in re.findall(r"psengine_\w+", text)}
    assert used - names_of(exposition()) == set()
    # A worker that asks for weights alone is counted there too.
    assert all('reason!="abstained"' in text for text in expressions if "psengine_refused_total" in text)
    assert {"datasource", "job"} <= {variable["name"] for variable in board["templating"]["list"]}
    for text in [*expressions, *queries]:
        assert not re.search(r"[{,( ]job[=,)]", text), text  # Prometheus's own label, of what it scrapes
        # Each server tells of all workers: without this, two servers would make four of two.
        for match in re.finditer(r"psengine_(?:worker_|job_workers)", text):
            assert re.search(r"(max|min)( by \([a-z, ]+\))? ?\($", text[: match.start()]), text
    for panel in board["panels"]:
        legends = [target["legendFormat"] for target in panel.get("targets", [])]
        assert not [legend for legend in legends if "{{shard}}" in legend and "{{instance}}" not in legend]
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs the package prometheus")
    for path in FOLDER.glob("*.yml"):
        shutil.copy(path, tmp_path)
    checked = run(promtool, "check", "config", "--syntax-only", "prometheus.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert run(promtool, "check", "rules", "alerts.yml", cwd=tmp_path).returncode == 0
    tested = run(promtool, "test", "rules", "alerts_test.yml", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    linted = run(promtool, "check", "metrics", text=exposition())
    assert "error" not in linted.stderr, linted.stderr
