"""Versions, the native extension, GPUs, threads, /dev/shm and the host's name, as this process may use them."""

from __future__ import annotations

import functools
import ipaddress
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import collect_env

import psengine
from psengine.cli.doctor_checks.findings import CheckContext, Finding, Level, read_text
from psengine.environment import installation
from psengine.kernels import native, ops
from psengine.specification import Specification
from psengine.version import __version__

CGROUPS = Path("/sys/fs/cgroup")
MIN_SHARED_MEMORY_BYTES = 256 << 20
GET_TORCH = "install a torch for this GPU and driver: https://pytorch.org/get-started/locally"

_torchs_report = functools.cache(collect_env.get_env_info)


def versions(context: CheckContext) -> Iterator[Finding]:
    """Where psengine lies, torch, Python, the system."""
    found = _torchs_report()
    yield Finding(
        "ok",
        f"psengine {__version__} in {Path(psengine.__file__).parent}, torch {found.torch_version}, Python"
        f" {found.python_version.split()[0]}, {found.os}, {found.libc_version}",
    )


def native_extension(context: CheckContext) -> Iterator[Finding]:
    """Whether the C++ kernels and the shared-memory collective are there."""
    if native.extension is None:
        yield Finding(
            "warning",
            f"the native extension is not loaded ({native.reason}): kernels are plain torch, ranks"
            " of one host exchange over gloo instead of shared memory, and the codecs int8, fp4 and onebit are missing",
            f"{installation.BUILD_COMMAND}, with a C++ compiler",
        )
    else:
        yield Finding("ok", f"the native extension is loaded, with {ops.native_kernels()} kernels")


def cuda(context: CheckContext) -> Iterator[Finding]:
    """GPUs, the driver, and whether this torch can use them, and nccl."""
    found = _torchs_report()
    cards = "; ".join((found.nvidia_gpu_models or "none").splitlines())
    text = f"GPUs: {cards}; driver {found.nvidia_driver_version}; torch is built for CUDA {torch.version.cuda}"
    if cards == "none" or (torch.cuda.is_available() and dist.is_nccl_available()):
        yield Finding("ok", text)
    else:
        text += "; torch cannot use them" if not torch.cuda.is_available() else "; torch has no nccl"
        fix = f"unset CUDA_VISIBLE_DEVICES, update the driver, start the container with --gpus all, or {GET_TORCH}"
        is_hidden = context.variables.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
        yield Finding("warning" if is_hidden else "problem", text, fix)


def threads(context: CheckContext) -> Iterator[Finding]:
    """How many threads the ranks of this host compute with, against the cores that they may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(float(allowed), _cpu_quota())
    ranks = context.number("LOCAL_WORLD_SIZE") or 1
    strategy = Specification.parse("strategy", context.variables.get("PSENGINE_STRATEGY", "").strip() or "sync")
    # With virtual workers, bits depend on the number of threads, so it depends on no number of ranks.
    shares = max(ranks, int(str(strategy.written.get("virtual_workers", ranks))))
    fair = f"set OMP_NUM_THREADS={max(1, int(usable) // shares)}"
    given = context.variables.get("OMP_NUM_THREADS", "").strip()
    text = f"ranks here: {ranks}, threads of each: {torch.get_num_threads()}, cores: {usable:g} of {os.cpu_count()}"
    if given and not given.split(",")[0].lstrip("0").isdecimal():
        yield Finding("problem", f"OMP_NUM_THREADS={given!r} is no number of threads: libraries ignore it", fair)
    elif torch.get_num_threads() * ranks > max(1, math.ceil(usable)):
        yield Finding("warning", f"{text}; the ranks take the cores from each other", fair)
    else:
        yield Finding("ok", text)


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
    state = os.statvfs("/dev/shm")
    size, free = state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail
    text = f"/dev/shm: {free >> 20} MiB free of {size >> 20} MiB"
    if free >= MIN_SHARED_MEMORY_BYTES and os.access("/dev/shm", os.W_OK):
        yield Finding("ok", text)
    else:
        fix = "start the container with --shm-size=8g or --ipc=host, or remove files that dead processes left there"
        yield Finding("warning", f"{text}, too little or not writable: DataLoader's workers die with 'Bus error'", fix)


def hostname(context: CheckContext) -> Iterator[Finding]:
    """The interface of GLOO_SOCKET_IFNAME, else what this host's name resolves to: gloo tells it to the other ranks."""
    name, chosen = socket.gethostname(), context.variables.get("GLOO_SOCKET_IFNAME", "").strip()
    # Loopback's state is "unknown".
    up = [one for _, one in socket.if_nameindex() if read_text(f"/sys/class/net/{one}/operstate") != "down"]
    other = next((one for one in up if one != "lo"), "INTERFACE")
    fix = f"set GLOO_SOCKET_IFNAME={other} on every host, or let /etc/hosts name the address that the others use"
    if chosen:
        text = f"GLOO_SOCKET_IFNAME={chosen}; the interfaces that are up: {', '.join(up)}"
        is_good = chosen in up and not (chosen == "lo" and context.spans_hosts)
    else:
        addresses = addresses_of(name)
        text = f"this host's name, {name}, resolves to {', '.join(addresses) or 'nothing'}"
        is_good = bool(addresses) and all(map(_is_reachable, addresses))
    level: Level = "problem" if chosen or context.spans_hosts else "note"
    if is_good:
        yield Finding("ok", text)
    else:
        yield Finding(level, f"{text}: ranks on other hosts cannot connect to this one", fix)


def addresses_of(host: str) -> list[str]:
    """What a name resolves to; empty where it does not."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def _is_reachable(address: str) -> bool:
    """Whether an interface of this host has the address, and other hosts reach it."""
    ip = ipaddress.ip_address(address)
    try:
        with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return ip.is_link_local  # it needs its interface beside it
    return not ip.is_loopback
