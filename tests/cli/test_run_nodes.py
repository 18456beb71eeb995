"""psengine run on several nodes: each of them a launcher of its own on this host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_process import running_command
from support.signals import send_signal
from torch.distributed import TCPStore

from psengine.cli.launching.failure import LAUNCHER, RankEnd, first_failure
from psengine.cli.launching.nodes import NodeFailures
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.run_directory import LOCK, remove_deserted
from psengine.cli.run import recorded

WORKER = str(Path(__file__).parents[1] / "support" / "launched_worker.py")
PART = '{"traceEvents": [], "otherData": {"processes": [{"rank": 0}]}}'


@contextmanager
def two_nodes(end):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    line = ["run", "--nnodes", "2", "--local-addr", "127.0.0.1", "--rdzv-endpoint", endpoint, WORKER, end]
    with running_command(line) as one, running_command(line) as other:
        for node in (one, other):
            node.wait_until(lambda node=node: " has " in node.stdout)
        yield one, other


@pytest.mark.slow
def test_a_signal_to_one_node_ends_the_others():
    with two_nodes("hang") as (one, other):
        other.signal(signal.SIGHUP)
        assert (one.wait(), other.wait()) == (128 + signal.SIGHUP, 128 + signal.SIGHUP)
        assert other.stderr == "psengine run: SIGHUP: ending the workers\n"
        assert f"psengine run: the launcher on host {socket.gethostname()} failed first" in one.stderr
        assert "SIGHUP came to that launcher, which ended its workers" in one.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_node_whose_store_stands_still():
    with two_nodes("hang") as nodes:
        host = next(node for node in nodes if listens(node.pid))
        other = next(node for node in nodes if node is not host)
        send_signal(host.pid, signal.SIGSTOP)
        try:
            switches = []
            other.wait_until(lambda: stands_still(other, switches))
            other.signal(signal.SIGINT)
            other.wait_until(lambda: "SIGINT: ending the workers (again: at once)" in other.stderr)
            other.signal(signal.SIGTERM)  # another than the first: at once
            assert other.wait(20) == 128 + signal.SIGINT
        finally:
            host.signal(signal.SIGCONT)


def stands_still(node, switches):
    """Whether the main thread, which looks after its workers ten times a second, has been asleep for a second."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    switches.append(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return switches[-20:] == [switches[-1]] * 20


def listens(pid):
    """Whether a process has a listening socket: the store at which the agents meet."""
    inodes = {
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return any(link.removeprefix("socket:[").rstrip("]") in inodes for link in links)


STANDS_STILL = """
import signal
import socket

from torch.distributed import TCPStore

from psengine.cli.launching import interruption

interruption.UNHEARD_S = interruption.LEAVE_S = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
with interruption.Interruption(KeyboardInterrupt) as ends:
    ends.on_first(lambda number: print("first", number, flush=True))
    ends.on_force(lambda: print("forced", flush=True))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        print("stands", flush=True)
        TCPStore("127.0.0.1", mute.getsockname()[1], is_master=False)
"""


def test_signals_are_heard_where_the_main_thread_stands_outside_python():
    with subprocess.Popen([sys.executable, "-c", STANDS_STILL], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "stands\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == f"first {signal.SIGINT:d}\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "forced\n"
            assert process.wait(20) == 128 + signal.SIGINT
        finally:
            process.kill()


SIGNALLED = RankEnd(
    rank=LAUNCHER, local_rank=LAUNCHER, host="b", pid=1, exit_code=-signal.SIGHUP, failed_s=1.0, traceback=("SIGHUP",)
)


def test_nodes_tell_each_other_of_a_signal():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = []
    with NodeFailures(heard.append) as one, NodeFailures(heard.append, lambda: SIGNALLED) as other:
        for node in (other, one):
            node.watch("127.0.0.1", store.port)
        own = replace(SIGNALLED, rank=0, exit_code=1, traceback=("PeerLostError: Lost rank 1",))
        one.settle(own)
        assert heard == [SIGNALLED]
        assert one.first == other.first == SIGNALLED
        assert first_failure([own, SIGNALLED]).name == "the launcher on host b"


def test_nodes_of_one_host_name_write_timelines_of_their_own(tmp_path):
    plan = Plan(torchrun=Namespace(), script=(), workers=1, is_multi_node=True)
    for ranks in ((0, 1), (2, 3)):
        with recorded(plan, tmp_path / "out.json", lambda said: None) as own:
            for rank in ranks:
                Path(own.variables["PSENGINE_TIMELINE"] + f".rank{rank}").write_text(PART)
    host = socket.gethostname()
    assert sorted(os.listdir(tmp_path)) == [f"out.{host}.rank0.json", f"out.{host}.rank2.json"]


def test_parts_that_a_killed_launcher_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = Plan(torchrun=Namespace(), script=(), workers=1)
    (tmp_path / "out").mkdir()
    with recorded(plan, tmp_path / "out" / "out.json", lambda said: None) as own:
        directory = Path(own.variables["PSENGINE_TIMELINE"]).parent
        os.utime(directory / LOCK, (0, 0))
        assert remove_deserted(tmp_path) == []
        deserted = directory.with_name(directory.name + "x")
        deserted.mkdir()
        (deserted / LOCK).touch()
        assert remove_deserted(tmp_path, young_s=-1.0) == [deserted]
    assert os.listdir(tmp_path) == ["out"]
