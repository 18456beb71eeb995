"""Who started this process? Each launcher's environment variables, read into one ``Placement``.

Pure: a mapping in, a placement out, no process state. The first that is recognised wins::

    worker     PSENGINE_WORKER                        an independent worker, a world of its own, whatever else is set
    torchrun   RANK                                   also anybody who sets the same variables by hand
    Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, ...       before Slurm: inside an allocation mpirun starts its daemons with
                                                      srun, and the ranks inherit the daemons' SLURM_PROCID
    Slurm      SLURM_STEP_ID of a step made by srun   an sbatch script and an salloc shell have SLURM_PROCID=0 and
                                                      SLURM_NTASKS=N as well, but there are no N processes
    none       otherwise: a single process

Variables that are set but empty count as unset.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from psengine.environment.slurm_lists import expand_node_list
from psengine.errors import EnvironmentVariableError

# Derived ports lie below Linux's default range of ephemeral ports (32768-60999), so no outgoing connection holds them.
_FIRST_DERIVED_PORT = 10000
_DERIVED_PORTS = 20000

# slurm.h: SLURM_MAX_NORMAL_STEP_ID; larger ones are batch, extern and interactive steps (salloc's shell), not srun's.
_SLURM_MAX_NORMAL_STEP_ID = 0xFFFFFFF0

_INTEGER = re.compile(r"-?[0-9]{1,18}")

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI_VARIABLES = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_SLURM_VARIABLES = (
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
)
# Workers are numbered by two bytes in messages to the servers.
MAX_WORKERS = 0x10000
WORKER, WORKERS = "PSENGINE_WORKER", "PSENGINE_WORKERS"

# A process without these variables has no placement. Names of jobs and hosts alone give it none.
PLACEMENT_VARIABLES = (*_TORCHRUN_VARIABLES, *_OPEN_MPI_VARIABLES, *_SLURM_VARIABLES)


@dataclass(frozen=True, kw_only=True)
class Master:
    """Where rank 0 (or torchrun's agent) listens for the others.

    Attributes:
        address: a host's name or address.
        port: of TCP.
        address_source, port_source: the variable that each is from, in words.
    """

    address: str
    port: int
    address_source: str = field(default="MASTER_ADDR", compare=False)
    port_source: str = field(default="MASTER_PORT", compare=False)

    @property
    def is_address_given(self) -> bool:
        """Whether a user or torchrun gave the address; else it is read off a launcher's list of hosts."""
        return self.address_source in ("MASTER_ADDR", "init_method")

    @property
    def sources(self) -> str:
        """Where address and port are from, for messages."""
        return f"host from {self.address_source}, port from {self.port_source}"

    def __str__(self) -> str:
        bare_ipv6 = ":" in self.address and not self.address.startswith("[")
        return f"[{self.address}]:{self.port}" if bare_ipv6 else f"{self.address}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a launcher, or the arguments of ``init``, told this process.

    Attributes:
        launcher: "torchrun", "Open MPI", "Slurm", "PSENGINE_WORKER", "arguments of init()" or "none".
        rank: this process in the world, 0 <= rank < world_size.
        local_rank: this process among those of its host; None where nobody says.
        world_size: number of processes.
        local_world_size: number of processes on this host; None where nobody says.
        master: where to meet; None where the world size is 1, or no master was asked for.
        meeting_file: the path of a file to meet in, instead of at a master; usually empty.
        device_index: which of the host's devices to take; default ``local_rank``.
        note: a warning for the log; usually empty.
    """

    launcher: str
    rank: int
    local_rank: int | None
    world_size: int
    local_world_size: int | None
    master: Master | None
    meeting_file: str = ""
    device_index: int | None = None
    note: str = ""


def detect(environment: Mapping[str, str], *, needs_master: bool = True) -> Placement:
    """Return the placement that the variables in ``environment`` describe.

    Args:
        environment: variables by name.
        needs_master: False where the ranks meet elsewhere: then ``master`` is None, and its variables may be missing.

    Raises:
        EnvironmentVariableError: a launcher's variables are incomplete, malformed or contradict each other.
    """
    variables = _set_variables(environment)
    if WORKER in variables:
        return _detect_independent(variables)
    if "RANK" in variables:
        return _detect_torchrun(variables, needs_master)
    if any(name in variables for name in _OPEN_MPI_VARIABLES):
        return _detect_open_mpi(variables, needs_master)
    if _is_slurm_step(variables):
        return _detect_slurm(variables, needs_master)
    # Last: batch scripts often export WORLD_SIZE, for their own use, before they call srun or mpirun.
    if "WORLD_SIZE" in variables or "LOCAL_RANK" in variables:
        return _detect_torchrun(variables, needs_master)
    tasks, note = variables.get("SLURM_NTASKS", "1"), ""
    if "SLURM_JOB_ID" in variables and tasks != "1":
        note = (
            f"SLURM_NTASKS={tasks}, but srun did not start this process: it trains alone."
            " For one process per task start it with `srun python script.py`."
        )
    return Placement(
        launcher="none", rank=0, local_rank=0, world_size=1, local_world_size=1, master=None, note=note
    )  # fmt: skip


def read_worker(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return PSENGINE_WORKER and PSENGINE_WORKERS, each None where it is not set.

    Raises:
        EnvironmentVariableError: one is no number, or the worker's number is not below the number of workers.
    """
    variables = _set_variables(environment)
    worker = _integer(variables, WORKER, 0, MAX_WORKERS - 1) if WORKER in variables else None
    workers = _integer(variables, WORKERS, 1, MAX_WORKERS) if WORKERS in variables else None
    if worker is not None and workers is not None and worker >= workers:
        raise EnvironmentVariableError(
            f"Workers are numbered from 0 (expected {WORKER} below {WORKERS}={workers}, got {worker}). Fix: set"
            f" {WORKERS} to the number of workers of the whole job, the same on each of them, and {WORKER} to 0 to"
            f" {workers - 1}."
        )
    return worker, workers


def master_from(environment: Mapping[str, str], world_size: int) -> Master | None:
    """Return the master that MASTER_ADDR and MASTER_PORT name; None for a world of one.

    Raises:
        EnvironmentVariableError: one of them is missing, or malformed.
    """
    return _master(_set_variables(environment), world_size, host=None, port_seed=None)


def _set_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value.strip() for name, value in environment.items() if value.strip()}


def _detect_independent(variables: Mapping[str, str]) -> Placement:
    """A world of one; of the launcher's variables only the place on the host counts, to choose a device by."""
    worker, _ = read_worker(variables)
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", *(["SLURM_LOCALID"] if _is_slurm_step(variables) else [])]
    local = next((variables[name] for name in names if name in variables), "0")
    world_size, note = variables.get("WORLD_SIZE", "1"), ""
    if "RANK" in variables and world_size != "1":
        note = (
            f"{WORKER}={worker} makes this process an independent worker: it joins no process group, though torchrun's"
            f" variables name it rank {variables['RANK']} of {world_size}. Unset {WORKER} to train in the group."
        )
    return Placement(
        launcher=WORKER, rank=0, local_rank=0, world_size=1, local_world_size=1, master=None, note=note,
        device_index=int(local) if _INTEGER.fullmatch(local) and int(local) >= 0 else 0,
    )  # fmt: skip


def _detect_torchrun(variables: Mapping[str, str], needs_master: bool) -> Placement:
    needed = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    if needs_master and variables.get("WORLD_SIZE") != "1":
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    _require(
        variables,
        "A torchrun-style launch",
        needed,
        "start the script with `torchrun --nproc-per-node=N script.py`, set the missing variables (LOCAL_RANK=0 where"
        " every host runs one process), or unset the others to train in a single process",
    )
    world_size = _integer(variables, "WORLD_SIZE", 1)
    local_world_size = 1 if world_size == 1 else None
    if "LOCAL_WORLD_SIZE" in variables:
        local_world_size = _integer(variables, "LOCAL_WORLD_SIZE", 1, world_size)
    master = _master(variables, world_size, host=None, port_seed=None) if needs_master else None
    return _placement("torchrun", variables, ("RANK", "LOCAL_RANK"), world_size, local_world_size, master)


def _detect_open_mpi(variables: Mapping[str, str], needs_master: bool) -> Placement:
    rank_name, world_size_name, local_rank_name, local_world_size_name = _OPEN_MPI_VARIABLES
    _require(
        variables,
        "An Open MPI launch",
        _OPEN_MPI_VARIABLES,
        "start the script with `mpirun -n N python script.py`, and pass all OMPI_COMM_WORLD_* variables on to it"
        " (wrappers and containers may drop some)",
    )
    world_size = _integer(variables, world_size_name, 1)
    local_world_size = _integer(variables, local_world_size_name, 1, world_size)
    if needs_master and local_world_size < world_size and "MASTER_ADDR" not in variables:
        raise EnvironmentVariableError(
            "An Open MPI launch over several hosts needs MASTER_ADDR, because Open MPI does not tell where rank 0 runs"
            f" (expected MASTER_ADDR to be set, got {local_world_size_name}={local_world_size} of"
            f" {world_size_name}={world_size} ranks on this host and no MASTER_ADDR)."
            " Fix: `mpirun -x MASTER_ADDR=<host of rank 0> ...`."
        )
    # PMIX_NAMESPACE names the job from Open MPI 2 on, the other one up to Open MPI 4 (gone with ORTE in 5).
    seed = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
    host = "127.0.0.1", "Open MPI's one host"
    master = _master(variables, world_size, host, seed) if needs_master else None
    return _placement("Open MPI", variables, (rank_name, local_rank_name), world_size, local_world_size, master)


def _is_slurm_step(variables: Mapping[str, str]) -> bool:
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    return _INTEGER.fullmatch(step) is not None and 0 <= int(step) <= _SLURM_MAX_NORMAL_STEP_ID


def _detect_slurm(variables: Mapping[str, str], needs_master: bool) -> Placement:
    # With --preserve-env SLURM_NTASKS stays the job's, so the step's own count goes first.
    world_size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    _require(
        variables,
        "A Slurm step",
        ["SLURM_PROCID", world_size_name, "SLURM_LOCALID"],
        "start the script with `srun python script.py`, and pass all SLURM_* variables on to it (wrappers and"
        " containers may drop some), or unset SLURM_STEP_ID to train in a single process",
    )
    world_size = _integer(variables, world_size_name, 1)
    job = variables.get("SLURM_JOB_ID", variables.get("SLURM_JOBID"))
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID"))
    # The step's number is part of the seed, so that steps of one job may run side by side.
    seed = f"slurm {job}.{step}" if job else None
    host = _slurm_first_host(variables) if needs_master and "MASTER_ADDR" not in variables else None
    master = _master(variables, world_size, host, seed) if needs_master else None
    names = ("SLURM_PROCID", "SLURM_LOCALID")
    # The job's counts may be those of other steps, so the ranks of a host are counted when they meet.
    local_world_size = 1 if world_size == 1 else None
    return _placement("Slurm", variables, names, world_size, local_world_size, master)


def _slurm_first_host(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """The first host of this step's list, and the variable that it is from."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in variables:
            return expand_node_list(variables[name], name)[0], f"the first of {name}={variables[name]}"
    return None


def _require(variables: Mapping[str, str], launch: str, needed: Sequence[str], fix: str) -> None:
    missing = [name for name in needed if name not in variables]
    if missing:
        found = ", ".join(f"{name}={variables[name]}" for name in needed if name in variables)
        raise EnvironmentVariableError(
            f"{launch} sets all its variables (expected {', '.join(needed)}; got {found or 'none'};"
            f" missing {', '.join(missing)}). Fix: {fix}."
        )


def _integer(variables: Mapping[str, str], name: str, minimum: int, maximum: int | None = None) -> int:
    text = variables[name]
    if not _INTEGER.fullmatch(text) or int(text) < minimum or (maximum is not None and int(text) > maximum):
        limits = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
        raise EnvironmentVariableError(
            f"{name} must be an integer in its range (expected {limits}, got {text!r})."
            f" Fix: correct {name}, or unset it where the launcher is to set it."
        )
    return int(text)


def _placement(
    launcher: str,
    variables: Mapping[str, str],
    names: tuple[str, str],
    world_size: int,
    local_world_size: int | None,
    master: Master | None,
) -> Placement:
    """``names``: the variables of rank and local rank."""
    return Placement(
        launcher=launcher,
        rank=_integer(variables, names[0], 0, world_size - 1),
        local_rank=_integer(variables, names[1], 0, (local_world_size or world_size) - 1),
        world_size=world_size,
        local_world_size=local_world_size,
        master=master,
    )


def _master(
    variables: Mapping[str, str], world_size: int, host: tuple[str, str] | None, port_seed: str | None
) -> Master | None:
    """MASTER_ADDR and MASTER_PORT where set, else ``host`` with its source, and a port that all ranks derive alike."""
    if world_size == 1:
        return None
    if "MASTER_ADDR" in variables:
        host = variables["MASTER_ADDR"], "MASTER_ADDR"
    port: tuple[int, str] | None = None
    if "MASTER_PORT" in variables:
        port = _integer(variables, "MASTER_PORT", 1, 65535), "MASTER_PORT"
    elif port_seed is not None:
        number = _FIRST_DERIVED_PORT + zlib.crc32(port_seed.encode()) % _DERIVED_PORTS
        port = number, f"the job's name, {port_seed!r}"
    if host is None or port is None:
        missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None]
        raise EnvironmentVariableError(
            f"{world_size} ranks need one address to meet at, and the launcher names none (expected MASTER_ADDR and"
            f" MASTER_PORT, got neither {' nor '.join(missing)} nor a variable to derive it from)."
            f" Fix: set {' and '.join(missing)} to the same value on every rank."
        )
    return Master(address=host[0], port=port[0], address_source=host[1], port_source=port[1])
