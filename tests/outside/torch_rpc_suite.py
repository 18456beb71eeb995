"""torch's tests of DistributedDataParallel under RPC and distributed autograd, which its wheel ships as base classes.

One process imports them with a class in the place of torch's, and forks the ranks of each test:

    pytest's process           suite process             ranks (forked per test)
        run_tests()   ───────▶   torch's unittest   ──▶    the test's body
        {test: trouble} ◀─────   runner             ◀──    exit code, traceback
"""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from typing import Any

from outside import wrappings
from outside.wrappings import Wrapping
from support.processes import run_ranks

TEST_TIMEOUT_S = 60.0


def run_tests(names: dict[str, tuple[str, ...]], wrapping: Wrapping, directory: Path) -> dict[str, str]:
    """By test, what went wrong, or "" where it passed.

    Args:
        names: by class of ``ddp_under_dist_autograd_test``, its tests.
        wrapping: whose class wraps the models.
        directory: for the log, of which ``trouble`` holds the end where a test fails.
    """
    deadline_s = TEST_TIMEOUT_S * (1 + sum(map(len, names.values())))
    [troubles] = run_ranks(
        _suite_process, 1, names, wrapping, directory, init_group=False, may_have_children=True, deadline_s=deadline_s
    )
    return troubles


def _suite_process(
    _rank: int, _world_size: int, names: dict[str, tuple[str, ...]], wrapping: Wrapping, directory: Path
) -> dict[str, str]:
    log_path = directory / "suite.log"
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        wrapping.environment,
        TMPDIR=str(directory),
        GLOO_SOCKET_IFNAME="lo",
        TP_SOCKET_IFNAME="lo",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(TEST_TIMEOUT_S)),
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    wrappings.install(wrapping)
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as suite

    troubles = {}
    for class_name, tests in names.items():
        test_class = _made_to_fork(getattr(suite, class_name))
        for test in tests:
            log_start = log_path.stat().st_size
            result = unittest.TestResult()
            unittest.TestSuite([test_class(test)]).run(result)
            problems = [text for _, text in (*result.errors, *result.failures, *result.skipped)]
            printed = log_path.read_bytes()[log_start:].decode(errors="replace")
            troubles[test] = "\n".join([*problems, "--- printed ---", printed[-5_000:]]) if problems else ""
    return troubles


def _made_to_fork(base: Any) -> Any:
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    class WithFork(TensorPipeRpcAgentTestFixture, base, MultiProcessTestCase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return WithFork
