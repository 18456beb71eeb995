"""Strategy "sync-server:virtual_workers=V": plain sync-server's bits with V workers, whoever plays or dies."""

from __future__ import annotations

import os
import signal
from functools import cache

import pytest
import torch
from support import elastic_training
from support.command_process import RunningCommand, run_command, running_command, servers_of
from support.elastic_training import process_of, weights_in
from support.marks import slow

import psengine
from psengine.errors import ConfigurationError
from psengine.strategies.registry import resolve_strategy

SCRIPT = elastic_training.__file__
STRATEGY = "sync-server:virtual_workers=3"


@cache
def expected() -> str:
    """The digest of a training by three workers, under plain sync-server."""
    code, stdout, stderr = run_command(["run", "--workers", "3", SCRIPT, "0", "sync-server"])
    assert code == 0, stderr
    (digest,) = weights_in(stdout)
    return digest


def kill_a_server(command: RunningCommand) -> None:
    process_of(command, 0, 5)
    os.kill(servers_of(command.pid)[0], signal.SIGKILL)


def kill_a_server_and_a_worker(command: RunningCommand) -> None:
    kill_a_server(command)
    os.kill(process_of(command, 1, 5), signal.SIGKILL)


@pytest.mark.parametrize(
    ("workers", "servers", "disturb"),
    [slow(3, 2, kill_a_server), (2, 1, kill_a_server_and_a_worker)],
)
def test_the_bits_of_plain_sync_server(workers, servers, disturb):
    options = ["--workers", str(workers), "--independent", "--servers", str(servers), "--server-option", "lease_s=2"]
    with running_command(["run", *options, SCRIPT, "0.02", STRATEGY]) as command:
        disturb(command)
        assert command.wait() == 0, command.stderr
        assert weights_in(command.stdout) == {expected()}


@pytest.mark.parametrize(
    "option",
    ["quorum=2", "servers=tcp://a:1", "job=j", "timeout_s=9", "timeout_s=300", "compress=bf16", "durability=log"],
)
def test_options_of_plain_sync_server_are_refused(option):
    with pytest.raises(ConfigurationError, match=f"expected virtual_workers alone, got {option.partition('=')[0]}"):
        resolve_strategy(f"{STRATEGY},{option}")


def test_a_training_without_servers_is_refused():
    with pytest.raises(ConfigurationError, match="expected PSENGINE_SERVERS, and no process group, got no servers"):
        psengine.DistributedDataParallel(torch.nn.Linear(1, 1), strategy=STRATEGY)
