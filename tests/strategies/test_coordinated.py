"""Independent workers with virtual workers: processes are killed, and the weights are those of the undisturbed run."""

from __future__ import annotations

import os
import re
import signal
from functools import cache

import pytest
from support import elastic_training
from support.command_process import RunningCommand, run_command, running_command, servers_of

SCRIPT = elastic_training.__file__


@cache
def undisturbed() -> str:
    """The digest of a training by one worker, without a coordinator."""
    code, stdout, stderr = run_command(["run", "--workers", "1", SCRIPT, "0"])
    assert code == 0, stderr
    return re.findall(r"weights (\w+)", stdout)[0]


def process_of(command: RunningCommand, worker: int, step: int) -> int:
    """The process of a worker, once it has done a step, or a later one."""

    def found() -> int:
        lines = re.findall(rf"process (\d+) worker {worker} step (\d+)", command.stdout)
        return next((int(process) for process, done in reversed(lines) if int(done) >= step), 0)

    return command.wait_until(found)


def kill_one(command: RunningCommand) -> None:
    os.kill(process_of(command, 1, 5), signal.SIGKILL)


def kill_the_first_and_stop_another(command: RunningCommand) -> None:
    first, second = process_of(command, 0, 5), process_of(command, 1, 5)
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGSTOP)
    command.wait_until(lambda: re.search(r"worker 2 step 1[0-9]", command.stdout))
    os.kill(second, signal.SIGKILL)


def kill_the_coordinator_and_one(command: RunningCommand) -> None:
    worker = process_of(command, 2, 5)
    (server,) = servers_of(command.pid)
    os.kill(server, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("disturb", [kill_one, kill_the_first_and_stop_another, kill_the_coordinator_and_one])
def test_whoever_dies_the_weights_are_those_of_the_undisturbed_run(disturb):
    arguments = ["run", "--workers", "3", "--independent", "--server-option", "lease_s=2", SCRIPT, "0.02"]
    with running_command(arguments) as command:
        disturb(command)
        assert command.wait() == 0, command.stderr
        digests = re.findall(r"weights (\w+)", command.stdout)
    assert len(digests) >= 1
    assert set(digests) == {undisturbed()}
