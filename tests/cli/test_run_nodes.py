"""psengine run on several nodes: each of them a launcher of its own on this host."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_process import WORKER, running_command
from support.processes import free_port
from support.signals import send_signal
from support.waiting import eventually
from torch.distributed import TCPStore

from psengine.cli.launching.failure import LAUNCHER, RankEnd, first_failure
from psengine.cli.launching.nodes import NodeFailures


@contextmanager
def two_nodes(end, *options):
    line = ["run", "--nnodes", "2", "--local-addr", "127.0.0.1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with running_command([*line, *options, WORKER, end]) as one, running_command([*line, *options, WORKER, end]) as two:
        yield one, two


@pytest.mark.slow
def test_every_node_names_the_rank_that_failed_first():
    with two_nodes("raise-on-rank-3", "--workers", "2") as nodes:
        assert [node.wait() for node in nodes] == [1, 1], nodes[0].stderr + nodes[1].stderr
        for node in nodes:
            report = node.stderr[node.stderr.index("psengine run: ") :]
            assert report.startswith("psengine run: rank 3 (local rank 1) on host"), report
            assert "RuntimeError: on rank 3" in report
            assert "failed after it" not in report


@pytest.mark.slow
def test_a_signal_to_one_node_ends_the_others():
    with two_nodes("hang") as (one, other):
        for node in (one, other):
            node.wait_until(lambda node=node: " has " in node.stdout)
        other.signal(signal.SIGHUP)
        assert (one.wait(), other.wait()) == (128 + signal.SIGHUP, 128 + signal.SIGHUP)
        assert other.stderr == "psengine run: SIGHUP: ending the workers\n"
        assert f"psengine run: the launcher on host {socket.gethostname()} failed first" in one.stderr
        assert "SIGHUP came to that launcher, which ended its workers" in one.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_node_whose_store_stands_still():
    with two_nodes("hang") as nodes:
        for node in nodes:
            node.wait_until(lambda node=node: " has " in node.stdout)
        host = next(node for node in nodes if listens(node.pid))
        other = next(node for node in nodes if node is not host)
        send_signal(host.pid, signal.SIGSTOP)
        try:
            other.signal(signal.SIGINT)
            other.wait_until(lambda: "SIGINT: ending the workers (again: at once)" in other.stderr)
            other.signal(signal.SIGTERM)  # another than the first: at once
            assert other.wait(20) == 128 + signal.SIGINT
        finally:
            host.signal(signal.SIGCONT)


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


SIGNALLED = RankEnd(
    rank=LAUNCHER, local_rank=LAUNCHER, host="b", pid=1, exit_code=-signal.SIGHUP, failed_s=1.0, traceback=("SIGHUP",)
)


def test_nodes_tell_each_other_of_a_signal():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other = NodeFailures(), NodeFailures()
    try:
        for node in (other, one):
            node.watch("127.0.0.1", store.port)
        other.tell(SIGNALLED)
        eventually(lambda: one.first)
        own = replace(SIGNALLED, rank=0, exit_code=1, traceback=("PeerLostError: Lost rank 1",))
        one.settle(own, lambda: False)
        assert one.first == other.first
        assert (one.first.host, one.first.exit_code) == ("b", -signal.SIGHUP)
        assert first_failure([own, SIGNALLED]).name == "the launcher on host b"
    finally:
        one.close()
        other.close()
