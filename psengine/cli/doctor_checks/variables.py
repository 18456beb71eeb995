"""The environment: is a launcher's placement complete, and does every PSENGINE_* variable mean something?"""

from __future__ import annotations

import difflib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, warning
from psengine.environment.launchers import detect
from psengine.errors import MissingExtraError, PSEngineError

PREFIX = "PSENGINE_"
# Besides the settings of psengine-server, which are PSENGINE_ and the setting's name.
KNOWN = (
    "PSENGINE_CLIENT_KEY",
    "PSENGINE_COLLECTIVE",
    "PSENGINE_CONFIG",
    "PSENGINE_CUDA",
    "PSENGINE_JOB",
    "PSENGINE_RUNTIME_DIR",
    "PSENGINE_RUN_ID",
    "PSENGINE_SERVERS",
    "PSENGINE_SERVER_KEY",
    "PSENGINE_STALL_S",
    "PSENGINE_STRATEGY",
    "PSENGINE_TIMELINE",
    "PSENGINE_TIMELINE_STEPS",
    "PSENGINE_WORKER",
)
# How alike two names must be for one to be taken for a misspelling of the other.
ALIKE, ALIKE_WITHOUT_PREFIX = 0.75, 0.88


def launcher(circumstances: Circumstances) -> Iterator[Finding]:
    """Where the launcher's variables place this process, as ``psengine.init`` would read them."""
    try:
        placement = detect(circumstances.variables)
    except PSEngineError as error:
        text, _, fix = str(error).partition(" Fix: ")
        yield problem(text, fix or "correct the variables, or unset them")
        return
    if placement.launcher == "none":
        halves = [name for name in ("MASTER_ADDR", "MASTER_PORT") if circumstances.variables.get(name, "").strip()]
        if halves:
            yield warning(
                f"{' and '.join(halves)} set, and RANK and WORLD_SIZE are not: a script would train alone",
                "start it with psengine run or torchrun, which set all of them, or unset these",
            )
        elif placement.note:
            yield note(placement.note)
        else:
            yield ok("no launcher: a script started here is a world of its own", launcher="none")
        return
    where = f"{placement.launcher} places this process as rank {placement.rank} of {placement.world_size}"
    if placement.master is None:
        yield ok(where, launcher=placement.launcher)
        return
    address, port = placement.master.address, placement.master.port
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield problem(
            f"{where}; the master's name {address} does not resolve ({error.strerror or error})",
            "set MASTER_ADDR to a name or address of rank 0's host that every host knows",
        )
    else:
        yield ok(f"{where}, meeting at {address}:{port}", launcher=placement.launcher)


def variables(circumstances: Circumstances) -> Iterator[Finding]:
    """PSENGINE_* variables: known by name, and with a value that can be read."""
    given = {name: value for name, value in circumstances.variables.items() if name.startswith(PREFIX)}
    known = known_names()
    has_trouble = False
    for name in circumstances.variables:
        close = _misspelt(name, known)
        if close is not None:
            has_trouble = True
            yield problem(
                f"{name} is no variable of psengine, and counts for nothing",
                f"did you mean {close}?" if close else f"unset it; known are {', '.join(known)}",
                variable=name,
            )
    for name, reason in _unreadable(given):
        has_trouble = True
        text, _, fix = reason.partition(" Fix: ")
        yield problem(f"{name}={given[name]!r}: {text}", fix or f"correct {name}, or unset it", variable=name)
    if not has_trouble:
        # Values may be secrets of the site; names are not.
        yield ok(
            f"set: {', '.join(sorted(given))}" if given else "no PSENGINE_* variable is set", variables=sorted(given)
        )


def known_names() -> list[str]:
    """Every variable that psengine reads."""
    from psengine.parameter_server.server.settings import describe_settings

    return sorted({*KNOWN, *(PREFIX + name.upper() for name in describe_settings())})


def _misspelt(name: str, known: list[str]) -> str | None:
    """None for a known variable or a stranger's; else the known one it resembles most, or ""."""
    if name in known:
        return None
    if name.startswith(PREFIX):
        return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)), "")
    return next(iter(difflib.get_close_matches(name.upper(), known, n=1, cutoff=ALIKE_WITHOUT_PREFIX)), None)


def _unreadable(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each variable whose value cannot be used, and the reason."""
    for name, read in _readers().items():
        if name in given and given[name].strip():
            try:
                read(given[name].strip())
            except MissingExtraError:
                continue  # that is what the check of packages says
            except PSEngineError as error:
                yield name, str(error)
            except ValueError as error:
                yield name, f"expected {error}"


def _readers() -> dict[str, Callable[[str], object]]:
    from psengine.collectives.registry import check_name
    from psengine.parameter_server.client.addresses import parse_addresses
    from psengine.parameter_server.server.settings import ServerSettings
    from psengine.protocol.keys import read_key_pair, read_public_key
    from psengine.strategies.registry import resolve_strategy

    return {
        "PSENGINE_CLIENT_KEY": read_key_pair,
        "PSENGINE_COLLECTIVE": check_name,
        "PSENGINE_SERVERS": parse_addresses,
        "PSENGINE_SERVER_KEY": read_public_key,
        "PSENGINE_STALL_S": _seconds,
        "PSENGINE_STRATEGY": resolve_strategy,
        "PSENGINE_TIMELINE_STEPS": _count,
        "PSENGINE_WORKER": _rank,
        **{PREFIX + setting.name.upper(): setting.metadata["parse"] for setting in fields(ServerSettings)},
    }


def _seconds(text: str) -> None:
    try:
        is_good = 0 <= float(text) < float("inf")
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("a number of seconds, 0 or more")


def _count(text: str) -> None:
    if not (text.isdecimal() and int(text) > 0):
        raise ValueError("a number of steps, 1 or more")


def _rank(text: str) -> None:
    if not (text.isdecimal() and int(text) < 65536):
        raise ValueError("a rank, 0 to 65535")
