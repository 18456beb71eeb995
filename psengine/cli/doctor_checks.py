"""What ``psengine doctor`` looks at, one function per check, and what a check is given and finds.

The machine: versions, the native extension, GPUs, threads, /dev/shm and the host's name, as this process may use them.
A training: the variables, a trial all-reduce of two processes, the parameter servers.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.utils import collect_env

import psengine
from psengine.cli import other_copy
from psengine.collectives.registry import COLLECTIVES, collective_for, default_group
from psengine.environment import installation
from psengine.environment.launchers import detect
from psengine.errors import PSEngineError
from psengine.kernels import native, ops
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.client import connect
from psengine.specification import Specification, did_you_mean
from psengine.strategies.registry import resolve_strategy
from psengine.verify.ranks import Place, RankFailedError, run_ranks
from psengine.version import __version__

Level = Literal["ok", "note", "warning", "problem"]
CGROUPS = Path("/sys/fs/cgroup")
MIN_SHARED_MEMORY_BYTES = 256 << 20
GET_TORCH = "install a torch for this GPU and driver: https://pytorch.org/get-started/locally"
_torchs_report = functools.cache(collect_env.get_env_info)
PREFIX = "PSENGINE_"
# After the prefix; the settings of psengine-server are names too.
KNOWN = (
    *(
        "ATTEMPT",
        "CLIENT_KEY",
        "CHECK_REPLICAS",
        "COLLECTIVE",
        "CONTINUE",
        "CUDA",
        "JOB",
        "METRICS_BIND",
        "METRICS_PORT",
    ),
    *("RUNTIME_DIR", "RUN_ID", "RUN_NAME", "RUN_THREADS", "SEGMENTS", "SERVERS", "SERVER_KEY", "STALL_S"),
    *("STRATEGY", "TRACEBACK", "TIMELINE", "TIMELINE_STEPS", "TIMELINE_SYNCHRONIZE", "WORKER", "WORKERS"),
)
DEADLINE_S = 35.0
# Two interpreters start for the exchange.
CHECK_DEADLINE_S = 45.0
LARGE_BYTES, ROUNDS = 4 << 20, 7


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: "ok"; "note", worth knowing; "warning", costs time or will fail later; "problem", training fails, or does
            not do what was asked for.
        text: what was found, with the numbers.
        fix: what to do about it; "" where there is nothing to do.
    """

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What checks look at besides the machine itself.

    Attributes:
        variables: the environment this process was started with.
        servers: addresses of parameter servers, instead of those of PSENGINE_SERVERS.
        timeout_s: deadline of one answer of a server.
    """

    variables: Mapping[str, str]
    servers: str | None = None
    timeout_s: float = 5.0

    @property
    def spans_hosts(self) -> bool:
        """Whether the launcher's variables say that there are ranks on other hosts."""
        world_size = self.number("WORLD_SIZE")
        return self.number("SLURM_NNODES") > 1 or world_size > self.number("LOCAL_WORLD_SIZE", world_size)

    def number(self, name: str, default: int = 0) -> int:
        """The value of a variable that consists of digits, else ``default``."""
        text = self.variables.get(name, "").strip()
        return int(text) if text.isdecimal() else default


def examine(name: str, context: CheckContext) -> list[Finding]:
    """What a check finds; a check that fails, or does not end in time, is a finding too."""
    check: Callable[[CheckContext], Iterator[Finding]] = globals()[name.replace("-", "_")]
    findings: list[Finding] = []

    def work() -> None:
        try:
            for finding in check(context):
                findings.append(finding)
        except Exception as error:
            text = f"this check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding("warning", text, "report it, with the output of psengine doctor --json"))

    # A daemon thread: a check that hangs must not keep the command from ending.
    thread = threading.Thread(target=work, name=f"psengine-doctor-{name}", daemon=True)
    thread.start()
    thread.join(CHECK_DEADLINE_S + 10 * context.timeout_s)
    if thread.is_alive():
        fix = "something that it asks does not answer: name servers, the network, the driver, or a very busy machine"
        findings.append(Finding("problem", "this check did not end", fix))
    return findings


def judged(is_good: bool, level: Level, text: str, trouble: str, fix: str) -> Finding:
    """What was found, and if it is not good, why, how bad, and what to do."""
    return Finding("ok", text) if is_good else Finding(level, f"{text}; {trouble}", fix)


def problem_of(error: Exception, fix: str, subject: str) -> Finding:
    """A problem in an error's own words, with the error's own fix where its message has one."""
    text, _, own_fix = str(error).partition(" Fix: ")
    return Finding("problem", f"{subject}: {text}", own_fix or fix)


def read_text(path: str | Path) -> str:
    """The text of a small file of /proc or /sys; "" where it cannot be read."""
    try:
        return Path(path).read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def versions(context: CheckContext) -> Iterator[Finding]:
    """Where psengine lies, torch, Python, the system."""
    found = _torchs_report()
    yield Finding(
        "ok",
        f"psengine {__version__} in {Path(psengine.__file__).parent}, torch {found.torch_version}, Python"
        f" {found.python_version.split()[0]}, {found.os}, {found.libc_version}",
    )
    text, _, fix = other_copy(".").partition(". Fix: ")
    if text:
        yield Finding("warning" if fix else "note", text, fix)


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
    is_usable = torch.cuda.is_available()
    is_good = cards == "none" or (is_usable and dist.is_nccl_available())
    trouble = "torch has no nccl" if is_usable else "torch cannot use them"
    fix = f"unset CUDA_VISIBLE_DEVICES, update the driver, start the container with --gpus all, or {GET_TORCH}"
    is_hidden = context.variables.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    yield judged(is_good, "warning" if is_hidden else "problem", text, trouble, fix)


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
    else:
        is_good = torch.get_num_threads() * ranks <= max(1, math.ceil(usable))
        yield judged(is_good, "warning", text, "the ranks take the cores from each other", fair)


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
    is_good = free >= MIN_SHARED_MEMORY_BYTES and os.access("/dev/shm", os.W_OK)
    fix = "start the container with --shm-size=8g or --ipc=host, or remove files that dead processes left there"
    trouble = "too little or not writable: DataLoader's workers die with 'Bus error'"
    yield judged(is_good, "warning", text, trouble, fix)


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
    yield judged(is_good, level, text, "ranks on other hosts cannot connect to this one", fix)


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


def launcher(context: CheckContext) -> Iterator[Finding]:
    """Where the launcher's variables place this process, as ``psengine.init`` would read them."""
    try:
        placement = detect(context.variables)
    except PSEngineError as error:
        yield problem_of(error, "correct the variables, or unset them", "launcher")
        return
    host = urlsplit(placement.init_method).hostname
    text = f"launcher: {placement.launcher}, rank {placement.rank} of {placement.world_size}"
    is_good = not host or bool(addresses_of(host))
    fix = "set MASTER_ADDR to a name or address of rank 0's host that every host knows"
    yield judged(is_good, "problem", text, f"the master's name {host} does not resolve", fix)


def variables(context: CheckContext) -> Iterator[Finding]:
    """PSENGINE_* variables: known by name; and those that every training reads have a value that can be read."""
    known = known_names()
    readers: dict[str, Callable[[str], object]] = {
        "PSENGINE_COLLECTIVE": COLLECTIVES.read,
        "PSENGINE_SERVERS": parse_addresses,
        "PSENGINE_STRATEGY": resolve_strategy,
    }
    given = sorted(name for name in context.variables if name.startswith(PREFIX))
    findings = []
    for name in given:
        value = context.variables[name].strip()
        if name not in known:
            fix = did_you_mean(name, known, 0.75).removeprefix(". ") or f"unset it; known are {', '.join(known)}"
            findings.append(Finding("problem", f"{name} is no variable of psengine, and is ignored", fix))
        elif name in readers and value:
            try:
                readers[name](value)
            except PSEngineError as error:
                findings.append(problem_of(error, f"correct {name}, or unset it", f"{name}={value!r}"))
    # Values may be secrets of the site; names are not.
    yield from findings or [Finding("ok", f"set: {', '.join(given) or 'none of psengine'}")]


def known_names() -> list[str]:
    """Every variable that psengine reads."""
    from psengine.parameter_server.server.settings import ServerSettings

    return sorted(PREFIX + name for name in {*KNOWN, *(name.upper() for name in ServerSettings.model_fields)})


def exchange(context: CheckContext) -> Iterator[Finding]:
    """Two processes connect here and sum 4 MiB, over gloo and in shared memory."""
    try:
        seconds, refusal = run_ranks(sum_as_rank, world_size=2, timeout_s=DEADLINE_S)[0]
    except RankFailedError as error:
        fix = "see hostname, or set GLOO_SOCKET_IFNAME to an interface that is up (lo will do on one host)"
        text = f"two processes of this host could not sum a tensor: {error}: {error.rank_traceback.strip()[-500:]}"
        yield Finding("problem", text, fix)
        return
    for transport, duration_s in seconds.items():
        yield Finding("ok", f"two processes over {transport} sum 4 MiB in {duration_s * 1e3:.2f} ms")
    if refusal:
        fix = "mount /proc without hidepid, allow memfd_create, put all ranks into one container; see native-extension"
        yield Finding("note", f"no shared memory, so ranks of one host exchange over gloo: {refusal}", fix)


def sum_as_rank(place: Place) -> tuple[dict[str, float], str]:
    """A rank of the trial: the shortest seconds of an all-reduce by transport; and why there is no shared memory."""
    torch.set_num_threads(1)
    own = torch.empty(LARGE_BYTES // 4)
    seconds = {"gloo": _shortest_s(place, own, lambda: dist.all_reduce(own))}
    try:
        shared = collective_for(default_group(), "shared_memory")
        shared.connect()
    except PSEngineError as error:
        return seconds, str(error)
    mapped = shared.allocate(LARGE_BYTES // 4, torch.float32, place.device)
    seconds["shared memory"] = _shortest_s(place, mapped, lambda: shared.sum(mapped))
    return seconds, ""


def _shortest_s(place: Place, own: torch.Tensor, add: Callable[[], object]) -> float:
    """Shortest seconds of ``add``, which sums ``own`` of both ranks; RuntimeError if the sum is wrong."""
    durations_s = []
    for _ in range(ROUNDS):
        own.fill_(place.rank + 1.0)
        dist.barrier()
        begin_s = time.perf_counter()
        add()
        durations_s.append(time.perf_counter() - begin_s)
        if not bool((own == 3.0).all()):
            raise RuntimeError(f"rank {place.rank}: the sum of a tensor is wrong")
    return min(durations_s)


def servers(context: CheckContext) -> Iterator[Finding]:
    """Each server accepts this client, which connects as a reader: that changes nothing; and how fast it answers."""
    named = context.servers or context.variables.get("PSENGINE_SERVERS", "")
    if not named:
        yield Finding("note", "no server is named, so none was tried", "--server-address tcp://host:port")
    for address in filter(None, named.split(",")):
        try:
            (address,) = parse_addresses(address)
            yield _measured(address, context.timeout_s)
        except PSEngineError as error:
            yield problem_of(error, "start psengine-server there, bound to an address that this host reaches", address)


def _measured(address: str, timeout_s: float) -> Finding:
    keys = keys_from_environment()
    with connect(address, role="reader", timeout_s=timeout_s, connect_timeout_s=timeout_s, keys=keys) as client:
        shards = client.status()
        round_trip_s = min(client.echo(8) for _ in range(ROUNDS))
        echo_s = min(client.echo(LARGE_BYTES) for _ in range(ROUNDS))
    software = shards[0]["server"]["software"]
    text = f"{address}: psengine-server {software} with {len(shards)} shards, {'with' if keys else 'without'} keys;"
    text += f" a round trip takes {round_trip_s * 1e3:.2f} ms, and 4 MiB there and back {echo_s * 1e3:.1f} ms"
    if software != __version__:
        fix = "install the same psengine on workers and servers"
        return Finding("warning", f"{text}; this side is {__version__}", fix)
    if shards[0]["server"]["durability"] == "memory":
        fix = "start it with --snapshot-dir DIRECTORY (and --durability log: no acknowledged update is lost)"
        return Finding("note", f"{text}; its durability is memory: when it ends, models of async jobs are lost", fix)
    return Finding("ok", text)
