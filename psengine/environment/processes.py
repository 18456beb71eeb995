"""Processes of this host and their memory, as Linux shows them."""

from __future__ import annotations

import functools
import os
import signal
from mmap import PAGESIZE
from pathlib import Path

import torch

# ``timeout`` signals its child, and then its group; wrappers forward what the group got. Such a stop comes twice.
SAME_STOP_S = 2.0


@functools.cache
def share_of_cores(processes: int) -> int:
    """Threads for each of so many processes: the cores that this one may use, shared out; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def machine_memory_bytes() -> int:
    """What this machine, or the container, has."""
    limits = [PAGESIZE * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max"
    return min(limits)


def resident_bytes() -> int:
    """Resident memory of this process alone, without what it shares with others; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * PAGESIZE
    except (OSError, ValueError):
        return 0


def process_table() -> str:
    """A word for the processes that this one can see by number: the same in another process if, and only if, process
    numbers mean the same there. Hosts and containers may have a name in common. Empty where Linux does not say.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_state(process_id: int) -> str | None:
    """The letter of a process's state as Linux gives it, such as "T" for stopped; None where there is none."""
    try:
        # The state follows the command name, which may itself hold spaces and parentheses (man 5 proc).
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def end_with_parent() -> None:
    """Let Linux kill this process as soon as its parent ends."""
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]


def has_exited(process_id: int) -> bool:
    """Whether a process is gone, or a zombie: dead, not yet reaped by its parent."""
    return process_state(process_id) in (None, "Z", "X")
