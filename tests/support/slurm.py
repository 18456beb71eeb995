"""A Slurm cluster on this machine: real daemons on emulated hosts (``hosts.py``).

::

    node-0                   munged (all nodes use its socket, in a shared folder), slurmctld; sbatch runs here
    node-1, node-2 ...       slurmd

Hosts are namespaces: no port is taken, nothing outside changes, and the end of the test ends all daemons and jobs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.hosts import ROOT, Host, emulated_hosts, missing_for_hosts

START_S = 120.0
JOB_S = 150.0
_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
_PROGRAMS = {
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue"), "slurm-wlm"),
    "munged": "munge",
}
# Nodes have more cores, memory and GPUs than this machine, so that deploy/slurm's own lines fit (config_overrides).
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=node-0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n/pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n/log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=60
# Only the backfill scheduler starts heterogeneous jobs. It plans in units of bf_resolution, by default a minute.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,batch_sched_delay=0,sched_interval=1
NodeName=node-[1-{nodes}] CPUs=64 RealMemory=131072 Gres=gpu:4
PartitionName=main Nodes=node-[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def missing_for_slurm() -> str | None:
    """What this machine lacks for a cluster, in words; None where it has everything."""
    packages = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if packages:
        return f"a Slurm cluster needs Debian's packages {', '.join(packages)}"
    return missing_for_hosts()


needs_slurm = pytest.mark.skipif(missing_for_slurm() is not None, reason=str(missing_for_slurm()))


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        controller: the host where users type commands.
        directory: of the daemons' files; all hosts share it.
    """

    controller: Host
    directory: Path

    def run(
        self, command: Sequence[str | Path], *, folder: Path = ROOT, variables: Mapping[str, str] | None = None
    ) -> str:
        """Run ``command`` on the controller; return what it wrote.

        Raises:
            AssertionError: it failed, or took longer than ``JOB_S``.
        """
        ended = self.controller.run(
            command, environment=self._environment(variables or {}), folder=folder, deadline_s=JOB_S
        )
        assert ended.code == 0, f"{shlex.join(map(str, command))}: {ended.code}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def submit(
        self, arguments: Sequence[str | Path], *, folder: Path, variables: Mapping[str, str] | None = None
    ) -> Job:
        """Give ``arguments`` to sbatch in ``folder``."""
        output = folder / "slurm.out"
        command = ["sbatch", "--parsable", f"--output={output}", *arguments]
        return Job(self, int(self.run(command, folder=folder, variables=variables)), output)

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "SLURM_CONF": f"{self.directory}/slurm.conf",
            **variables,
        }


@dataclass(frozen=True)
class Job:
    """A job in the queue; of a heterogeneous one its first component.

    Attributes:
        output: what it writes.
    """

    cluster: Cluster
    number: int
    output: Path

    def facts(self) -> dict[str, str]:
        """What ``scontrol show job`` says of it."""
        lines = self.cluster.run(["scontrol", "--oneliner", "show", "job", str(self.number)]).splitlines()
        return dict(word.split("=", 1) for word in lines[0].split() if "=" in word)

    def steps(self, program: str) -> dict[str, str]:
        """Node to the identifier, as scancel takes it, of each running step of ``program``."""
        lines = self.cluster.run(["squeue", "--noheader", "--steps", "--format=%i %N %j"]).splitlines()
        found = [line.split() for line in lines]
        return {node: identifier for identifier, node, name in found if name == program}

    def wait_until(self, condition: Callable[[], object], timeout_s: float = JOB_S) -> None:
        """Wait for ``condition`` while the job is in the queue."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            state = self.facts()["JobState"]
            assert state in _UNFINISHED, self._report(f"is {state}")
            assert time.monotonic() < deadline_s, self._report(f"is {state}; still not so after {timeout_s:g} s")
            time.sleep(0.2)

    def end(self, timeout_s: float = JOB_S) -> str:
        """The job's state at its end."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self.facts()["JobState"]) in _UNFINISHED:
            if time.monotonic() > deadline_s:
                self.cancel()
                raise AssertionError(self._report(f"was still {state} after {timeout_s:g} s"))
            time.sleep(0.2)
        return state

    def cancel(self) -> None:
        """Take it out of the queue."""
        self.cluster.run(["scancel", str(self.number)])

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def _report(self, what: str) -> str:
        log = (self.cluster.directory / "slurmctld.log").read_text(errors="replace").splitlines()
        return "\n".join([f"job {self.number} {what}", self.text, *log[-15:]])


@contextmanager
def slurm_cluster(nodes: int, *, shared: Sequence[Path] = ()) -> Iterator[Cluster]:
    """Bring up a cluster of ``nodes`` nodes, and take it down at the end; ``shared``: as of ``emulated_hosts``.

    Raises:
        AssertionError: the daemons do not answer within two minutes; the message has what they wrote.
    """
    with tempfile.TemporaryDirectory(prefix="psengine-slurm-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o755)  # munge refuses others
        _write_files(directory, nodes)
        with emulated_hosts(nodes + 1, shared=[directory, *shared]) as hosts:
            environment = {"SLURM_CONF": f"{directory}/slurm.conf"}
            files = [f"--{name}={directory}/munge.{name[:3]}" for name in ("pid-file", "log-file", "seed-file")]
            munged = ["munged", "--foreground", f"--key-file={directory}/munge.key", *files]
            daemons = [hosts[0].start([*munged, f"--socket={directory}/munge.socket"])]
            daemons[0].wait_until((directory / "munge.socket").exists)
            daemons.append(hosts[0].start(["slurmctld", "-D"], environment=environment))
            daemons += [host.start(["slurmd", "-D", "-N", host.name], environment=environment) for host in hosts[1:]]
            cluster = Cluster(hosts[0], directory)
            deadline_s = time.monotonic() + START_S
            while (states := states_of(cluster)) != ["idle"] * nodes:
                said = "\n".join(daemon.stderr[-2000:] for daemon in daemons)
                assert time.monotonic() < deadline_s, f"the nodes are {states} after {START_S:g} s\n{said}"
                time.sleep(0.1)
            yield cluster


def states_of(cluster: Cluster) -> list[str]:
    """The states of its nodes."""
    try:
        return cluster.run(["sinfo", "--noheader", "--Node", "--format=%T"]).split()
    except AssertionError as error:  # nobody answers yet
        return [str(error)]


def _write_files(directory: Path, nodes: int) -> None:
    for name in ("state", *(f"node-{node}" for node in range(1, nodes + 1))):
        (directory / name).mkdir()
    (directory / "munge.key").touch(mode=0o600)
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "slurm.conf").write_text(_CONFIGURATION.format(directory=directory, nodes=nodes))
    (directory / "gres.conf").write_text(f"NodeName=node-[1-{nodes}] Name=gpu File={directory}/gpu[0-3]\n")
    for number in range(4):
        os.mknod(directory / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))  # Slurm wants devices: /dev/null's
