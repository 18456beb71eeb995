"""Which worker of the job a process is: in a group, as an independent worker, and where servers number the workers."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.processes import free_port, run_ranks, run_ranks_to_any_end

import psengine
from psengine.environment import job
from psengine.environment.launchers import detect, read_worker
from psengine.errors import ArgumentTypeError, CollectiveError, ConfigurationError, EnvironmentVariableError

PREFIXES = ("SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_", "MASTER_", "PSENGINE_WORKER", "PSENGINE_SERVERS")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
TORCHRUN |= {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "1"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "2"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "node-0"}


def clear() -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            del os.environ[name]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)
    yield monkeypatch
    psengine.shutdown()
    job.forget()


def numbers(context: psengine.Context) -> tuple[Any, ...]:
    return context.rank, context.world_size, context.worker, context.workers, context.is_main_process


def set_all(patches: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        patches.setenv(name, value)


def test_a_process_alone(bare):
    assert psengine.is_main_process()
    assert numbers(psengine.init()) == (0, 1, 0, 1, True)


@pytest.mark.parametrize("launcher", [{}, TORCHRUN, SRUN], ids=["no launcher", "torchrun", "srun"])
def test_an_independent_worker_is_a_world_of_its_own_whatever_the_launcher_says(bare, launcher, caplog):
    set_all(bare, launcher | {"PSENGINE_WORKER": "2", "PSENGINE_WORKERS": "4"})
    assert not psengine.is_main_process()
    assert numbers(psengine.init()) == (0, 1, 2, 4, False)
    assert ("torchrun's variables name it rank 1 of 3" in caplog.text) == (launcher is TORCHRUN)
    assert detect(os.environ).device_index == (2 if launcher is SRUN else 1 if launcher else 0)


def test_an_independent_worker_does_not_train_alone_unnoticed(bare):
    psengine.init()
    bare.setenv("PSENGINE_WORKER", "1")
    with raises(ConfigurationError, "independent worker 1", "got 'sync' with PSENGINE_WORKER=1", "Fix: strategy="):
        psengine.DistributedDataParallel(torch.nn.Linear(1, 1), strategy="sync")
    set_all(bare, {"PSENGINE_WORKER": "0", "PSENGINE_WORKERS": "1"})
    psengine.DistributedDataParallel(torch.nn.Linear(1, 1), strategy="sync")


def test_the_number_of_workers_is_needed_only_where_it_is_read(bare):
    bare.setenv("PSENGINE_WORKER", "1")
    context = psengine.init()
    assert (context.worker, context.is_main_process) == (1, False)
    with raises(EnvironmentVariableError, "PSENGINE_WORKERS beside PSENGINE_WORKER=1", "Fix: set PSENGINE_WORKERS"):
        _ = context.workers


@pytest.mark.parametrize(
    ("worker", "workers", "words"),
    [
        ("two", "4", "PSENGINE_WORKER must be an integer"),
        ("-1", "4", "0 to 65535"),
        ("65536", "", "0 to 65535"),
        ("0", "0", "PSENGINE_WORKERS must be an integer"),
        ("4", "4", "expected PSENGINE_WORKER below PSENGINE_WORKERS=4, got 4"),
    ],
)
def test_malformed_numbers_are_refused_at_once(bare, worker, workers, words):
    set_all(bare, {"PSENGINE_WORKER": worker, "PSENGINE_WORKERS": workers})
    for call in (psengine.init, psengine.is_main_process):
        with raises(EnvironmentVariableError, words, "Fix: "):
            call()
    assert not dist.is_initialized()


def test_empty_is_unset():
    assert read_worker({"PSENGINE_WORKER": " ", "PSENGINE_WORKERS": ""}) == (None, None)


def test_before_the_servers_have_assigned_a_number_a_read_warns_once(bare, caplog):
    bare.setenv("PSENGINE_SERVERS", "tcp://127.0.0.1:1")
    context = psengine.init()
    assert numbers(context) == (0, 1, 0, 1, True)
    assert caplog.text.count("PSENGINE_WORKER is not set") == 1
    job.assign(3)
    job.assign(5)  # of a second model
    assert numbers(context) == (0, 1, 3, 4, False)
    assert "counts as 4" in caplog.text
    bare.setenv("PSENGINE_WORKERS", "4")
    assert context.workers == 4
    bare.setenv("PSENGINE_WORKERS", "3")
    with raises(EnvironmentVariableError, "expected a worker below 3, got 3", "Fix: set PSENGINE_WORKERS"):
        _ = context.workers


@pytest.mark.parametrize("assigned", [0, 2])
def test_a_number_that_comes_after_a_read_warns_where_no_variable_named_the_servers(bare, caplog, assigned):
    context = psengine.init()
    assert context.is_main_process
    job.assign(assigned)
    assert context.worker == assigned
    assert (f"worker {assigned} of the job, and it counted as worker 0 before" in caplog.text) == (assigned > 0)


def in_a_group(rank: int, world_size: int) -> Any:
    """A group that the user made: its rank is the worker, whatever PSENGINE_WORKER says."""
    clear()
    os.environ.update(PSENGINE_WORKER="7", PSENGINE_WORKERS="9")
    context = psengine.init()
    assert psengine.is_main_process() == context.is_main_process
    return numbers(context)


def test_in_a_group_the_rank_is_the_worker():
    assert run_ranks(in_a_group, 2) == [(0, 2, 0, 2, True), (1, 2, 1, 2, False)]


# ---- init's arguments ------------------------------------------------------------------------------------------------


def by_arguments(rank: int, world_size: int, init_method: str | None, launcher: dict[str, str]) -> Any:
    clear()
    os.environ.update({name: value.format(rank=rank) for name, value in launcher.items()})
    if rank == 1 and "WORLD_SIZE" not in launcher:
        socket.gethostname = lambda: "elsewhere"
    arguments: dict[str, Any] = {"rank": rank, "world_size": world_size} if "RANK" not in launcher else {}
    with psengine.init("gloo", timeout=timedelta(seconds=30), init_method=init_method, **arguments) as context:
        total = torch.tensor([context.rank + 1.0])
        dist.all_reduce(total)
        psengine.barrier()
        assert psengine.init(rank=rank, world_size=world_size) == context
        with raises(ConfigurationError, f"expected rank={rank} or none, got {1 - rank}", "Fix: "):
            psengine.init(rank=1 - rank, world_size=world_size)
        found = total.item(), context.rank, context.local_rank, context.local_world_size
    assert not dist.is_initialized()
    return found


def test_ranks_meet_where_the_arguments_say(tmp_path):
    port = free_port()
    alone = [(3, 0, 0, 1), (3, 1, 0, 1)]
    assert run_ranks(by_arguments, 2, f"tcp://127.0.0.1:{port}", {}, init_group=False) == alone
    assert run_ranks(by_arguments, 2, f"file://{tmp_path}/meeting", {}, init_group=False) == alone
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_ranks(by_arguments, 2, None, master, init_group=False) == alone


def test_the_place_on_the_host_is_the_launchers():
    launcher = {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2"}
    method = f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(by_arguments, 2, method, launcher, init_group=False) == [(3, 0, 0, 2), (3, 1, 1, 2)]


def meet_nobody(rank: int, world_size: int, init_method: str) -> str:
    clear()
    with pytest.raises(CollectiveError) as caught:
        psengine.init("gloo", timeout=timedelta(seconds=0.5), rank=1, world_size=2, init_method=init_method)
    return str(caught.value)


def test_who_is_missed_is_said(tmp_path):
    port = free_port()
    [by_tcp] = run_ranks(meet_nobody, 1, f"tcp://127.0.0.1:{port}", init_group=False)
    assert f"init_method=tcp://127.0.0.1:{port} (expected all 2 ranks" in by_tcp
    [by_file] = run_ranks(meet_nobody, 1, f"file://{tmp_path}/meeting", init_group=False)
    assert f"through the file {tmp_path}/meeting" in by_file
    assert "Fix: " in by_tcp
    assert "Fix: " in by_file


def test_a_world_of_one_needs_no_meeting_point(bare):
    assert numbers(psengine.init(rank=0, world_size=1)) == (0, 1, 0, 1, True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rank": 0}, ConfigurationError, "expected both or neither, got rank=0, world_size=None"),
        ({"init_method": "tcp://h:1"}, ConfigurationError, "nothing says how many there are"),
        ({"rank": 2, "world_size": 2}, ConfigurationError, "got rank 2 of 2"),
        ({"rank": "0", "world_size": 2}, ArgumentTypeError, "init(rank=) is a whole number (expected an int, got '0')"),
        ({"rank": 0, "world_size": True}, ArgumentTypeError, "init(world_size=)"),
        ({"rank": 0, "world_size": 2}, EnvironmentVariableError, "MASTER_ADDR"),
        *(
            ({"rank": 0, "world_size": 2, "init_method": method}, ConfigurationError, "expected tcp://HOST:PORT")
            for method in ("tcp://h", "tcp://h:x", "h:1", "tcp://h:1?rank=0", "file://relative", "", 3)
        ),
    ],
)
def test_arguments_that_do_not_fit(bare, arguments, error, words):
    with raises(error, words):
        psengine.init("gloo", timeout=timedelta(seconds=1), **arguments)
    assert not dist.is_initialized()


def test_under_torchrun_no_other_address_is_listened_at(bare):
    set_all(bare, TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    with raises(ConfigurationError, "expected no init_method, or tcp://no.such.host.invalid:1; got tcp://h:2", "Fix: "):
        psengine.init("gloo", init_method="tcp://h:2")


def test_of_nested_blocks_the_outermost_shuts_down(bare):
    for _ in range(2):
        with psengine.init("gloo", rank=0, world_size=1):
            with psengine.init():
                pass
            assert dist.is_initialized()
            with pytest.raises(KeyError), psengine.init():
                raise KeyError
            assert dist.is_initialized()
        assert not dist.is_initialized()


def leave_by_an_error(rank: int, world_size: int) -> None:
    clear()
    with psengine.init("gloo", rank=0, world_size=1):
        raise ValueError("of the script")


def test_an_error_in_the_block_is_raised_on():
    [result] = run_ranks_to_any_end(leave_by_an_error, 1, init_group=False)
    assert "ValueError: of the script" in result.error
