"""torch's own tests of DistributedDataParallel, run against psengine's class or, as the oracle, against torch's.

They ship in torch's wheel and take the class by name when their module is imported, so ``serve`` prepares its process
first and imports them then. Ranks are forked from that process: a test costs about half a second, where the suite's
own way (spawn) imports torch anew in each rank.

    pytest's process          suite process (one)             ranks (forked per test)
        Request   ───────────▶  torch's unittest runner  ───▶  the test's body
        problem   ◀───────────  joins, reads exit codes  ◀───  exit code, traceback
"""

import itertools
import os
import sys
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.native_class import replace_native_class
from torch_suite.selection import LOOKS_FOR_GLOO, SKIPPED_BY_TORCH

MAX_WORLD_SIZE = 4
NOT_IN_THIS_TORCH = "this version of torch has no such test"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One test to run; ``cpu_for_gpu`` says whether it needs to be shown GPUs that are not there."""

    test: str
    world_size: int
    cpu_for_gpu: bool


def serve(connection: Connection, wrapper: str, log_path: Path, test_timeout_s: float) -> None:
    """Answer each ``Request`` on ``connection`` with its problem, "" where it passed, until the other end closes.

    Args:
        connection: owned by the caller.
        wrapper: whose DistributedDataParallel to test, "torch" or "psengine".
        log_path: where everything that the tests print goes; its directory takes their temporary files too.
        test_timeout_s: after which the ranks of a test are terminated and it counts as failed.
    """
    os.setpgrp()  # so that the caller can end this process and its ranks together
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(MAX_WORLD_SIZE),  # decides at import which tests exist at all
        TMPDIR=str(log_path.parent),
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",  # a test unpickles the hook state that it has just pickled
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(test_timeout_s)),
    )
    test_class = load(wrapper, test_timeout_s)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        log_start = os.fstat(log).st_size
        problem = run(test_class, request)
        printed = log_path.read_bytes()[log_start:].decode(errors="replace")
        connection.send(problem and f"{problem}\n--- printed ---\n{printed[-20_000:]}")


def load(wrapper: str, test_timeout_s: float) -> Any:
    """Import torch's suite with ``wrapper``'s class in the place of torch's; return its test class, made to fork."""
    import torch

    torch.set_num_threads(1)
    wrapper_class = replace_native_class() if wrapper == "psengine" else torch.nn.parallel.DistributedDataParallel
    from torch.testing._internal import common_distributed
    from torch_suite import cpu_for_gpu

    common_distributed.TIMEOUT_OVERRIDE.clear()
    cpu_for_gpu.ignore_gpu_demands()
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class TestDistBackendWithFork(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        shows_gpus = False
        exit_codes: list[int | None] = []

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _join_processes(self, fn: Any) -> None:
            # torch's own way looks every 0.1 s, which is a third of what most tests take.
            for process in self.processes:
                process.join(test_timeout_s)
            super()._join_processes(fn)

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

        # One of the models of test_ddp_uneven_inputs takes a 1000 x 1000 image: minutes on a CPU, for nothing.
        def _run_uneven_inputs_test(self, test_case: Any, *arguments: Any, **named: Any) -> None:
            if test_case.name == "large_conv_model":
                test_case = test_case._replace(inp=test_case.inp[..., :32, :32])
            super()._run_uneven_inputs_test(test_case, *arguments, **named)

        # torch's tests by these two names are commented out (for their own infrastructure); what they call is there.
        def test_optimizer_in_hook_adamw(self) -> None:
            for as_view, static_graph, subset in itertools.product((True, False), repeat=3):
                self._test_ddp_hook_with_optimizer_parity(
                    as_view, static_graph, torch.optim.AdamW, subset, 1e-2, betas=(0.9, 0.99), eps=1e-6
                )

        def test_optimizer_in_hook_sgd(self) -> None:
            for subset in (True, False):
                self._test_ddp_hook_with_optimizer_parity(
                    True, False, torch.optim.SGD, subset, 1e-2, momentum=0.9, weight_decay=0.01
                )

    for name in SKIPPED_BY_TORCH:
        if hasattr(TestDistBackendWithFork, name):
            setattr(TestDistBackendWithFork, name, _unskipped(getattr(TestDistBackendWithFork, name)))
    return TestDistBackendWithFork


def _unskipped(test: Callable[[Any], None]) -> Callable[[Any], None]:
    # unittest.skip replaces the function or, in some of torch's decorators, marks the function itself.
    while getattr(test, "__unittest_skip__", False) and hasattr(test, "__wrapped__"):
        test = test.__wrapped__

    def run_anyway(self: Any) -> None:
        test(self)

    return run_anyway


def run(test_class: Any, request: Request) -> str:
    """Run one test on ranks forked from this process; return what went wrong, "" where nothing did."""
    if not hasattr(test_class, request.test):
        return f"{NOT_IN_THIS_TORCH}: {request.test}"
    os.environ["WORLD_SIZE"] = str(request.world_size)
    os.environ["PSENGINE_COLLECTIVE"] = "c10d" if request.test in LOOKS_FOR_GLOO else "auto"
    test_class.shows_gpus = request.cpu_for_gpu
    test_class.exit_codes = []
    result = unittest.TestResult()
    unittest.TestSuite([test_class(request.test)]).run(result)
    problems = [text for _, text in (*result.errors, *result.failures)]
    problems += [f"skipped: {reason}" for _, reason in result.skipped]
    if not problems and set(test_class.exit_codes) != {0}:
        return f"expected exit code 0 of every rank (got {test_class.exit_codes})"
    return "\n".join(problems)
