"""Each launcher's variables, read into a placement."""

import dataclasses
import zlib

import pytest
import torch

from psengine.environment.devices import choose_device
from psengine.environment.launchers import detect, first_host, read_worker
from psengine.environment.variables import continues_training, launched_run
from psengine.errors import EnvironmentVariableError

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


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def derived(seed: str) -> int:
    return 10000 + zlib.crc32(seed.encode()) % 20000


SINGLE = (0, 0, 1, 1, "")
STEP = (5, 1, 7, None, f"tcp://node03:{derived('slurm 99.0')}")
OPEN_MPI_4 = without(OPEN_MPI, "PMIX_NAMESPACE") | {"OMPI_MCA_ess_base_jobid": "77"}
OPEN_MPI_MANY = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
ONE_HOST = (1, 1, 2, 2, f"tcp://127.0.0.1:{derived(OPEN_MPI['PMIX_NAMESPACE'])}")
PLACEMENTS = {
    "nothing": ({}, "none", SINGLE),
    "an address is no launch": ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "none", SINGLE),
    "empty is unset": ({"RANK": " ", "WORLD_SIZE": ""}, "none", SINGLE),
    "torchrun": (TORCHRUN, "torchrun", (3, 1, 4, 2, "tcp://a:29500")),
    "no local size": (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "torchrun", (3, 1, 4, None, "tcp://a:29500")),
    "IPv6": (TORCHRUN | {"MASTER_ADDR": "::1"}, "torchrun", (3, 1, 4, 2, "tcp://[::1]:29500")),
    "torchrun in a Slurm step": (TORCHRUN | SLURM, "torchrun", (3, 1, 4, 2, "tcp://a:29500")),
    "world of 1": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "torchrun", SINGLE),
    "srun": (SLURM, "Slurm", STEP),
    "exported WORLD_SIZE": (SLURM | {"WORLD_SIZE": "36"}, "Slurm", STEP),
    "own address": (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "5"}, "Slurm", (5, 1, 7, None, "tcp://m:5")),
    "--preserve-env": (SLURM | {"SLURM_NTASKS": "36"}, "Slurm", STEP),
    "sbatch without srun": (SBATCH, "none", SINGLE),
    "salloc's interactive step": (SBATCH | {"SLURM_STEP_ID": "4294967290"}, "none", SINGLE),
    "mpirun": (OPEN_MPI, "Open MPI", ONE_HOST),
    "Open MPI 4": (OPEN_MPI_4, "Open MPI", (1, 1, 2, 2, f"tcp://127.0.0.1:{derived('77')}")),
    "two hosts": (OPEN_MPI_MANY | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}, "Open MPI", (1, 1, 4, 2, "tcp://h:9")),
    "mpirun's daemons started by srun": (OPEN_MPI | SLURM, "Open MPI", ONE_HOST),
    "an independent worker": (TORCHRUN | {"PSENGINE_WORKER": "2"}, "PSENGINE_WORKER", SINGLE),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "launcher", "expected"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_launchers_variables_are_a_placement(variables, launcher, expected):
    found = detect(variables)
    assert found.launcher == launcher
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.init_method) == expected


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, OPEN_MPI_MANY])
def test_who_needs_no_master_needs_none_of_its_variables(variables):
    about_master = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "PMIX_NAMESPACE")
    found = detect(without(variables, *about_master), needs_master=False)
    expected = detect(variables | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found == dataclasses.replace(expected, init_method="")


REFUSED = {
    "RANK alone": ({"RANK": "0"}, ["missing WORLD_SIZE, LOCAL_RANK"]),
    "no port": (without(TORCHRUN, "MASTER_PORT"), ["got no MASTER_PORT", "MASTER_PORT to a free port"]),
    "rank >= world": (TORCHRUN | {"WORLD_SIZE": "2"}, ["RANK", "0 to 1", "got '3'"]),
    "other digits": (TORCHRUN | {"RANK": "\u0661"}, ["RANK", "0 to 3"]),
    "local > world": (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE", "1 to 4", "got '5'"]),
    "port abc": (TORCHRUN | {"MASTER_PORT": "abc"}, ["MASTER_PORT", "1 to 65535", "got 'abc'"]),
    "no PROCID": (without(SLURM, "SLURM_PROCID"), ["missing SLURM_PROCID)"]),
    "bad node list": (SLURM | {"SLURM_STEP_NODELIST": "n[1"}, ["got no MASTER_ADDR)"]),
    "no job id": (without(SLURM, "SLURM_JOB_ID"), ["got no MASTER_PORT)"]),
    "no local rank": (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), ["COMM_WORLD_LOCAL_RANK)", "mpirun"]),
    "several hosts": (OPEN_MPI_MANY, ["got no MASTER_ADDR", "mpirun: -x"]),
    "a worker's number": ({"PSENGINE_WORKER": "two"}, ["PSENGINE_WORKER must be an integer"]),
    "too many workers": ({"PSENGINE_WORKER": "65536"}, ["0 to 65535"]),
    "no workers": ({"PSENGINE_WORKER": "0", "PSENGINE_WORKERS": "0"}, ["PSENGINE_WORKERS must be an integer"]),
    "worker 4 of 4": ({"PSENGINE_WORKER": "4", "PSENGINE_WORKERS": "4"}, ["below PSENGINE_WORKERS=4, got 4"]),
}


@pytest.mark.parametrize(("variables", "words"), REFUSED.values(), ids=REFUSED)
def test_incomplete_and_contradicting_variables_are_refused(variables, words):
    with pytest.raises(EnvironmentVariableError) as caught:
        detect(variables)
    assert [word for word in (*words, "expected", "Fix: ") if word not in str(caught.value)] == []


def test_jobs_have_ports_of_their_own_below_the_ephemeral_range():
    ports = {int(detect(SLURM | {"SLURM_JOB_ID": str(job)}).init_method.rpartition(":")[2]) for job in range(500)}
    assert 10000 <= min(ports) <= max(ports) < 30000
    assert len(ports) > 450


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node[1-3,07,10-12]", "node1"),
        ("n[08-11]", "n08"),
        ("r[0-1][5-6],other", "r05"),
        ("single,node[1-2]", "single"),
        ("gpu-a[001-002]-x", "gpu-a001-x"),
        *((malformed, "") for malformed in ("", ",b", "a[1", "a[x]", "a[[1]]")),
    ],
)
def test_the_first_host_of_slurms_lists(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("local_rank", "count", "device"), [(3, 0, "cpu"), (3, 1, "cuda:0"), (0, 4, "cuda:0"), (3, 4, "cuda:3")]
)
def test_a_local_rank_has_its_device(local_rank, count, device):
    assert choose_device(local_rank, count) == torch.device(device)


def test_too_few_devices():
    with pytest.raises(EnvironmentVariableError, match=r"below 2 visible.*got 2 on .*Fix: .*at most 2"):
        choose_device(2, 2)


def test_an_independent_worker_takes_the_device_of_its_place_on_the_host():
    assert detect(SLURM | {"PSENGINE_WORKER": "2"}).device_index == 1
    assert detect({"PSENGINE_WORKER": "2"}).device_index == 0
    assert read_worker({"PSENGINE_WORKER": " ", "PSENGINE_WORKERS": ""}) == (None, None)


@pytest.mark.parametrize(
    ("variables", "run"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7.2"),
        ({"TORCHELASTIC_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ({"PSENGINE_RUN_ID": "ours", "TORCHELASTIC_RUN_ID": "mine"}, "ours"),
        ({"PSENGINE_RUN_ID": "ours", "PSENGINE_RUN_NAME": "the user's"}, "the user's"),
        ({"PSENGINE_RUN_ID": "", "TORCHELASTIC_RUN_ID": "x" * 300}, "x" * 200),
        ({"PSENGINE_CONTINUE": "1"}, ""),
    ],
)
def test_a_launch_has_the_name_that_its_launcher_gave(monkeypatch, variables, run):
    goes_on = ("SLURM_RESTART_COUNT", "PSENGINE_CONTINUE")
    for name in ("PSENGINE_RUN_NAME", "PSENGINE_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", *goes_on):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_run() == run
    assert continues_training() == any(name in variables for name in goes_on)
