"""Threads, /dev/shm and the host's name, as this process may use them: a container often has less than its machine."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, read_text, warning

CGROUPS = Path("/sys/fs/cgroup")
MIN_SHARED_MEMORY_BYTES = 256 << 20


def threads(context: CheckContext) -> Iterator[Finding]:
    """How many threads the ranks of this host compute with, against the cores that they may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(float(allowed), _cpu_quota())
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
        fix = "set OMP_NUM_THREADS to the number of cores divided by the number of ranks"
        yield note(f"{text}; OMP_NUM_THREADS is not set", fix, **facts)
    else:
        yield ok(text, **facts)


def _cpu_quota() -> float:
    """Cores that the container may use, by the tightest quota above this process (cgroup v2); infinity without one."""
    quotas = [math.inf]
    _, _, path = read_text("/proc/self/cgroup").rpartition("0::")
    here = CGROUPS / path.strip("/")
    for directory in (here, *here.parents):
        quota, _, period = read_text(directory / "cpu.max").partition(" ")
        if quota.isdecimal():  # without a quota: "max"
            quotas.append(int(quota) / int(period))
    return min(quotas)


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


def hostname(context: CheckContext) -> Iterator[Finding]:
    """What this host's name resolves to; and the interface of GLOO_SOCKET_IFNAME, which gloo takes instead."""
    name = socket.gethostname()
    # Loopback's state is "unknown".
    up = [one for _, one in socket.if_nameindex() if read_text(f"/sys/class/net/{one}/operstate") != "down"]
    proposed = next((one for one in up if one != "lo"), "<interface>")
    chosen = context.variables.get("GLOO_SOCKET_IFNAME", "").strip()
    if chosen:
        text, fix = f"GLOO_SOCKET_IFNAME={chosen}", f"GLOO_SOCKET_IFNAME={proposed}, or unset it"
        if chosen not in up:
            yield problem(f"{text}: there is no such interface, or it is down (up are {', '.join(up)})", fix)
        elif chosen == "lo" and context.spans_hosts:
            yield problem(f"{text}: other hosts do not reach a loopback interface", fix)
        else:
            yield ok(text)
    needs_others = context.spans_hosts and not chosen
    use = f"set GLOO_SOCKET_IFNAME={proposed} on every host, or"
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        yield (problem if needs_others else warning)(
            f"this host's name, {name}, does not resolve ({error.strerror or error}): gloo falls back to loopback, and"
            " ranks on other hosts cannot reach it",
            f"{use} add '<address> {name}' to /etc/hosts",
        )
        return
    addresses = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
    foreign = [address for address in addresses if not _is_ours(address)]
    text = f"this host's name, {name}, resolves to {', '.join(addresses)}"
    if foreign:
        yield (problem if needs_others else warning)(
            f"{text}; no interface of this host has {', '.join(foreign)}", f"{use} correct /etc/hosts or the DNS entry"
        )
    elif all(ipaddress.ip_address(address).is_loopback for address in addresses):
        yield (problem if needs_others else note)(
            f"{text}: enough for one host, but ranks on other hosts would be told to connect to themselves",
            f"for several hosts, {use} let /etc/hosts name the address that the others use",
        )
    else:
        yield ok(text, addresses=addresses)


def _is_ours(address: str) -> bool:
    """Whether a socket can listen at the address, which is what gloo tries."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        # A link-local address needs its interface beside it, and is never another host's.
        return ipaddress.ip_address(address).is_link_local
    return True
