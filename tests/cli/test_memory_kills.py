"""Whether a worker was killed for lack of memory is said by the kernel's own count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from psengine.cli.launching.failure import describe_exit
from psengine.cli.launching.memory_kills import MemoryKills

LIMIT_BYTES = 64 << 20

# A launcher in a control group of little memory, whose worker takes more than there is.
LAUNCHER = f"""
import os, subprocess, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from psengine.cli.launching.memory_kills import MemoryKills
kills = MemoryKills()
killed = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
print(killed.returncode, kills.have_grown())
starved = subprocess.run([sys.executable, "-c", "b'1' * {4 * LIMIT_BYTES}"])
print(starved.returncode, kills.have_grown())
"""


@contextmanager
def little_memory() -> Iterator[Path]:
    """A control group under this process's; skips where this user cannot make one."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    roots = [(Path("/sys/fs/cgroup/memory"), own.get("memory"), "memory.limit_in_bytes")]
    roots.append((Path("/sys/fs/cgroup"), own.get(""), "memory.max"))
    for root, path, limit in roots:
        folder = root / (path or "/")[1:] / f"psengine-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            try:
                (folder / limit).write_text(str(LIMIT_BYTES))
            except OSError:
                continue
            yield folder
            return
        finally:
            folder.rmdir()
    pytest.skip("this user cannot limit the memory of a control group")


def test_the_kernels_count_tells_a_kill_from_a_lack_of_memory():
    with little_memory() as group:
        launcher = subprocess.run(
            [sys.executable, "-c", LAUNCHER, group], capture_output=True, text=True, timeout=60, check=True
        )
    assert launcher.stdout.split("\n")[:2] == ["-9 False", "-9 True"], launcher.stderr


@pytest.mark.parametrize(
    ("was_short_of_memory", "words"),
    [
        (True, "out of memory: the kernel ended a process"),
        (False, "by someone or by the kernel, but not for lack of memory"),
        (None, "by someone or by the kernel, perhaps for lack of memory"),
    ],
)
def test_sigkill_is_described_by_what_the_kernel_counted(was_short_of_memory, words):
    assert f"killed by SIGKILL ({words}" in describe_exit(-signal.SIGKILL, was_short_of_memory)


def test_the_count_is_read_on_this_machine():
    assert MemoryKills().have_grown() is False
