"""Where the storm's processes run: emulated hosts, or without root this machine; and the processes on one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from support.hosts import emulated_hosts, missing_for_hosts
from support.process_table import command_line
from support.processes import free_port

PORT = 7077
LAUNCHERS = ("psengine.cli.main run", "torch.distributed.run")


class Local:
    """This machine in the place of a host: its link cannot be cut."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], *, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self._started.append(
            subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(10)


def logging_to(path: Path, command: Sequence[str]) -> list[str]:
    """The command, whose output is added to ``path``."""
    return ["sh", "-c", f'exec "$@" >> {shlex.quote(str(path))} 2>&1', "sh", *command]


@contextmanager
def sites(count: int, shared: Sequence[Path]) -> Iterator[tuple[list[Any], str]]:
    """``count`` of them, which see the folders ``shared``; and the address of a coordinator on the last one."""
    with ExitStack() as stack:
        if missing_for_hosts() is None:
            # Hosts have a /tmp of their own; modules may be imported from this one.
            modules = [Path(path) for path in sys.path if path.startswith("/tmp/") and Path(path).is_dir()]
            hosts: list[Any] = stack.enter_context(emulated_hosts(count, shared=[*shared, *modules]))
            yield hosts, f"tcp://{hosts[-1].name}:{PORT}"
            return
        hosts = [Local(f"node-{index}") for index in range(count)]
        for host in hosts:
            stack.callback(host.close)
        yield hosts, f"tcp://127.0.0.1:{free_port()}"


def processes_of(host: str) -> dict[str, list[int]]:
    """The "launcher" and "worker" processes of a host, by their command lines, as this machine counts them."""
    found: dict[str, list[int]] = {"launcher": [], "worker": []}
    for entry in Path("/proc").iterdir():
        line = command_line(int(entry.name)) if entry.name.isdecimal() else ""
        if f"--host {host} " in line and not line.startswith("nsenter"):
            is_launcher = any(name in line for name in LAUNCHERS)
            found["launcher" if is_launcher else "worker"].append(int(entry.name))
    return found


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
