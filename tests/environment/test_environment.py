from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zlib
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.interpreters import running_program
from support.marks import slow
from support.processes import free_port, run_ranks, run_ranks_to_any_end

from psengine.environment import context as environment
from psengine.environment.backends import default_backend
from psengine.environment.context import Context, init, is_main_process, shutdown
from psengine.environment.devices import choose_device
from psengine.environment.launchers import detect
from psengine.environment.slurm_lists import expand_node_list
from psengine.environment.variables import default_strategy
from psengine.errors import ArgumentTypeError, CollectiveError, ConfigurationError, EnvironmentVariableError

LAUNCHER_VARIABLE = re.compile(
    r"(SLURM|OMPI|PMIX|TORCHELASTIC|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$|GROUP_RANK|PSENGINE_STRATEGY"
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
# What srun sets for task 5 of `srun -n 7` on four nodes, in a job of more.
SLURM = {
    "SLURM_JOB_ID": "99",
    "SLURM_JOB_NODELIST": "node[1-9]",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "node[03-06]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
# What a batch script of the same job has before any srun.
SBATCH = {
    "SLURM_JOB_ID": "99",
    "SLURM_JOB_NODELIST": "node[1-9]",
    "SLURM_NTASKS": "36",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SINGLE = (0, 0, 1, 1, None)


SEED = "slurm 99.0"


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def derived(seed: str) -> int:
    return 10000 + zlib.crc32(seed.encode()) % 20000


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if LAUNCHER_VARIABLE.match(name):
            monkeypatch.delenv(name)
    yield monkeypatch
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


OPEN_MPI_4 = without(OPEN_MPI, "PMIX_NAMESPACE") | {"OMPI_MCA_ess_base_jobid": "77"}
OPEN_MPI_MANY = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
LOCAL_MASTER = f"127.0.0.1:{derived(OPEN_MPI['PMIX_NAMESPACE'])}"
PLACEMENTS = {
    "nothing": ({}, "none", SINGLE),
    "an address is no launch": ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "none", SINGLE),
    "empty is unset": ({"RANK": " ", "WORLD_SIZE": ""}, "none", SINGLE),
    "torchrun": (TORCHRUN, "torchrun", (3, 1, 4, 2, "a:29500")),
    "no local size": (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "torchrun", (3, 1, 4, None, "a:29500")),
    "IPv6": (TORCHRUN | {"MASTER_ADDR": "::1"}, "torchrun", (3, 1, 4, 2, "[::1]:29500")),
    "torchrun in a Slurm step": (TORCHRUN | SLURM, "torchrun", (3, 1, 4, 2, "a:29500")),
    "world of 1": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "torchrun", SINGLE),
    "srun": (SLURM, "Slurm", (5, 1, 7, None, f"node03:{derived(SEED)}")),
    "exported WORLD_SIZE": (SLURM | {"WORLD_SIZE": "36"}, "Slurm", (5, 1, 7, None, f"node03:{derived(SEED)}")),
    "own address": (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "5"}, "Slurm", (5, 1, 7, None, "m:5")),
    "--preserve-env": (SLURM | {"SLURM_NTASKS": "36"}, "Slurm", (5, 1, 7, None, f"node03:{derived(SEED)}")),
    "sbatch without srun": (SBATCH, "none", SINGLE),
    "salloc's interactive step": (SBATCH | {"SLURM_STEP_ID": "4294967290"}, "none", SINGLE),
    "mpirun": (OPEN_MPI, "Open MPI", (1, 1, 2, 2, LOCAL_MASTER)),
    "Open MPI 4": (OPEN_MPI_4, "Open MPI", (1, 1, 2, 2, f"127.0.0.1:{derived('77')}")),
    "two hosts": (OPEN_MPI_MANY | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}, "Open MPI", (1, 1, 4, 2, "h:9")),
    "mpirun's daemons started by srun": (OPEN_MPI | SLURM, "Open MPI", (1, 1, 2, 2, LOCAL_MASTER)),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "launcher", "expected"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_launchers_variables_are_a_placement(variables, launcher, expected):
    found = detect(variables)
    master = found.master and str(found.master)
    assert found.launcher == launcher
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, master) == expected


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, OPEN_MPI_MANY])
def test_who_needs_no_master_needs_none_of_its_variables(variables):
    about_master = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "PMIX_NAMESPACE")
    found = detect(without(variables, *about_master), needs_master=False)
    expected = detect(variables | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found == dataclasses.replace(expected, master=None)


REFUSED = {
    "RANK alone": ({"RANK": "0"}, ["got RANK=0", "missing WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"]),
    "no port": (without(TORCHRUN, "MASTER_PORT"), ["missing MASTER_PORT)", "MASTER_ADDR=a"]),
    "rank >= world": (TORCHRUN | {"WORLD_SIZE": "2"}, ["RANK", "0 to 1", "got '3'"]),
    "other digits": (TORCHRUN | {"RANK": "\u0661"}, ["RANK", "0 to 3"]),
    "local > world": (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE", "1 to 4", "got '5'"]),
    "port abc": (TORCHRUN | {"MASTER_PORT": "abc"}, ["MASTER_PORT", "1 to 65535", "got 'abc'"]),
    "no PROCID": (without(SLURM, "SLURM_PROCID"), ["missing SLURM_PROCID)", "SLURM_LOCALID=1"]),
    "bad node list": (SLURM | {"SLURM_STEP_NODELIST": "n[1"}, ["SLURM_STEP_NODELIST", "'n[1'"]),
    "no node list": (
        without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        ["7 ranks", "neither MASTER_ADDR nor", "Fix: set MASTER_ADDR to"],
    ),
    "no job id": (without(SLURM, "SLURM_JOB_ID"), ["Fix: set MASTER_PORT to"]),
    "no local rank": (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), ["COMM_WORLD_LOCAL_RANK)", "mpirun"]),
    "several hosts": (OPEN_MPI_MANY, ["MASTER_ADDR", "=2 of", "=4", "mpirun -x"]),
    "no job name": (without(OPEN_MPI, "PMIX_NAMESPACE"), ["Fix: set MASTER_PORT to"]),
}


@pytest.mark.parametrize(("variables", "words"), REFUSED.values(), ids=REFUSED)
def test_incomplete_and_contradicting_variables_are_refused(variables, words):
    with pytest.raises(EnvironmentVariableError) as caught:
        detect(variables)
    assert [word for word in (*words, "expected", "Fix: ") if word not in str(caught.value)] == []


def test_a_batch_script_without_srun_is_told():
    assert "SLURM_NTASKS=36" in detect(SBATCH).note
    assert "srun python" in detect(SBATCH).note
    assert detect(SBATCH | {"SLURM_NTASKS": "1"}).note == detect(SLURM).note == ""


def test_derived_ports_lie_below_the_ephemeral_range():
    ports = [detect(SLURM | {"SLURM_JOB_ID": str(job)}).master.port for job in range(500)]
    assert min(ports) >= 10000
    assert max(ports) < 30000
    assert len(set(ports)) > 450


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[1-3,07,10-12]", "node1 node2 node3 node07 node10 node11 node12"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[0-1][5-6]", "r05 r06 r15 r16"),
        ("node[1-2,07],gpu-a[001-002]-x,single", "node1 node2 node07 gpu-a001-x gpu-a002-x single"),
    ],
)
def test_slurms_lists_of_hosts(text, hosts):
    assert expand_node_list(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a[[1]]", "a[]", "a[3-1]", "a[x]", "a[1-2-3]"])
def test_malformed_lists_of_hosts_are_refused(text):
    with pytest.raises(EnvironmentVariableError, match=r"NODES must follow.*expected.*got .*Fix: ") as caught:
        expand_node_list(text, "NODES")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("local_rank", "count", "device"), [(3, 0, "cpu"), (3, 1, "cuda:0"), (0, 4, "cuda:0"), (3, 4, "cuda:3")]
)
def test_a_local_rank_has_its_device(local_rank, count, device):
    assert choose_device(local_rank, count) == torch.device(device)


def test_too_few_devices():
    with pytest.raises(EnvironmentVariableError, match=r"below 2 visible.*got local rank 2.*Fix: .*at most 2"):
        choose_device(2, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts the CPU's defaults")
class TestSingleProcess:
    def test_init_and_shutdown(self, bare_environment):
        context = init()
        assert context == Context(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            device=torch.device("cpu"),
            hostname=socket.gethostname(),
        )
        assert context.is_main_process
        assert dist.get_backend() == "gloo"
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
        assert init() == init("gloo") == context
        shutdown()
        assert not dist.is_initialized()
        shutdown()
        assert init() == context

    def test_meets_nobody(self, bare_environment):
        bare_environment.setattr(environment, "rendezvous", None)
        bare_environment.setenv("MASTER_ADDR", "no.such.host.invalid")
        bare_environment.setenv("MASTER_PORT", "1")
        assert init().world_size == 1
        shutdown()
        for name in ("RANK", "LOCAL_RANK"):
            bare_environment.setenv(name, "0")
        bare_environment.setenv("WORLD_SIZE", "1")
        assert init().world_size == 1

    def test_after_the_user_replaced_our_group(self, bare_environment):
        context = init()
        dist.destroy_process_group()
        assert init() == context
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        shutdown()
        assert dist.group.WORLD is group
        init()
        shutdown()
        assert dist.group.WORLD is group

    def test_adopts_a_group(self, bare_environment):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        assert init().world_size == 1
        assert dist.group.WORLD is group
        with pytest.raises(ConfigurationError, match=r"expected backend='gloo' or none, got 'cpu:gloo'.*Fix: "):
            init("cpu:gloo")
        shutdown()
        assert dist.group.WORLD is group

    @pytest.mark.parametrize("backend", ["bogus", "nccl", "", "cpu:gloo,cuda:bogus", 3])
    def test_refuses_backends(self, bare_environment, backend):
        with pytest.raises(ConfigurationError, match=rf"expected one of gloo.*got {re.escape(repr(backend))}.*Fix: "):
            init(backend)
        assert not dist.is_initialized()

    @pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), timedelta.max])
    def test_refuses_timeouts(self, bare_environment, timeout):
        with pytest.raises(ConfigurationError, match=rf"at least a millisecond.*got {re.escape(str(timeout))}"):
            init(timeout=timeout)

    @pytest.mark.parametrize("timeout", [5, 0.5, True, "5", None])
    def test_refuses_timeouts_that_are_none(self, bare_environment, timeout):
        with pytest.raises(ArgumentTypeError, match=rf"got {re.escape(repr(timeout))}.*timedelta\(seconds=60\)"):
            init(timeout=timeout)

    def test_half_set_environment(self, bare_environment):
        bare_environment.setenv("RANK", "0")
        with pytest.raises(EnvironmentVariableError, match="missing WORLD_SIZE"):
            init()
        with pytest.raises(EnvironmentVariableError, match="missing WORLD_SIZE"):
            is_main_process()

    def test_batch_script_logs_what_is_missing(self, bare_environment, caplog):
        for name, value in SBATCH.items():
            bare_environment.setenv(name, value)
        assert init().world_size == 1
        assert "srun python" in caplog.text

    def test_is_main_process(self, bare_environment):
        assert is_main_process()
        for name, value in TORCHRUN.items():
            bare_environment.setenv(name, value)
        assert not is_main_process()
        bare_environment.setenv("RANK", "0")
        assert is_main_process()

    def test_default_strategy(self, bare_environment):
        assert default_strategy() == "sync"
        bare_environment.setenv("PSENGINE_STRATEGY", "")
        assert default_strategy() == "sync"
        bare_environment.setenv("PSENGINE_STRATEGY", "async:max_staleness=4")
        assert default_strategy() == "async:max_staleness=4"

    def test_gloo_keeps_a_cuda_device(self, bare_environment):
        selected = []
        bare_environment.setattr(torch.cuda, "is_available", lambda: True)
        bare_environment.setattr(torch.cuda, "device_count", lambda: 2)
        bare_environment.setattr(torch.cuda, "set_device", selected.append)
        assert init("gloo").device == torch.device("cuda", 0)
        assert selected == [torch.device("cuda", 0)]
        assert dist.get_backend() == "gloo"

    def test_nccl_is_preferred_with_cuda(self, bare_environment):
        bare_environment.setattr(torch.cuda, "is_available", lambda: True)
        bare_environment.setattr(dist, "is_nccl_available", lambda: True)
        assert default_backend() == "nccl"


def set_environment(style: str, rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> None:
    for name in list(os.environ):
        if LAUNCHER_VARIABLE.match(name):
            del os.environ[name]
    names = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        "open mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "none": (),
    }[style]
    os.environ.update(zip(names, map(str, (rank, world_size, rank)), strict=False))
    os.environ["MASTER_PORT"] = str(port)
    if style == "torchrun":
        os.environ["MASTER_ADDR"] = address
    elif style == "slurm":
        os.environ.update(SLURM_JOB_ID="1", SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost")
    elif style == "open mpi":
        os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(world_size)


def sum_of_ranks(rank: int) -> float:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value.item()


def init_and_sum(rank: int, world_size: int, style: str, port: int, address: str = "127.0.0.1"):
    set_environment(style, rank, world_size, port, address)
    context = init(backend="gloo", timeout=timedelta(seconds=30))
    assert is_main_process() == context.is_main_process == (rank == 0)
    total = sum_of_ranks(rank)
    dist.barrier()
    return context, total


@pytest.mark.parametrize("style", ["torchrun", "slurm", "open mpi"])
def test_two_processes(style):
    for rank, (context, total) in enumerate(run_ranks(init_and_sum, 2, style, free_port(), init_group=False)):
        assert total == 3
        assert (context.rank, context.local_rank, context.world_size, context.local_world_size) == (rank, rank, 2, 2)
        assert context.hostname == socket.gethostname()


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 loopback")
@pytest.mark.parametrize("address", ["::1", slow("[::1]")])
def test_ipv6_master(address):
    results = run_ranks(init_and_sum, 2, "torchrun", free_port(), address, init_group=False)
    assert [total for _, total in results] == [3, 3]


def init_again_and_again(rank: int, world_size: int, port: int, has_agent: bool) -> list[float]:
    set_environment("torchrun", rank, world_size, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(has_agent)
    totals = []
    for turn in range(2):
        if turn % 2 == rank:
            time.sleep(0.05)  # each rank is the late one in turn
        init("gloo", timeout=timedelta(seconds=30))
        totals.append(sum_of_ranks(rank))
        if rank == 0:
            time.sleep(0.1)  # rank 1 is back already when the store's host shuts down
        shutdown()
        assert not dist.is_initialized()
    time.sleep(0.2)  # rank 0 hosts the store, where no agent does
    return totals


@pytest.mark.parametrize("has_agent", [False, True], ids=["rank 0's store", "an agent's store, which keeps keys"])
def test_init_works_again_after_shutdown(has_agent):
    port = free_port()
    agents = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if has_agent else None
    assert run_ranks(init_again_and_again, 2, port, has_agent, init_group=False) == [[3, 3], [3, 3]]
    del agents


def init_with_host_names(rank: int, world_size: int, port: int, local_ranks: list[int]):
    set_environment("torchrun", rank, world_size, port)
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    host = "left" if rank < 2 else "right"
    environment.socket.gethostname = lambda: host  # type: ignore[attr-defined]
    try:
        context = init("gloo", timeout=timedelta(seconds=30))
    except EnvironmentVariableError as error:
        assert not dist.is_initialized()
        return str(error)
    dist.barrier()
    return context.hostname, context.local_world_size


def test_ranks_of_a_host_are_counted_where_the_launcher_does_not_say():
    results = run_ranks(init_with_host_names, 3, free_port(), [0, 1, 0], init_group=False)
    assert results == [("left", 2), ("left", 2), ("right", 1)]


def init_alone_with_local_rank(rank: int, world_size: int, port: int):
    return init_with_host_names(rank, world_size, port, [0, 2, 0])


def test_local_rank_beyond_the_counted_ranks():
    results = run_ranks_to_any_end(init_alone_with_local_rank, 3, free_port(), init_group=False)
    assert "expected below 2" in results[1].value
    assert "got 2 on rank 1" in results[1].value


def adopt(rank: int, world_size: int, variables: dict[str, str]):
    set_environment("none", rank, world_size, 1)
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    group = dist.group.WORLD
    context = init()
    assert dist.group.WORLD is group
    shutdown()
    assert dist.is_initialized()
    return context.rank, context.local_rank, context.world_size, context.local_world_size


@pytest.mark.parametrize("variables", [{}, {"RANK": "{rank}"}], ids=["no variables", "half of them"])
def test_adopts_the_users_group(variables):
    assert run_ranks(adopt, 2, variables) == [(0, 0, 2, 2), (1, 1, 2, 2)]


def test_adopted_group_is_placed_by_the_environment():
    variables = {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | {
        "MASTER_ADDR": "unused"
    }
    assert run_ranks(adopt, 2, variables) == [(0, 0, 2, 1), (1, 0, 2, 1)]


def fail_to_meet(rank: int, world_size: int, port: int, missing_rank: int):
    """Only one of two ranks comes."""
    set_environment("torchrun", 1 - missing_rank, 2, port)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        init("gloo", timeout=timedelta(seconds=0.5))
    assert not dist.is_initialized()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("missing_rank", [0, 1])
def test_unreachable_master(missing_rank):
    port = free_port()
    [(message, waited_s)] = run_ranks(fail_to_meet, 1, port, missing_rank, init_group=False)
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in message
    assert f"Rank {1 - missing_rank} of 2" in message
    assert "within timeout=0.5 s" in message
    assert "Fix: " in message
    assert "\n" not in message
    assert waited_s < 10


SCRIPT = """
    import json, os, signal, sys, time, warnings
    from datetime import timedelta
    import torch, torch.distributed as dist
    from psengine.environment import context as environment

    warnings.filterwarnings("error", category=UserWarning, module="__main__")

    def say(*values):  # in one write, so that ranks do not interleave
        os.write(1, (json.dumps(values) + "\\n").encode())

    context = environment.init("gloo", timeout=timedelta(seconds=4))
    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    say(context.rank, context.local_rank, context.world_size, context.local_world_size, total.item())
"""


def script(more: str = "") -> str:
    return textwrap.dedent(SCRIPT) + textwrap.dedent(more)


def script_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLE.match(name)}
    return kept | {"PYTHONPATH": str(Path(environment.__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_torchrun(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(script())
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *endpoint, str(path)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(json.loads(line) for line in run.stdout.splitlines()) == [[0, 0, 2, 2, 3], [1, 1, 2, 2, 3]]
    assert "destroy_process_group" not in run.stderr


ENDS_OF_ONE = [
    ("cpu:gloo", "", False),
    slow("cpu:gloo", "raise RuntimeError('boom')", False),
    slow("cuda:nccl", "", False),
    ("cuda:nccl", "raise RuntimeError('boom')", True),
]


@pytest.mark.parametrize(("backends", "ending", "group_is_left"), ENDS_OF_ONE)
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


@pytest.mark.parametrize(
    ("ending", "exit_codes"),
    [
        pytest.param("", (0, 0), id="both end", marks=pytest.mark.slow),
        pytest.param(
            "if context.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwork = dist.all_reduce(total, async_op=True)",
            (0, -9),
            id="dead peer, pending work",
        ),
        pytest.param(
            "if context.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nwork = dist.all_reduce(total, async_op=True)",
            (0, -9),
            id="stopped peer, pending work",
        ),
        pytest.param("if context.rank == 0: raise RuntimeError('boom')\ntime.sleep(0.3)", (1, 0), id="exception"),
    ],
)
def test_end_of_the_interpreter_does_not_hang(ending, exit_codes):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as programs:
        first, second = (
            programs.enter_context(
                running_program(script(ending), script_environment() | shared | {"RANK": rank, "LOCAL_RANK": rank})
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
