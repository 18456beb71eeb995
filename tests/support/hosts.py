"""Emulated hosts on this machine: what a test needs to run programs on "two machines". Needs root.

Each host is a set of namespaces of its own (network, host name, processes, mounts, System V IPC), held by one process
that waits for the end of its input::

    bridge (a network namespace of its own, so that this machine's network is not touched)
     ├─ port0 ══ eth0 of host node-0, 10.77.0.1
     └─ port1 ══ eth0 of host node-1, 10.77.0.2

Hosts reach each other by name and address, and nothing else: neither this machine nor the internet. They share this
machine's files, as over a network file system, except those through which processes of one host find each other: /proc,
/dev/shm, /run and /tmp are each host's own. ``shared`` brings folders of /tmp back.

``rate`` limits links with tc(8)'s tbf. With ``round_trip_s`` a relay (``relay.py``) carries the packets instead of the
bridge, with that delay and at ``rate``: the kernels that tests run on lack netem. ``Host.cut`` cuts a host's link and
``Host.mend`` mends it; packets are lost between, and nobody is told.

Nothing outlives the test. The processes that hold the namespaces end with their input, so also when the test is killed;
the kernel then ends every process on the hosts and removes mounts and links. Several tests at once do not meet.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import override

from support.host_links import SET_UP_DEADLINE_S, bridge, namespaces, relay, relayed_mbit_per_s, run_ip
from support.process_table import children_of
from support.running import DEADLINE_S, Running

ROOT = Path(__file__).parents[2]
_GRACE_S = 1.0
_PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
# A host's first process. Its arguments: the host's name, the table of all hosts, folders of /tmp that it sees.
_FIRST_PROCESS = """set -e
echo "$1" > /proc/sys/kernel/hostname
for private in /dev/shm /run; do mount -t tmpfs -o mode=1777 tmpfs "$private"; done
printf %s "$2" > /run/hosts
mount --bind /run/hosts /etc/hosts
shift 2
mkdir -m 1777 /run/tmp
for folder in "$@"; do mkdir -p "/run/tmp/$folder"; mount --bind "/tmp/$folder" "/run/tmp/$folder"; done
mount --rbind /run/tmp /tmp
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""  # ignored, so that the kernel removes orphans that end


@functools.cache
def missing_for_hosts() -> str | None:
    """What this machine lacks for emulated hosts, in words; None where it has everything."""
    if sys.platform != "linux":
        return "emulated hosts need Linux"
    if os.geteuid() != 0:
        return f"emulated hosts need root (expected user 0, got {os.geteuid()})"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"emulated hosts need the program {program} (Debian's package {package})"
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    link = ["ip", "link", "add", "type", "veth"]
    tried = subprocess.run([*command, *link], capture_output=True, text=True, timeout=SET_UP_DEADLINE_S, check=False)
    if tried.returncode != 0:
        return f"emulated hosts need the right to make namespaces and links: {tried.stderr.strip()}"
    return None


needs_hosts = pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts()))


@dataclass(frozen=True)
class Ended:
    """How a command on a host ended.

    Attributes:
        code: its exit code; negative for a signal.
    """

    code: int
    stdout: str
    stderr: str


class HostProcess(Running):
    """A command that runs on a host; a context manager that ends it.

    Attributes:
        host: its name.
    """

    def __init__(self, host: str, process: subprocess.Popen[bytes], directory: Path) -> None:
        super().__init__(f"the command on {host}", directory)
        self.host = host
        self._process = process

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.poll() is None

    @override
    def poll(self) -> int | None:
        return self._process.poll()

    @override
    def signal(self, number: int) -> None:
        """Send a signal to the command, not to what it started."""
        for child in children_of(self._process.pid):  # nsenter's only child
            os.kill(child, number)

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, grace_s: float = _GRACE_S) -> None:
        """Ask the command to end, with SIGTERM, and kill it and its process group if it does not."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SET_UP_DEADLINE_S)


class Host:
    """A host.

    Attributes:
        name: as its programs see it (``socket.gethostname()``), and as all hosts look it up.
        address: its IPv4 address.
        pid: of its first process, as this machine counts.
    """

    def __init__(self, name: str, address: str, pid: int, directory: Path, link: Callable[[str], None]) -> None:
        self.name = name
        self.address = address
        self.pid = pid
        self._directory = directory
        self._link = link
        self._processes: list[HostProcess] = []

    def cut(self) -> None:
        """Cut its link: from now on every packet from it and to it is lost. Connections stay open."""
        self._link("cut")

    def mend(self) -> None:
        """Undo ``cut``."""
        self._link("mend")

    def start(
        self, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, folder: Path = ROOT
    ) -> HostProcess:
        """Begin a command in ``folder``, with ``environment`` added to this process's."""
        directory = self._directory / f"{self.name}-{len(self._processes)}"
        directory.mkdir()
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--mount", "--pid"]
        with (directory / "stdout").open("wb") as stdout, (directory / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [*enter, "env", f"--chdir={folder}", *map(str, command)],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._processes.append(HostProcess(self.name, process, directory))
        return self._processes[-1]

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        deadline_s: float = DEADLINE_S,
    ) -> Ended:
        """Run a command to its end.

        Raises:
            AssertionError: it still ran after ``deadline_s``, and was ended.
        """
        with self.start(command, environment=environment, folder=folder) as process:
            return Ended(process.wait(deadline_s), process.stdout, process.stderr)

    def _close(self) -> None:
        for process in self._processes:
            process.end(grace_s=0.0)


def run_together(
    hosts: Sequence[Host],
    command: Callable[[int], Sequence[str | Path]],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    deadline_s: float = DEADLINE_S,
) -> list[Ended]:
    """Run ``command(position)`` on each host at once; how they ended, in the order of hosts."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(host.start(command(position), environment=environment, folder=folder))
            for position, host in enumerate(hosts)
        ]
        deadline = time.monotonic() + deadline_s
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in started]
        return [Ended(code, each.stdout, each.stderr) for code, each in zip(codes, started, strict=True)]


@contextmanager
def emulated_hosts(
    count: int,
    *,
    rate: str | None = None,
    round_trip_s: float = 0.0,
    shared: Sequence[Path] = (),
) -> Iterator[list[Host]]:
    """Make ``count`` hosts, called ``node-0``, ``node-1`` ...; all ends with the block.

    Args:
        count: of hosts.
        rate: of each host's link, in each direction, as tc(8) spells it: "100mbit"; None does not limit it.
        round_trip_s: how long a small packet and its answer take; needs a rate of at most 100 Mbit/s.
        shared: folders below /tmp that hosts see too, such as a test's ``tmp_path``. Folders elsewhere are seen anyway.

    Raises:
        RuntimeError: this machine lacks something, see ``missing_for_hosts``; or a host or link did not start.
    """
    assert 1 <= count <= 200, count
    mbit_per_s = relayed_mbit_per_s(rate, round_trip_s)
    if (missing := missing_for_hosts()) is not None:
        raise RuntimeError(missing)
    addresses = {f"node-{index}": f"10.77.0.{index + 1}" for index in range(count)}
    table = "".join(f"{address} {host}\n" for host, address in {"localhost": "127.0.0.1", **addresses}.items())
    # The repository and the interpreter, where they lie in /tmp.
    folders = _below_tmp([ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared])
    every = ["--net", "--uts", "--ipc", "--mount", "--propagation=private", "--pid", "--mount-proc"]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psengine-hosts-")))
        pids = []
        for host in addresses:
            pids.append(
                stack.enter_context(namespaces(every, ["sh", "-c", _FIRST_PROCESS, "sh", host, table, *folders]))
            )
            run_ip(pids[-1], "link set lo up")
        ends = list(zip(pids, addresses.values(), strict=True))
        if mbit_per_s is None:
            link = stack.enter_context(bridge(ends, rate))
        else:
            link = stack.enter_context(relay(ends, mbit_per_s, round_trip_s / 2))
        hosts = []
        for index, (host, address) in enumerate(addresses.items()):
            hosts.append(Host(host, address, pids[index], directory, functools.partial(link, index)))
            stack.callback(hosts[-1]._close)
        yield hosts


def _below_tmp(folders: Sequence[Path]) -> list[str]:
    """Those of ``folders`` that lie in /tmp, as seen from there."""
    resolved = {folder.resolve() for folder in folders}
    return sorted(str(folder.relative_to("/tmp")) for folder in resolved if folder.is_relative_to("/tmp"))
