"""psengine run: its command line, what it refuses, and what reaches the script."""

import json
import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_process import SUPPORT, WORKER, run_command

from psengine.cli.launching.plan import Plan, RunArguments, RunOptions, expected_servers, make_plan, split_arguments
from psengine.cli.main import main
from psengine.cli.run import recorded
from psengine.integrations import replacing

OWN = {"--workers": True, "--independent": False, "--strategy": True}
TORCHRUN = {"--nnodes": True, "--rdzv-endpoint": True, "--standalone": False, "-m": False, "-r": True}
INDEPENDENT = ["--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("line", "own", "torchrun", "script"),
    [
        ("train.py", "", {}, "train.py"),
        ("--workers 2 train.py --workers 3 -h", "--workers 2", {}, "train.py --workers 3 -h"),
        ("--workers=2 --nnodes 1 train.py", "--workers 2", {"--nnodes": "1"}, "train.py"),
        ("--standalone --independent -m a.b -- x", "--independent", {"--standalone": None, "-m": None}, "a.b -- x"),
        ("--workers 2 -- train.py --", "--workers 2", {}, "train.py --"),
        ("-r3 --rdzv-endpoint=h:1 t.py", "", {"-r": "3", "--rdzv-endpoint": "h:1"}, "t.py"),
        ("--workers 2", "--workers 2", {}, ""),
    ],
)
def test_the_line_is_cut_at_the_script(line, own, torchrun, script):
    parts = split_arguments(line.split(), OWN, TORCHRUN)
    assert (parts.own, parts.torchrun, parts.script) == (own.split(), torchrun, script.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script"),
        (["--worker", "2", WORKER], "Did you mean --workers?"),
        (["--workers", "none", WORKER], "--workers a number"),
        (["--workers", "2", "--nproc-per-node", "2", WORKER], "give one of them"),
        (["--strategy", "sync:", WORKER], "got nothing after the colon"),
        (["--strategy", "sync:virtual_wrokers=8", WORKER], "Did you mean virtual_workers?"),
        (["--strategy", "asink:max_staleness=4", "--servers", "1", WORKER], "Did you mean async?"),
        (["--collective", "shared_memroy", WORKER], "Did you mean shared_memory?"),
        (["--strategy", "sync", WORKER + "x"], "there is no script"),
        (["--independent", "--strategy", "sync:virtual_workers=0", WORKER], "got 0"),
        (["--strategy", "sync-server:virtual_workers=4", WORKER], "virtual_workers is an option of strategy 'sync'"),
        (["--signals-to-handle", "SIGNOT", WORKER], "got 'SIGNOT'"),
        (["--nnodes", "2:1", WORKER], "MIN:MAX"),
        (["--nnodes", "2", WORKER], "--rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--strategy", "async", WORKER], "psengine-server --bind"),
        (["--independent", WORKER], "got 'sync'"),
        ([*INDEPENDENT, "--rdzv-endpoint=h:1", "--node_rank", "1", "-r3", WORKER], "--rdzv-endpoint, --node-rank, -r"),
        (["--replace-ddp", *INDEPENDENT, WORKER], "Fix: leave --independent out"),
        (["--replace-ddp", "--strategy", "sync:virtual_workers=4", WORKER], "psengine.ElasticLoader"),
        (["--first-worker", "2", WORKER], "expected --independent with it"),
        (["--total-workers", "2", WORKER], "--total-workers numbers independent workers"),
        (["--servers", "1", "--server-address", "tcp://h:1", WORKER], "leave --servers out"),
        (["--strategy", "async", "--server-option", "leas_s=1", WORKER], "--lease-s"),
        (["--timeline", "/no/such/folder/out.json", WORKER], "existing folder"),
    ],
)
def test_what_is_wrong_with_the_line_is_one_message(arguments, message, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments])
    written = capfd.readouterr()
    assert message in " ".join(written.err.split())
    assert "Traceback" not in written.err
    assert (end.value.code, written.out) == (2, "")


@pytest.mark.parametrize(
    ("strategy", "options", "servers"),
    [
        *(("sync", options, 0) for options in ({}, {"servers": 0})),
        *(("async", options, 1) for options in ({}, {"servers": 1})),
        ("async", {"server_address": "tcp://h:1"}, 0),
        ("sync-server", {"servers": 3}, 3),
        *((f"async:servers={servers}", {}, int(not servers)) for servers in ("tcp://h:1,max_staleness=4", "")),
        ("async:job=servers=2", {}, 1),
    ],
)
def test_a_server_is_started_where_the_strategy_names_none(strategy, options, servers):
    options = RunOptions(strategy=strategy, **options)
    plan = make_plan(RunArguments(script=[WORKER]), options)
    assert (plan.servers, plan.uses_servers) == (servers, strategy != "sync")
    assert expected_servers(options) == servers  # which are launched before there is a plan


def test_independent_workers_meet_at_the_servers_that_the_strategy_names():
    options = RunOptions(strategy="async:servers=tcp://h:1,tcp://i:2", independent=True, workers="2", total_workers=6)
    plan = make_plan(RunArguments(script=[WORKER]), options)
    assert (plan.servers, plan.ranks, plan.total_workers) == (0, range(2), 6)
    options = replace(options, first_worker=3, total_workers=None, continues=True)
    plan = make_plan(RunArguments(script=[WORKER]), options)
    assert (plan.total_workers, plan.variables["PSENGINE_CONTINUE"]) == (5, "1")


def test_servers_of_a_strategy_that_uses_none_are_for_tables():
    for options in ({"servers": 2}, {"strategy": "sync", "server_address": "tcp://h:1"}):
        plan = make_plan(RunArguments(script=[WORKER]), RunOptions(**options))
        assert plan.servers == options.get("servers", 0)
        assert "tables alone" in plan.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rdzv-backend", "foo", "--rdzv-endpoint", "h:1"], "The rendezvous backend 'foo' is not registered"),
        (["--no-python"], "Permission denied"),
    ],
)
def test_what_torchrun_refuses_is_one_message(options, message):
    code, out, err = run_command(["run", *options, WORKER])
    assert (code, out) == (2, "")
    assert err.startswith("psengine: torchrun could not start the workers: ")
    assert message in err
    assert "Traceback" not in err


def test_one_node_meets_itself_at_a_free_port():
    def chosen(**options):
        given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        return make_plan(RunArguments(torchrun=given, script=[WORKER]), RunOptions(workers="1")).torchrun

    for options in ({}, {"standalone": None}, {"rdzv_backend": "c10d"}, {"nnodes": "1", "rdzv_backend": "c10d"}):
        found = chosen(**options)
        assert (found.rdzv_backend, found.rdzv_endpoint, found.local_addr) == ("c10d", "localhost:0", "127.0.0.1")
        assert found.rdzv_id != "none"
    assert chosen(rdzv_id="mine").rdzv_id == "mine"
    assert chosen(nnodes="2", rdzv_endpoint="h:1").rdzv_backend == "c10d"


def test_arguments_reach_the_script_and_variables_the_workers():
    options = ["--workers", "2", "--strategy", "local:every=4", "--run-path"]
    code, out, err = run_command(
        ["run", *options, "--", WORKER, "well", "--help", "--workers", "9"], environment={"OMP_NUM_THREADS": "3"}
    )
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"[rank {rank}] worker {rank} has ['--help', '--workers', '9'] RANK={rank}")
        assert "WORLD_SIZE=2 PSENGINE_STRATEGY=local:every=4 PSENGINE_SERVERS=None OMP_NUM_THREADS=3" in line
    assert err == ""


def test_one_worker_writes_as_it_would_alone():
    code, out, err = run_command(
        ["run", "--workers", "1", "-m", "support.launched_worker", "well"],
        environment={"PYTHONPATH": str(SUPPORT.parent)},
    )
    assert (code, err) == (0, "")
    assert out.startswith("worker 0 has []")


@pytest.mark.timeout(600)
def test_a_script_for_native_ddp_runs_as_it_is():
    results = []
    for options in ("", *(f"--replace-ddp --strategy {name}" for name in ("sync", "async", "local:every=4"))):
        code, out, err = run_command(["run", "--workers", "2", *options.split(), str(SUPPORT / "native_script.py")])
        assert code == 0, err
        results.append(sorted(line.rsplit(" ", 1) for line in out.splitlines()))
    native, same, pushed, rounds = results
    assert same == native
    for lines in (pushed, rounds):
        assert [who for who, _ in lines] == [who.replace("] ", "] Distributed") for who, _ in native]
    assert [digest for _, digest in rounds[:2]] == [digest for _, digest in rounds[2:]]  # after two whole rounds


def test_a_script_that_wraps_nothing_hears_of_it(tmp_path):
    """And the user's own sitecustomize.py runs, too."""
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    program = "import torch; torch.optim.SGD([torch.ones(1, requires_grad=True)])"
    variables = {**os.environ, "PYTHONPATH": f"{replacing.__path__[0]}:{tmp_path}", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=170)
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert "--replace-ddp changed nothing here" in done.stderr


def test_a_group_is_started_again_and_shares_out_the_cores(tmp_path):
    code, out, err = run_command(
        ["run", "--workers", "2", "--no-prefix", "--max-restarts", "1", WORKER, "fail-once", str(tmp_path)],
        environment={"OMP_NUM_THREADS": ""},
    )
    assert code == 0, err
    assert len(re.findall("^\\[rank 1\\] worker 1 has", out, re.MULTILINE)) == 2
    assert len(re.findall("^worker 0 has", out, re.MULTILINE)) == 2  # --no-prefix
    assert out.count(f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // 2)} ") == 4


@pytest.mark.slow
def test_the_timeline_holds_all_ranks(tmp_path):
    path, training = tmp_path / "out.json", [str(SUPPORT / "scheduled_training.py"), str(tmp_path), "--steps", "4"]
    code, _, err = run_command(["run", "--workers", "2", "--timeline", str(path), "--strategy", "async", *training])
    assert code == 0, err
    assert f"timeline of 2 ranks in {path}" in err
    events = json.loads(path.read_text())["traceEvents"]
    forwards = [(event["pid"], event["args"]["step"]) for event in events if event["name"] == "forward"]
    assert len(forwards) == 8
    assert {rank for rank, _ in forwards} == {0, 1}


def test_each_node_writes_the_timeline_of_its_ranks(tmp_path):
    plan = Plan(torchrun=Namespace(), script=(), workers=1, nodes=(2, 2))
    part = '{"traceEvents": [], "otherData": {"processes": [{"rank": 0}]}}'
    for ranks in ((0, 1), (2, 3)):
        with recorded(plan, tmp_path / "out.json", lambda said: None) as own:
            for rank in ranks:
                Path(own.variables["PSENGINE_TIMELINE"] + f".rank{rank}").write_text(part)
    host = socket.gethostname()
    assert sorted(os.listdir(tmp_path)) == [f"out.{host}.rank0.json", f"out.{host}.rank2.json"]


def test_workers_of_virtual_ones_get_a_coordinator_and_more_restarts():
    options = RunOptions(strategy="sync:virtual_workers=8", independent=True, workers="2")
    plan = make_plan(RunArguments(script=[WORKER]), options)
    assert (plan.servers, plan.uses_servers, plan.torchrun.max_restarts) == (1, True, 10)
    plan = make_plan(RunArguments(script=[WORKER], torchrun={"--max-restarts": "2"}), options)
    assert plan.torchrun.max_restarts == 2
