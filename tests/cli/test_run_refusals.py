"""psengine run: lines that cannot be are one message and exit code 2, and lines of torchrun's that can be, run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.command_process import run_command

from psengine.cli.launching.torchrun_options import choose_meeting_point, node_counts, parse_torchrun
from psengine.cli.main import main
from psengine.errors import ConfigurationError

WORKER = str(Path(__file__).parents[1] / "support" / "launched_worker.py")
INDEPENDENT = ["--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--signals-to-handle", "SIGTERM,SIGKILL"], "nobody can handle SIGKILL"),
        (["--signals-to-handle", "SIGNOT"], "got 'SIGNOT'"),
        (["--rdzv-backend", "foo"], "--rdzv-backend is one of those torch has (expected one of ['c10d', "),
        (["--nnodes", "2", "--rdzv-backend", "foo", "--rdzv-endpoint", "h:1"], "got 'foo'"),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1"], "The 'etcd' module is required"),
        (["--rdzv-endpoint", "localhost:xx"], "--rdzv-endpoint is HOST:PORT"),
        (["--rdzv-endpoint", "localhost:xx"], "got 'localhost:xx'"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "local host:1"], "got 'local host:1'"),
        (["--rdzv-conf", "timeout"], "torchrun refuses its options"),
        (["--numa-binding", "node"], "--numa-binding"),
        (["--standalone", "--nnodes", "2"], "--standalone is one node alone (expected no --nnodes"),
        (["--run-path", "-m"], "--run-path runs a script's file"),
        (["--run-path", "--no-python"], "--run-path runs a script's file"),
        ([*INDEPENDENT, "--log-dir", "/tmp/logs"], "have no use for torchrun's --log-dir"),
        ([*INDEPENDENT, "-r3"], "have no use for torchrun's -r"),
        ([*INDEPENDENT, "--rdzv-endpoint=h:1", "--node_rank", "1"], "torchrun's --rdzv-endpoint, --node_rank"),
        ([*INDEPENDENT, "--run-path"], "have no use for torchrun's --run-path"),
        ([*INDEPENDENT, "--nnodes", "2"], "no meeting of nodes"),
    ],
)
def test_torchruns_options_that_cannot_be_are_refused(arguments, message, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments, WORKER, "well"])
    written = capfd.readouterr()
    assert message in written.err
    assert "Traceback" not in written.err
    assert (end.value.code, written.out) == (2, "")


def test_independent_workers_keep_the_options_that_they_heed():
    heeded = ["--max_restarts", "1", "--signals-to-handle", "SIGTERM", "--shutdown-timeout=3", "--nnodes", "1"]
    code, out, err = run_command(["run", *INDEPENDENT, "--nproc-per-node", "1", *heeded, WORKER, "well"])
    assert code == 0, err
    assert "worker 0 has" in out


@pytest.mark.parametrize("place", ["a file", "in a file", "nowhere"])
def test_snapshots_need_a_folder(place, tmp_path, capfd):
    (tmp_path / "file").touch()
    folder = {"a file": tmp_path / "file", "in a file": tmp_path / "file" / "x", "nowhere": Path("/proc/x/y")}[place]
    with pytest.raises(SystemExit) as end:
        main(["run", "--strategy", "async", "--snapshot-dir", str(folder), WORKER, "well"])
    written = capfd.readouterr()
    assert f"--snapshot-dir is a folder for the servers to write in (got {folder}: " in written.err
    assert "Traceback" not in written.err
    assert end.value.code == 2


def meeting_point(*arguments):
    options = parse_torchrun(arguments, ["train.py"])
    choose_meeting_point(options, node_counts(options))
    return options


def test_one_node_meets_itself_at_a_free_port():
    for arguments in ([], ["--standalone"], ["--rdzv-backend", "c10d"], ["--nnodes", "1", "--rdzv-backend=c10d"]):
        options = meeting_point(*arguments)
        assert (options.rdzv_backend, options.rdzv_endpoint, options.local_addr) == ("c10d", "localhost:0", "127.0.0.1")
        assert options.rdzv_id != "none"
    assert meeting_point("--rdzv-backend", "c10d", "--rdzv-id", "mine").rdzv_id == "mine"
    with pytest.raises(ConfigurationError, match="needs an address"):
        meeting_point("--nnodes", "2", "--rdzv-backend", "c10d")
    # A file is no address, and another backend's endpoint is its own affair.
    in_a_file = meeting_point("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", "/tmp/a b")
    assert in_a_file.rdzv_endpoint == "/tmp/a b"


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run_command(["run", "--master-port", str(port), WORKER, "well"])
    assert code == 2
    assert f"port {port} is in use on this node (expected a free one). Fix: leave --master-port out" in err
    assert "the others" not in err


def test_a_script_named_by_its_path_runs_as_any_other():
    code, out, err = run_command(["run", "--workers", "2", "--run-path", WORKER, "well", "--flag"])
    assert code == 0, err
    for rank, line in enumerate(sorted(out.splitlines())):
        assert line.startswith(f"[rank {rank}] worker {rank} has ['--flag']")
    assert len(out.splitlines()) == 2
