"""torch's own tests of DistributedDataParallel pass with psengine's class in its place.

``PSENGINE_SUITE_CLASS=torch`` runs the same list with torch's class: the oracle of the list itself. What runs, how and
why the rest does not: ``torch_suite/selection.py``.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet
from torch_suite import selection
from torch_suite.suite import NOT_IN_THIS_TORCH, Request, serve

TEST_TIMEOUT_S = 500.0
# Importing the suite takes 4 s; then a test ends by itself or by TEST_TIMEOUT_S.
DEADLINE_S = TEST_TIMEOUT_S + 50.0

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="the suite's ranks speak gloo"),
    pytest.mark.timeout(DEADLINE_S + 50.0),
]


class SuiteProcess:
    """The process that has imported torch's suite; started by the first request, and again if it died."""

    def __init__(self, wrapper: str, directory: Path) -> None:
        self._wrapper = wrapper
        self._directory = directory
        self._process: multiprocessing.process.BaseProcess | None = None

    def run(self, request: Request) -> str:
        """What went wrong, "" where nothing did."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(request)
            if self._connection.poll(DEADLINE_S):
                return self._connection.recv()
            problem = f"no answer within {DEADLINE_S:g} s"
        except (EOFError, OSError) as error:
            problem = f"the suite process ended: {error!r}"
        self.close()
        return f"{problem}\n--- printed ---\n{(self._directory / 'log').read_text(errors='replace')[-20_000:]}"

    def _start(self) -> None:
        # Spawned, because the class must be replaced before anything imports the suite, and this process keeps its own.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._wrapper, self._directory / "log", TEST_TIMEOUT_S)
        )
        self._process.start()
        theirs.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()
        # It leads a group of its own, its ranks among it, and has nothing to save; a tidy exit would take seconds.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # in case it had not got that far
        process.join()
        process.close()


def wrapper_under_test() -> str:
    return os.environ.get("PSENGINE_SUITE_CLASS", "psengine")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuiteProcess]:
    process = SuiteProcess(wrapper_under_test(), tmp_path_factory.mktemp("torch_suite"))
    try:
        yield process
    finally:
        process.close()


def every_test() -> Iterator[ParameterSet]:
    needs_psengine = pytest.mark.skipif(wrapper_under_test() == "torch", reason="torch has no SyncBatchNorm on the CPU")
    for group, names, world_size in (
        ("cpu", selection.ON_CPU, 2),
        ("gpu_on_cpu", selection.FOR_GPU, 2),
        ("sync_batch_norm", selection.WITH_SYNC_BATCHNORM, 2),
        ("four_ranks", selection.ALSO_ON_FOUR_RANKS, 4),
    ):
        for name in names:
            marks = [pytest.mark.slow] if (name, world_size) in selection.SLOW else []
            marks += [needs_psengine] if group == "sync_batch_norm" else []
            yield pytest.param(name, world_size, id=f"{group}-{name}", marks=marks)


@pytest.mark.parametrize(("name", "world_size"), list(every_test()))
def test_torchs_own_test_passes(suite: SuiteProcess, name: str, world_size: int) -> None:
    problem = suite.run(Request(test=name, world_size=world_size, cpu_for_gpu=name not in selection.ON_CPU))
    if problem.startswith(NOT_IN_THIS_TORCH):
        pytest.skip(problem)
    assert not problem, f"{name} on {world_size} ranks\n{problem}"
