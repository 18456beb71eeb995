"""torch's own tests of DistributedDataParallel, run against psengine's class or, as the oracle, against torch's.

They ship in torch's wheel and take the class by name when their module is imported, so ``serve`` prepares its process
first and imports them then. Ranks are forked from that process: a test costs about half a second, where the suite's
own way (spawn) imports torch anew in each rank.

    pytest's process          suite process (one)             ranks (forked per test)
        Request   ───────────▶  torch's unittest runner  ───▶  the test's body
        Outcome   ◀───────────  joins, reads exit codes  ◀───  exit code, traceback
"""

from __future__ import annotations

import os
import unittest
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

MAX_WORLD_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """One test to run; ``cpu_for_gpu`` says whether it needs to be shown GPUs that are not there."""

    test: str
    world_size: int
    cpu_for_gpu: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a test ended: ``verdict`` is "passed", "skipped" or "failed", ``detail`` says why."""

    verdict: str
    detail: str
    duration_s: float


def serve(connection: Connection, wrapper: str, log_path: Path, test_timeout_s: float) -> None:
    """Answer each ``Request`` on ``connection`` with an ``Outcome`` until the other end closes.

    Args:
        connection: owned by the caller.
        wrapper: whose DistributedDataParallel to test, "torch" or "psengine".
        log_path: where everything that the tests print goes; its directory takes their temporary files too.
        test_timeout_s: after which the ranks of a test are terminated and it counts as failed.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(MAX_WORLD_SIZE),  # decides at import which tests exist at all
        TMPDIR=str(log_path.parent),
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(test_timeout_s)),
    )
    test_class = load(wrapper)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        log_start = os.fstat(log).st_size
        outcome = run(test_class, request)
        if outcome.verdict == "failed":
            printed = log_path.read_bytes()[log_start:].decode(errors="replace")
            outcome = Outcome(
                verdict=outcome.verdict,
                detail=f"{outcome.detail}\n--- printed ---\n{printed[-20_000:]}",
                duration_s=outcome.duration_s,
            )
        connection.send(outcome)


def load(wrapper: str) -> Any:
    """Import torch's suite with ``wrapper``'s class in the place of torch's; return its test class, made to fork."""
    import torch

    torch.set_num_threads(1)
    wrapper_class = replace_native_class(wrapper)
    from torch.testing._internal import common_distributed
    from torch_suite import cpu_for_gpu

    common_distributed.TIMEOUT_OVERRIDE.clear()
    cpu_for_gpu.ignore_gpu_demands()
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    assert torch.nn.parallel.DistributedDataParallel is wrapper_class

    class TestDistBackendWithFork(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        shows_gpus = False

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            processes = self.processes
            super().tearDown()
            for process in processes:
                process.join(timeout=10)
            # torch's own runner looks at rank 0's exit code only.
            type(self).exit_codes = [process.exitcode for process in processes]

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            if not self.shows_gpus:
                return super().run_test(test_name, parent_pipe)
            cpu_for_gpu.pretend_gpus(int(self.world_size), wrapper_class)
            with cpu_for_gpu.CudaMeansCpu():
                return super().run_test(test_name, parent_pipe)

    import os
    for name in os.environ.get("UNSKIP","").split():
        test = getattr(TestDistBackendWithFork, name)
        while getattr(test, "__unittest_skip__", False) and hasattr(test,"__wrapped__"):
            test = test.__wrapped__
        def unskipped(self, test=test): test(self)
        unskipped.__wrapped__=test
        setattr(TestDistBackendWithFork, name, unskipped)
    return TestDistBackendWithFork


def replace_native_class(wrapper: str) -> Any:
    """Put ``wrapper``'s class wherever a program finds torch's by name; return it."""
    import torch
    import torch.nn.parallel.distributed

    if wrapper == "psengine":
        from psengine.parallel import DistributedDataParallel

        torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
        torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    elif wrapper != "torch":
        raise ValueError(f"a suite class is 'torch' or 'psengine' (got {wrapper!r})")
    return torch.nn.parallel.DistributedDataParallel


def run(test_class: Any, request: Request) -> Outcome:
    """Run one test on ranks forked from this process."""
    os.environ["WORLD_SIZE"] = str(request.world_size)
    test_class.shows_gpus = request.cpu_for_gpu
    test_class.exit_codes = []
    started = monotonic()
    result = unittest.TestResult()
    unittest.TestSuite([test_class(request.test)]).run(result)
    duration_s = monotonic() - started
    problems = [text for _, text in (*result.errors, *result.failures)]
    reasons = [reason for _, reason in result.skipped]
    if not problems and not reasons and set(test_class.exit_codes) != {0}:
        problems = [f"expected exit code 0 of every rank (got {test_class.exit_codes})"]
    verdict = "failed" if problems else "skipped" if reasons else "passed"
    return Outcome(verdict=verdict, detail="\n".join(problems or reasons), duration_s=duration_s)
