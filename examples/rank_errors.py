"""The errors that end a run in one line, and how ranks share them, so that none waits for one that has left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

import psengine

T = TypeVar("T")


class UserError(Exception):
    """Something that the user can put right: one line on rank 0, exit code 2."""


class TrainingError(Exception):
    """Training went wrong; raised on all ranks alike: one line on each, exit code 1."""


def on_all_ranks(prepare: Callable[[], T], only_rank: int | None = None) -> T | None:
    """Return ``prepare()``, called on all ranks or one; what is wrong on any is raised on all, so that nobody waits."""
    result, problem = None, None
    try:
        if only_rank in (None, dist.get_rank()):
            result = prepare()
    except (UserError, psengine.ConfigurationError, psengine.ServerError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise UserError(problem if rank == 0 else f"rank {rank}: {problem}")
    return result


def speaks_for_its_group() -> bool:
    """Whether this process prints what all ranks of its group raise; each independent worker is a group of its own."""
    return dist.get_rank() == 0 if dist.is_initialized() else psengine.is_main_process()


def wait_for_all_ranks() -> None:
    """Wait until all ranks have spoken: torchrun ends the others as soon as one has left."""
    if dist.is_initialized():
        dist.barrier()


def run_to_the_end(program: Callable[[], int]) -> int:
    """Return ``program()``, an exit code; what the user can put right is one line on one rank, and exit code 2."""
    try:
        return program()
    except UserError as error:
        if speaks_for_its_group():
            print_error(error)
        wait_for_all_ranks()
    except psengine.PSEngineError as error:
        print_error(error)
    return 2


def print_error(error: Exception) -> None:
    """Print one line; in one write, so that ranks' lines stay whole."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
