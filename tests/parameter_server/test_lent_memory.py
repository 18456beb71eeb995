"""Weights that workers read in the server's own memory: never half of one version and half of another."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import forkserver
from support.server_process import running_server
from support.shard_world import APPLY, SGD, Worker, World, spec
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.errors import ServerError
from psengine.parameter_server.client import operation
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.parameter_server.segments.memory import IS_AVAILABLE, SegmentMapping, make_segment
from psengine.parameter_server.segments.offer import Member, Offer, Place
from psengine.parameter_server.server.rules.exchange import PayloadPins
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
    segments = session._membership.connection.segments
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


@pytest.mark.parametrize("end", ["member", "evicted", "replaced", "server killed"])
def test_a_worker_that_stops_half_way_through_an_answer_gets_one_version_or_none(end):
    ours, theirs = forkserver.Pipe()
    is_lost = end in ("replaced", "server killed")
    with running_server(lease_s=0.8 if end in ("evicted", "replaced") else 60.0) as server:
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
            if end in ("evicted", "replaced"):
                eventually(lambda: 1 not in others[0].members)
            if end == "replaced":
                others.append(entered_worker(server.addresses[0], 1))
                eventually(lambda: memories(server.pid) < shared)
            if end == "server killed":
                server.kill()
            for _ in range(0 if end == "server killed" else 10):
                for other in others:
                    version, least, most = push(other)
                    assert (least, most) == (-version, -version)
            assert all(lent(other) > 0 for other in others)
            os.kill(worker.pid, signal.SIGCONT)
            assert ours.poll(20)
            landed = ours.recv()
            if is_lost:
                assert isinstance(landed.pop(2), str)
            assert [(least, most) for _, least, most in landed] == [(-version, -version) for version, *_ in landed]
            assert len(landed) == (2 if is_lost else 4)
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


def test_what_was_pushed_stays_where_the_answer_lands_on_it_until_that_is_whole():
    with running_server() as server:
        session = entered_worker(server.addresses[0], 0, workers=1)
        try:
            push(session)
            memory = ONES.clone()
            kept = session.push(0, memory, [memory])
            kept.wait()
            assert memory.eq(-2.0).all()
            # The answer that turns out to be none leaves what has to be pushed again.
            memory.fill_(1.0)
            halves = memory.split(NUMEL // 2)
            question = Message(MessageType.PUSH, payload=memory, numel=NUMEL, dtype=memory.dtype)
            torn = Message(MessageType.UPDATED, payload=torch.zeros(NUMEL), numel=NUMEL, dtype=memory.dtype)
            torn.is_intact = lambda: False
            again = operation.Push(question, str, operation.Parking(lambda: 0.0), 1.0, halves, memory.dtype)
            assert not again.takes_whole(torn, 0.0)
            assert memory.eq(1.0).all()
        finally:
            session.close()


def test_only_a_later_push_says_that_an_answer_was_read():
    world = World()
    worker = Worker(world, 0, rule=APPLY)
    worker.initialise([spec(0, NUMEL)])
    size_bytes = ONES.nbytes
    ours, theirs = socket.socketpair()
    descriptor = make_segment(2 * size_bytes)
    with ours, theirs:
        try:
            segments = ShardSegments()
            member = Member(job_number("demo"), 0, worker.incarnation)
            places = {0: Place(0, size_bytes, size_bytes)}
            offer = Offer(member, segments.token(member), 2 * size_bytes, places)
            segment = WorkerSegment(offer, SegmentMapping(descriptor, 2 * size_bytes), ours)
            assert segments.attach(world.shard, segment) == ""
        finally:
            os.close(descriptor)
        assert segment.lent is not None
        pins = PayloadPins(segment.lent.token)
        fields = {"job": member.job, "worker": 0, "incarnation": member.incarnation, "key": 0}
        answer = Message(MessageType.UPDATED, sequence=5, payload=ONES, numel=NUMEL, dtype=ONES.dtype, **fields)
        assert segments.put(answer, pins)
        assert answer.body == {"place": 0}
        for sequence in (4, 5):
            segments.find(Message(MessageType.PUSH, sequence=sequence, **fields))
            assert pins.are_held()
        segments.find(Message(MessageType.PUSH, sequence=6, **fields))
        assert not pins.are_held()
