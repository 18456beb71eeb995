"""Processes that a test started: what the kernel's table says of them, and signals to them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ends meanwhile; its children are another's
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def listeners_of(pid: int) -> set[tuple[str, int]]:
    """Where a process listens over TCP: (address as the kernel writes it, port)."""
    links = [os.readlink(one.path) for one in os.scandir(f"/proc/{pid}/fd") if os.path.islink(one.path)]
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {(address, int(port, 16)) for address, port in places}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def send_signal(process: int, number: int, timeout_s: float = 10.0) -> None:
    """Send ``number`` to a process; after SIGSTOP return once all of its threads have stopped, which on a busy machine
    they do only when it is their turn.

    Raises:
        AssertionError: it had not stopped after ``timeout_s``.
    """
    os.kill(process, number)
    if number != signal.SIGSTOP:
        return
    deadline_s = time.monotonic() + timeout_s
    while not _is_stopped(process):
        assert time.monotonic() < deadline_s, f"process {process} did not stop within {timeout_s:g} s"
        time.sleep(0.005)


def _is_stopped(process: int) -> bool:
    states = []
    for status in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            # Behind the name, which may hold anything.
            states.append(status.read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # the thread has ended meanwhile
    return all(state in "TtZX" for state in states)
