"""Cores, threads and memory, as this process may use them: a container often has less than its machine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, read_text, size_text, warning

CGROUPS = Path("/sys/fs/cgroup")
# A limit above this is none: cgroup v1 writes the largest page-aligned number.
NO_LIMIT_BYTES = 1 << 60
LITTLE_MEMORY_BYTES = 1 << 30
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def cores(circumstances: Circumstances) -> Iterator[Finding]:
    """How many cores there are, and how many of them this process may use."""
    logical = os.cpu_count() or 1
    physical = _physical_cores() or logical
    usable, allowed, quota = _usable_cores()
    facts = {"logical": logical, "physical": physical, "affinity": allowed, "quota": quota, "usable": usable}
    text = f"{physical} physical and {logical} logical cores; this process may use {usable:g}"
    if usable < 1:
        yield warning(f"{text}: less than one", "give the container more: docker run --cpus=N", **facts)
    elif usable < logical:
        reason = f"affinity allows {allowed}" if allowed < logical else f"the container's quota is {quota:g}"
        yield note(f"{text} ({reason})", "start so many ranks, not one for each core of the machine", **facts)
    else:
        yield ok(text, **facts)


def threads(circumstances: Circumstances) -> Iterator[Finding]:
    """How many threads each rank computes with; with more threads than cores, all of them wait for each other."""
    usable, _, _ = _usable_cores()
    ranks = circumstances.number("LOCAL_WORLD_SIZE") or 1
    found: dict[str, int] = {}
    for name in THREAD_VARIABLES:
        text = circumstances.variables.get(name)
        if text is None or not text.strip():
            continue
        if not re.fullmatch(r"\s*[1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*", text):
            yield problem(
                f"{name} is no number of threads (expected a positive integer, got {text!r}), so it counts for nothing",
                f"set {name}={max(1, int(usable) // ranks)}, or unset it",
                **{name: text},
            )
        else:
            found[name] = int(text.split(",")[0])
    per_rank = found.get("OMP_NUM_THREADS", torch.get_num_threads())
    facts = {"torch_threads": torch.get_num_threads(), "ranks": ranks, **found}
    fair = max(1, int(usable) // ranks)
    several = (
        f"{ranks} ranks here with {per_rank} threads each"
        if ranks > 1
        else f"{per_rank} thread{'s' if per_rank != 1 else ''} a rank"
    )
    if per_rank * ranks > max(1, math.ceil(usable)):
        yield warning(
            f"{several}, on {usable:g} cores: they take them from each other", f"OMP_NUM_THREADS={fair}", **facts
        )
    elif "OMP_NUM_THREADS" in found:
        yield ok(f"OMP_NUM_THREADS={per_rank}: {several}, on {usable:g} cores", **facts)
    elif "OMP_NUM_THREADS" not in circumstances.variables:
        yield note(
            f"OMP_NUM_THREADS is not set: a process computes with {per_rank} threads, and N of them with N times as"
            " many (torchrun sets 1 where it starts several)",
            "set OMP_NUM_THREADS to the number of cores divided by that of ranks",
            **facts,
        )


def memory(circumstances: Circumstances) -> Iterator[Finding]:
    """How much memory there is, and how much of it the container may have."""
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text("/proc/meminfo"), re.MULTILINE))
    if "MemTotal" not in lines:
        yield note("how much memory there is cannot be read here (no /proc/meminfo)")
        return
    total, available = int(lines["MemTotal"]) * 1024, int(lines.get("MemAvailable", 0)) * 1024
    limit, used = _memory_limit()
    text = f"{size_text(total)} of memory, {size_text(available)} available"
    facts = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    if limit is not None and limit < total:
        text += f"; the container may have {size_text(limit)}, and has {size_text(used)}"
        available = min(available, max(0, limit - used))
    needed = 0 if circumstances.model_bytes is None else 4 * circumstances.model_bytes
    if needed > available:
        yield problem(
            f"{text}; a rank needs about {size_text(needed)} for parameters, gradients and Adam's state",
            "a smaller model, fewer ranks on this host, or more memory",
            **facts,
        )
    elif available < LITTLE_MEMORY_BYTES:
        yield warning(f"{text}: little for training", "end other programs, or raise the container's limit", **facts)
    else:
        yield ok(text, **facts)


def _usable_cores() -> tuple[float, int, float | None]:
    """Cores this process may use, those its affinity allows, and the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cpu_quota()
    return (allowed if quota is None else min(float(allowed), quota)), allowed, quota


def _physical_cores() -> int:
    """From /proc/cpuinfo; 0 where that does not say."""
    places = set()
    for block in read_text("/proc/cpuinfo").split("\n\n"):
        fields = dict(re.findall(r"^(physical id|core id)\s*:\s*(\d+)", block, re.MULTILINE))
        if "core id" in fields:
            places.add((fields.get("physical id"), fields["core id"]))
    return len(places)


def _cgroup_directories(controller: str) -> Iterator[Path]:
    """Where this process's limits are, innermost first: of cgroup v2, or of a controller of v1."""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        here = root / path.strip("/")
        yield from (directory for directory in (here, *here.parents) if directory.is_relative_to(root))


def _cpu_quota() -> float | None:
    quotas = []
    for directory in _cgroup_directories("cpu"):
        quota, _, period = read_text(directory / "cpu.max").partition(" ")  # v2
        if not quota:
            quota, period = read_text(directory / "cpu.cfs_quota_us"), read_text(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # v2 writes "max", v1 -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limit() -> tuple[int | None, int]:
    """The tightest limit on this process's container and what is in use there; None and 0 without one."""
    limits = []
    for directory in _cgroup_directories("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = read_text(directory / limit_name), read_text(directory / used_name)
            if limit.isdecimal() and int(limit) < NO_LIMIT_BYTES:
                limits.append((int(limit), int(used) if used.isdecimal() else 0))
    return min(limits, default=(None, 0))
