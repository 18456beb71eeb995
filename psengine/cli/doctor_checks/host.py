"""What the operating system grants: shared memory, files, processes, a clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, read_text, size_text, warning

LITTLE_SHARED_MEMORY_BYTES = 256 << 20
FEW_FILES, TOO_FEW_FILES = 1024, 256
FEW_PROCESSES = 512
# Reading these costs a system call instead of some nanoseconds.
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
OTHER_PROCESS_TIMEOUT_S = 10.0
# Proves that it read what the other process wrote, and not some other file.
_OPEN_AND_READ = "import os, sys; d = os.open(sys.argv[1], os.O_RDWR); sys.stdout.write(os.pread(d, 64, 0).hex())"


def dev_shm(circumstances: Circumstances) -> Iterator[Finding]:
    """/dev/shm, through which DataLoader's workers hand over batches."""
    path = "/dev/shm"
    bigger = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory)"
    try:
        state = os.statvfs(path)
    except OSError as error:
        yield warning(f"{path} cannot be used ({error.strerror}): DataLoader(num_workers > 0) fails", bigger)
        return
    size, free = state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail
    text = f"{path}: {size_text(free)} free of {size_text(size)}"
    facts = {"size_bytes": size, "free_bytes": free}
    if not os.access(path, os.W_OK):
        yield warning(f"{text}, and not writable: DataLoader(num_workers > 0) fails", bigger, **facts)
    elif size < LITTLE_SHARED_MEMORY_BYTES:
        yield warning(f"{text}: little for DataLoader's workers, who die of it with 'Bus error'", bigger, **facts)
    elif free < size // 10:
        yield warning(f"{text}: nearly full", f"look for files that dead processes left: ls -l {path}", **facts)
    else:
        yield ok(f"{text} (for DataLoader's workers; psengine's own shared memory does not need it)", **facts)


def memory_sharing(circumstances: Circumstances) -> Iterator[Finding]:
    """Whether another process of this user can open an anonymous file of ours, as the shared-memory collective does."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        yield note("anonymous files (memfd) are Linux's alone: ranks of one host exchange over gloo")
        return
    over_gloo = "; ranks of one host exchange over gloo instead of shared memory"
    fix = (
        "let processes of one user see each other: mount /proc without hidepid, no seccomp filter on memfd_create, all"
        " ranks in one container and one user; or live with collective='c10d'"
    )
    try:
        descriptor = create("psengine-doctor")
    except OSError as error:
        yield warning(f"memfd_create is refused ({error.strerror}){over_gloo}", fix)
        return
    try:
        content = os.urandom(32)
        os.write(descriptor, content)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _OPEN_AND_READ, path],
            capture_output=True,
            text=True,
            timeout=OTHER_PROCESS_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield warning(f"a second process could not be tried: {error}", "see whether processes can be started at all")
        return
    finally:
        os.close(descriptor)
    facts = {"ptrace_scope": read_text("/proc/sys/kernel/yama/ptrace_scope") or None}
    if done.returncode == 0 and done.stdout == content.hex():
        yield ok("another process opened this one's memory through /proc: ranks of one host can share it", **facts)
    else:
        reason = (done.stderr.strip().splitlines() or ["it read something else"])[-1]
        yield warning(f"another process cannot open this one's memory ({reason}){over_gloo}", fix, **facts)


def limits(circumstances: Circumstances) -> Iterator[Finding]:
    """Open files, processes, locked memory and address space (ulimit)."""
    try:
        import resource
    except ImportError:
        yield note("limits of processes (ulimit) cannot be read here: this Python has no module resource")
        return
    files, files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"open files: {_count(files)} (may be raised to {_count(files_most)})"
    raise_files = f"ulimit -n {min(65536, files_most) if files_most > 0 else 65536}"
    if 0 <= files < FEW_FILES:
        why = "sockets, DataLoader's workers and shared tensors each take some"
        kind = problem if files < TOO_FEW_FILES else warning
        yield kind(
            f"{text}: too few; {why}", f"{raise_files} before starting (or LimitNOFILE= of the unit)", files=files
        )
    else:
        yield ok(text, files=files, files_most=files_most)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= processes < FEW_PROCESSES:
        yield warning(
            f"processes and threads of this user: {processes}; every rank has dozens", "ulimit -u 4096", most=processes
        )
    else:
        yield ok(f"processes and threads of this user: {_count(processes)}", processes=processes)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= locked < 64 << 20 and Path("/sys/class/infiniband").is_dir():
        yield warning(
            f"locked memory: {size_text(locked)}, too little for InfiniBand", "ulimit -l unlimited", locked_bytes=locked
        )
    else:
        text = "unlimited" if locked < 0 else size_text(locked)
        yield ok(f"locked memory: {text} (only InfiniBand and pinned memory ask for it)", locked_bytes=locked)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space >= 0:
        yield warning(
            f"address space: {size_text(space)}; CUDA and torch map far more than they use", "ulimit -v unlimited",
            address_space_bytes=space,
        )  # fmt: skip


def clock(circumstances: Circumstances) -> Iterator[Finding]:
    """Whether the time of day is sane, and the clock that deadlines use runs on."""
    now_s, installed_s = time.time(), Path(__file__).stat().st_mtime
    if now_s < installed_s - 86400:
        yield warning(
            f"this machine's date ({time.strftime('%Y-%m-%d', time.gmtime(now_s))}) lies before psengine was installed:"
            " certificates, logs and snapshots will be dated wrongly",
            "timedatectl set-ntp true",
        )
    first = time.monotonic()
    time.sleep(0.02)
    passed_s = time.monotonic() - first
    source = read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    facts = {"source": source or None, "unix_s": now_s}
    if passed_s <= 0:
        yield problem("the monotonic clock stands still: no deadline would ever pass", "restart the machine", **facts)
    elif source in SLOW_CLOCKS:
        yield warning(
            f"the clock is {source!r}, whose reading costs microseconds",
            "let the kernel use tsc (it may have judged it unstable: dmesg | grep -i tsc)",
            **facts,
        )
    else:
        date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
        yield ok(f"{date}; leases and deadlines use a monotonic clock ({source or 'of the system'})", **facts)


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
