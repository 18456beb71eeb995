"""The way to each parameter server: name, connection, handshake, round trip, bandwidth."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, problem_of, warning
from psengine.errors import PSEngineError, ServerLostError
from psengine.version import __version__

ROUND_TRIPS = 20
SMALL_BYTES, LARGE_BYTES, LARGE_ROUNDS = 8, 8 << 20, 5
SLOW_ROUND_TRIP_S = 0.02
# Bytes a second, both ways counted: loopback does 2e9 and more, CURVE encrypts at about 0.4e9, 1 Gbit/s is 0.11e9.
MIN_LOOPBACK, MIN_WITH_KEYS, MIN_NETWORK = 0.5e9, 0.1e9, 0.055e9


def servers(context: CheckContext) -> Iterator[Finding]:
    """Each server: its name resolves, TCP connects, it accepts this client, and how fast it answers."""
    if not context.servers:
        yield note("no server is named, so none was tried", "psengine doctor --server-address tcp://host:port")
    for address in context.servers:
        is_near = True
        if address.startswith("tcp://"):
            reached = _connect(address, context.timeout_s)
            yield reached
            if "connect_s" not in reached.facts:
                continue
            is_near = reached.facts["local_address"] == reached.facts["resolved"]
        elif not os.path.exists(address.removeprefix("ipc://")):
            yield problem(f"{address}: there is no such socket", f"start psengine-server --bind {address}")
            continue
        yield from _measure(address, is_near, context)


def _connect(address: str, timeout_s: float) -> Finding:
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 0
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return problem(
            f"{address}: the name {host} does not resolve ({error.strerror or error})",
            "correct the address, or add the name to DNS or /etc/hosts",
        )
    local_address = _local_address(family, target)
    where = f"{target[0]} from {local_address}" if local_address else f"{target[0]}, to which there is no route"
    facts = {"address": address, "resolved": target[0], "local_address": local_address}
    started_s = time.perf_counter()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(target)
    except TimeoutError:
        fix = f"is the host up, and does a firewall let port {port} through? Try from there: ss -ltn"
        return problem(f"{address}: no answer within {timeout_s:g} s from {where}", fix, **facts)
    except ConnectionRefusedError:
        fix = "start psengine-server there; it must --bind an address that this host reaches, not 127.0.0.1"
        return problem(f"{address}: nobody listens ({where})", fix, **facts)
    except OSError as error:
        fix = "correct the address, or the route to it"
        return problem(f"{address}: cannot be reached ({where}): {error.strerror or error}", fix, **facts)
    connect_s = time.perf_counter() - started_s
    return ok(f"{address}: TCP connects to {where} in {connect_s * 1e3:.2f} ms", connect_s=connect_s, **facts)


def _local_address(family: int, target: Any) -> str:
    """The address of this host towards the target; "" without a route. Connecting a datagram socket sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _measure(address: str, is_near: bool, context: CheckContext) -> Iterator[Finding]:
    """Connect as a reader, which works before any job exists and changes nothing."""
    from psengine.parameter_server.client.addresses import keys_from_environment
    from psengine.parameter_server.client.client import connect

    timeout_s = context.timeout_s
    try:
        keys = keys_from_environment()
        with connect(address, role="reader", timeout_s=timeout_s, connect_timeout_s=timeout_s, keys=keys) as client:
            shards = client.status()
            yield _introduce(address, shards, has_keys=keys is not None)
            if any(shard.get("durability") == "memory" for shard in shards):
                yield warning(
                    f"{address}: has durability memory; when it ends, the models of its async jobs are lost",
                    "start it with --snapshot-dir DIRECTORY (and --durability log: no acknowledged update is lost)",
                )
            round_trip_s = statistics.median(client.echo(SMALL_BYTES) for _ in range(ROUND_TRIPS))
            yield _judge_round_trip(address, round_trip_s)
            echo_s = statistics.median(client.echo(LARGE_BYTES) for _ in range(LARGE_ROUNDS))
            expected = MIN_WITH_KEYS if keys is not None else MIN_LOOPBACK if is_near else MIN_NETWORK
            yield _judge_bandwidth(address, echo_s, expected, context)
    except ServerLostError as error:
        yield problem_of(error, "is this a psengine-server, and does it hang? Look at its log", address)
    except PSEngineError as error:
        yield problem_of(error, "see docs/servers/reference.md, 'When something is wrong'", address)


def _introduce(address: str, shards: list[dict[str, Any]], *, has_keys: bool) -> Finding:
    software = next((str(shard["software"]) for shard in shards if shard.get("software")), None)
    text = f"{address}: psengine-server {software} with {len(shards)} shard{'s' if len(shards) != 1 else ''},"
    text += f" {'encrypted' if has_keys else 'in the clear'}, accepts this client"
    facts = {"address": address, "software": software, "shards": len(shards)}
    if software != __version__:
        fix = "install the same psengine on workers and servers"
        return warning(f"{text}; this side is {__version__}", fix, **facts)
    return ok(text, **facts)


def _judge_round_trip(address: str, seconds: float) -> Finding:
    text = f"{address}: a round trip takes {seconds * 1e3:.2f} ms (median of {ROUND_TRIPS})"
    if seconds > SLOW_ROUND_TRIP_S:
        fix = "place servers near the workers, or give a busy server cores of its own"
        return warning(f"{text}: every step waits at least so long", fix, round_trip_s=seconds)
    return ok(text, round_trip_s=seconds)


def _judge_bandwidth(address: str, echo_s: float, expected: float, context: CheckContext) -> Finding:
    speed = 2 * LARGE_BYTES / echo_s
    text = f"{address}: {LARGE_BYTES >> 20} MiB there and back in {echo_s * 1e3:.1f} ms ({speed / 1e9:.2f} GB/s)"
    facts = {"address": address, "bytes_per_s": speed, "echo_s": echo_s}
    if context.model_bytes is not None:
        step_s = context.model_bytes / len(context.servers) / LARGE_BYTES * echo_s
        facts["step_s"] = step_s
        text += f"; its part of {context.model_bytes / 1e6:g} MB: {step_s * 1e3:.0f} ms a step"
    if speed < expected:
        return warning(
            f"{text}; expected {expected / 1e9:.2g} GB/s or more",
            "more shards (--shards) and servers share the load; end what else uses the machine or the line",
            **facts,
        )
    return ok(text, **facts)
