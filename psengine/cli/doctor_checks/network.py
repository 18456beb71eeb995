"""The address that gloo tells the other ranks: of the interface it is told to take, else of this host's name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from psengine.cli.doctor_checks.findings import CheckContext, Finding, note, ok, problem, read_text, warning


def hostname(context: CheckContext) -> Iterator[Finding]:
    """What this host's name resolves to; and the interface of GLOO_SOCKET_IFNAME, which gloo takes instead."""
    name = socket.gethostname()
    up = [one for _, one in socket.if_nameindex() if _is_up(one)]
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


def _is_up(name: str) -> bool:
    """Whether the kernel can send there; True where it does not say. Loopback's state is "unknown"."""
    return read_text(f"/sys/class/net/{name}/operstate") != "down"


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
