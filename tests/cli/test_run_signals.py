"""psengine run: Ctrl-C and its like end everything that it started, and nothing is left behind."""

import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from support import elastic_training
from support.command_process import WORKER, running_command, servers_of
from support.process_table import children_of, command_line, is_running
from support.waiting import eventually

from psengine.environment.processes import SAME_STOP_S

INDEPENDENT = ["--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9", "--max-restarts", "3"]


ELASTIC = ["--independent", "--strategy", "sync:virtual_workers=4", "--workers"]


def pids_of(directory):
    """Of the workers "grandchildren", and their children."""
    files = [directory / f"pids-{rank}" for rank in range(2)]
    return [int(pid) for file in files for pid in file.read_text().split()] if all(map(Path.exists, files)) else []


@pytest.mark.parametrize(
    ("timeout_s", "why"), [("60", "at the second signal"), ("1", "after 1 s (--shutdown-timeout)")]
)
def test_the_second_ctrl_c_ends_everything_at_once(timeout_s, why, tmp_path):
    """And the time-out: workers that ignore it, their children, a child that left the group."""
    for options in ([], INDEPENDENT):
        folder = tmp_path / str(len(options))
        folder.mkdir()
        arguments = ["run", *options, "--workers", "2", "--shutdown-timeout", timeout_s, WORKER, "grandchildren"]
        with running_command([*arguments, str(folder)]) as command:
            pids = command.wait_until(lambda folder=folder: pids_of(folder))
            command.signal(signal.SIGINT)
            command.wait_until(lambda command=command: "again after 2 s: at once" in command.stderr)
            if timeout_s == "60":
                time.sleep(SAME_STOP_S)
                assert len([pid for pid in pids if is_running(pid)]) == 6
                command.signal(signal.SIGINT)
            assert command.wait() == 128 + signal.SIGINT
            assert f"killed ranks 0-1 {why}: what they have not saved is lost" in command.stderr
            assert [pid for pid in pids if is_running(pid)] == []


TRAINING = """
import time, torch, psengine
psengine.init()
model = psengine.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
while True:
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    print("trains", flush=True)
"""
TARGET = """
import time, torch
def make():
    print("trains", flush=True)
    batch = lambda rank, step: time.sleep(1) or torch.ones(3, 4)
    return torch.nn.Linear(4, 2), batch, lambda m, b: m(b).sum(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
"""
MAIN, SERVER = "psengine.cli.main", "psengine.cli.server"


@pytest.mark.parametrize(
    ("module", "arguments", "begun", "said"),
    [
        (MAIN, ["run", "--workers", "2", "train.py"], "trains", "psengine run: SIGINT: ending the workers"),
        (MAIN, ["run", *ELASTIC, "2", elastic_training.__file__, "1"], "step 1", "psengine run: SIGINT: ending the"),
        (MAIN, ["advise", "--steps", "1000000", "train.py"], "trains", "psengine advise: SIGINT: ending the workers"),
        (MAIN, ["verify", "--steps", "1000", "target.py:make"], "loading", "psengine: interrupted"),
        (MAIN, ["status", "--timeout-s", "100", "--server-address", "tcp://10.255.255.1:9"], "", "psengine: interr"),
        (SERVER, ["--bind", "tcp://127.0.0.1:0"], "psengine-server ready", "shutting down: SIGINT"),
    ],
)
def test_ctrl_c_is_one_line_and_exit_code_130(module, arguments, begun, said, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "target.py").write_text(TARGET)
    line = [str(tmp_path / one) if one.startswith(("train.py", "target.py")) else one for one in arguments]
    with running_command(line, module=module, prepare=announce_start) as command:
        command.wait_until(lambda: "begins" in command.stdout and begun in command.stdout + command.stderr)
        command.signal(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        own = [line for line in command.stderr.splitlines() if not line.startswith("[rank")]
        assert said in own[-1]
        assert "Traceback" not in command.stderr


def announce_start():
    print("begins", flush=True)


def test_a_signal_ends_the_server_too():
    options = ["--workers", "2", "--strategy", "async", "--shutdown-timeout", "1"]
    with running_command(["run", *options, WORKER, "hang"]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        pids = [pid for pid in children_of(command.pid) if WORKER in command_line(pid)]
        match = re.search(r"1 server at (\S+); dashboard at (http://127\.0\.0\.1:\d+)", command.stderr)
        assert match, command.stderr
        assert f"PSENGINE_SERVERS={match[1]}" in command.stdout
        with urllib.request.urlopen(f"{match[2]}/healthz", timeout=10) as answer:
            assert answer.status == 200
        pids += servers_of(command.pid)
        command.signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert len(pids) == 3
        assert [pid for pid in pids if is_running(pid)] == []


@pytest.mark.parametrize("options", [[], INDEPENDENT])
def test_workers_have_time_to_save_also_if_the_stop_arrives_twice(options, tmp_path):
    may_save = tmp_path / "may-save"
    with running_command(["run", *options, "--workers", "2", WORKER, "save", str(may_save)]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        command.signal(signal.SIGINT)
        command.wait_until(lambda: "ending the workers" in command.stderr)
        command.signal(signal.SIGINT)
        may_save.touch()
        assert command.wait() == 130
        assert command.stdout.count(" has ") == 2
        assert command.stderr.count("checkpoint saved") == 2


def test_independent_workers_die_with_a_launcher_that_is_killed():
    with running_command(["run", *ELASTIC, "1", elastic_training.__file__, "60"]) as command:
        (worker,) = command.wait_until(lambda: re.findall(r"process (\d+) worker 0 is ready", command.stdout))
        command.signal(signal.SIGKILL)
        eventually(lambda: not is_running(int(worker)), "the worker's end")


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


def test_children_of_a_rank_that_failed_are_ended(tmp_path):
    line = ["run", "--workers", "2", "--shutdown-timeout", "1", WORKER, "raise-and-leave", str(tmp_path)]
    with running_command(line) as command:
        assert command.wait() == 1
        assert "ValueError: bad data" in command.stderr
        assert "more processes of the workers" in command.stderr
        assert [pid for pid in (tmp_path / "pids-1").read_text().split() if is_running(int(pid))] == []
