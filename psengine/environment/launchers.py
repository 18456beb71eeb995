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
from collections.abc import Mapping
from dataclasses import dataclass

from psengine.errors import EnvironmentVariableError

# Derived ports lie below Linux's default range of ephemeral ports (32768-60999), so no outgoing connection holds them.
_FIRST_DERIVED_PORT = 10000
_DERIVED_PORTS = 20000

# slurm.h: SLURM_MAX_NORMAL_STEP_ID; larger ones are batch, extern and interactive steps (salloc's shell), not srun's.
_SLURM_MAX_NORMAL_STEP_ID = 0xFFFFFFF0

_INTEGER = re.compile(r"-?[0-9]{1,18}")

# In this order: rank, world size, local rank, local world size.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
# What makes a process a task of a Slurm step.
_SLURM = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
# More workers than servers take.
MAX_WORKERS = 0x10000
WORKER, WORKERS = "PSENGINE_WORKER", "PSENGINE_WORKERS"

# A process without these variables has no placement. Names of jobs and hosts alone give it none.
PLACEMENT_VARIABLES = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT", *_OPEN_MPI, *_SLURM)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a launcher, or the arguments of ``init``, told this process.

    Attributes:
        launcher: "torchrun", "Open MPI", "Slurm", "PSENGINE_WORKER", "arguments of init()" or "none".
        rank: this process in the world, 0 <= rank < world_size.
        local_rank: this process among those of its host; None where nobody says.
        world_size: number of processes.
        local_world_size: number of processes on this host; None where nobody says.
        init_method: where the ranks meet, as torch spells it; "" where the world size is 1, or nobody asked for it.
        device_index: which of the host's devices to take; default ``local_rank``.
    """

    launcher: str
    rank: int = 0
    local_rank: int | None = 0
    world_size: int = 1
    local_world_size: int | None = 1
    init_method: str = ""
    device_index: int | None = None


def detect(environment: Mapping[str, str], *, needs_master: bool = True) -> Placement:
    """Return the placement that the variables in ``environment`` describe.

    Args:
        environment: variables by name.
        needs_master: False where the ranks meet elsewhere: then ``init_method`` is "", and no variable of it is needed.

    Raises:
        EnvironmentVariableError: a launcher's variables are incomplete, malformed or contradict each other.
    """
    variables = {name: value.strip() for name, value in environment.items() if value.strip()}
    if WORKER in variables:
        return _independent_worker(variables)
    # WORLD_SIZE alone comes last: batch scripts often export it, for their own use, before they call srun or mpirun.
    if "RANK" in variables:
        return _placement("torchrun", variables, _TORCHRUN, needs_master)
    if any(name in variables for name in _OPEN_MPI):
        return _open_mpi(variables, needs_master)
    if _is_slurm_step(variables):
        return _slurm(variables, needs_master)
    if "WORLD_SIZE" in variables or "LOCAL_RANK" in variables:
        return _placement("torchrun", variables, _TORCHRUN, needs_master)
    return Placement(launcher="none")


def read_worker(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return PSENGINE_WORKER and PSENGINE_WORKERS, each None where it is not set.

    Raises:
        EnvironmentVariableError: one is no number, or the worker's number is not below the number of workers.
    """
    worker = read_integer(environment, WORKER, 0, MAX_WORKERS - 1)
    workers = read_integer(environment, WORKERS, 1, MAX_WORKERS)
    if worker is not None and workers is not None and worker >= workers:
        raise EnvironmentVariableError(
            f"Workers are numbered from 0 (expected {WORKER} below {WORKERS}={workers}, got {worker}). Fix: set"
            f" {WORKERS} to the number of workers of the whole job, the same on each of them."
        )
    return worker, workers


def read_integer(environment: Mapping[str, str], name: str, minimum: int, maximum: int) -> int | None:
    """Return the number that the variable ``name`` is; None where it is not set.

    Raises:
        EnvironmentVariableError: it is no number from ``minimum`` to ``maximum``.
    """
    text = environment.get(name, "").strip()
    if text and not (_INTEGER.fullmatch(text) and minimum <= int(text) <= maximum):
        raise EnvironmentVariableError(
            f"{name} must be an integer in its range (expected {minimum} to {maximum}, got {text!r})."
            f" Fix: correct {name}, or unset it where the launcher is to set it."
        )
    return int(text) if text else None


def _independent_worker(variables: Mapping[str, str]) -> Placement:
    """A world of one; of the launcher's variables only the place on the host counts, to choose a device by."""
    read_worker(variables)
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", *(["SLURM_LOCALID"] if _is_slurm_step(variables) else [])]
    local = next((variables[name] for name in names if name in variables), "0")
    return Placement(launcher=WORKER, device_index=int(local) if local.isdecimal() else 0)


def _open_mpi(variables: Mapping[str, str], needs_master: bool) -> Placement:
    # Open MPI does not tell where rank 0 runs, unless all ranks are on this host.
    host = "127.0.0.1" if variables.get(_OPEN_MPI[3]) == variables.get(_OPEN_MPI[1]) else ""
    # PMIX_NAMESPACE names the job from Open MPI 2 on, the other one up to Open MPI 4 (gone with ORTE in 5).
    seed = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
    return _placement("Open MPI", variables, _OPEN_MPI, needs_master, host, seed)


def _is_slurm_step(variables: Mapping[str, str]) -> bool:
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    return _INTEGER.fullmatch(step) is not None and 0 <= int(step) <= _SLURM_MAX_NORMAL_STEP_ID


def _slurm(variables: Mapping[str, str], needs_master: bool) -> Placement:
    # With --preserve-env SLURM_NTASKS stays the job's, so the step's own count goes first.
    world_size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    job = variables.get("SLURM_JOB_ID", variables.get("SLURM_JOBID"))
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID"))
    host = first_host(variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", "")))
    # The step's number is part of the seed, so that steps of one job may run side by side.
    seed = f"slurm {job}.{step}" if job else None
    # The job's counts of tasks on a node may be those of other steps: the ranks of a host are counted when they meet.
    return _placement("Slurm", variables, ("SLURM_PROCID", world_size, "SLURM_LOCALID", ""), needs_master, host, seed)


def first_host(node_list: str) -> str:
    """Return the first host of Slurm's compressed list: ``"n[08-10],gpu"`` begins with n08; "" of a malformed list."""
    first = re.match(r"(?:[^][,]|\[[0-9][^][]*\])+(?=,|$)", node_list)
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", first[0]) if first else ""


def _placement(
    launcher: str,
    variables: Mapping[str, str],
    names: tuple[str, ...],
    needs_master: bool,
    host: str = "",
    seed: str | None = None,
) -> Placement:
    """``names``: the variables of rank, world size, local rank and local world size, of which the last may be unset."""
    if missing := [name for name in names[:3] if name not in variables]:
        raise EnvironmentVariableError(
            f"{launcher} sets all its variables (expected {', '.join(names[:3])}, missing {', '.join(missing)}). Fix:"
            " pass on all that torchrun, mpirun or srun sets; or unset them to train in a single process."
        )
    world_size = read_integer(variables, names[1], 1, 2**31 - 1) or 1
    local_world_size = read_integer(variables, names[3], 1, world_size) or (1 if world_size == 1 else None)
    return Placement(
        launcher=launcher,
        rank=read_integer(variables, names[0], 0, world_size - 1) or 0,
        local_rank=read_integer(variables, names[2], 0, (local_world_size or world_size) - 1),
        world_size=world_size,
        local_world_size=local_world_size,
        init_method=master_from(variables, host, seed) if needs_master and world_size > 1 else "",
    )


def master_from(environment: Mapping[str, str], host: str = "", seed: str | None = None) -> str:
    """Return the init method that MASTER_ADDR and MASTER_PORT name.

    Args:
        environment: variables by name.
        host: the host where MASTER_ADDR is not set; "" for none.
        seed: what all ranks derive the port from alike where MASTER_PORT is not set; None for nothing.

    Raises:
        EnvironmentVariableError: the host or the port is missing, or the port is malformed.
    """
    host = environment.get("MASTER_ADDR", "").strip() or host
    port = read_integer(environment, "MASTER_PORT", 1, 65535)
    if port is None and seed is not None:
        port = _FIRST_DERIVED_PORT + zlib.crc32(seed.encode()) % _DERIVED_PORTS
    if missing := [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]:
        raise EnvironmentVariableError(
            "Ranks meet at one address, and the launcher names none (expected MASTER_ADDR and MASTER_PORT, got no"
            f" {' and no '.join(missing)}). Fix: set them alike on every rank, MASTER_ADDR to the host of rank 0"
            " (mpirun: -x MASTER_ADDR=HOST), MASTER_PORT to a free port there."
        )
    # IPv6 in brackets, as in any URL.
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"
