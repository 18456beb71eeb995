"""Carries packets between emulated hosts with a delay and a rate: what netem does, where the kernel lacks it.

    python relay.py RATE_BITS_PER_S ONE_WAY_S MTU PREFIX PID=ADDRESS ...

Every host has a TUN device instead of a network card. This process holds the other ends::

    host 0 ── tun0 ══ uplink at RATE ─ queue ─ ONE_WAY_S ─ downlink at RATE ─ queue ══ tun0 ── host 1

A queue holds 100 ms at RATE, at least QUEUE_BYTES; what comes while it is full is dropped, so TCP slows down as on a
real link. Lines of the input: "cut 0" and "mend 0", each answered by "ok"; the devices end with this process, and it
ends with its input.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

QUEUE_S = 0.1
QUEUE_BYTES = 64 * 1024
# linux/if_tun.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKETS_AT_ONCE = 32


def open_device(pid: int, address: str, prefix: str, mtu: int) -> int:
    """Make tun0 in the network of process ``pid``; return the other end. This process then is in that network."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
    finally:
        os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
    set_up = f"addr add {address}/{prefix} dev tun0\nlink set tun0 mtu {mtu} up\n"
    subprocess.run(["ip", "-batch", "-"], input=set_up, text=True, check=True, timeout=20)
    return device


class Link:
    """A host's link, both ways. Times are those of the monotonic clock."""

    def __init__(self, device: int, bytes_per_s: float) -> None:
        self.device = device
        self.is_cut = False
        self._bytes_per_s = bytes_per_s
        self._longest_s = max(QUEUE_S, QUEUE_BYTES / bytes_per_s)
        self._free_s = {"up": 0.0, "down": 0.0}

    def queue(self, way: str, now_s: float, size_bytes: int) -> float | None:
        """When a packet that comes now has passed the link; None where it is dropped."""
        begin_s = max(now_s, self._free_s[way])
        if self.is_cut or begin_s - now_s > self._longest_s:
            return None
        self._free_s[way] = begin_s + size_bytes / self._bytes_per_s
        return self._free_s[way]


class Relay:
    """Packets under way, by the time at which something happens to them next."""

    def __init__(self, links: dict[bytes, Link], one_way_s: float) -> None:
        self._links = links
        self._one_way_s = one_way_s
        self._pending: list[tuple[float, int, bool, Link, bytes]] = []
        self._count = 0

    def take(self, source: Link) -> None:
        """Read what the host has sent."""
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(source.device, 65536)
            except BlockingIOError:
                return
            # An IPv4 packet with its addresses; hosts also send IPv6's multicasts.
            target = self._links.get(packet[16:20]) if len(packet) >= 20 and packet[0] >> 4 == 4 else None
            passed_s = None if target is None else source.queue("up", time.monotonic(), len(packet))
            if target is not None and passed_s is not None:
                self._add(passed_s + self._one_way_s, False, target, packet)

    def deliver(self) -> float | None:
        """Do what is due; return the seconds until more is, or None."""
        while self._pending:
            due_s, _, has_passed, target, packet = self._pending[0]
            now_s = time.monotonic()
            if due_s > now_s:
                return due_s - now_s
            heapq.heappop(self._pending)
            if not has_passed:
                passed_s = target.queue("down", due_s, len(packet))
                if passed_s is not None:
                    self._add(passed_s, True, target, packet)
            elif not target.is_cut:
                try:
                    os.write(target.device, packet)
                except OSError:
                    continue  # the device is down, or its queue is full: the packet is lost
        return None

    def _add(self, due_s: float, has_passed: bool, target: Link, packet: bytes) -> None:
        self._count += 1  # packets of one moment keep their order
        heapq.heappush(self._pending, (due_s, self._count, has_passed, target, packet))


def main() -> None:
    bits_per_s, one_way_s, mtu, prefix, *hosts = sys.argv[1:]
    links = {}
    for host in hosts:
        pid, _, address = host.partition("=")
        device = open_device(int(pid), address, prefix, int(mtu))
        links[bytes(map(int, address.split(".")))] = Link(device, float(bits_per_s) / 8)
    in_order = list(links.values())
    by_device = {link.device: link for link in in_order}
    relay = Relay(links, float(one_way_s))
    poller = select.epoll()
    for device in [0, *by_device]:
        poller.register(device, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        wait_s = relay.deliver()
        # epoll waits whole milliseconds; what remains below one is spent in select.
        if wait_s is not None and wait_s < 0.002:
            select.select([poller], [], [], wait_s)
            wait_s = 0
        for device, _ in poller.poll(wait_s):
            if device != 0:
                relay.take(by_device[device])
                continue
            line = sys.stdin.readline().split()
            if not line:
                return
            in_order[int(line[1])].is_cut = line[0] == "cut"
            print("ok", flush=True)


if __name__ == "__main__":
    main()
