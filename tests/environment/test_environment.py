"""``init`` and ``shutdown``: alone, in a group, as an independent worker; how ranks meet."""

import logging
import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.interpreters import running_program
from support.marks import slow
from support.processes import free_port, run_ranks
from support.scripted_peer import stranger

import psengine
from psengine.environment import context as environment
from psengine.environment import rendezvous
from psengine.environment.context import Context, assign_worker, init, is_main_process, shutdown
from psengine.environment.devices import default_backend
from psengine.errors import CollectiveError, ConfigurationError, EnvironmentVariableError, ServerLostError
from psengine.parameter_server.client import reachability

LAUNCHER_VARIABLE = re.compile(
    r"(SLURM|OMPI|PMIX|TORCHELASTIC|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$|GROUP_RANK|PSENGINE_(STRATEGY|WORKERS?|SERVERS)"
)
# RFC 6761: no such name will ever resolve.
NO_HOST = "node-0.invalid"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
TORCHRUN |= {"MASTER_ADDR": NO_HOST, "MASTER_PORT": "1"}


def clear() -> None:
    for name in list(os.environ):
        if LAUNCHER_VARIABLE.match(name):
            del os.environ[name]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if LAUNCHER_VARIABLE.match(name):
            monkeypatch.delenv(name)
    yield monkeypatch
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    assign_worker(None)


def numbers(context: Context) -> tuple[Any, ...]:
    return context.rank, context.world_size, context.worker, context.workers, context.is_main_process


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts the CPU's defaults")
def test_init_and_shutdown(bare):
    assert is_main_process()
    bare.setenv("MASTER_ADDR", NO_HOST)  # nobody is met
    bare.setenv("MASTER_PORT", "1")
    context = init()
    assert context == Context(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        device=torch.device("cpu"),
        hostname=socket.gethostname(),
    )
    assert numbers(context) == (0, 1, 0, 1, True)
    assert dist.get_backend() == "gloo"
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [1, 1, 1]
    assert init() == init("gloo") == init(rank=0, world_size=1) == context
    shutdown()
    assert not dist.is_initialized()
    shutdown()
    assert init() == context
    dist.destroy_process_group()
    assert init() == context


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "bogus"}, ConfigurationError, "got 'bogus'"),
        ({"timeout": timedelta(0)}, ConfigurationError, "at least a millisecond"),
        ({"rank": 0}, ConfigurationError, "got rank=0, world_size=None"),
        ({"init_method": "tcp://h:1"}, ConfigurationError, "needs both where there is no launcher"),
        ({"rank": 0, "world_size": 2}, EnvironmentVariableError, "MASTER_ADDR"),
        ({"rank": 0, "world_size": 2, "init_method": "foo://h:1"}, CollectiveError, "No rendezvous handler for foo://"),
    ],
)
def test_arguments_that_do_not_fit(bare, arguments, error, words):
    with raises(error, words, "expected", "Fix: "):
        init(**{"backend": "gloo", **arguments})
    assert not dist.is_initialized()


def test_gloo_keeps_a_cuda_device_and_nccl_is_preferred(bare):
    selected = []
    bare.setattr(torch.cuda, "is_available", lambda: True)
    bare.setattr(torch.cuda, "device_count", lambda: 2)
    bare.setattr(torch.cuda, "set_device", selected.append)
    assert init("gloo").device == torch.device("cuda", 0)
    assert selected == [torch.device("cuda", 0)]
    bare.setattr(dist, "is_nccl_available", lambda: True)
    assert default_backend() == "nccl"


def test_of_nested_blocks_the_outermost_shuts_down(bare):
    for _ in range(2):
        with init("gloo", rank=0, world_size=1):
            with init():
                pass
            assert dist.is_initialized()
            with pytest.raises(KeyError), init():
                raise KeyError
            assert dist.is_initialized()
        assert not dist.is_initialized()


@pytest.mark.parametrize("launcher", [{}, TORCHRUN], ids=["no launcher", "torchrun"])
def test_an_independent_worker_is_a_world_of_its_own_whatever_the_launcher_says(bare, launcher):
    for name, value in (launcher | {"PSENGINE_WORKER": "2", "PSENGINE_WORKERS": "4"}).items():
        bare.setenv(name, value)
    assert not is_main_process()
    assert numbers(init()) == (0, 1, 2, 4, False)


def test_an_independent_worker_does_not_train_alone_unnoticed(bare):
    bare.setenv("PSENGINE_WORKER", "1")
    context = init()
    with raises(ConfigurationError, "independent worker 1", "got 'sync' with PSENGINE_WORKER=1", "Fix: strategy="):
        psengine.DistributedDataParallel(torch.nn.Linear(1, 1), strategy="sync")
    assert (context.worker, context.is_main_process) == (1, False)
    with raises(EnvironmentVariableError, "PSENGINE_WORKERS beside PSENGINE_WORKER=1", "Fix: set PSENGINE_WORKERS"):
        _ = context.workers


def test_the_servers_number_counts_from_the_first_model_on(bare):
    context = init()
    assert numbers(context) == (0, 1, 0, 1, True)
    assign_worker(3)
    assign_worker(5)  # of a second model
    assert numbers(context) == (0, 1, 3, 4, False)


def init_with_host_names(rank: int, world_size: int, port: int, local_ranks: list[int]):
    clear()
    own = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_ranks[rank], "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}})
    host = "left" if rank < 2 else "right"
    socket.gethostname = lambda: host
    context = init("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    return context.hostname, context.local_world_size


def test_ranks_of_a_host_are_counted_where_the_launcher_does_not_say():
    results = run_ranks(init_with_host_names, 3, free_port(), [0, 1, 0], init_group=False)
    assert results == [("left", 2), ("left", 2), ("right", 1)]


def adopt(rank: int, world_size: int, variables: dict[str, str]) -> Any:
    clear()
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    group = dist.group.WORLD
    context = init()
    assert dist.group.WORLD is group
    assert is_main_process() == context.is_main_process
    assert (context.local_rank, context.local_world_size) == (rank, 2)
    shutdown()
    assert dist.is_initialized()
    return numbers(context)


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "{rank}"}, {"PSENGINE_WORKER": "7", "PSENGINE_WORKERS": "9"}],
    ids=["no variables", "half of them", "a worker's"],
)
def test_adopts_the_users_group_in_which_the_rank_is_the_worker(variables):
    assert run_ranks(adopt, 2, variables) == [(0, 2, 0, 2, True), (1, 2, 1, 2, False)]


def by_arguments(rank: int, world_size: int, init_method: str | None, variables: dict[str, str]) -> Any:
    clear()
    os.environ.update(variables)
    if rank == 1:
        socket.gethostname = lambda: "elsewhere"
    place = {"rank": rank, "world_size": world_size}
    with init("gloo", timeout=timedelta(seconds=30), init_method=init_method, **place) as context:
        total = torch.tensor([context.rank + 1.0])
        dist.all_reduce(total)
        psengine.barrier()
        assert init(rank=rank, world_size=world_size) == context
        with raises(ConfigurationError, f"expected rank={rank} or none, got {1 - rank}", "Fix: "):
            init(rank=1 - rank, world_size=world_size)
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


class Lines(logging.Handler):
    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def wait_in_vain(rank: int, world_size: int, as_rank: int, init_method: str) -> tuple[str, float, list[str]]:
    """The error, how long it took to come, and what was logged meanwhile."""
    clear()
    rendezvous.FIRST_LINE_S, rendezvous.GRACE_S = 0.3, 0.2
    said = Lines(rendezvous.logger).lines
    started_s = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        init("gloo", timeout=timedelta(seconds=1), rank=as_rank, world_size=2, init_method=init_method)
    assert not dist.is_initialized()
    return str(caught.value), time.monotonic() - started_s, said


@pytest.mark.parametrize(("as_rank", "address"), [(0, "127.0.0.1"), (1, "127.0.0.1"), (1, NO_HOST), slow(1, "[::1]")])
def test_who_is_missed_is_logged_and_is_an_error(as_rank, address):
    method = f"tcp://{address}:{free_port()}"
    ((message, waited_s, said),) = run_ranks(wait_in_vain, 1, as_rank, method, init_group=False)
    assert f"rank {as_rank} of 2 (arguments of init()) is still waiting for the other ranks at {method}" in said[0]
    assert f"Rank {as_rank} of 2" in message
    assert f"group at {method} (expected all 2 ranks to meet there within timeout=1 s" in message
    assert "Fix: " in message
    assert "\n" not in message
    assert waited_s < 30


def test_another_program_has_the_port():
    with stranger() as method:
        ((message, waited_s, _),) = run_ranks(wait_in_vain, 1, 1, method, init_group=False)
        assert "does not answer as a store" in message
        assert waited_s < 30
        ((refusal, _, _),) = run_ranks(wait_in_vain, 1, 0, method, init_group=False)
        assert "address already in use" in refusal


def name_a_server(rank: int, world_size: int, address: str) -> tuple[str, list[str]]:
    os.environ["PSENGINE_SERVERS"] = address
    reachability.SILENCE_S = 0.1
    said = Lines(reachability.logger).lines
    with pytest.raises(ServerLostError) as caught:
        psengine.connect(role="reader", connect_timeout_s=3.0).layout()
    return str(caught.value), said


@pytest.mark.parametrize(
    ("host", "words"), [(NO_HOST, "does not resolve here"), ("127.0.0.1", "nobody can be reached there")]
)
def test_a_server_that_cannot_be_reached_is_said_at_once_and_in_the_error(host, words):
    address = f"tcp://{host}:{free_port()}"
    ((message, said),) = run_ranks(name_a_server, 1, address, init_group=False)
    assert f"{address} does not answer: " in said[0]
    assert "PSENGINE_SERVERS" in said[0]
    assert words in said[0]
    assert words in message


# Two ranks that have met; one of them ends in another way than the other expects.
SCRIPT = """
import os, signal, time
from datetime import timedelta
import torch, torch.distributed as dist
from psengine.environment import context as environment

context = environment.init("gloo", timeout=timedelta(seconds=4))
total = torch.tensor([float(context.rank + 1)])
dist.all_reduce(total)
assert total.item() == 3 and context.local_world_size == 2
"""


def script_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLE.match(name)}
    return kept | {"PYTHONPATH": str(Path(environment.__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("backends", "ending", "group_is_left"),
    [("cpu:gloo", "", False), ("cuda:nccl", "raise RuntimeError('boom')", True)],
)
def test_end_of_the_interpreter_closes_the_group(backends, ending, group_is_left):
    """Unless an exception ended it and nccl's peers may be waiting within a collective."""
    program = (
        "import atexit, torch.distributed as dist\n"
        "from psengine.environment import context as environment\n"
        "atexit.register(lambda: print(dist.is_initialized()))  # runs last\n"
        "environment.init()\n"
        f"dist.get_backend_config = lambda: {backends!r}\n"
        f"{ending}\n"
    )
    with running_program(program, script_environment()) as run:
        run.wait()
        assert run.stdout.split() == [str(group_is_left)], run.stderr


DIES = "if context.rank == 1: os.kill(os.getpid(), signal.{})\nwork = dist.all_reduce(total, async_op=True)"
RAISES = "if context.rank == 0: raise RuntimeError('boom')\ntime.sleep(0.3)"


@pytest.mark.parametrize(
    ("ending", "exit_codes"),
    [(DIES.format("SIGKILL"), (0, -9)), (DIES.format("SIGSTOP"), (0, -9)), (RAISES, (1, 0))],
    ids=["dead peer, pending work", "stopped peer, pending work", "exception"],
)
def test_end_of_the_interpreter_does_not_hang(ending, exit_codes):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as programs:
        first, second = (
            programs.enter_context(
                running_program(SCRIPT + ending, script_environment() | shared | {"RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in "01"
        )
        exits = [first.wait()]
        if "SIGSTOP" in ending:
            second.signal(signal.SIGKILL)
        exits.append(second.wait())
        errors = [first.stderr, second.stderr]
    assert tuple(exits) == exit_codes, errors
    assert all("destroy_process_group" not in error for error in errors)
