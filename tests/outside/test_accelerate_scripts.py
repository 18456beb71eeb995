"""accelerate's three main test scripts, which its wheel ships, end over psengine with the bits of native DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from outside.programs import Program, Result, run
from outside.selection import ACCELERATE
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
def run_over(address: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Result]]:
    """Run a program over a wrapping; its ranks' results."""

    def run_over(program: Program, wrapping: Wrapping) -> list[Result]:
        pytest.importorskip("accelerate")
        directory = tmp_path_factory.mktemp(f"{program.name}-{wrapping.name}")
        job = f"{program.name}-{wrapping.name}"
        return run(program, wrapping.at(address, job) if wrapping.needs_server else wrapping, directory)

    return run_over


@pytest.fixture(scope="module")
def oracles() -> dict[str, list[Result]]:
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
    assert_same_models(oracles[program.path], run_over(program, wrapping))


def assert_same_models(expected: list[Result], found: list[Result]) -> None:
    for native, ours in zip(expected, found, strict=True):
        assert len(ours.models) == len(native.models)
        for number, (theirs, own) in enumerate(zip(native.models, ours.models, strict=True)):
            assert own.keys() == theirs.keys(), f"model {number}"
            different = [name for name in theirs if not torch.equal(own[name], theirs[name])]
            assert not different, f"model {number}: {different}"
