"""``psengine status``, against servers with clients that train, stop and die."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from support.processes import free_port
from support.server_process import running_server
from support.statuses import departed, shard, worker
from support.worker_sessions import entered

import psengine
from psengine.cli.main import main
from psengine.cli.status import ServerReport, jobs_view, merge, servers_table
from psengine.parameter_server.server.daemon import EventLog
from psengine.status_port.status_model import LogStatus, ReplicaStatus, ServerFacts

EVIL = "\x1b[2J\x9b1A\r\n\u202e[/x]"
SHOWN = r"\x1b[2J\x9b1A\r\n\u202e[/x]"


def exit_code(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code or 0


def status_of(capsys, *arguments):
    """Exit code and JSON of ``psengine status``."""
    capsys.readouterr()
    code = exit_code(["status", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@contextmanager
def training_client(address, *, steps=3):
    """A worker that has made ``steps`` exchanges, and lives."""
    weights = {"weight": torch.ones(1000)}
    with psengine.connect(address, rank=0) as client:
        client.register(weights, torch.optim.SGD(list(weights.values()), lr=0.1))
        for _ in range(steps):
            client.push_pull({"weight": torch.ones(1000)}, into=weights)
        yield client


def test_jobs_of_both_kinds(capsys, monkeypatch):
    with running_server(shards=2) as server:
        monkeypatch.setenv("PSENGINE_SERVERS", server.addresses[0])
        monkeypatch.setenv("COLUMNS", "80")
        code, before = status_of(capsys)
        assert (code, before["healthy"], before["jobs"]) == (0, True, {})
        assert exit_code(["status"]) == 0
        assert "no job to show" in capsys.readouterr().out
        with entered(server.addresses[0], 0, job="averaging") as session:
            for _ in range(2):
                session.push(0, torch.ones(4), []).wait()
                session.telemetry.step_ended()
            # Its weights are in its workers, which this server's end does not harm.
            assert status_of(capsys)[1]["warnings"] == []
            with training_client(server.addresses[0], steps=3):
                # The second shard's address leads to the same shards.
                code, found = 0, {"jobs": {}}
                while found["jobs"].get("default", {}).get("applied") != 3:  # a server makes its status once in a tick
                    code, found = status_of(capsys, "--server-address", ",".join(server.addresses))
                assert (code, found["problems"]) == (0, [])
                job, averaging = found["jobs"]["default"], found["jobs"]["averaging"]
                assert (job["kind"], job["applied"], job["members"]) == ("async", 3, 1)
                assert (averaging["kind"], averaging["averaged"]) == ("sync-server", 2)
                (told,) = job["workers"]
                assert (told["rank"], told["step"], told["pid"]) == (0, 3, os.getpid())
                assert {event["kind"] for event in found["events"]} >= {"started", "joined"}
                assert (found["servers"][0]["pid"], found["servers"][0]["durability"]) == (server.pid, "memory")
                assert "the model of job 'default' is lost" in found["warnings"][0]
                assert exit_code(["status", "--job", "averaging"]) == 0
                out = capsys.readouterr().out
                assert re.search(r"job averaging +sync-server +1 worker ", out)
                assert "job default" not in out
                assert re.search(r"^ +0 +live +2 +0 ", out, re.MULTILINE)
                assert exit_code(["status", "--job", "other"]) == 1
                assert "there is no job 'other'" in capsys.readouterr().out


def test_a_server_that_is_away_is_named_and_the_others_are_shown(capsys):
    dead = f"tcp://127.0.0.1:{free_port()}"
    with running_server() as server, training_client(server.addresses[0]):
        code, found = status_of(capsys, "--server-address", f"{dead},{server.addresses[0]}", "--timeout-s", "2")
        assert (code, found["healthy"]) == (1, False)
        assert [entry["error"] is None for entry in found["servers"]] == [False, True]
        assert found["jobs"]["default"]["applied"] == 3
        (problem,) = found["problems"]
        assert dead in problem
        assert "did not answer RESUME of job" in problem


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no server is named"),
        (["--server-address", "http://a:9100"], "malformed"),
        (["--server-address", "tcp://a:7077", "--timeout-s", "soon"], "timeout-s"),
        (["--server-address", "tcp://a:7077", "--json", "--watch"], "exclude each other"),
    ],
)
def test_wrong_arguments_are_one_message_and_code_2(arguments, words, capsys, monkeypatch):
    monkeypatch.delenv("PSENGINE_SERVERS", raising=False)
    assert exit_code(["status", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


def say_evil_things():
    note = EventLog.note

    def noted(self, kind, text, **more):
        note(self, kind, text + EVIL, **more)

    EventLog.note = noted


def test_what_a_server_says_moves_no_cursor_and_is_no_markup(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with running_server(sabotage=say_evil_things) as server:
        assert exit_code(["status", "--server-address", server.addresses[0]]) == 0
    out = capsys.readouterr().out
    assert SHOWN in out
    assert all(line.isprintable() for line in out.split("\n"))


def overview(facts=None, **changes):
    """A shard with two workers and one that is gone, as in life."""
    common = {"host": "a-host-with-a-long-name.example", "pid": 4711, "silent_s": 0.5, "staleness": {1: 5, 3: 1}}
    workers = [worker(rank, **common | {"step": step, "pushes": step} | changes) for rank, step in ((0, 120), (1, 100))]
    gone = departed(2, host="b", reason="evicted", unix_s=time.time() - 60, step=7)
    counters = {"applied": 100, "duplicates": 1, "non_finite": 3, "evicted": 1, "max_staleness": 2}
    counts = {"refused": {"not_finite": 3, "abstained": 7}, "staleness": {0: 1, 2: 9}}
    counts |= {"table_rows": {"users": 40}, "table_bytes": {"users": 3_000_000}}
    rule = {"name": "apply", "max_staleness": 4}
    told = shard(*workers, name="a-job", rule=rule, expected_workers=3, departed=(gone,), **counters, **counts)
    told = replace(told, server=facts or ServerFacts())
    return merge([ServerReport(address="tcp://a-server-with-a-long-name.example:7077", shards=(told,))])


def drawn(renderable, width):
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize("width", [60, 200])
def test_tables_fit_and_wide_ones_say_more(width):
    shown = overview()
    text = drawn(servers_table(shown.reports, width), width) + drawn(jobs_view(shown, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "2 of 3 workers" in text
    assert "refused 3 (3 not_finite)" in re.sub(r"\s+", " ", text)
    assert "table users of 40 rows, 3" in re.sub(r"\s+", " ", text)
    assert "staleness p50 2, p99 2, most 2" in re.sub(r"\s+", " ", text)
    assert "worker 2 on b is gone: evicted after step 7, 60s ago" in text
    header = next(line for line in text.splitlines() if line.startswith("rank"))
    for title in ("state", "step", "lag", "heard"):
        assert title in header
    assert ("samples/s" in header) == (width == 200)
    assert re.search(r"^ +1 +live .*\b20\b", text, re.MULTILINE)  # 20 steps behind


def test_what_is_a_problem():
    assert overview().problems == []
    assert overview(state="silent").problems == ["job 'a-job': nothing was heard of worker 0, 1"]
    log = LogStatus(shard=0, waiting_records=1, written_bytes=9, syncs=1, sync_seconds=0.1, is_full=True)
    (full,) = overview(ServerFacts(logs=(log,))).problems
    assert "no room for the log of shard 0" in full
    pair = ReplicaStatus(role="leading", term=2, is_in_sync=True, lag_records=3)
    assert overview(ServerFacts(replica=pair)).problems == []
    alone = ServerFacts(replica=replace(pair, is_in_sync=False, why="nobody follows"))
    assert overview(alone).problems[0].endswith("leading, term 2, not in sync, 3 records behind: nobody follows")
    lost = shard(worker(0), lost="job 'demo' is lost")
    assert merge([ServerReport(address="tcp://a:1", shards=(lost,))]).problems == ["job 'demo' is lost"]
    assert "a shard of it does not work" in overview(ServerFacts(healthy=False)).problems[0]


def test_watching_without_a_terminal_is_one_view_below_the_other():
    command = [sys.executable, "-m", "psengine.cli.main", "status", "--watch", "--interval-s", "0.1"]
    with (
        running_server() as server,
        subprocess.Popen(
            [*command, "--server-address", server.addresses[0]], stdout=subprocess.PIPE, text=True
        ) as seen,
    ):
        views = 0
        while views < 3:
            line = seen.stdout.readline()
            assert line, "it ended"
            views += line.startswith("server ")
        seen.send_signal(signal.SIGINT)
        seen.communicate(timeout=30)
        assert seen.returncode == 130
