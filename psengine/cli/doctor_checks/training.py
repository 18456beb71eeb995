"""What a training would meet: the variables, a trial all-reduce of two processes, the parameter servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from psengine.cli.doctor_checks.findings import CheckContext, Finding, problem_of
from psengine.cli.doctor_checks.machine import addresses_of
from psengine.collectives.registry import COLLECTIVES, collective_for, default_group
from psengine.environment.launchers import detect
from psengine.errors import PSEngineError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.client import connect
from psengine.specification import did_you_mean
from psengine.strategies.registry import resolve_strategy
from psengine.verify.ranks import Place, RankFailedError, run_ranks
from psengine.version import __version__

PREFIX = "PSENGINE_"
# After the prefix; the settings of psengine-server are names too.
KNOWN = (
    *("ATTEMPT", "CLIENT_KEY", "COLLECTIVE", "CONTINUE", "CUDA", "JOB", "METRICS_BIND", "METRICS_PORT"),
    *("RUNTIME_DIR", "RUN_ID", "RUN_NAME", "RUN_THREADS", "SEGMENTS", "SERVERS", "SERVER_KEY", "STALL_S"),
    *("STRATEGY", "TRACEBACK", "TIMELINE", "TIMELINE_STEPS", "TIMELINE_SYNCHRONIZE", "WORKER", "WORKERS"),
)
DEADLINE_S = 35.0
LARGE_BYTES, ROUNDS = 4 << 20, 7


def launcher(context: CheckContext) -> Iterator[Finding]:
    """Where the launcher's variables place this process, as ``psengine.init`` would read them."""
    try:
        placement = detect(context.variables)
    except PSEngineError as error:
        yield problem_of(error, "correct the variables, or unset them", "launcher")
        return
    host = urlsplit(placement.init_method).hostname
    text = f"launcher: {placement.launcher}, rank {placement.rank} of {placement.world_size}"
    if host and not addresses_of(host):
        fix = "set MASTER_ADDR to a name or address of rank 0's host that every host knows"
        yield Finding("problem", f"{text}; the master's name {host} does not resolve", fix)
    else:
        yield Finding("ok", text)


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
