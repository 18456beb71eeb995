"""On what a benchmark was measured; each ``run.py`` puts this folder on its path."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_machine(*circumstances: str) -> str:
    """Describe CPU, cores, load, versions and what else the figures depend on in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    software = ", ".join([f"Python {platform.python_version()}", f"torch {torch.__version__}", *circumstances])
    return f"{model}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start; {software}"
