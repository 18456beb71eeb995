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
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreters import running_program
from support.processes import free_port, run_ranks, run_ranks_to_any_end

from psengine.environment import context as environment
from psengine.environment.context import Context, choose_device, init, is_main_process, shutdown
from psengine.environment.launchers import Master, Placement, detect
from psengine.environment.slurm_lists import expand_node_list, expand_task_counts
from psengine.environment.variables import default_strategy
from psengine.errors import CollectiveError, ConfigurationError, EnvironmentVariableError

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
    "SLURM_TASKS_PER_NODE": "4(x9)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "node[03-06]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
# What a batch script of the same job has before any srun.
SBATCH = {
    "SLURM_JOB_ID": "99",
    "SLURM_JOB_NODELIST": "node[1-9]",
    "SLURM_NTASKS": "36",
    "SLURM_TASKS_PER_NODE": "4(x9)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SINGLE = (0, 0, 1, 1, None)


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def derived(seed: str) -> int:
    return 10000 + zlib.crc32(seed.encode()) % 20000


def summary(placement: Placement) -> tuple[object, ...]:
    master = placement.master and str(placement.master)
    return placement.rank, placement.local_rank, placement.world_size, placement.local_world_size, master


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if LAUNCHER_VARIABLE.match(name):
            monkeypatch.delenv(name)
    yield monkeypatch
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


class TestDetect:
    @pytest.mark.parametrize(
        ("variables", "launcher", "expected"),
        [
            pytest.param({}, "none", SINGLE, id="nothing"),
            pytest.param({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "none", SINGLE, id="an address is no launch"),
            pytest.param({"RANK": " ", "WORLD_SIZE": ""}, "none", SINGLE, id="empty is unset"),
            pytest.param(TORCHRUN, "torchrun", (3, 1, 4, 2, "a:29500"), id="torchrun"),
            pytest.param(
                without(TORCHRUN, "LOCAL_WORLD_SIZE"), "torchrun", (3, 1, 4, None, "a:29500"), id="no local size"
            ),
            pytest.param(TORCHRUN | {"MASTER_ADDR": "::1"}, "torchrun", (3, 1, 4, 2, "[::1]:29500"), id="IPv6"),
            pytest.param(TORCHRUN | SLURM, "torchrun", (3, 1, 4, 2, "a:29500"), id="torchrun in a Slurm step"),
            pytest.param({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "torchrun", SINGLE, id="world of 1"),
            pytest.param(SLURM, "Slurm", (5, 1, 7, 2, f"node03:{derived('slurm 99.0')}"), id="srun"),
            pytest.param(
                SLURM | {"WORLD_SIZE": "36"},
                "Slurm",
                (5, 1, 7, 2, f"node03:{derived('slurm 99.0')}"),
                id="exported WORLD_SIZE",
            ),
            pytest.param(
                SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "5"}, "Slurm", (5, 1, 7, 2, "m:5"), id="srun, own address"
            ),
            pytest.param(
                SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
                "Slurm",
                (6, 0, 7, 1, f"node03:{derived('slurm 99.0')}"),
                id="uneven last node",
            ),
            pytest.param(
                SLURM | {"SLURM_NTASKS": "36"},
                "Slurm",
                (5, 1, 7, 2, f"node03:{derived('slurm 99.0')}"),
                id="--preserve-env",
            ),
            pytest.param(
                without(SLURM, "SLURM_STEP_TASKS_PER_NODE"),
                "Slurm",
                (5, 1, 7, None, f"node03:{derived('slurm 99.0')}"),
                id="counts differ",
            ),
            pytest.param(
                without(SLURM, "SLURM_STEP_TASKS_PER_NODE")
                | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "4"},
                "Slurm",
                (5, 1, 8, 2, f"node03:{derived('slurm 99.0')}"),
                id="--ntasks-per-node",
            ),
            pytest.param(SBATCH, "none", SINGLE, id="sbatch without srun"),
            pytest.param(SBATCH | {"SLURM_STEP_ID": "4294967290"}, "none", SINGLE, id="salloc's interactive step"),
            pytest.param(
                OPEN_MPI, "Open MPI", (1, 1, 2, 2, f"127.0.0.1:{derived('prterun-host-4711@1')}"), id="mpirun"
            ),
            pytest.param(
                without(OPEN_MPI, "PMIX_NAMESPACE") | {"OMPI_MCA_ess_base_jobid": "77"},
                "Open MPI",
                (1, 1, 2, 2, f"127.0.0.1:{derived('77')}"),
                id="Open MPI 4",
            ),
            pytest.param(
                OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "9"},
                "Open MPI",
                (1, 1, 4, 2, "h:9"),
                id="mpirun on two hosts",
            ),
            pytest.param(
                OPEN_MPI | SLURM,
                "Open MPI",
                (1, 1, 2, 2, f"127.0.0.1:{derived('prterun-host-4711@1')}"),
                id="mpirun's daemons started by srun",
            ),
        ],
    )
    def test_placement(self, variables, launcher, expected):
        placement = detect(variables)
        assert (placement.launcher, summary(placement)) == (launcher, expected)

    @pytest.mark.parametrize("variables", [TORCHRUN, SLURM, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}])
    def test_who_needs_no_master_needs_none_of_its_variables(self, variables):
        about_master = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "PMIX_NAMESPACE")
        found = detect(without(variables, *about_master), needs_master=False)
        expected = detect(variables | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
        assert found == dataclasses.replace(expected, master=None)

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            pytest.param({"RANK": "0"}, ["got RANK=0", "missing WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"], id="RANK alone"),
            pytest.param(without(TORCHRUN, "MASTER_PORT"), ["missing MASTER_PORT)", "MASTER_ADDR=a"], id="no port"),
            pytest.param(without(TORCHRUN, "LOCAL_RANK"), ["missing LOCAL_RANK)", "LOCAL_RANK=0"], id="no LOCAL_RANK"),
            pytest.param(TORCHRUN | {"WORLD_SIZE": "2"}, ["RANK", "0 to 1", "got '3'"], id="rank >= world"),
            pytest.param(TORCHRUN | {"RANK": "\u0661"}, ["RANK", "0 to 3"], id="other digits"),
            pytest.param(
                TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE", "1 to 4", "got '5'"], id="local > world"
            ),
            pytest.param(TORCHRUN | {"MASTER_PORT": "abc"}, ["MASTER_PORT", "1 to 65535", "got 'abc'"], id="port abc"),
            pytest.param(without(SLURM, "SLURM_PROCID"), ["missing SLURM_PROCID)", "SLURM_LOCALID=1"], id="no PROCID"),
            pytest.param(SLURM | {"SLURM_STEP_NODELIST": "n[1"}, ["SLURM_STEP_NODELIST", "'n[1'"], id="bad node list"),
            pytest.param(
                without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
                ["7 ranks", "neither MASTER_ADDR nor", "Fix: set MASTER_ADDR to"],
                id="no node list",
            ),
            pytest.param(without(SLURM, "SLURM_JOB_ID"), ["Fix: set MASTER_PORT to"], id="no job id"),
            pytest.param(
                without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
                ["missing OMPI_COMM_WORLD_LOCAL_RANK)", "OMPI_COMM_WORLD_SIZE=2", "mpirun"],
                id="no local rank",
            ),
            pytest.param(
                OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
                ["MASTER_ADDR", "=2 of", "=4", "mpirun -x"],
                id="several hosts",
            ),
            pytest.param(without(OPEN_MPI, "PMIX_NAMESPACE"), ["Fix: set MASTER_PORT to"], id="no job name"),
        ],
    )
    def test_refuses(self, variables, words):
        with pytest.raises(EnvironmentVariableError) as caught:
            detect(variables)
        assert [word for word in words if word not in str(caught.value)] == []
        assert "Fix: " in str(caught.value)
        assert "expected" in str(caught.value)

    def test_batch_script_without_srun_is_told(self):
        assert "SLURM_NTASKS=36" in detect(SBATCH).note
        assert "srun python" in detect(SBATCH).note
        assert detect(SBATCH | {"SLURM_NTASKS": "1"}).note == ""
        assert detect(SLURM).note == ""

    def test_derived_ports_lie_below_the_ephemeral_range(self):
        ports = [detect(SLURM | {"SLURM_JOB_ID": str(job)}).master.port for job in range(500)]
        assert min(ports) >= 10000
        assert max(ports) < 30000
        assert len(set(ports)) > 450

    @pytest.mark.parametrize(
        ("address", "text"),
        [("h", "h:1"), ("10.0.0.1", "10.0.0.1:1"), ("fe80::1", "[fe80::1]:1"), ("[::1]", "[::1]:1")],
    )
    def test_master_as_text(self, address, text):
        assert str(Master(address=address, port=1)) == text


class TestNodeList:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("node[1-3,07,10-12]", ["node1", "node2", "node3", "node07", "node10", "node11", "node12"]),
            ("gpu-a[001-002]-x", ["gpu-a001-x", "gpu-a002-x"]),
            ("n[08-11]", ["n08", "n09", "n10", "n11"]),
            ("r[0-1][5-6]", ["r05", "r06", "r15", "r16"]),
            (
                "node[1-2,07],gpu-a[001-002]-x,single",
                ["node1", "node2", "node07", "gpu-a001-x", "gpu-a002-x", "single"],
            ),
        ],
    )
    def test_expands(self, text, hosts):
        assert expand_node_list(text) == hosts

    @pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a[[1]]", "a[]", "a[3-1]", "a[x]", "a[1-2-3]"])
    def test_refuses(self, text):
        with pytest.raises(EnvironmentVariableError, match=r"NODES must follow.*expected.*got .*Fix: ") as caught:
            expand_node_list(text, "NODES")
        assert repr(text) in str(caught.value)

    @given(st.data())
    @settings(max_examples=50, deadline=None)
    def test_round_trip(self, data):
        """Compress lists of hosts the way Slurm does; expanding gives them back."""
        terms, hosts = [], []
        for _ in range(data.draw(st.integers(1, 4), label="terms")):
            compressed, expanded = data.draw(st.text("ab-.9", min_size=1, max_size=4), label="prefix"), None
            expanded = [compressed]
            for _ in range(data.draw(st.integers(0, 2), label="brackets")):
                width = data.draw(st.integers(1, 4), label="width")
                numbers = data.draw(st.sets(st.integers(0, 10**width - 1), min_size=1, max_size=6), label="numbers")
                suffix = data.draw(st.text("xy-", max_size=2), label="suffix")
                digits = [str(number).zfill(width) for number in sorted(numbers)]
                compressed += f"[{compress(digits)}]{suffix}"
                expanded = [host + number + suffix for host in expanded for number in digits]
            terms.append(compressed)
            hosts += expanded
        assert expand_node_list(",".join(terms)) == hosts

    def test_task_counts(self):
        assert expand_task_counts("2(x3),1,0(x1)") == [2, 2, 2, 1, 0]

    @pytest.mark.parametrize("text", ["", "2,", "2(3)", "-1"])
    def test_refuses_task_counts(self, text):
        with pytest.raises(EnvironmentVariableError, match="COUNTS must follow"):
            expand_task_counts(text, "COUNTS")


def compress(digits: list[str]) -> str:
    items = []
    while digits:
        length = 1
        while length < len(digits) and int(digits[length]) == int(digits[0]) + length:
            length += 1
        items.append(digits[0] if length == 1 else f"{digits[0]}-{digits[length - 1]}")
        digits = digits[length:]
    return ",".join(items)


class TestDevice:
    @pytest.mark.parametrize(
        ("local_rank", "count", "device"),
        [(0, 0, "cpu"), (3, 0, "cpu"), (0, 1, "cuda:0"), (3, 1, "cuda:0"), (0, 4, "cuda:0"), (3, 4, "cuda:3")],
    )
    def test_choose_device(self, local_rank, count, device):
        assert choose_device(local_rank, count) == torch.device(device)

    def test_too_few_devices(self):
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

    @pytest.mark.parametrize("timeout_s", [0, float("nan"), float("inf"), True, "5"])
    def test_refuses_timeouts(self, bare_environment, timeout_s):
        with pytest.raises(ConfigurationError, match=rf"timeout_s must be.*got {re.escape(repr(timeout_s))}"):
            init(timeout_s=timeout_s)

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
        assert environment._default_backend() == "nccl"


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
        os.environ["SLURM_STEP_TASKS_PER_NODE"] = str(world_size)
        os.environ["SLURM_NODEID"] = "0"
    elif style == "open mpi":
        os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(world_size)


def sum_of_ranks(rank: int) -> float:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value.item()


def init_and_sum(rank: int, world_size: int, style: str, port: int, address: str = "127.0.0.1"):
    set_environment(style, rank, world_size, port, address)
    context = init(backend="gloo", timeout_s=30)
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
@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_ipv6_master(address):
    results = run_ranks(init_and_sum, 2, "torchrun", free_port(), address, init_group=False)
    assert [total for _, total in results] == [3, 3]


def init_again_and_again(rank: int, world_size: int, port: int) -> list[float]:
    set_environment("torchrun", rank, world_size, port)
    totals = []
    for turn in range(2):
        if turn % 2 == rank:
            time.sleep(0.05)  # each rank is the late one in turn
        init("gloo", timeout_s=30)
        totals.append(sum_of_ranks(rank))
        if rank == 0:
            time.sleep(0.1)  # rank 1 is back already when the store's host shuts down
        shutdown()
        assert not dist.is_initialized()
    time.sleep(0.2)  # rank 0 hosts the store
    return totals


def test_init_works_again_after_shutdown():
    assert run_ranks(init_again_and_again, 2, free_port(), init_group=False) == [[3] * 2, [3] * 2]


def init_with_host_names(rank: int, world_size: int, port: int, local_ranks: list[int]):
    set_environment("torchrun", rank, world_size, port)
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    host = "left" if rank < 2 else "right"
    environment.socket.gethostname = lambda: host  # type: ignore[attr-defined]
    try:
        context = init("gloo", timeout_s=30)
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
        init("gloo", timeout_s=0.5)
    assert not dist.is_initialized()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("missing_rank", [0, 1])
def test_unreachable_master(missing_rank):
    port = free_port()
    [(message, waited_s)] = run_ranks(fail_to_meet, 1, port, missing_rank, init_group=False)
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in message
    assert f"Rank {1 - missing_rank} of 2" in message
    assert "timeout_s=0.5" in message
    assert "Fix: " in message
    assert "\n" not in message
    assert waited_s < 10


SCRIPT = """
    import json, os, signal, sys, time, warnings
    import torch, torch.distributed as dist
    from psengine.environment import context as environment

    warnings.filterwarnings("error", category=UserWarning, module="__main__")

    def say(*values):  # in one write, so that ranks do not interleave
        os.write(1, (json.dumps(values) + "\\n").encode())

    context = environment.init("gloo", timeout_s=4)
    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    say(context.rank, context.local_rank, context.world_size, context.local_world_size, total.item())
"""


def script(more: str = "") -> str:
    return textwrap.dedent(SCRIPT) + textwrap.dedent(more)


def script_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLE.match(name)}
    return kept | {"PYTHONPATH": str(Path(environment.__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def test_torchrun(tmp_path):
    again = """
    environment.shutdown()
    environment.init("gloo", timeout_s=60)  # torchrun's agent hosts the store, keys of the first group included
    dist.all_reduce(total)
    say("again", total.item())
    """
    path = tmp_path / "script.py"
    path.write_text(script(again))
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *endpoint, str(path)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    lines = sorted((json.loads(line) for line in run.stdout.splitlines()), key=str)
    assert lines == [["again", 6], ["again", 6], [0, 0, 2, 2, 3], [1, 1, 2, 2, 3]]
    assert "destroy_process_group" not in run.stderr


ENDS_OF_ONE = [
    ("cpu:gloo", "", False),
    ("cpu:gloo", "raise RuntimeError('boom')", False),
    ("cuda:nccl", "", False),
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
        pytest.param("", (0, 0), id="both end"),
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
