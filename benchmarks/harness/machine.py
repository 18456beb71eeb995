"""On what a benchmark was measured, and what other programs did meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch

from psengine.version import __version__

CALM = 0.05  # of the machine's CPU time; above it, waiting for another process includes other programs' time slices


def describe_machine() -> dict[str, Any]:
    """CPU, cores, versions, load at the start."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "psengine": __version__,
        "kernel": os.uname().release,
    }


def sentence(machine: dict[str, Any], load: dict[str, float]) -> str:
    share = load["others"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} at the start; Python"
        f" {machine['python']}, torch {machine['torch']}, psengine {machine['psengine']}, Linux {machine['kernel']}."
        f" {load['elapsed_s']:.0f} s; meanwhile other programs took {share:.0%} of the CPU time"
        f" ({'a calm machine' if share <= CALM else 'NOT a calm machine: compare ratios, or measure again'})."
    )


class Load:
    """How much of the machine other programs take, from its making on."""

    def __init__(self) -> None:
        self._begin_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def so_far(self) -> dict[str, float]:
        """``others``: their part of all cores' time. A process that this one started must have been waited for."""
        elapsed_s = time.monotonic() - self._begin_s
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return {"others": max(0.0, others_s) / elapsed_s / (os.cpu_count() or 1), "elapsed_s": elapsed_s}


def _busy_s() -> float:
    """CPU seconds that all processes of the machine took so far (man 5 proc: user, nice, system)."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)
    return sum(int(fields[place]) for place in (1, 2, 3)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
