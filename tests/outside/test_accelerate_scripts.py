"""accelerate's own test scripts, which its wheel ships, pass over psengine and end with the bits of native DDP.

What runs, how and why the rest does not: selection.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from outside import tiny_bert
from outside.programs import Program, Result, run
from outside.selection import ACCELERATE, NOT_RUN_OF_ACCELERATE, SCRIPTS
from outside.wrappings import NATIVE, WRAPPINGS, Wrapping
from support.native_extension import needs_shared_memory
from support.processes import RanksFailedError
from support.server_process import running_server

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="accelerate's ranks on the CPU speak gloo")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(shards=2) as server:
        yield server.addresses[0]


@pytest.fixture
def run_over(address: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[Result], Path]]:
    """Run a program over a wrapping; its ranks' results and the directory that it ran in."""

    def run_over(program: Program, wrapping: Wrapping) -> tuple[list[Result], Path]:
        if (missing := program.missing_package()) is not None:
            pytest.skip(f"{missing} is not installed")
        directory = tmp_path_factory.mktemp(f"{program.name}-{wrapping.name}")
        if program.has_stand_ins:
            tiny_bert.save(directory / tiny_bert.HUB_NAME)
        job = f"{program.name}-{wrapping.name}"
        return run(program, wrapping.at(address, job) if wrapping.needs_server else wrapping, directory), directory

    return run_over


@pytest.fixture(scope="module")
def oracles() -> dict[str, tuple[list[Result], Path]]:
    """By program, what native DDP made of it; filled by the first test that asks."""
    return {}


def cases() -> Iterator[object]:
    for program in ACCELERATE:
        for wrapping in WRAPPINGS:
            marks = [] if wrapping.name in program.short else [pytest.mark.slow]
            if wrapping.needs_shared_memory:
                marks.append(needs_shared_memory)
            yield pytest.param(program, wrapping, id=f"{program.name}-{wrapping.name}", marks=marks)


@pytest.mark.parametrize(("program", "wrapping"), list(cases()))
def test_script(program: Program, wrapping: Wrapping, run_over, oracles) -> None:
    if (refusal := program.refused.get(wrapping.name)) is not None:
        with pytest.raises(RanksFailedError, match=refusal):
            run_over(program, wrapping)
        return
    if program.path not in oracles:
        oracles[program.path] = run_over(program, NATIVE)
    expected, native_directory = oracles[program.path]
    found, directory = run_over(program, wrapping)
    assert_same_models(expected, found)
    assert_same_files(native_directory, directory)


def assert_same_models(expected: list[Result], found: list[Result]) -> None:
    for native, ours in zip(expected, found, strict=True):
        assert len(ours.models) == len(native.models)
        for number, (theirs, own) in enumerate(zip(native.models, ours.models, strict=True)):
            assert own.keys() == theirs.keys(), f"model {number}"
            different = [name for name in theirs if not torch.equal(own[name], theirs[name])]
            assert not different, f"model {number}: {different}"


def assert_same_files(expected: Path, found: Path) -> None:
    """What the program wrote for others to read: results and weights."""
    names = {str(file.relative_to(expected)) for file in written_by(expected)}
    assert {str(file.relative_to(found)) for file in written_by(found)} == names
    for name in names:
        if name.endswith(".json"):
            assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text()), name
        else:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def written_by(directory: Path) -> Iterator[Path]:
    for pattern in ("*.json", "*.safetensors"):
        yield from directory.rglob(pattern)


def test_every_script_of_accelerate_is_run_or_has_a_reason() -> None:
    pytest.importorskip("accelerate")
    folder = ACCELERATE[0].file().parent
    shipped = {f"{SCRIPTS}/{file.relative_to(folder)}" for file in folder.rglob("test_*.py")}
    assert shipped == {program.path for program in ACCELERATE} | NOT_RUN_OF_ACCELERATE.keys()
