"""psengine run where its own streams, descriptors or servers fail it; and what it says of servers nobody used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.command_process import run_command, running_command
from support.process_table import children_of, command_line
from support.waiting import eventually

import psengine.cli.main
from psengine.cli.launching.deaths import DeathWatch
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.servers import ServerGroup, has_joined_workers
from psengine.cli.main import main
from psengine.cli.server_status import ServerReport

SUPPORT = Path(__file__).parents[1] / "support"
WORKER = str(SUPPORT / "launched_worker.py")
TRAINING = str(SUPPORT / "launched_training.py")
COMMAND = [sys.executable, "-m", "psengine.cli.main"]
DEADLINE_S = 30.0


def nobody_reads_stderr():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


def stderr_is_full():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


@pytest.mark.parametrize("break_stderr", [nobody_reads_stderr, stderr_is_full])
def test_a_failure_that_cannot_be_said_has_its_exit_code(break_stderr):
    with running_command(["run", "--workers", "2", WORKER, "exit"], prepare=break_stderr) as command:
        assert command.wait() == 7
        assert command.stdout.count(" has ") == 2


def test_a_signal_that_cannot_be_announced_ends_the_run_in_order():
    with running_command(["run", WORKER, "hang"], prepare=nobody_reads_stderr) as command:
        command.wait_until(lambda: " has " in command.stdout)
        command.signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM


def test_a_restart_that_cannot_be_said_is_made(tmp_path):
    options = ["--workers", "2", "--independent", "--strategy", "async", "--max-restarts", "1"]
    options += ["--server-address", "tcp://127.0.0.1:9"]
    line = ["run", *options, WORKER, "fail-once", str(tmp_path)]
    with running_command(line, prepare=nobody_reads_stderr) as command:
        assert command.wait() == 0
        assert [command.stdout.count(f"worker {rank} has") for rank in range(2)] == [1, 2]


def test_what_stderr_did_not_take_does_not_change_the_code_at_the_interpreters_end():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "run", "missing.py"], stderr=full, timeout=60)
    assert done.returncode == 2


@pytest.mark.parametrize(("closed", "stream"), [(">&-", 2), ("<&- 2>&-", 1)])
def test_a_stream_that_the_shell_closed_is_dev_null(closed, stream, tmp_path):
    script = tmp_path / "write.py"
    script.write_text("import sys; sys.stdin.read(); print('out'); print('err', file=sys.stderr); sys.exit(5)")
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, "run", str(script)]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5, done.stderr
    written = ["", done.stdout, done.stderr]
    assert written[stream].startswith(["", "out\n", "err\n"][stream])
    assert written[3 - stream] == ""
    assert "psengine.cli" not in done.stderr  # a traceback of ours


def interrupt_at_the_start():
    build_app = psengine.cli.main.build_app

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        return build_app()

    psengine.cli.main.build_app = interrupted


def interrupt_in_the_background():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt_at_the_start()


def test_ctrl_c_before_anything_began_ends_it_without_a_word():
    with running_command(["run", WORKER, "well"], prepare=interrupt_at_the_start) as command:
        assert command.wait() == -signal.SIGINT
        assert command.stdout + command.stderr == ""
    with running_command(["--version"], prepare=interrupt_in_the_background) as command:
        assert command.wait() == 0


def test_commands_get_the_interrupts_they_had(capsys):
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    try:
        with pytest.raises(SystemExit):
            main(["--version"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_pipes_of_workers_that_were_started_again_are_closed(tmp_path):
    with open(tmp_path / "shown", "wb", buffering=0) as shown, WorkerOutput(tmp_path, shown, shown) as output:
        files = [output.pipe(0, is_stderr=is_stderr) for is_stderr in (False, True)]
        before = open_descriptors(), len(os.listdir(tmp_path))
        for life in range(8):
            for file in files:
                Path(file).write_bytes(b"life %d\nunfinished" % life)
            files = [output.pipe(0, is_stderr=is_stderr) for is_stderr in (False, True)]
        eventually(lambda: (open_descriptors(), len(os.listdir(tmp_path))) == before)
        assert output.stderr_of(0) == []
        lines = (tmp_path / "shown").read_text().splitlines()
    assert sorted(lines) == sorted(2 * [f"[rank 0] life {life}" for life in range(8)] + 16 * ["[rank 0] unfinished"])


def test_a_pipe_stays_while_somebody_writes_to_it(tmp_path):
    """A worker's own child outlives it; what it says is not the next life's."""
    with open(tmp_path / "shown", "wb", buffering=0) as shown, WorkerOutput(tmp_path, shown, shown) as output:
        before = open_descriptors()
        with open(output.pipe(0, is_stderr=True), "wb", buffering=0) as child:
            output.pipe(0, is_stderr=True)
            for number in range(3):
                child.write(b"late %d\n" % number)
                output.drain()
        eventually(lambda: open_descriptors() == before + 1)
        assert output.stderr_of(0) == []
    assert (tmp_path / "shown").read_text() == "".join(f"[rank 0] late {number}\n" for number in range(3))


def test_a_line_begins_behind_an_unfinished_one_on_the_next(tmp_path):
    shown = tmp_path / "shown"
    with open(shown, "wb", buffering=0) as target, WorkerOutput(tmp_path, target, target, plain_ranks=[0]) as output:
        bar, others = (Path(output.pipe(rank, is_stderr=False)) for rank in (0, 1))
        for file, text, expected in (
            (bar, "\r50%", "\r50%"),
            (others, "half\n", "\r50%\n[rank 1] half\n"),
            (bar, "\r100%\n", "\r50%\n[rank 1] half\n\r100%\n"),
            (others, "done\n", "\r50%\n[rank 1] half\n\r100%\n[rank 1] done\n"),
        ):
            file.write_bytes(text.encode())
            eventually(lambda expected=expected: shown.read_bytes() == expected.encode())


def test_the_dead_are_watched_no_longer():
    with DeathWatch() as watch, ExitStack() as stack:
        before = open_descriptors()
        for code in range(8):
            process = stack.enter_context(subprocess.Popen(["sh", "-c", f"exit {code}"]))
            watch.add(process.pid)
            eventually(lambda pid=process.pid: pid in watch.ended_s)
            assert watch.exit_codes[process.pid] == code
        eventually(lambda: open_descriptors() == before)


def servers_here():
    return [pid for pid in children_of(os.getpid()) if "psengine.cli.server" in command_line(pid)]


def group_of_one(directory, *options, report=lambda line: None, give_up=lambda why: None):
    return ServerGroup(
        1, snapshot_dir=directory, status_port=0, options=options, report=report, give_up=give_up
    )  # fmt: skip


def test_a_server_that_logs_json_comes_back(tmp_path):
    said, is_back = [], threading.Event()

    def report(line):
        said.append(line)
        if "is back" in line:
            is_back.set()

    with group_of_one(tmp_path, "log_format=json", report=report) as group:
        with urllib.request.urlopen(f"{group.dashboard_url}/healthz", timeout=10) as answer:
            assert answer.status == 200
        os.kill(group._servers[0].pid, signal.SIGKILL)
        assert is_back.wait(DEADLINE_S), said
        with urllib.request.urlopen(f"{group.dashboard_url}/healthz", timeout=10) as answer:
            assert answer.status == 200


def test_a_watch_that_cannot_go_on_ends_the_run(tmp_path):
    given_up = threading.Event()

    def report(line):
        raise LookupError("no words")

    with group_of_one(tmp_path, report=report, give_up=lambda why: given_up.set()) as group:
        os.kill(group._servers[0].pid, signal.SIGKILL)
        assert given_up.wait(DEADLINE_S)
        assert group.failure.startswith("psengine run cannot watch its servers any more (LookupError: no words)")


def test_force_does_not_wait_for_a_server_that_is_starting_again(tmp_path):
    group = group_of_one(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(group)
        (first,) = servers_here()
        os.kill(first, signal.SIGKILL)
        (second,) = eventually(lambda: [pid for pid in servers_here() if pid != first])
        # It never says that it is ready.
        os.kill(second, signal.SIGSTOP)
        stack.callback(group._thread.join, DEADLINE_S)
        stack.callback(os.kill, second, signal.SIGKILL)
        group.kill()
        stopper = threading.Thread(target=group.stop, daemon=True)
        stopper.start()
        stopper.join(10)
        assert not stopper.is_alive()
        assert group._thread.is_alive()
    group._thread.join(DEADLINE_S)
    assert not group._thread.is_alive()
    assert group.failure == ""


UNUSED = "psengine run: no worker joined the servers: does the script name its own strategy"


@pytest.mark.parametrize(
    ("script", "is_unused"),
    [([WORKER, "well"], True), pytest.param([TRAINING, "2"], False, marks=pytest.mark.slow)],
)
def test_servers_that_no_worker_joined_are_said(script, is_unused):
    code, _, err = run_command(["run", "--strategy", "async", *script])
    assert code == 0, err
    assert (UNUSED in err) == is_unused


JOB = {"members": 0, "departed": []}


@pytest.mark.parametrize(
    ("report", "has_joined"),
    [
        ({"page": {"events": [{"kind": "started", "worker": None}]}}, False),
        ({"page": {"events": [{"kind": "started", "worker": None}, {"kind": "joined", "worker": 0}]}}, True),
        ({"page": {"events": [{"kind": "refused", "worker": 3}]}}, True),
        ({"page": {"events": [{"kind": "memory", "worker": None}]}}, None),
        ({"page": {"events": [{"kind": "started", "worker": None}]}, "shards": [{"jobs": {"restored": JOB}}]}, False),
        ({"page": {"events": []}, "shards": [{"jobs": {"default": {**JOB, "departed": [{"rank": 0}]}}}]}, True),
        ({"page": {"events": []}, "shards": [{"jobs": {"default": {**JOB, "members": 1}}}]}, True),
        ({"page": {"events": [{"kind": "started"}]}, "mute": [{"index": 1}]}, None),
        ({"error": "timed out"}, None),
        ({}, None),
    ],
)
def test_who_joined_is_known_or_not(report, has_joined):
    assert has_joined_workers(ServerReport(address="http://127.0.0.1:1", **report)) is has_joined
