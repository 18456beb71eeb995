"""Weights that workers read in the server's own memory: never half of one version and half of another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import forkserver
from support.server_process import running_server
from support.shard_world import APPLY, SGD, spec
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.errors import ServerError
from psengine.parameter_server.client import operation
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.parameter_server.segments.memory import IS_AVAILABLE

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 16_384
ONES = torch.ones(NUMEL)


def entered_worker(address: str, rank: int, workers: int = 3) -> WorkerSession:
    """Of a job whose weights are -1 times their version: each push is of ones."""
    session = entered(address, rank, [spec(0, NUMEL)], rule=APPLY, world_size=workers)
    session.configure(0, {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, NUMEL, 0]]}).wait()
    return session


def push(session: WorkerSession) -> tuple[int, float, float]:
    """The version of the answer, and the least and the largest weight that landed."""
    landing = torch.full((NUMEL,), float("nan"))
    version = session.push(0, ONES, [landing]).wait().version
    return version, landing.min().item(), landing.max().item()


def lent(session: WorkerSession) -> int:
    """How many places of the server's memory this worker has read in."""
    segments = session._membership.connection.segments
    assert segments is not None
    return sum(len(one.lent_answers) for one in segments._attachments.values())


def is_in_lent_memory(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "psengine-server" in line)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def stop_half_way(address: str, pipe) -> None:
    """Worker 1: stops when it has read half of its third answer; goes on for one more."""
    real, done = operation.ctypes.memmove, []

    def halting(target: int, source: int, size_bytes: int) -> None:
        half = size_bytes // 2
        real(target, source, half)
        done.append(source)
        if len(done) == 3 and is_in_lent_memory(source):
            pipe.send("half way")
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.05)  # another thread may take the signal first
        real(target + half, source + half, size_bytes - half)

    operation.ctypes = SimpleNamespace(memmove=halting)
    session = entered_worker(address, 1)
    landed = []
    try:
        for _ in range(4):
            landed.append(push(session))
        assert lent(session) > 0
    except ServerError as error:
        landed.append(str(error))
    finally:
        pipe.send(landed)
        session.close()


def memories(pid: int) -> int:
    """How many workers share their memory with this server."""
    return Path(f"/proc/{pid}/maps").read_text().count("psengine-worker")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"


@pytest.mark.parametrize("end", ["member", "evicted", "replaced"])
def test_a_worker_that_stops_half_way_through_an_answer_gets_one_version_or_none(end):
    ours, theirs = forkserver.Pipe()
    with running_server(lease_s=60.0 if end == "member" else 0.8) as server:
        others = [entered_worker(server.addresses[0], rank) for rank in (0, 2)]
        for other in others:
            push(other)
        worker = forkserver.Process(target=stop_half_way, args=(server.addresses[0], theirs), daemon=True)
        worker.start()
        try:
            assert ours.poll(20)
            assert ours.recv() == "half way"
            shared = memories(server.pid)
            eventually(lambda: is_stopped(worker.pid))
            if end != "member":
                eventually(lambda: 1 not in others[0].members)
            if end == "replaced":
                others.append(entered_worker(server.addresses[0], 1))
                eventually(lambda: memories(server.pid) < shared)
            for _ in range(10):
                for other in others:
                    version, least, most = push(other)
                    assert (least, most) == (-version, -version)
            assert all(lent(other) > 0 for other in others)
            os.kill(worker.pid, signal.SIGCONT)
            assert ours.poll(20)
            landed = ours.recv()
            if end == "replaced":
                assert isinstance(landed.pop(2), str)
            assert [(least, most) for _, least, most in landed] == [(-version, -version) for version, *_ in landed]
            assert len(landed) == (2 if end == "replaced" else 4)
        finally:
            worker.kill()
            worker.join(10)
            for other in others:
                other.close()


def test_a_worker_alone_reads_at_one_place_and_two_never_wait_for_each_other():
    with running_server() as server:
        alone = entered_worker(server.addresses[0], 0, workers=1)
        try:
            assert [push(alone) for _ in range(5)] == [(n, -n, -n) for n in range(1, 6)]
            assert lent(alone) == 1
        finally:
            alone.close()
    with running_server() as server:
        both = [entered_worker(server.addresses[0], rank, workers=2) for rank in range(2)]
        try:
            versions = [push(session) for _ in range(5) for session in both]
            assert versions == [(n, -n, -n) for n in range(1, 11)]
            assert all(0 < lent(session) <= 2 for session in both)
        finally:
            for session in both:
                session.close()
