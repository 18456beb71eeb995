"""Weights that workers read in the server's own memory: never half of one version and half of another."""

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import forkserver
from support.server_process import Peer, running_server
from support.shard_world import APPLY, AVERAGE, SGD, spec
from support.waiting import eventually
from support.worker_sessions import crew, entered

from psengine import DistributedDataParallel, SyncServer
from psengine.environment.processes import process_state
from psengine.errors import ServerError
from psengine.parameter_server.client import operation
from psengine.parameter_server.client.operation import Push
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.parameter_server.segment import IS_AVAILABLE

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 16_384
ONES = torch.ones(NUMEL)
MEMORY: weakref.WeakKeyDictionary[WorkerSession, torch.Tensor] = weakref.WeakKeyDictionary()


def entered_worker(address: str, rank: int) -> WorkerSession:
    """Of a job whose weights are -1 times their version: each push is of ones."""
    session = entered(address, rank, [spec(0, NUMEL)], rule=APPLY, world_size=3)
    session.configure(0, {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, NUMEL, 0]]}).wait()
    return session


def packed(session: WorkerSession, values: torch.Tensor) -> torch.Tensor:
    """These values in memory that the server can read."""
    if session not in MEMORY:
        MEMORY[session] = session.segments.allocate(NUMEL, torch.float32)
    return MEMORY[session].copy_(values)


def push(session: WorkerSession) -> tuple[int, float, float]:
    """The version of the answer, and the least and the largest weight that landed."""
    landing = torch.full((NUMEL,), float("nan"))
    version = session.push(0, packed(session, ONES), [landing]).wait().version
    return version, landing.min().item(), landing.max().item()


def is_in_lent_memory(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "psengine-server" in line)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def stop_half_way(address: str, pipe, timeout_s: float) -> None:
    """Worker 1: stops when it has read half of its third answer; goes on for one more."""
    real, done = operation.ctypes.memmove, list[bool]()

    def halting(target: int, source: int, size_bytes: int) -> None:
        half = size_bytes // 2
        real(target, source, half)
        done.append(is_in_lent_memory(source))
        if len(done) == 3 and done[-1]:
            pipe.send("half way")
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # os.kill: another thread may take it, later
        real(target + half, source + half, size_bytes - half)

    operation.ctypes = SimpleNamespace(memmove=halting)
    session = entered_worker(address, 1)
    landed = []
    try:
        landed += [push(session) for _ in range(3)]
        session.job_connection.options = replace(session.options, timeout_s=timeout_s)
        landed.append(push(session))
        assert any(done)
    except ServerError as error:
        landed.append(str(error))
    finally:
        pipe.send(landed)
        session.close()


@pytest.mark.parametrize("end", ["member", "replaced", "server killed"])
def test_a_worker_that_stops_half_way_through_an_answer_gets_one_version(end):
    ours, theirs = forkserver.Pipe()
    is_lost = end in ("replaced", "server killed")
    with running_server(lease_s=4.0 if end == "replaced" else 60.0) as server:
        others = [entered_worker(server.addresses[0], rank) for rank in (0, 2)]
        for other in others:
            push(other)
        arguments = server.addresses[0], theirs, 2.0 if is_lost else 20.0
        worker = forkserver.Process(target=stop_half_way, args=arguments, daemon=True)
        worker.start()
        try:
            assert ours.poll(120)
            assert ours.recv() == "half way"
            eventually(lambda: process_state(worker.pid) == "T")
            if end == "replaced":
                eventually(lambda: 1 not in others[0].members)
                others.append(entered_worker(server.addresses[0], 1))
            if end == "server killed":
                server.kill()
            for _ in range(0 if end == "server killed" else 10):
                for other in others:
                    version, least, most = push(other)
                    assert (least, most) == (-version, -version)
            os.kill(worker.pid, signal.SIGCONT)
            assert ours.poll(120)
            landed = ours.recv()
            if is_lost:
                assert isinstance(landed.pop(), str)
            assert [(least, most) for _, least, most in landed] == [(-version, -version) for version, *_ in landed]
            assert len(landed) == (3 if is_lost else 4)
        finally:
            worker.kill()
            worker.join(10)
            for other in others:
                other.close()


def average(sessions: Sequence[WorkerSession], value: float) -> list[Push]:
    pushes = []
    for session in sessions:
        landing = torch.zeros(NUMEL)
        pushes.append(session.push(0, packed(session, torch.full((NUMEL,), value)), [landing], reads_in_place=True))
    for one in pushes:
        one.wait()
        values = one.destinations[0] if one.take() is None else one.take()
        assert values.eq(value).all()
    return pushes


def test_averages_are_read_where_the_server_makes_them_and_stay_while_somebody_may_read_them():
    with running_server() as server, crew(server.addresses[0], 2, [spec(0, NUMEL)], rule=AVERAGE) as sessions:
        for step in range(4):
            pushes = average(sessions, float(step))
            assert all(one.take() is not None for one in pushes)
        kept = pushes[0].take()
        del pushes
        incarnation = sessions[0].job_connection.identity.incarnation
        sessions.pop(0).close()
        with Peer(server.addresses[0]) as stranger:  # its push would say that this worker has read the answer
            stranger.incarnation, stranger.epoch = incarnation, server.status()["epoch"]
            assert stranger.request("PUSH", key=0, sequence=99, payload=ONES).type.name == "ERROR"
        # Of two places one is read by a worker that has left, the other has the last average: then it is copied.
        found = {average(sessions, float(step))[0].take() is None for step in range(4, 10)}
        assert found == {False, True}
        assert kept.eq(3.0).all()
        del kept
        eventually(lambda: [average(sessions, 1.0)[0].take() is None for _ in range(4)] == [False] * 4)


def test_a_bucket_of_many_chunks_is_one_piece_of_the_servers_memory():
    with running_server() as server:
        strategy = SyncServer(servers=server.addresses, job="one piece")
        model = DistributedDataParallel(torch.nn.Linear(1024, 700), strategy=strategy)
        try:
            bare = torch.nn.Linear(1024, 700)
            bare.load_state_dict(model.module.state_dict())
            assert max(map(len, strategy.chunks.of_bucket)) == 3
            for result in strategy._results:
                result.zero_()
            for _ in range(3):
                batch = torch.randn(4, 1024)
                for one in (model, bare):
                    one.zero_grad()
                    one(batch).square().sum().backward()
                for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
                    assert torch.equal(mine.grad, theirs.grad)
                assert not any(result.any() for result in strategy._results)  # nothing has landed there
        finally:
            model.leave()
