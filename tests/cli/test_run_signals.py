"""psengine run: Ctrl-C and its like end everything that it started, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

from support.command_process import WORKER, running_command, servers_of
from support.process_table import children_of, command_line, is_running

from psengine.cli.launching import processes
from psengine.cli.launching.interruption import REPEAT_S


def pids_of(directory):
    """Of the workers "grandchildren", and their children."""
    files = [directory / f"pids-{rank}" for rank in range(2)]
    return [int(pid) for file in files for pid in file.read_text().split()] if all(map(Path.exists, files)) else []


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
        pids += servers_of(command.pid)
        command.signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert len(pids) == 3
        assert [pid for pid in pids if is_running(pid)] == []


def test_ctrl_c_leaves_out_what_each_rank_says_of_it():
    with running_command(["run", "--workers", "2", WORKER, "save"]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        announced, *saved = command.stderr.splitlines()
        assert announced == "psengine run: SIGINT: ending the workers (again: at once)"
        assert sorted(saved) == ["[rank 0] checkpoint saved", "[rank 1] checkpoint saved"]


def test_independent_workers_end_with_their_launcher():
    options = ["--workers", "2", "--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9"]
    with running_command(["run", *options, "--max-restarts", "3", WORKER, "save"]) as command:
        command.wait_until(lambda: command.stdout.count(" has ") == 2)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.stdout.count(" has ") == 2
        assert command.stderr.count("checkpoint saved") == 2


def test_a_signal_to_launcher_and_workers_starts_no_worker_again():
    # Slurm signals every process of a step. The launcher is stopped, so that it sees both at once.
    options = ["--workers", "1", "--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9"]
    with running_command(["run", *options, "--max-restarts", "3", WORKER, "hang"]) as command:
        command.wait_until(lambda: " has " in command.stdout)
        (worker,) = (pid for pid in children_of(command.pid) if WORKER in command_line(pid))
        command.signal(signal.SIGSTOP)
        for pid in (worker, command.pid):
            os.kill(pid, signal.SIGTERM)
        command.wait_until(lambda: not is_running(worker))
        command.signal(signal.SIGCONT)
        assert command.wait() == 128 + signal.SIGTERM
        assert command.stderr == "psengine run: SIGTERM: ending the workers\n"


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


def have_less_patience():
    processes.GRACE_S = 0.3


def test_a_signal_after_a_failure_keeps_its_report(tmp_path):
    line = ["run", "--workers", "2", "--shutdown-timeout", "1", WORKER, "raise-and-leave", str(tmp_path), "stubborn"]
    with running_command(line, prepare=have_less_patience) as command:
        command.wait_until(lambda: "ValueError: bad data" in command.stderr)
        # Rank 0 is asked to end, and does not.
        command.wait_until(lambda: len([p for p in children_of(command.pid) if WORKER in command_line(p)]) == 1)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        report = command.stderr[command.stderr.index("failed first") :]
        assert "ValueError: bad data" in report
        assert "ended because of it: rank 0" in report
        assert [pid for pid in pids_of(tmp_path) if is_running(pid)] == []
