"""Runs programs that accelerate ships: as they are, on ranks that psengine's tests start and end.

pytest's process                   ranks (forked with torch imported)
    run(program, wrapping)  ────▶    torchrun's variables; stdout and stderr to a file for each rank
                                     wrappings.install(): whose class wraps models
    list[Result]            ◀────    the program as ``__main__``; what it wrapped, as it was left
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from outside import wrappings
from outside.wrappings import Wrapping
from support.integration_ranks import launch
from support.processes import RanksFailedError, run_ranks

DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """A file that accelerate ships.

    Attributes:
        path: of the file, inside the package.
        is_shown_gpus: whether accelerate is told of GPUs; see ``wrappings.start_accelerate``.
        refused: by wrapping's name, the error that psengine is to raise in it.
        short: names of the wrappings over which it runs in `make test`; over the others it is slow.
    """

    path: str
    is_shown_gpus: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    short: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.path).stem

    def file(self) -> Path:
        """Where it is installed."""
        spec = util.find_spec("accelerate")
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parent / self.path


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a rank wrapped, in order: of each model the parameters and their gradients as the program left them."""

    models: list[dict[str, torch.Tensor]]


def run(program: Program, wrapping: Wrapping, directory: Path, world_size: int = 2) -> list[Result]:
    """Run ``program`` in ``directory``; return each rank's result.

    Raises:
        RanksFailedError: a rank raised, exited with another code than 0, or did not end; the message says what each
            printed.
    """
    options = {"init_group": False, "may_have_children": True, "deadline_s": DEADLINE_S}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        return run_ranks(_run_rank, world_size, store.port, program, wrapping, directory, **options)
    except RanksFailedError as error:
        logs = sorted(directory.glob("rank-*.log"))
        printed = "\n".join(f"--- {log.stem} printed ---\n{log.read_text(errors='replace')[-10_000:]}" for log in logs)
        raise RanksFailedError(f"{program.path} over {wrapping.name}: {error}\n{printed}") from None


def _run_rank(rank: int, world_size: int, port: int, program: Program, wrapping: Wrapping, directory: Path) -> Result:
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    launch(rank, world_size, port)
    os.environ.update(wrapping.environment, OMP_NUM_THREADS="1")
    os.chdir(directory)
    # Programs of others warn of what they like; what psengine warns of is an error here too.
    warnings.simplefilter("default")
    warnings.filterwarnings("error", module="psengine")
    wrapped = wrappings.install(wrapping)
    wrappings.start_accelerate(world_size, pretend_gpus=program.is_shown_gpus)
    numpy.random.default_rng = functools.partial(_seeded, numpy.random.default_rng, rank)
    sys.argv = [str(program.file())]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    return Result(models=[_values(model) for model in wrapped])


def _seeded(default_rng: Any, rank: int, seed: Any = None) -> Any:
    """Data that programs draw without a seed, the same over every wrapping."""
    return default_rng(rank if seed is None else seed)


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**values, **gradients}
