"""The environment variables of this process. The only reader of ``os.environ`` in the package."""

from __future__ import annotations

import os
from collections.abc import Mapping

from psengine.environment.launchers import Placement, detect, master_from, read_worker

# ``psengine run`` marks its workers with it, and their children inherit it.
RUN_ID = "PSENGINE_RUN_ID"


def launched_as(*, needs_master: bool = True) -> Placement:
    """Return what the launcher told this process.

    Args:
        needs_master: False where the ranks meet elsewhere: then nothing about the master is required.

    Raises:
        EnvironmentVariableError: the launcher's variables are incomplete or contradict each other.
    """
    return detect(os.environ, needs_master=needs_master)


def master_variables() -> str:
    """Return the init method that MASTER_ADDR and MASTER_PORT name; see ``launchers.master_from``."""
    return master_from(os.environ)


def given_worker() -> tuple[int | None, int | None]:
    """Return PSENGINE_WORKER and PSENGINE_WORKERS, each None where it is not set; see ``launchers.read_worker``."""
    return read_worker(os.environ)


def default_strategy() -> str:
    """Return the strategy to use where no argument names one: PSENGINE_STRATEGY, else "sync"."""
    return os.environ.get("PSENGINE_STRATEGY", "").strip() or "sync"


def default_collective() -> str:
    """Return the collective to use where no argument names one: PSENGINE_COLLECTIVE, else "auto"."""
    return os.environ.get("PSENGINE_COLLECTIVE", "").strip() or "auto"


def launch_attempt() -> str:
    """Return the name of the launcher's attempt that this process belongs to, the same on all of its ranks.

    ``psengine run`` names it on every node. Of torchrun's own count only one node's is right: with several nodes an
    agent counts the restarts that its own workers caused.
    """
    if attempt := os.environ.get("PSENGINE_ATTEMPT"):
        return attempt
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"


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
    """A copy of this process's environment variables, for a process that it starts with others."""
    return dict(os.environ)
