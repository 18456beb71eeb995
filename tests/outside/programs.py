"""Runs programs that other packages ship: as they are, on ranks that psengine's tests start and end.

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
from importlib import metadata, util
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
STAND_INS = Path(__file__).with_name("stand_ins")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A file that another package ships, and what of it is run.

    Attributes:
        package: that ships it.
        path: of the file, inside the package.
        command_lines: one for each time that it is run, in the same directory, whose name replaces ``{directory}``.
        calls: functions of the file with their keyword arguments, called in this order instead of running the file.
        is_shown_gpus: whether accelerate is told of GPUs; see ``wrappings.start_accelerate``.
        has_stand_ins: whether it imports ``datasets`` and ``evaluate``, which are ours, in ``stand_ins/``.
        needs: other packages that it imports.
        refused: by wrapping's name, the error that psengine is to raise in it.
        short: names of the wrappings over which it runs in `make test`; over the others it is slow.
    """

    package: str
    path: str
    command_lines: tuple[tuple[str, ...], ...] = ((),)
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    is_shown_gpus: bool = False
    has_stand_ins: bool = False
    needs: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    short: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.path).stem

    def file(self) -> Path:
        """Where it is installed.

        Raises:
            FileNotFoundError: this version of the package has no such file.
        """
        spec = util.find_spec(self.package)
        assert spec is not None
        assert spec.origin is not None
        found = Path(spec.origin).parent / self.path
        if not found.is_file():
            raise FileNotFoundError(
                f"tests/outside/selection.py names {self.path} of {self.package} (expected a file of this name, got"
                f" none in version {metadata.version(self.package)}). Fix: name what has taken its place"
            )
        return found

    def missing_package(self) -> str | None:
        """One that is not installed, of those without which it cannot run."""
        return next((name for name in (self.package, *self.needs) if util.find_spec(name) is None), None)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a rank wrapped, in order: of each model the parameters and their gradients as the program left them."""

    models: list[dict[str, torch.Tensor]]


def run(program: Program, wrapping: Wrapping, directory: Path, world_size: int = 2) -> list[Result]:
    """Run ``program`` in ``directory``, as often as it has command lines; return each rank's results in this order.

    Raises:
        RanksFailedError: a rank raised, exited with another code than 0, or did not end; the message says what each
            printed.
    """
    file = program.file()
    options = {"init_group": False, "may_have_children": True, "deadline_s": DEADLINE_S}
    results: list[Result] = []
    try:
        for number, command_line in enumerate(program.command_lines):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            words = [word.format(directory=directory) for word in command_line]
            setup = (store.port, program, [str(file), *words], wrapping.for_run(number), directory)
            results += run_ranks(_run_rank, world_size, *setup, **options)
        return results
    except RanksFailedError as error:
        logs = sorted(directory.glob("rank-*.log"))
        printed = "\n".join(f"--- {log.stem} printed ---\n{log.read_text(errors='replace')[-10_000:]}" for log in logs)
        raise RanksFailedError(f"{program.path} over {wrapping.name}: {error}\n{printed}") from None


def _run_rank(
    rank: int, world_size: int, port: int, program: Program, words: list[str], wrapping: Wrapping, directory: Path
) -> Result:
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    launch(rank, world_size, port)
    os.environ.update(wrapping.environment, OMP_NUM_THREADS="1")
    os.chdir(directory)
    # Programs of others warn of what they like; what psengine warns of is an error here too.
    warnings.simplefilter("default")
    warnings.filterwarnings("error", module="psengine")
    if program.has_stand_ins:
        sys.path.insert(0, str(STAND_INS))
    wrapped = wrappings.install(wrapping)
    if program.package == "accelerate":
        wrappings.start_accelerate(world_size, pretend_gpus=program.is_shown_gpus)
    numpy.random.default_rng = functools.partial(_seeded, numpy.random.default_rng, rank)
    sys.argv = words
    names = runpy.run_path(words[0], run_name=program.name if program.calls else "__main__")
    for function, arguments in program.calls:
        names[function](**arguments)
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
