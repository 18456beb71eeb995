"""The way to each parameter server: name, route, connection, handshake, round trip, bandwidth."""

from __future__ import annotations

import ipaddress
import os
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, warning
from psengine.cli.doctor_checks.network_interfaces import Interface, interface_of
from psengine.errors import (
    AuthenticationError,
    ConfigurationError,
    MissingExtraError,
    PSEngineError,
    ServerLostError,
)
from psengine.version import __version__

if TYPE_CHECKING:
    from psengine.parameter_server.client.client import Client

ROUND_TRIPS = 20
SMALL_BYTES, LARGE_BYTES, LARGE_ROUNDS = 8, 8 << 20, 5
SLOW_ROUND_TRIP_S = 0.02
# Bytes moved a second, both ways counted: loopback does 2 GB/s and more; CURVE encrypts at about 0.4.
SLOW_LOOPBACK, SLOW_WITH_KEYS, GIGABIT = 0.5e9, 0.1e9, 0.11e9
# What a card promises is not what a TCP stream gets.
SHARE_OF_LINK = 0.4


@dataclass(frozen=True)
class Route:
    """How packets leave towards a server.

    Attributes:
        local_address: what the server sees as the client's; "" where there is no route.
        interface: the one that has it.
    """

    local_address: str
    interface: Interface | None

    def __str__(self) -> str:
        """As people read it."""
        return f"{self.interface.name if self.interface else 'an unknown interface'} ({self.local_address})"


def servers(circumstances: Circumstances) -> Iterator[Finding]:
    """Each server: its name resolves, TCP connects, it lets this client in, and how fast it answers and carries."""
    if not circumstances.servers:
        yield note("no server is named, so none was tried", "psengine doctor --servers tcp://host:port")
        return
    for address in circumstances.servers:
        yield from _examine(address, circumstances)


def _examine(address: str, circumstances: Circumstances) -> Iterator[Finding]:
    route: Route | None = None
    if address.startswith("tcp://"):
        parts = urlsplit(address)
        resolved = _resolve(address, parts.hostname or "", parts.port or 0)
        if isinstance(resolved, Finding):
            yield resolved
            return
        reached = _connect(address, resolved, circumstances.timeout_s)
        yield reached
        if "connect_s" not in reached.facts:
            return
        route = _route_to(resolved)
    elif not os.path.exists(address.removeprefix("ipc://")):
        yield problem(f"{address}: there is no such socket", "start psengine-server --bind " + address, address=address)
        return
    yield from _talk(address, route, circumstances)


def _resolve(address: str, host: str, port: int) -> list[tuple[Any, ...]] | Finding:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return problem(
            f"{address}: the name {host} does not resolve ({error.strerror or error})",
            "correct the address, or add the name to DNS or /etc/hosts",
            address=address,
        )


def _connect(address: str, resolved: list[tuple[Any, ...]], timeout_s: float) -> Finding:
    family, _, _, _, target = resolved[0]
    route = _route_to(resolved)
    where = f"{target[0]} through {route}" if route.local_address else f"{target[0]}, to which there is no route"
    facts = {
        "address": address,
        "resolved": target[0],
        "local_address": route.local_address,
        "interface": route.interface.name if route.interface else None,
    }
    started_s = time.perf_counter()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(target)
            connect_s = time.perf_counter() - started_s
    except TimeoutError:
        fix = f"is the host up, and does a firewall let port {target[1]} through? Try from there: ss -ltn"
        return problem(f"{address}: no answer within {timeout_s:g} s from {where}", fix, **facts)
    except ConnectionRefusedError:
        fix = "start psengine-server there; it must --bind an address that this host reaches, not 127.0.0.1"
        return problem(f"{address}: nobody listens ({where})", fix, **facts)
    except OSError as error:
        fix = "correct the address, or the route to it"
        return problem(f"{address}: cannot be reached ({where}): {error.strerror or error}", fix, **facts)
    return ok(f"{address}: TCP connects to {where} in {connect_s * 1e3:.2f} ms", connect_s=connect_s, **facts)


def _route_to(resolved: list[tuple[Any, ...]]) -> Route:
    """Connecting a datagram socket sends nothing, and makes the kernel choose."""
    family, _, _, _, target = resolved[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            local_address = str(probe.getsockname()[0])
    except OSError:
        return Route("", None)
    return Route(local_address, interface_of(local_address))


def _talk(address: str, route: Route | None, circumstances: Circumstances) -> Iterator[Finding]:
    """Say HELLO as a reader, which works before any job exists and changes nothing."""
    from psengine.parameter_server.client.client import connect
    from psengine.parameter_server.client.options import keys_from_environment

    timeout_s = circumstances.timeout_s
    started_s = time.perf_counter()
    try:
        keys = keys_from_environment()
        client = connect(address, role="reader", timeout_s=timeout_s, connect_timeout_s=timeout_s, keys=keys)
    except MissingExtraError as error:
        text, _, fix = str(error).partition(" Fix: ")
        yield problem(f"{address}: {text}", fix, address=address)
        return
    except AuthenticationError as error:
        text, _, fix = str(error).partition(" Fix: ")
        yield problem(text if text.startswith(address) else f"{address}: {text}", fix, address=address)
        return
    except ServerLostError as error:
        fix = "is this a psengine-server at all, and is it stuck? Look at its log"
        yield problem(f"{address}: {error}", fix, address=address)
        return
    except PSEngineError as error:
        yield problem(f"{address}: {error}", "see docs/parameter_server.md, 'When something is wrong'", address=address)
        return
    with client:
        handshake_s = time.perf_counter() - started_s
        try:
            shards = client.status()
            yield _introduce(address, shards, handshake_s, has_keys=keys is not None)
            yield _judge_round_trip(address, *_round_trips(client), circumstances)
            yield _judge_bandwidth(address, client, route, circumstances, has_keys=keys is not None)
        except PSEngineError as error:
            yield problem(
                f"{address}: let this client in, and then failed: {error}", "look at its log", address=address
            )


def _introduce(address: str, shards: list[dict[str, Any]], handshake_s: float, *, has_keys: bool) -> Finding:
    software = next((str(shard["software"]) for shard in shards if shard.get("software")), None)
    text = f"{address}: psengine-server{' ' + software if software else ''} with {len(shards)} shard"
    text += f"{'s' if len(shards) != 1 else ''}, {'encrypted' if has_keys else 'in the clear'}, let us in after"
    text += f" {handshake_s * 1e3:.0f} ms"
    facts = {"address": address, "software": software, "handshake_s": handshake_s, "shards": len(shards)}
    if software is not None and software != __version__:
        return warning(
            f"{text}; this side is {__version__}", "install the same psengine on workers and servers", **facts
        )
    return ok(text, **facts)


def _round_trips(client: Client) -> tuple[float, str]:
    """Median seconds of a small question, and what was asked."""
    asks_echo = _echo(client, SMALL_BYTES) is not None
    times = []
    for _ in range(ROUND_TRIPS):
        started_s = time.perf_counter()
        if asks_echo:
            _echo(client, SMALL_BYTES)
        else:
            client.status()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times), "ECHO" if asks_echo else "STATUS"


def _judge_round_trip(address: str, seconds: float, asked: str, circumstances: Circumstances) -> Finding:
    text = f"{address}: a round trip takes {seconds * 1e3:.2f} ms (median of {ROUND_TRIPS} {asked}s)"
    facts = {"address": address, "round_trip_s": seconds, "asked": asked}
    if seconds > SLOW_ROUND_TRIP_S:
        fix = "place servers near the workers, or give a busy server cores of its own"
        return warning(f"{text}: every step waits at least so long", fix, **facts)
    return ok(text, **facts)


def _judge_bandwidth(
    address: str, client: Client, route: Route | None, circumstances: Circumstances, *, has_keys: bool
) -> Finding:
    times = [seconds for _ in range(LARGE_ROUNDS) if (seconds := _echo(client, LARGE_BYTES)) is not None]
    if not times:
        return note(
            f"{address}: the server is too old to send back what it gets, so its bandwidth was not measured",
            "install a newer psengine on the server",
            address=address,
        )
    seconds = statistics.median(times)
    speed = 2 * LARGE_BYTES / seconds
    text = f"{address}: {LARGE_BYTES >> 20} MiB there and back in {seconds * 1e3:.1f} ms ({speed / 1e9:.2f} GB/s)"
    facts = {"address": address, "bytes_per_s": speed, "echo_s": seconds}
    if circumstances.model_bytes is not None:
        step_s = circumstances.model_bytes / len(circumstances.servers) / LARGE_BYTES * seconds
        facts["step_s"] = step_s
        text += f"; its part of {circumstances.model_bytes / 1e6:g} MB: {step_s * 1e3:.0f} ms a step"
    expected, reason = _expected_speed(route, has_keys=has_keys)
    if speed < expected:
        return warning(
            f"{text}; expected {expected / 1e9:.2g} GB/s or more {reason}",
            "more shards (--shards) and servers share the load; end what else uses the machine or the line",
            **facts,
        )
    return ok(text, **facts)


def _expected_speed(route: Route | None, *, has_keys: bool) -> tuple[float, str]:
    """What a healthy connection of this kind reaches, in bytes moved a second, and why."""
    if has_keys:
        return SLOW_WITH_KEYS, "with encryption"
    is_near = route is None or ipaddress.ip_address(route.local_address.partition("%")[0]).is_loopback
    if is_near or route is None:
        return SLOW_LOOPBACK, "within one machine"
    link = route.interface.speed_bytes_per_s if route.interface else None
    if link is not None:
        return SHARE_OF_LINK * link, f"over {route.interface}, whose card says {link / 1e9:.3g}"
    return 0.5 * GIGABIT, "even over 1 Gbit/s, which carries 0.11"


def _echo(client: Client, size_bytes: int) -> float | None:
    """Seconds for so many bytes to go to the server's first shard and come back; None where it is too old for that."""
    try:
        return client.echo(size_bytes)
    except ConfigurationError:  # the size is within every server's bounds
        return None
