"""Namespaces, and the links between those of emulated hosts; see ``hosts.py``. Needs root."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.process_table import children_of

SET_UP_DEADLINE_S = 20.0
# A queue of 100 ms, and bursts of 512 kB: what a switch's port has.
_SHAPE = ("burst", "512kb", "latency", "100ms")
_PREFIX = 24
# The relay is a Python program: it carries 100 Mbit/s of large packets a host on part of a core.
MAX_RELAYED_MBIT_PER_S = 100.0
_LARGE_MTU, _MTU, _LARGE_FROM_MBIT_PER_S = 9000, 1500, 20.0


def relayed_mbit_per_s(rate: str | None, round_trip_s: float) -> float | None:
    """The rate of links that need the relay; None where the bridge does."""
    if not round_trip_s:
        return None
    mbit_per_s = float((rate or "").removesuffix("mbit"))
    assert 0 < mbit_per_s <= MAX_RELAYED_MBIT_PER_S, f"links with a delay have at most 100mbit, got {rate}"
    return mbit_per_s


@contextmanager
def bridge(ends: Sequence[tuple[int, str]], rate: str | None) -> Iterator[Callable[[int, str], None]]:
    """Connect hosts, given by process and address, over a bridge; yields what cuts and mends a host's link."""
    with namespaces(["--net"], ["sh", "-c", "echo ready; exec cat > /dev/null"]) as middle:
        run_ip(middle, "link add bridge type bridge", "link set bridge up")
        for index, (pid, address) in enumerate(ends):
            run_ip(
                middle,
                f"link add port{index} type veth peer name eth0 netns {pid}",
                f"link set port{index} master bridge up",
            )
            run_ip(pid, f"addr add {address}/{_PREFIX} dev eth0", "link set eth0 up")
            if rate is not None:
                for end, device in ((middle, f"port{index}"), (pid, "eth0")):
                    _in_network(end, ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *_SHAPE])
        yield lambda index, what: run_ip(middle, f"link set port{index} {'down' if what == 'cut' else 'up'}")


@contextmanager
def relay(ends: Sequence[tuple[int, str]], mbit_per_s: float, one_way_s: float) -> Iterator[Callable[[int, str], None]]:
    """As ``bridge``, by the program ``relay.py``."""
    mtu = _LARGE_MTU if mbit_per_s >= _LARGE_FROM_MBIT_PER_S else _MTU
    program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py"))]
    arguments = [f"{mbit_per_s * 1e6:g}", f"{one_way_s:g}", str(mtu), str(_PREFIX)]
    arguments += [f"{pid}={address}" for pid, address in ends]
    with _holding([*program, *arguments], "the relay between emulated hosts") as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def order(index: int, what: str) -> None:
            process.stdin.write(f"{what} {index}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline() == b"ok\n", "the relay has ended"

        yield order


@contextmanager
def namespaces(which: Sequence[str], first_process: Sequence[str]) -> Iterator[int]:
    """New namespaces, as unshare(1) names them, until the end of the block; yields their first process's number.

    The first process prints "ready", and then runs until the end of its input, of which this process has the only end.
    """
    with _holding(["unshare", *which, "--fork", "--kill-child", *first_process], "an emulated host") as holder:
        (first,) = children_of(holder.pid)
        yield first


@contextmanager
def _holding(command: Sequence[str], what: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has printed "ready" and runs until the end of its input, which is the end of the block."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline().decode()
        if said != "ready\n":
            process.stdin.close()
            raise RuntimeError(f"{what} did not start: {said}{process.stdout.read().decode()}")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(SET_UP_DEADLINE_S)
        finally:
            process.kill()  # nothing, if it has ended
            process.stdout.close()


def run_ip(pid: int, *commands: str) -> None:
    """Run ip(8) commands in the network of process ``pid``."""
    _in_network(pid, ["ip", "-batch", "-"], "\n".join(commands))


def _in_network(pid: int, command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", *command],
        input=text,
        capture_output=True,
        text=True,
        timeout=SET_UP_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} {text!r} failed: {done.stderr.strip()}")
