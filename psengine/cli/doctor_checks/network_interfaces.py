"""The machine's network interfaces and their addresses, from the C library; no packets are sent."""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from psengine.cli.doctor_checks.findings import read_text

_UP, _LOOPBACK = 0x1, 0x8


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as eth0.
        addresses: IPv4 and IPv6, without scope.
        is_up, is_loopback: what the kernel says.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    is_loopback: bool

    @property
    def speed_bytes_per_s(self) -> float | None:
        """What the card says it can; None where it does not."""
        text = read_text(f"/sys/class/net/{self.name}/speed")
        return int(text) * 1e6 / 8 if text.isdecimal() and int(text) > 0 else None


class _SocketAddress(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _InterfaceAddress(ctypes.Structure):
    pass


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def list_interfaces() -> list[Interface]:
    """All interfaces, in the kernel's order.

    Raises:
        OSError: this C library has no getifaddrs, or it failed.
    """
    flags: dict[str, int] = {}
    addresses: dict[str, list[str]] = {}
    for name, its_flags, address in _entries():
        flags[name] = its_flags
        addresses.setdefault(name, [])
        if address:
            addresses[name].append(address)
    return [
        Interface(name, tuple(addresses[name]), bool(flags[name] & _UP), bool(flags[name] & _LOOPBACK))
        for name in flags
    ]


def interface_of(address: str) -> Interface | None:
    """The interface that has this address; None where none has, or they cannot be listed."""
    try:
        return next((one for one in list_interfaces() if address.partition("%")[0] in one.addresses), None)
    except OSError:
        return None


def _entries() -> Iterator[tuple[str, int, str]]:
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if not hasattr(library, "getifaddrs") or library.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        entry = first
        while entry:
            found = entry.contents
            yield found.name.decode(errors="replace"), found.flags, _text_of(found.address)
            entry = found.next
    finally:
        library.freeifaddrs(first)


def _text_of(address: ctypes._Pointer[_SocketAddress]) -> str:
    if not address:
        return ""
    family, data = address.contents.family, bytes(address.contents.data)
    if family == socket.AF_INET:  # port, then the address
        return socket.inet_ntop(family, data[2:6])
    if family == socket.AF_INET6:  # port, flow information, then the address
        return socket.inet_ntop(family, data[6:22])
    return ""
