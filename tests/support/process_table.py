"""Processes that a test started: what the kernel's table says of them, and signals to them."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from psengine.environment.processes import has_exited, process_state
from support.waiting import eventually


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
    return not has_exited(pid)


def send_signal(process: int, number: int, timeout_s: float = 60.0) -> None:
    """Send ``number`` to a process; after SIGSTOP return once all of its threads have stopped, which on a busy machine
    they do only when it is their turn.

    Raises:
        AssertionError: it had not stopped after ``timeout_s``.
    """
    os.kill(process, number)
    if number != signal.SIGSTOP:
        return
    eventually(lambda: _is_stopped(process), f"process {process} has stopped", timeout_s=timeout_s, interval_s=0.005)


def _is_stopped(process: int) -> bool:
    threads = Path(f"/proc/{process}/task").glob("*")
    return all((process_state(int(thread.name)) or "X") in "TtZX" for thread in threads)  # None: it has ended meanwhile
