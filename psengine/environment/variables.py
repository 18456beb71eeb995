"""The environment variables of this process. The only reader of ``os.environ`` in the package."""

from __future__ import annotations

import os
from collections.abc import Mapping

# ``psengine run`` marks its workers with it, and their children inherit it.
RUN_ID = "PSENGINE_RUN_ID"
# What it has set OMP_NUM_THREADS to, where the user had not set it.
RUN_THREADS = "PSENGINE_RUN_THREADS"


def default_strategy() -> str:
    """Return the strategy to use where no argument names one: PSENGINE_STRATEGY, else "sync"."""
    return os.environ.get("PSENGINE_STRATEGY", "").strip() or "sync"


def default_collective() -> str:
    """Return the collective to use where no argument names one: PSENGINE_COLLECTIVE, else "auto"."""
    return os.environ.get("PSENGINE_COLLECTIVE", "").strip() or "auto"


def default_replica_check() -> str:
    """Return what a comparison of replicas does where no argument says it: PSENGINE_CHECK_REPLICAS, else "off"."""
    return os.environ.get("PSENGINE_CHECK_REPLICAS", "").strip() or "off"


def launch_attempt() -> str:
    """Return the name of the launcher's attempt that this process belongs to, the same on all of its ranks.

    ``psengine run`` names it on every node. Of torchrun's own count only one node's is right: with several nodes an
    agent counts the restarts that its own workers caused.
    """
    if attempt := os.environ.get("PSENGINE_ATTEMPT"):
        return attempt
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"


def launched_run() -> str:
    """Return the name of the launch that this process belongs to, the same when the launcher starts it again, or ""."""
    run = os.environ.get("PSENGINE_RUN_NAME") or os.environ.get(RUN_ID, "")
    torchrun, slurm = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("SLURM_JOB_ID", "")
    if not run and torchrun != "none":  # what torchrun sets where nobody named the run
        run = torchrun
    if not run and slurm:
        run = f"{slurm}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"  # a requeued job has its number again
    return run[:200]


def continues_training() -> bool:
    """Return whether this process is to go on from what an earlier run has trained: PSENGINE_CONTINUE.

    A job that Slurm has requeued is the same run, although it has another name in ``launched_run``.
    """
    names = ("PSENGINE_CONTINUE", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0").strip() not in ("", "0") for name in names)


def has_chosen_threads() -> bool:
    """Return whether OMP_NUM_THREADS is the user's, and not set by ``psengine run`` or torchrun.

    torchrun sets 1, which cannot be told from a user's 1.
    """
    by_torchrun = not os.environ.get(RUN_ID) and os.environ.get("TORCHELASTIC_RUN_ID")
    launchers = "1" if by_torchrun else os.environ.get(RUN_THREADS)
    return os.environ.get("OMP_NUM_THREADS", "").strip() not in ("", launchers)


def read_variable(name: str) -> str | None:
    """The environment variable ``name``, or None; for the parts of the package that report or honour torch's own."""
    return os.environ.get(name)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process, and unset those that are None; processes that it starts inherit them."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def inherited_variables() -> dict[str, str]:
    """A copy of this process's environment variables, to read a placement from, or for a process that it starts."""
    return dict(os.environ)
