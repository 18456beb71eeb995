"""The environment: is a launcher's placement complete, and does every PSENGINE_* variable mean something?"""

from __future__ import annotations

import difflib
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, problem_of, warning
from psengine.collectives.registry import check_name
from psengine.environment.launchers import WORKER, WORKERS, detect, read_worker
from psengine.errors import PSEngineError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.strategies.registry import resolve_strategy

PREFIX = "PSENGINE_"
# Besides the settings of psengine-server, which are PSENGINE_ and the setting's name.
KNOWN = (
    "PSENGINE_CLIENT_KEY",
    "PSENGINE_COLLECTIVE",
    "PSENGINE_CONFIG",
    "PSENGINE_CUDA",
    "PSENGINE_JOB",
    "PSENGINE_METRICS_BIND",
    "PSENGINE_METRICS_PORT",
    "PSENGINE_RUNTIME_DIR",
    "PSENGINE_RUN_ID",
    "PSENGINE_SEGMENTS",
    "PSENGINE_SERVERS",
    "PSENGINE_SERVER_KEY",
    "PSENGINE_STALL_S",
    "PSENGINE_STATUS_CA",
    "PSENGINE_STRATEGY",
    "PSENGINE_TIMELINE",
    "PSENGINE_TIMELINE_STEPS",
    "PSENGINE_TIMELINE_SYNCHRONIZE",
    "PSENGINE_WORKER",
    "PSENGINE_WORKERS",
)
# How alike two names must be for one to be taken for a misspelling of the other.
ALIKE, ALIKE_WITHOUT_PREFIX = 0.75, 0.88


def launcher(context: CheckContext) -> Iterator[Finding]:
    """Where the launcher's variables place this process, as ``psengine.init`` would read them."""
    try:
        placement = detect(context.variables)
    except PSEngineError as error:
        yield problem_of(error, "correct the variables, or unset them")
        return
    if placement.launcher == "none":
        halves = [name for name in ("MASTER_ADDR", "MASTER_PORT") if context.variables.get(name, "").strip()]
        if halves:
            yield warning(
                f"{' and '.join(halves)} set, and RANK and WORLD_SIZE are not: a script would train alone",
                "start it with psengine run or torchrun, which set all of them, or unset these",
            )
        elif placement.note:
            yield note(placement.note)
        else:
            yield ok("no launcher: a script started here is a world of its own")
        return
    if placement.launcher == WORKER:
        worker, workers = read_worker(context.variables)
        if workers is None:
            yield warning(
                f"{WORKER} makes this process independent worker {worker}, of an unknown number",
                f"set {WORKERS} to the number of workers of the job; context.workers is an error without it",
            )
        else:
            yield ok(f"{WORKER} makes this process independent worker {worker} of {workers}")
        return
    where = f"{placement.launcher} places this process as rank {placement.rank} of {placement.world_size}"
    if not placement.init_method:
        yield ok(where)
        return
    url = urlsplit(placement.init_method)
    address, port = url.hostname, url.port
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield problem(
            f"{where}; the master's name {address} does not resolve ({error.strerror or error})",
            "set MASTER_ADDR to a name or address of rank 0's host that every host knows",
        )
    else:
        yield ok(f"{where}, meeting at {address}:{port}")


def variables(context: CheckContext) -> Iterator[Finding]:
    """PSENGINE_* variables: known by name; and those that every training reads have a value that can be read."""
    known = known_names()
    readers: dict[str, Callable[[str], object]] = {
        "PSENGINE_COLLECTIVE": check_name,
        "PSENGINE_SERVERS": parse_addresses,
        "PSENGINE_STRATEGY": resolve_strategy,
    }
    findings = []
    for name, value in context.variables.items():
        is_ours = name.startswith(PREFIX)
        cutoff = ALIKE if is_ours else ALIKE_WITHOUT_PREFIX
        close = [] if name in known else difflib.get_close_matches(name.upper(), known, n=1, cutoff=cutoff)
        if close or (is_ours and name not in known):
            fix = f"did you mean {close[0]}?" if close else f"unset it; known are {', '.join(known)}"
            findings.append(problem(f"{name} is no variable of psengine, and is ignored", fix))
        elif name in readers and value.strip():
            try:
                readers[name](value.strip())
            except PSEngineError as error:
                findings.append(problem_of(error, f"correct {name}, or unset it", f"{name}={value!r}"))
    given = sorted(name for name in context.variables if name.startswith(PREFIX))
    # Values may be secrets of the site; names are not.
    yield from findings or [ok(f"set: {', '.join(given)}" if given else "no PSENGINE_* variable is set")]


def known_names() -> list[str]:
    """Every variable that psengine reads."""
    from psengine.parameter_server.server.settings import ServerSettings

    return sorted({*KNOWN, *(PREFIX + name.upper() for name in ServerSettings.model_fields)})
