"""Weights that workers read in the server's own memory: never half of one version and half of another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import forkserver
from support.server_process import running_server
from support.shard_world import APPLY, AVERAGE, SGD, World, spec, team
from support.waiting import eventually
from support.worker_sessions import all_entered, entered

from psengine import DistributedDataParallel, SyncServer
from psengine.errors import ServerError
from psengine.parameter_server.client import operation
from psengine.parameter_server.client.operation import Push
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.parameter_server.segments.memory import IS_AVAILABLE, SegmentMapping, make_segment
from psengine.parameter_server.segments.offer import Member, Offer, Place
from psengine.parameter_server.server.transport.segments import ShardSegments, WorkerSegment
from psengine.protocol.layout import job_number
from psengine.protocol.messages import Message, MessageType

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 16_384
ONES = torch.ones(NUMEL)


def entered_worker(address: str, rank: int, workers: int = 3, timeout_s: float = 20.0) -> WorkerSession:
    """Of a job whose weights are -1 times their version: each push is of ones."""
    session = entered(address, rank, [spec(0, NUMEL)], rule=APPLY, world_size=workers, timeout_s=timeout_s)
    session.configure(0, {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, NUMEL, 0]]}).wait()
    return session


def push(session: WorkerSession) -> tuple[int, float, float]:
    """The version of the answer, and the least and the largest weight that landed."""
    landing = torch.full((NUMEL,), float("nan"))
    version = session.push(0, ONES, [landing]).wait().version
    return version, landing.min().item(), landing.max().item()


def lent(session: WorkerSession) -> int:
    """How many places of the server's memory this worker has read in."""
    segments = session.job_connection.transport.segments
    assert segments is not None
    return sum(len(one.lent_answers) for one in segments._attachments.values())


def is_in_lent_memory(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "psengine-server" in line)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def stop_half_way(address: str, pipe, timeout_s: float) -> None:
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
    session = entered_worker(address, 1, timeout_s=timeout_s)
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


@pytest.mark.parametrize("end", ["member", "replaced", "server killed"])
def test_a_worker_that_stops_half_way_through_an_answer_gets_one_version(end):
    ours, theirs = forkserver.Pipe()
    is_lost = end in ("replaced", "server killed")
    with running_server(lease_s=0.8 if end == "replaced" else 60.0) as server:
        others = [entered_worker(server.addresses[0], rank) for rank in (0, 2)]
        for other in others:
            push(other)
        worker = forkserver.Process(
            target=stop_half_way, args=(server.addresses[0], theirs, 2.0 if is_lost else 20.0), daemon=True
        )
        worker.start()
        try:
            assert ours.poll(20)
            assert ours.recv() == "half way"
            shared = memories(server.pid)
            eventually(lambda: is_stopped(worker.pid))
            if end == "replaced":
                eventually(lambda: 1 not in others[0].members)
                others.append(entered_worker(server.addresses[0], 1))
                eventually(lambda: memories(server.pid) < shared)
            if end == "server killed":
                server.kill()
            for _ in range(0 if end == "server killed" else 10):
                for other in others:
                    version, least, most = push(other)
                    assert (least, most) == (-version, -version)
            assert any(lent(other) > 0 for other in others)  # the worker that was replaced may still read one place
            os.kill(worker.pid, signal.SIGCONT)
            assert ours.poll(20)
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


def test_an_answer_may_land_on_what_was_pushed():
    with running_server() as server:
        session = entered_worker(server.addresses[0], 0, workers=1)
        try:
            memory = ONES.clone()
            for version in (1, 2):
                memory.fill_(1.0)
                session.push(0, memory, [memory]).wait()
                assert memory.eq(-version).all()
            assert lent(session) == 1
        finally:
            session.close()


def average(sessions: Sequence[WorkerSession], value: float) -> list[Push]:
    pushes = []
    for session in sessions:
        landing = torch.zeros(NUMEL)
        pushes.append(session.push(0, torch.full((NUMEL,), value), [landing], reads_in_place=True))
    for one in pushes:
        one.wait()
        values = one.destinations[0] if one.take() is None else one.take()
        assert values.eq(value).all()
    return pushes


def test_averages_are_read_where_the_server_makes_them_and_stay_while_somebody_may_read_them():
    with running_server() as server:
        sessions = all_entered(server.addresses[0], 2, [spec(0, NUMEL)], rule=AVERAGE)
        try:
            for step in range(4):
                pushes = average(sessions, float(step))
                assert all(one.take() is not None for one in pushes)
            kept = pushes[0].take()
            del pushes
            sessions.pop(0).close()
            # Of two places one is read by a worker that has left, the other has the last average: then it is copied.
            found = {average(sessions, float(step))[0].take() is None for step in range(4, 10)}
            assert found == {False, True}
            assert kept.eq(3.0).all()
            del kept
            eventually(lambda: [average(sessions, 1.0)[0].take() is None for _ in range(4)] == [False] * 4)
        finally:
            for session in sessions:
                session.close()


def test_a_bucket_of_many_chunks_is_one_piece_of_the_servers_memory():
    with running_server() as server:
        strategy = SyncServer(servers=server.addresses, job="one piece")
        model = DistributedDataParallel(torch.nn.Linear(1024, 700), strategy=strategy)
        try:
            bare = torch.nn.Linear(1024, 700)
            bare.load_state_dict(model.module.state_dict())
            assert max(map(len, strategy.chunks.of_bucket)) == 3
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


def attached() -> tuple[ShardSegments, WorkerSegment]:
    """A worker's segment at a shard: a place for the gradient of a chunk, and one for its answer."""
    world = World()
    (worker,) = team(world, 1, [spec(0, NUMEL)], rule=APPLY)
    size_bytes = ONES.nbytes
    descriptor = make_segment(2 * size_bytes)
    try:
        segments = ShardSegments()
        member = Member(job_number("demo"), 0, worker.incarnation)
        places = {0: Place(0, size_bytes, size_bytes)}
        offer = Offer(member, segments.token(member), 2 * size_bytes, places)
        segment = WorkerSegment(offer, SegmentMapping(descriptor, 2 * size_bytes))
        assert segments.attach(world.shards[0], segment) == ""
    finally:
        os.close(descriptor)
    return segments, segment


def answer_to(segment: WorkerSegment, sequence: int, values: torch.Tensor) -> Message:
    member = segment.offer.member
    fields = {"job": member.job, "worker": member.worker, "incarnation": member.incarnation, "key": 0}
    return Message(MessageType.UPDATED, sequence=sequence, payload=values, numel=NUMEL, dtype=values.dtype, **fields)


def test_a_repeated_answer_does_not_land_on_the_first_which_the_worker_may_be_reading():
    segments, segment = attached()
    assert segments.put(answer_to(segment, 5, ONES), None)
    landed = segment.mapping.tensor(ONES.nbytes, NUMEL, ONES.dtype)
    assert not segments.put(answer_to(segment, 5, ONES * 2), None)  # a newer version, to the same push
    assert torch.equal(landed, ONES)
    assert segments.put(answer_to(segment, 6, ONES * 3), None)
    assert not segments.put(answer_to(segment, 5, ONES), None)
    assert torch.equal(landed, ONES * 3)
