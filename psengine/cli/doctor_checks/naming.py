"""What this host calls itself, and which interface gloo and NCCL will take."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, warning
from psengine.cli.doctor_checks.network_interfaces import Interface, list_interfaces

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def hostname(circumstances: Circumstances) -> Iterator[Finding]:
    """What this host's name resolves to: the address that gloo tells the other ranks, unless an interface is named."""
    name = socket.gethostname()
    grade = problem if circumstances.spans_hosts and "GLOO_SOCKET_IFNAME" not in circumstances.variables else warning
    use = f"set GLOO_SOCKET_IFNAME={_proposed_interface()} on every host, or"
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        yield grade(
            f"this host's name, {name}, does not resolve ({error.strerror or error}): gloo falls back to loopback, and"
            " ranks on other hosts cannot reach it",
            f"{use} add '<address> {name}' to /etc/hosts",
            hostname=name,
        )
        return
    addresses = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
    facts = {"hostname": name, "addresses": addresses}
    foreign = [address for address in addresses if not _is_ours(address)]
    text = f"this host's name, {name}, resolves to {', '.join(addresses)}"
    if foreign:
        yield grade(
            f"{text}; no interface of this host has {', '.join(foreign)}",
            f"{use} correct /etc/hosts or the DNS entry",
            **facts,
        )
    elif all(ipaddress.ip_address(address).is_loopback for address in addresses):
        text += ": enough for one host, but ranks on other hosts would be told to connect to themselves"
        fix = f"for several hosts, {use} let /etc/hosts name the address that the others use"
        yield problem(text, fix, **facts) if grade is problem else note(text, fix, **facts)
    else:
        yield ok(text, **facts)


def interfaces(circumstances: Circumstances) -> Iterator[Finding]:
    """The interfaces there are, and whether the variables name some of them."""
    try:
        found = list_interfaces()
    except OSError as error:
        yield note(f"the network interfaces cannot be listed here ({error})")
        return
    usable = [one for one in found if one.is_up and one.addresses]
    listed = ", ".join(f"{one.name} ({one.addresses[0]})" for one in usable)
    yield ok(f"interfaces: {listed or 'none is up'}", interfaces={one.name: list(one.addresses) for one in usable})
    for name in INTERFACE_VARIABLES:
        value = circumstances.variables.get(name, "").strip()
        if value:
            yield _judge_choice(name, value, found, circumstances)


def _judge_choice(variable: str, value: str, found: list[Interface], circumstances: Circumstances) -> Finding:
    chosen, unknown = _chosen(variable, value, found)
    proposal = f"{variable}={_proposed_interface()}, or unset it"
    facts = {variable: value, "chosen": [one.name for one in chosen]}
    if unknown:
        names = ", ".join(one.name for one in found)
        return problem(f"{variable}={value}: there is no interface {', '.join(unknown)} (there are {names})", proposal)
    down = [one.name for one in chosen if not one.is_up or not one.addresses]
    if down:
        return problem(f"{variable}={value}: {', '.join(down)} is down or has no address", proposal, **facts)
    if circumstances.spans_hosts and all(one.is_loopback for one in chosen):
        return problem(f"{variable}={value}: other hosts do not reach a loopback interface", proposal, **facts)
    return ok(f"{variable}={value}: {', '.join(one.name for one in chosen)}", **facts)


def _chosen(variable: str, value: str, found: list[Interface]) -> tuple[list[Interface], list[str]]:
    """The interfaces that a variable names, and what it names that is not there."""
    exact = not variable.startswith("NCCL") or value.startswith("=")
    excludes = variable.startswith("NCCL") and value.startswith("^")
    names = [name.strip() for name in value.lstrip("^=").split(",") if name.strip()]

    def is_named(one: Interface, name: str) -> bool:
        return one.name == name if exact else one.name.startswith(name)  # NCCL takes prefixes

    if excludes:
        left = [one for one in found if one.is_up and one.addresses and not any(is_named(one, name) for name in names)]
        return left, [] if left else ["left"]
    unknown = [name for name in names if not any(is_named(one, name) for one in found)]
    return [one for one in found if any(is_named(one, name) for name in names)], unknown


def _proposed_interface() -> str:
    """The first interface that other hosts might reach."""
    try:
        candidates = [one.name for one in list_interfaces() if one.is_up and one.addresses and not one.is_loopback]
    except OSError:
        candidates = []
    return candidates[0] if candidates else "<interface>"


def _is_ours(address: str) -> bool:
    """Whether a socket can listen at it, which is what gloo tries."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        # A link-local address needs its interface beside it; it is ours or nobody's.
        return ipaddress.ip_address(address).is_link_local
    return True
