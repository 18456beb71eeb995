"""psengine run: the command line, whose failure is shown, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
from support.command_process import run_command, running_command
from support.process_table import children_of, command_line, is_running

import psengine
from psengine.cli.launching import output as worker_output
from psengine.cli.launching.deaths import DeathWatch
from psengine.cli.launching.elastic import ElasticWorkers
from psengine.cli.launching.failure import RankEnd, first_failure, last_traceback
from psengine.cli.launching.interrupt_filter import InterruptFilter
from psengine.cli.launching.interruption import REPEAT_S
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.run_directory import LOCK, PREFIX, remove_deserted, run_directory
from psengine.cli.launching.servers import ServerGroup
from psengine.cli.main import main
from psengine.cli.run import recorded, warn_of_silent_servers
from psengine.cli.run_arguments import split_arguments
from psengine.environment import launchers

SUPPORT = Path(__file__).parents[1] / "support"
WORKER = str(SUPPORT / "launched_worker.py")
TRAINING = str(SUPPORT / "launched_training.py")
HOST = socket.gethostname()

OWN = {"--workers": True, "--independent": False, "--strategy": True}
TORCHRUN = {"--nnodes": True, "--rdzv-endpoint": True, "--standalone": False, "-m": False, "-r": True}


@pytest.mark.parametrize(
    ("line", "own", "torchrun", "script"),
    [
        ("train.py", "", "", "train.py"),
        ("--workers 2 train.py --workers 3 -h", "--workers 2", "", "train.py --workers 3 -h"),
        ("--workers=2 --nnodes 1 train.py", "--workers=2", "--nnodes 1", "train.py"),
        ("--standalone --independent -m pkg.train -- x", "--independent", "--standalone -m", "pkg.train -- x"),
        ("--workers 2 -- train.py --", "--workers 2", "", "train.py --"),
        ("-r3 --rdzv-endpoint=h:1 t.py", "", "-r3 --rdzv-endpoint=h:1", "t.py"),
        ("--workers 2", "--workers 2", "", ""),
    ],
)
def test_the_line_is_cut_at_the_script(line, own, torchrun, script):
    parts = split_arguments(line.split(), OWN, TORCHRUN)
    assert (parts.own, parts.torchrun, parts.script) == (own.split(), torchrun.split(), script.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script"),
        (["--workers", "2"], "which script"),
        (["missing.py"], "no such file: missing.py"),
        (["-m", "missing_package.train"], "no such module: missing_package.train"),
        (["--no-python", "missing-program"], "no such program: missing-program"),
        (["--worker", "2", WORKER], "Did you mean --workers?"),
        (["--rdvz-endpoint", "h:1", WORKER], "Did you mean --rdzv-endpoint?"),
        (["--strategy"], "needs a value"),
        (["--workers", "none", WORKER], "--workers is a number"),
        (["--workers", "0", WORKER], "expected at least 1"),
        (["--workers", "2", "--nproc-per-node", "2", WORKER], "give one of them"),
        (["--servers", "-1", WORKER], "Invalid value for '--servers'"),
        (["--strategy", "asink", WORKER], "expected one of ['async', 'sync', 'sync-server'], got 'asink'"),
        (["--strategy", "async:max_stalenes=4", WORKER], "unknown option 'max_stalenes' (expected some of"),
        (["--strategy", "async:max_stalenes=4", WORKER], "Did you mean max_staleness?"),
        (["--strategy", "sync", "--servers", "2", WORKER], "strategy 'sync' uses no servers"),
        (["--collective", "mpi", WORKER], "unknown collective"),
        (["--max-restarts", "many", WORKER], "--max-restarts"),
        (["--max-restarts", "-1", WORKER], "expected 0 or more"),
        (["--signals-to-handle", "SIGNOT", WORKER], "--signals-to-handle"),
        (["--nnodes", "2:1", WORKER], "MIN:MAX"),
        (["--nnodes", "2", WORKER], "--rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--strategy", "async", WORKER], "psengine-server --bind"),
        (["--independent", WORKER], "'sync', whose ranks need each other"),
        (["--independent", "--strategy", "async", "--servers", "0", WORKER], "meet at parameter servers"),
        (["--first-worker", "2", WORKER], "expected --independent with it"),
        (["--strategy", "async", "--server-address", "here", WORKER], "address is malformed"),
        (["--servers", "1", "--server-address", "tcp://h:1", WORKER], "leave one of them out"),
        (["--strategy", "async", "--server-option", "leas_s=1", WORKER], "lease_s"),
        (["--strategy", "async", "--server-option", "bind=tcp://h:1", WORKER], "psengine run sets bind itself"),
        (["--timeline", "/no/such/folder/out.json", WORKER], "existing folder"),
        (["--timeline", "/proc/out.json", WORKER], "--timeline cannot write in /proc"),
    ],
)
def test_what_is_wrong_with_the_line_is_one_message(arguments, message, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments])
    written = capfd.readouterr()
    assert end.value.code == 2
    assert message in written.err
    assert "Traceback" not in written.err
    assert not written.out


def test_arguments_reach_the_script_and_variables_the_workers():
    code, out, err = run_command(
        ["run", "--workers", "2", "--strategy", "sync", "--", WORKER, "well", "--help", "--workers", "9"],
        environment={"OMP_NUM_THREADS": "3"},
    )
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"[rank {rank}] worker {rank} has ['--help', '--workers', '9'] RANK={rank}")
        assert "WORLD_SIZE=2 PSENGINE_STRATEGY=sync PSENGINE_SERVERS=None OMP_NUM_THREADS=3" in line


def test_servers_that_are_not_there_are_named():
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as listening:
        bound.bind(("127.0.0.1", 0))  # nobody else takes the port meanwhile
        dead, live = (f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (bound, listening))
        said = []
        warn_of_silent_servers([live, dead, "ipc:///tmp/none"], said.append)
        assert len(said) == 1
        assert said[0].startswith(f"nobody answers at {dead}; workers go on trying")
        warn_of_silent_servers([live], said.append)
        assert len(said) == 1
        code, _, err = run_command(["run", "--strategy", "async", "--server-address", dead, WORKER, "well"])
        assert code == 0
        assert f"psengine run: nobody answers at {dead};" in err


def test_what_a_killed_launcher_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = {}
    for name in ("deserted", "young", "serving", "without"):
        made[name] = tmp_path / f"{PREFIX}{name}"
        (made[name] / "snapshots" / "server-0").mkdir(parents=True)
        if name != "without":
            (made[name] / LOCK).touch()
            os.utime(made[name] / LOCK, (0, 0) if name != "young" else None)
    (tmp_path / "another").mkdir()
    with (made["serving"] / "snapshots" / "server-0" / "lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with run_directory() as live:
            os.utime(live / LOCK, (0, 0))
            assert sorted(tmp_path.iterdir()) == sorted(
                [live, tmp_path / "another", *(made[name] for name in ("young", "serving", "without"))]
            )
            with run_directory() as other:
                assert live.exists()
        assert not live.exists()
        assert not other.exists()
    assert remove_deserted(tmp_path) == [made["serving"]]


def test_one_worker_writes_as_it_would_alone():
    code, out, err = run_command(
        ["run", "--workers", "1", "-m", "launched_worker", "well"], environment={"PYTHONPATH": str(SUPPORT)}
    )
    assert (code, err) == (0, "")
    assert out.startswith("worker 0 has []")


@pytest.mark.parametrize(
    ("end", "code", "fate", "traceback"),
    [
        ("raise", 1, "exit code 1", ["KeyError: 'weights'", "direct cause", "ValueError: bad checkpoint"]),
        pytest.param("exit", 7, "exit code 7", [], marks=pytest.mark.slow),
        ("kill", 137, "killed by SIGKILL", []),
        ("segfault", 139, "killed by SIGSEGV", ["Segmentation fault", "launched_worker.py"]),
        pytest.param("import", 1, "exit code 1", ["No module named 'no_such_package'"], marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_first_is_named(end, code, fate, traceback):
    exit_code, _, err = run_command(["run", "--workers", "2", WORKER, end])
    assert exit_code == code
    report = err[err.index("psengine run: ") :]
    headline = rf"psengine run: rank 1 \(local rank 1\) on host {re.escape(HOST)} failed first, at [\d:]+: {fate}"
    assert re.match(headline, report), err
    for words in traceback:
        assert words in report
        assert words in err[: err.index("psengine run: ")]  # and was shown when it happened
    assert "ended because of it: rank 0" in report


def test_a_group_is_started_again_and_shares_out_the_cores(tmp_path):
    code, out, err = run_command(
        ["run", "--workers", "2", "--no-prefix", "--max-restarts", "1", WORKER, "fail-once", str(tmp_path)],
        environment={"OMP_NUM_THREADS": ""},
    )
    assert code == 0, err
    assert len(re.findall("^\\[rank 1\\] worker 1 has", out, re.MULTILINE)) == 2
    assert len(re.findall("^worker 0 has", out, re.MULTILINE)) == 2  # --no-prefix
    assert out.count(f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // 2)} ") == 4


# By srun, and by mpirun.
PLACED = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "8"}
PLACED |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node-0"}
PLACED |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("LOCAL_SIZE", "SIZE")}
PLACED |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


def test_without_its_variables_no_launcher_is_seen():
    assert launchers.detect(PLACED, needs_master=False).launcher == "Open MPI"
    own = {name: value for name, value in PLACED.items() if name not in launchers.PLACEMENT_VARIABLES}
    found = launchers.detect(own)
    assert (found.launcher, found.note, own) == ("none", "", {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node-0"})


def test_an_independent_worker_dies_alone(tmp_path):
    options = ["--workers", "3", "--independent", "--strategy", "async", "--max-restarts", "1", "--first-worker", "1"]
    # Nobody connects: these workers train nothing.
    options += ["--server-address", "tcp://127.0.0.1:9"]
    code, out, err = run_command(["run", *options, WORKER, "fail-once", str(tmp_path)], environment=PLACED)
    assert code == 0, err
    assert out.count("foreign=[]") == 4
    assert [out.count(f"worker {rank} has") for rank in range(5)] == [0, 2, 1, 1, 0]
    assert "RANK=None PSENGINE_WORKER=2 WORLD_SIZE=None" in out
    assert "worker 1 ended (exit code 1); starting it again (1 of 1)" in err
    assert re.search(r"2 .* in order", err)


@pytest.mark.slow
def test_an_independent_worker_that_failed_for_good_is_in_the_table(tmp_path):
    options = ["--workers", "2", "--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9"]
    code, _, err = run_command(["run", *options, WORKER, "fail-once", str(tmp_path)])
    assert code == 1
    assert "rank 1 (local rank 1)" in err
    assert re.search(r"1 .* exit code 1 .* not yet", err)
    assert re.search(r"0 .* in order", err)


def pids_of(directory):
    """Of the workers "grandchildren", and their children."""
    files = [directory / f"pids-{rank}" for rank in range(2)]
    return [int(pid) for file in files for pid in file.read_text().split()] if all(map(Path.exists, files)) else []


def servers_of(command):
    return [pid for pid in children_of(command.pid) if "psengine.cli.server" in command_line(pid)]


def test_the_second_ctrl_c_ends_everything_at_once(tmp_path):
    """Workers that ignore it, their children, a child that left the group."""
    arguments = ["run", "--workers", "2", "--shutdown-timeout", "60", WORKER, "grandchildren", str(tmp_path)]
    with running_command(arguments) as command:
        pids = command.wait_until(lambda: pids_of(tmp_path))
        command.signal(signal.SIGINT)
        command.wait_until(lambda: "again: at once" in command.stderr)
        command.signal(signal.SIGINT)  # the same Ctrl-C, once more: a wrapper passed it on
        time.sleep(REPEAT_S + 0.1)
        assert len([pid for pid in pids if is_running(pid)]) == 6
        command.signal(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        assert [pid for pid in pids if is_running(pid)] == []


def test_a_signal_ends_the_server_too():
    options = ["--workers", "2", "--strategy", "async", "--shutdown-timeout", "1", "--server-option", "lease_s=3"]
    with running_command(["run", *options, WORKER, "hang"]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        pids = [pid for pid in children_of(command.pid) if WORKER in command_line(pid)]
        match = re.search(r"1 server at (\S+); dashboard at (http://127\.0\.0\.1:\d+)", command.stderr)
        assert match, command.stderr
        assert f"PSENGINE_SERVERS={match[1]}" in command.stdout
        with urllib.request.urlopen(f"{match[2]}/healthz", timeout=10) as answer:
            assert answer.status == 200
        pids += servers_of(command)
        command.signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert len(pids) == 3
        assert [pid for pid in pids if is_running(pid)] == []


@pytest.mark.slow
def test_a_server_comes_back_at_its_address():
    with running_command(["run", "--strategy", "async", WORKER, "hang"]) as command:
        command.wait_until(lambda: "worker 0 has" in command.stdout)
        address = re.search(r"1 server at (\S+);", command.stderr)[1]
        (server,) = servers_of(command)
        os.kill(server, signal.SIGKILL)
        command.wait_until(lambda: "starting it again" in command.stderr)
        with psengine.connect(address, role="reader", timeout_s=30) as client:
            assert client.status()
        assert servers_of(command) != [server]


def test_ctrl_c_leaves_out_what_each_rank_says_of_it():
    with running_command(["run", "--workers", "2", WORKER, "save"]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        announced, *saved = command.stderr.splitlines()
        assert announced == "psengine run: SIGINT: ending the workers (again: at once)"
        assert sorted(saved) == ["[rank 0] checkpoint saved", "[rank 1] checkpoint saved"]


INTERRUPT = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyboardInterrupt"]
ERROR = [*INTERRUPT[:2], "ValueError: x"]
LINKS = [[""], ["During handling of the above exception, another exception occurred:"], [""]]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([INTERRUPT], []),
        ([["a"], INTERRUPT, [""], ["b"], INTERRUPT], [["a"], [""], ["b"]]),
        ([ERROR, INTERRUPT], [ERROR]),
        ([INTERRUPT, ERROR], [ERROR]),
        ([INTERRUPT, *LINKS, ERROR], [INTERRUPT, *LINKS, ERROR]),
        ([ERROR, *LINKS, INTERRUPT], [ERROR, *LINKS, INTERRUPT]),
        ([INTERRUPT[:2], ["checkpoint saved"]], [INTERRUPT[:2], ["checkpoint saved"]]),
        ([INTERRUPT[:2]], [INTERRUPT[:2]]),
        ([["KeyboardInterrupt"]], []),
        ([["saved"], ["KeyboardInterrupt"]], [["saved"], ["KeyboardInterrupt"]]),
    ],
)
def test_only_the_traceback_of_ctrl_c_itself_is_left_out(written, shown):
    kept = InterruptFilter()
    found = [one for block in written for line in block for one in kept.take(line, line.encode())]
    assert [line.decode() for line in [*found, *kept.finish()]] == [line for block in shown for line in block]


def test_a_reader_that_stands_still_does_not_hold_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_output, "DRAIN_S", 0.2)
    reader, writer = os.pipe()
    # As sys.stdout.buffer is: buffered, before a pipe that is full and that nobody reads.
    with open(reader, "rb") as unread, open(writer, "wb") as stdout:
        output = WorkerOutput(tmp_path, stdout, stdout)
        worker = os.open(output.pipe(0, is_stderr=False), os.O_WRONLY | os.O_NONBLOCK)
        is_full_s = time.monotonic() + 0.3  # full for good: nothing could be written for so long
        while time.monotonic() < is_full_s:
            with suppress(BlockingIOError):
                os.write(worker, b"x" * 1023 + b"\n")
                is_full_s = time.monotonic() + 0.3
            time.sleep(0.001)
        os.close(worker)

        def end():
            output.stderr_of(0)
            output.drain()
            output.abandon()
            output.close()

        ender = threading.Thread(target=end, daemon=True)
        ender.start()
        ender.join(20)
        is_stuck = ender.is_alive()
        unread.close()
        assert not is_stuck


def test_a_woken_death_watch_does_not_wait_for_another_waking():
    with DeathWatch() as watch:
        assert not os.get_blocking(watch._wake_reader)
        watch.settle()


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_what_was_ignored_stays_so_and_sigterm_always_ends_the_run():
    line = ["run", "--signals-to-handle", "SIGHUP,SIGINT", WORKER, "hang"]
    with running_command(line, prepare=ignore_hangup) as command:
        command.wait_until(lambda: " has " in command.stdout)
        command.signal(signal.SIGHUP)
        command.signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert command.stderr == "psengine run: SIGTERM: ending the workers\n"


def interrupt_while_torchrun_listens():
    started = ElasticWorkers._started

    def interrupted(self, rank, pid):
        if not self._pids:
            os.kill(os.getpid(), signal.SIGINT)
        started(self, rank, pid)

    ElasticWorkers._started = interrupted


def test_a_signal_to_torchruns_own_handler_ends_the_run():
    with running_command(["run", WORKER, "hang"], prepare=interrupt_while_torchrun_listens) as command:
        assert command.wait() == 130
        # The signal may reach a worker while its interpreter starts: Python then writes an error before ours.
        lines = [line for line in command.stderr.splitlines() if line.startswith("psengine run:")]
        assert lines == ["psengine run: SIGINT: ending the workers (again: at once)"]


def test_a_signal_at_the_end_interrupts_neither_report_nor_tidying(tmp_path):
    with running_command(["run", "--workers", "2", WORKER, "raise-and-leave", str(tmp_path)]) as command:
        command.wait_until(lambda: "ValueError: bad data" in command.stderr)
        # Its children do not listen to SIGTERM: ending them takes three seconds.
        command.wait_until(lambda: not [pid for pid in children_of(command.pid) if WORKER in command_line(pid)])
        time.sleep(0.5)
        command.signal(signal.SIGINT)
        command.wait_until(lambda: "SIGINT: the run is ending already (again: at once)" in command.stderr)
        command.signal(signal.SIGTERM)
        assert command.wait() == 1
        assert "rank 1 (local rank 1)" in command.stderr
        pids = (tmp_path / "pids-1").read_text().split()
        assert len(pids) == 3
        assert [pid for pid in pids if is_running(int(pid))] == []


@pytest.mark.slow
def test_a_signal_after_a_failure_keeps_its_report(tmp_path):
    line = ["run", "--workers", "2", "--shutdown-timeout", "3", WORKER, "raise-and-leave", str(tmp_path), "stubborn"]
    with running_command(line) as command:
        command.wait_until(lambda: "ValueError: bad data" in command.stderr)
        time.sleep(0.5)  # now rank 0 is asked to end, and does not
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        report = command.stderr[command.stderr.index("failed first") :]
        assert "ValueError: bad data" in report
        assert "ended because of it: rank 0" in report
        assert [pid for pid in pids_of(tmp_path) if is_running(pid)] == []


@pytest.mark.slow
def test_every_node_names_the_rank_that_failed_first():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    line = ["run", "--nnodes", "2", "--workers", "2", "--rdzv-endpoint", endpoint, WORKER, "raise-on-rank-3"]
    with running_command(line) as one, running_command(line) as other:
        assert (one.wait(), other.wait()) == (1, 1), one.stderr + other.stderr
        for command in (one, other):
            report = command.stderr[command.stderr.index("psengine run: ") :]
            assert report.startswith("psengine run: rank 3 (local rank 1) on host"), report
            assert "RuntimeError: on rank 3" in report
            assert "failed after it" not in report


@pytest.mark.slow
def test_a_server_that_keeps_dying_ends_the_run():
    with running_command(["run", "--strategy", "async", WORKER, "hang"]) as command:
        seen: set[int] = set()

        def new_server() -> int | None:
            return next((pid for pid in servers_of(command) if pid not in seen), None)

        command.wait_until(lambda: "worker 0 has" in command.stdout)
        for life in range(3):
            server = command.wait_until(new_server)
            command.wait_until(lambda life=life: command.stderr.count("is back") == life)
            seen.add(server)
            os.kill(server, signal.SIGKILL)
        assert command.wait() == 1
        assert "died 3 times in 60 s. It wrote last:" in command.stderr


@pytest.mark.slow
def test_a_server_that_cannot_be_started_again_is_given_up(tmp_path):
    given_up, said = threading.Event(), []
    group = ServerGroup(
        1, snapshot_dir=tmp_path, status_port=None, options=[], report=said.append, give_up=lambda why: given_up.set()
    )
    with group, socket.socket() as taken:
        server = group._servers[0].pid
        host, _, port = group.addresses[0].removeprefix("tcp://").rpartition(":")
        os.kill(server, signal.SIGKILL)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline_s = time.monotonic() + 5
        while True:  # its other threads may outlive its first one, and hold the port
            try:
                taken.bind((host, int(port)))
                break
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
        taken.listen()
        assert given_up.wait(60)
        assert "died, and could not be started again (2 attempts)" in group.failure
        assert [line for line in said if "starting it again" in line] == said[:1]


@pytest.mark.slow
def test_async_training_outlives_its_server(tmp_path):
    arguments = ["run", "--workers", "2", "--strategy", "async", "--server-option", "snapshot_interval_s=0.2"]
    with running_command([*arguments, TRAINING, "600", "0", "0.02", str(tmp_path)]) as command:
        command.wait_until(lambda: (tmp_path / "steps").exists() and int((tmp_path / "steps").read_text() or 0) > 100)
        (server,) = servers_of(command)
        os.kill(server, signal.SIGKILL)
        assert command.wait(120) == 0, command.stderr
        assert (tmp_path / "steps").read_text() == "600"
        assert "starting it again" in command.stderr


@pytest.mark.slow
def test_the_timeline_holds_all_ranks(tmp_path):
    path = tmp_path / "out.json"
    code, _, err = run_command(["run", "--workers", "2", "--timeline", str(path), TRAINING, "4"])
    assert code == 0, err
    assert f"timeline of 2 ranks in {path}" in err
    events = json.loads(path.read_text())["traceEvents"]
    forwards = [(event["pid"], event["args"]["step"]) for event in events if event["name"] == "forward"]
    assert len(forwards) == 8
    assert {rank for rank, _ in forwards} == {0, 1}


PART = '{"traceEvents": [], "otherData": {"processes": [{"rank": 0}]}}'
ONE = Plan(torchrun=Namespace(), script=(), workers=1)


def test_parts_of_a_timeline_become_one_file(tmp_path):
    said = []
    with recorded(ONE, tmp_path / "out.json", said.append) as own:
        part = Path(own.variables["PSENGINE_TIMELINE"] + ".rank0")
        part.write_text(PART)
    assert said[0].startswith(f"timeline of 1 rank in {tmp_path / 'out.json'}")
    assert json.loads((tmp_path / "out.json").read_text())["otherData"]["processes"] == [{"rank": 0}]
    assert not part.parent.exists()
    assert os.listdir(tmp_path) == ["out.json"]


def test_parts_of_a_timeline_that_cannot_be_written_are_kept(tmp_path):
    folder, said = tmp_path / "gone", []
    folder.mkdir()
    with recorded(ONE, folder / "out.json", said.append) as own:
        part = Path(own.variables["PSENGINE_TIMELINE"] + ".rank0")
        part.write_text(PART)
        folder.rmdir()
    kept = Path(re.search(r"parts are kept in (\S+);", said[0])[1])
    try:
        assert (kept / part.name).read_text() == PART
        assert not part.parent.exists()
    finally:
        shutil.rmtree(kept)


def end(rank, code, failed_s, *words, was_ended=False):
    return RankEnd(
        rank=rank, local_rank=rank, host="h", pid=rank, exit_code=code, failed_s=failed_s, traceback=words,
        was_ended=was_ended,
    )  # fmt: skip


def test_the_first_failure_is_no_consequence():
    lost = "psengine.errors.PeerLostError: Lost rank 2 (process 7 on h)"
    assert first_failure([end(0, 0, None), end(1, 0, None)]) is None
    # The peers of rank 2 were quicker to say that it is gone than it was to end.
    ends = [end(0, 1, 3.0, lost), end(1, 1, 3.1, lost), end(2, 1, 3.2, "ValueError: x"), end(3, 0, None)]
    assert first_failure(ends).rank == 2
    assert first_failure([end(0, -9, 5.0), end(1, -15, 4.0, was_ended=True), end(2, 1, 6.0, "x")]).rank == 0
    assert first_failure([end(0, 1, 2.0, lost), end(1, 1, 1.0, lost)]).rank == 1


def test_the_last_traceback_comes_with_its_causes():
    text = """noise
Traceback (most recent call last):
  File "old.py", line 1
OldError: lived through

more noise
Traceback (most recent call last):
  File "a.py", line 1
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2
ValueError: b"""
    lines = [(float(number), line) for number, line in enumerate(text.splitlines())]
    when, found = last_traceback(lines)
    assert when == 6.0
    assert list(found) == text.splitlines()[6:]
    assert last_traceback(lines[:1]) == (None, ("noise",))
    group = ["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: two (1 sub-exception)"]
    group += [
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        "    | ValueError: c",
    ]
    assert last_traceback([(1.0, line) for line in ["x", *group]])[1] == tuple(group)
