"""psengine run: Ctrl-C and its like end everything that it started, and nothing is left behind."""

from __future__ import annotations

import re
import signal
import urllib.request
from pathlib import Path

from support import elastic_training
from support.command_process import WORKER, running_command, servers_of
from support.process_table import children_of, command_line, is_running
from support.waiting import eventually

INDEPENDENT = ["--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9", "--max-restarts", "3"]


def pids_of(directory):
    """Of the workers "grandchildren", and their children."""
    files = [directory / f"pids-{rank}" for rank in range(2)]
    return [int(pid) for file in files for pid in file.read_text().split()] if all(map(Path.exists, files)) else []


def test_the_second_ctrl_c_ends_everything_at_once(tmp_path):
    """Workers that ignore it, their children, a child that left the group."""
    for options in ([], INDEPENDENT):
        folder = tmp_path / str(len(options))
        folder.mkdir()
        arguments = ["run", *options, "--workers", "2", "--shutdown-timeout", "60", WORKER, "grandchildren"]
        with running_command([*arguments, str(folder)]) as command:
            pids = command.wait_until(lambda folder=folder: pids_of(folder))
            command.signal(signal.SIGINT)
            command.wait_until(lambda command=command: "again: at once" in command.stderr)
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
        pids += servers_of(command.pid)
        command.signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert len(pids) == 3
        assert [pid for pid in pids if is_running(pid)] == []


def test_independent_workers_end_with_their_launcher():
    with running_command(["run", *INDEPENDENT, "--workers", "2", WORKER, "save"]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.stdout.count(" has ") == 2
        assert command.stderr.count("checkpoint saved") == 2


def test_independent_workers_die_with_a_launcher_that_is_killed():
    elastic = ["--independent", "--strategy", "sync:virtual_workers=4"]
    with running_command(["run", *elastic, elastic_training.__file__, "60"]) as command:
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
