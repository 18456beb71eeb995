"""``import psengine`` and strategy "sync" need no module that Windows lacks."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.processes import free_port

import psengine

# Modules that are POSIX's alone. Not here: what torch itself imports on this system.
MODULES = (
    *("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses"),
    *("multiprocessing.shared_memory",),
)
# Functions of os that are POSIX's alone.
FUNCTIONS = (
    *("fork", "register_at_fork", "memfd_create", "sched_getaffinity", "pidfd_open", "mkfifo", "statvfs", "killpg"),
    *("getuid", "geteuid", "getgid", "getpgrp", "setsid"),
)
AS_ON_WINDOWS = textwrap.dedent(
    f"""
    import os, sys

    for name in {MODULES!r}:
        sys.modules[name] = None  # where it is imported, ModuleNotFoundError
    import torch, torch.distributed

    child = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1" if child == 0 else "0"
    for name in {FUNCTIONS!r}:
        delattr(os, name)
    sys.modules["psengine._native"] = None  # built without shared memory there
    """
)
TRAIN = textwrap.dedent(
    """
    import contextlib, psengine
    from datetime import timedelta
    context = psengine.init("gloo", timeout=timedelta(seconds=60))
    finals = []
    for collective, timeline in (("c10d", psengine.timeline(sys.argv[1])), ("auto", contextlib.nullcontext())):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        model = psengine.DistributedDataParallel(module, collective=collective)
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with timeline:
            for step in range(3):
                torch.manual_seed(10 * step + context.rank)
                optimizer.zero_grad()
                loss = model(torch.randn(5, 8)).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        finals.append([parameter.sum().item() for parameter in model.parameters()])
        psengine.mean({"loss": loss.detach()})
    of_rank_0 = torch.tensor(finals)
    torch.distributed.broadcast(of_rank_0, 0)
    assert of_rank_0.tolist() == finals, "the ranks' models differ"
    assert finals[0] == finals[1], "the collectives' results differ"
    assert all(sys.modules[name] is None for name in ("fcntl", "resource"))
    psengine.shutdown()
    if child:
        assert os.waitpid(child, 0)[1] == 0, "rank 1 failed"
        import psengine.parameter_server.server.snapshots.generations  # locks its directory: what is blocked is blocked
    """
)


def test_two_ranks_train_under_sync_and_merge_their_timelines_without(tmp_path):
    path = tmp_path / "timeline.json"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS + TRAIN, str(path)],
        env={**os.environ, **shared, "PYTHONPATH": str(Path(psengine.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "ModuleNotFoundError: import of fcntl halted" in done.stderr.splitlines()[-1], done.stderr
    merged = json.loads(path.read_text())
    assert {process["rank"] for process in merged["otherData"]["processes"]} == {0, 1}
    assert {event["pid"] for event in merged["traceEvents"] if event["ph"] == "X"} == {0, 1}
