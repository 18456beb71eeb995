"""Threads and /dev/shm, as this process may use them: a container often has less than its machine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, read_text, warning

CGROUPS = Path("/sys/fs/cgroup")
MIN_SHARED_MEMORY_BYTES = 256 << 20


def threads(context: CheckContext) -> Iterator[Finding]:
    """How many threads the ranks of this host compute with, against the cores that they may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = float(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    usable = min(allowed, _cpu_quota())
    ranks = context.number("LOCAL_WORLD_SIZE") or 1
    fair = f"OMP_NUM_THREADS={max(1, int(usable) // ranks)}"
    given = context.variables.get("OMP_NUM_THREADS", "").strip()
    if given and not re.fullmatch(r"[1-9][0-9]*(\s*,\s*[1-9][0-9]*)*", given):
        yield problem(
            f"OMP_NUM_THREADS is no number of threads (expected a positive integer, got {given!r}): libraries"
            " ignore it",
            f"set {fair}, or unset it",
        )
        return
    per_rank = int(given.split(",")[0]) if given else torch.get_num_threads()
    text = f"{ranks} rank{'s' if ranks != 1 else ''} here with {per_rank} thread{'s' if per_rank != 1 else ''} each"
    text += f", on {usable:g} of {os.cpu_count()} cores"
    facts = {"usable_cores": usable, "ranks": ranks, "threads": per_rank}
    if per_rank * ranks > max(1, math.ceil(usable)):
        yield warning(f"{text}: they take the cores from each other", fair, **facts)
    elif not given:
        yield note(
            f"OMP_NUM_THREADS is not set: each process computes with {per_rank} threads, on {usable:g} cores",
            "set OMP_NUM_THREADS to the number of cores divided by the number of ranks",
            **facts,
        )
    else:
        yield ok(text, **facts)


def dev_shm(context: CheckContext) -> Iterator[Finding]:
    """/dev/shm, through which DataLoader's workers hand over batches."""
    bigger = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory)"
    try:
        state = os.statvfs("/dev/shm")
    except OSError as error:
        yield warning(f"/dev/shm cannot be used ({error.strerror}): DataLoader(num_workers > 0) fails", bigger)
        return
    size, free = state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail
    text = f"/dev/shm: {free >> 20} MiB free of {size >> 20} MiB"
    facts = {"size_bytes": size, "free_bytes": free}
    if not os.access("/dev/shm", os.W_OK):
        yield warning(f"{text}, and not writable: DataLoader(num_workers > 0) fails", bigger, **facts)
    elif size < MIN_SHARED_MEMORY_BYTES:
        yield warning(f"{text}: little for DataLoader's workers, which then die with 'Bus error'", bigger, **facts)
    elif free < size // 10:
        yield warning(f"{text}: nearly full", "remove files that dead processes left: ls -l /dev/shm", **facts)
    else:
        yield ok(f"{text} (for DataLoader's workers; psengine's own shared memory does not need it)", **facts)


def _cpu_quota() -> float:
    """Cores that the container may use, by the tightest quota above this process; infinity without one."""
    quotas = []
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / "cpu" if controllers else CGROUPS
        here = root / path.strip("/")
        for directory in (one for one in (here, *here.parents) if one.is_relative_to(root)):
            quota, _, period = read_text(directory / "cpu.max").partition(" ")  # cgroup v2
            if not quota:
                quota, period = read_text(directory / "cpu.cfs_quota_us"), read_text(directory / "cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # without a quota v2 has "max", v1 -1
                quotas.append(int(quota) / int(period))
    return min(quotas, default=math.inf)
