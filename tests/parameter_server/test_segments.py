"""Workers and servers of one host share memory: the same bits as over sockets, whoever dies, and nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.processes import forkserver
from support.server_process import ServerProcess, running_server
from support.shard_world import APPLY, AVERAGE, SGD
from support.waiting import eventually
from support.worker_sessions import all_entered, entered

from psengine.errors import EnvironmentVariableError, ServerError, ServerLostError
from psengine.parameter_server.client import operation
from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.parameter_server.segment import IS_AVAILABLE, Segment
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import Message, MessageType

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 60_000
SPECS = [
    *cut(ChunkKind.PARAMETER, [("w", (NUMEL,), (1,), NUMEL)], torch.float32, 0, 64 * 1024),
    *cut(ChunkKind.BUFFER, [("running mean", (37,), (1,), 37)], torch.float64, 4),
]
CHUNKS = range(len(SPECS))
MEMORY: weakref.WeakKeyDictionary[WorkerSession, list[torch.Tensor]] = weakref.WeakKeyDictionary()


def packed(session: WorkerSession, rank: int, step: int) -> list[torch.Tensor]:
    """The gradients of a step, in memory that servers can read."""
    if session not in MEMORY:
        MEMORY[session] = [session.segments.allocate(spec.numel, spec.dtype) for spec in SPECS]
    return [place.copy_(one) for place, one in zip(MEMORY[session], gradient(rank, step), strict=True)]


def gradient(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(spec.numel, generator=generator, dtype=spec.dtype) for spec in SPECS]


def landings() -> list[torch.Tensor]:
    return [torch.zeros(spec.numel, dtype=spec.dtype) for spec in SPECS]


def sharing(session: WorkerSession) -> int:
    """How many shards share this worker's memory."""
    segments = session.job_connection.transport.segments
    assert segments is not None
    return len(segments._theirs)


def shared_maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("psengine-worker")


def push_all(sessions: Sequence[WorkerSession], step: int, answers: list[list[torch.Tensor]]) -> None:
    """All workers push a gradient of every chunk; their answers land in ``answers``."""
    pushes = [
        session.push(key, payload, [landing])
        for rank, session in enumerate(sessions)
        for key, payload, landing in zip(CHUNKS, packed(session, rank, step), answers[rank], strict=True)
    ]
    wait_all(pushes)


def history(
    server: ServerProcess, job: str, rule: dict[str, object], workers: int, steps: int = 4
) -> list[torch.Tensor]:
    """Every answer to every worker; under "apply" the workers push one after the other."""
    shares = not job.endswith("over sockets")
    made: list[torch.Tensor] = []
    sessions: list[WorkerSession] = []
    try:
        sessions = all_entered(server.addresses[0], workers, SPECS, job=job, rule=rule, uses_segments=shares)
        if rule["name"] == "apply":
            for spec in SPECS[:-1]:
                body = {"optimizer": "SGD", "groups": [SGD], "runs": [[0, spec.numel, 0]]}
                sessions[0].configure(spec.key, body).wait()
        for step in range(steps):
            answers = [landings() for _ in sessions]
            if rule["name"] == "average":
                push_all(sessions, step, answers)
            else:
                for rank, session in enumerate(sessions):
                    pairs = zip(CHUNKS, packed(session, rank, step), answers[rank], strict=True)
                    wait_all([session.push(key, payload, [landing]) for key, payload, landing in pairs])
            made += [tensor for landed in answers for tensor in landed]
        assert {sharing(session) for session in sessions} == {len(server.addresses) if shares else 0}
    finally:
        for session in sessions:
            session.close()
        sessions.clear()
    return made


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running


@pytest.mark.parametrize("rule", [AVERAGE, APPLY], ids=["average", "apply"])
def test_answers_have_the_bits_that_sockets_bring(server, rule):
    shared = history(server, str(rule["name"]), rule, 2)
    sent = history(server, f"{rule['name']} over sockets", rule, 2)
    assert len(shared) == len(sent) == 4 * 2 * len(SPECS)
    assert all(torch.equal(a, b) for a, b in zip(shared, sent, strict=True))


def test_after_a_wait_that_failed_servers_see_no_writes_and_the_exchange_has_what_was_pushed():
    with running_server(lease_s=30.0) as server:
        sessions = all_entered(server.addresses[0], 2, SPECS[:1], job="late", timeout_s=2.0)
        try:
            mine = sessions[0]
            flat = mine.segments.allocate(SPECS[0].numel, torch.float32)
            flat.fill_(1.0)
            landing = torch.zeros(SPECS[0].numel)
            push = mine.push(0, flat, [landing])
            with pytest.raises(ServerLostError):
                push.wait()
            assert sharing(mine) == 1
            mine.segments.withdraw()
            flat.fill_(100.0)  # the next step's gradients, in the same memory
            assert sharing(mine) == 0
            sessions[1].push(0, torch.full_like(flat, 3.0), [landing]).wait()
            assert torch.equal(landing, torch.full_like(landing, 2.0))
        finally:
            for session in sessions:
                session.close()


def test_a_forked_child_neither_changes_the_memory_nor_keeps_it_shared():
    with running_server(lease_s=30.0) as server, ExitStack() as stack:
        session = entered(server.addresses[0], 0, SPECS[:1])
        stack.callback(session.close)
        flat, result = session.segments.allocate(SPECS[0].numel, torch.float32), torch.zeros(SPECS[0].numel)
        session.push(0, flat.fill_(1.0), [result]).wait()
        assert sharing(session) == 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                assert flat.eq(1.0).all()
                flat.fill_(7.0)
                with contextlib.suppress(ServerError):
                    session.push(0, torch.full_like(flat, 9.0), [result])
                session.segments.withdraw()
                code = 0
            os.write(writer, bytes([code]))
            time.sleep(60.0)
            os._exit(code)
        stack.callback(os.waitpid, child, 0)
        stack.callback(os.kill, child, signal.SIGKILL)
        assert os.read(reader, 1) == b"\0"
        os.close(reader)
        os.close(writer)
        assert flat.eq(1.0).all()
        assert result.eq(1.0).all()
        assert sharing(session) == 1
        session.push(0, flat.add_(1.0), [result]).wait()
        assert result.eq(2.0).all()
        session.segments.withdraw()
        session.push(0, flat.add_(1.0), [result]).wait()  # while its answers are read the server keeps what it has
        assert result.eq(3.0).all()
        eventually(lambda: shared_maps(server.pid) == 0)


def push_all_as(session: WorkerSession, rank: int, step: int) -> list[torch.Tensor]:
    answers = landings()
    pairs = zip(CHUNKS, packed(session, rank, step), answers, strict=True)
    wait_all([session.push(key, payload, [landing]) for key, payload, landing in pairs])
    return answers


def push_for_ever(address: str, rank: int) -> None:
    session = entered(address, rank, SPECS, job="killed", world_size=2)
    for step in itertools.count():
        push_all_as(session, rank, step)


def test_a_worker_that_is_killed_leaves_no_memory_and_no_half_gradient():
    with running_server(lease_s=1.0) as server:
        victim = forkserver.Process(target=push_for_ever, args=(server.addresses[0], 1), daemon=True)
        victim.start()
        survivor = entered(server.addresses[0], 0, SPECS, job="killed", world_size=2)
        try:
            eventually(lambda: 1 in survivor.members)
            stop_s, is_dead, alone = time.monotonic() + random.uniform(0.05, 0.6), False, 0
            for step in itertools.count():
                answers = push_all_as(survivor, 0, step)
                own, theirs = gradient(0, step), gradient(1, step)
                for spec, got, mine, other in zip(SPECS, answers, own, theirs, strict=True):
                    both = mine if spec.kind is ChunkKind.BUFFER else (mine + other) / 2
                    assert torch.equal(got, both) or (is_dead and torch.equal(got, mine))
                alone += torch.equal(answers[0], own[0])
                if not is_dead and time.monotonic() > stop_s:
                    victim.kill()
                    is_dead = True
                if alone >= 3:
                    break
            eventually(lambda: shared_maps(server.pid) == 1)
        finally:
            victim.kill()
            victim.join(10)
            survivor.close()


@pytest.mark.parametrize("reads_in_place", [True, False])
def test_servers_that_are_killed_at_any_moment_change_no_bit(reads_in_place):
    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        address = server.addresses[0]
        sessions = all_entered(address, 2, SPECS, job="restarts")
        try:
            for step in range(12):
                answers = [landings() for _ in sessions]
                pushes = [
                    session.push(key, payload, [landing], reads_in_place=reads_in_place)
                    for rank, session in enumerate(sessions)
                    for key, payload, landing in zip(CHUNKS, packed(session, rank, step), answers[rank], strict=True)
                ]
                if step in (3, 7):
                    time.sleep(random.uniform(0.0, 0.003))
                    server.kill()
                    server = stack.enter_context(running_server(bind=address))
                wait_all(pushes)
                read = [push.destinations[0] if (values := push.take()) is None else values for push in pushes]
                halves = read[: len(SPECS)], read[len(SPECS) :]
                for spec, mine, theirs, *landed in zip(
                    SPECS, gradient(0, step), gradient(1, step), *halves, strict=True
                ):
                    expected = mine if spec.kind is ChunkKind.BUFFER else (mine + theirs) / 2
                    assert all(torch.equal(one, expected) for one in landed), (step, spec.key)
            assert [sharing(session) for session in sessions] == [1, 1]
        finally:
            for session in sessions:
                session.close()


def test_memory_that_is_shared_is_packed_in_and_the_answer_read_without_a_copy(monkeypatch):
    with running_server() as server:
        session = entered(server.addresses[0], 0, SPECS[:1])
        try:
            flat, result = session.segments.allocate(SPECS[0].numel, torch.float32), torch.zeros(SPECS[0].numel)
            moved: list[int] = []
            monkeypatch.setattr(operation.ctypes, "memmove", lambda *arguments: moved.append(arguments[2]))
            for step in range(3):
                flat.copy_(gradient(0, step)[0])
                push = session.push(0, flat, [result], reads_in_place=True)
                push.wait()
                assert torch.equal(push.take(), gradient(0, step)[0])
            assert sharing(session) == 1
            assert not moved
        finally:
            session.close()


def test_only_who_is_reached_over_a_unix_socket_says_where_memory_is():
    mine, theirs = WorkerSegments(is_wanted=True), Segment.make("psengine-server", 4096)
    mine.reserve(4096)
    told = Message(MessageType.RESUMED, body={"memory": [os.getpid(), theirs.descriptor, theirs.mark]})
    push = Message(MessageType.PUSH, payload=mine.allocate(4, torch.float32))
    for way, is_shared in (("tcp://a:1", False), ("ipc://beside", True)):
        mine.resumed("tcp://a:1", way, told)
        mine.place("tcp://a:1", push)
        assert (push.place is not None) == is_shared


def test_the_log_says_that_memory_is_shared_and_the_variable_turns_it_off(server, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="psengine.parameter_server.client.segments")
    for value, is_shared in (("1", True), ("0", False)):
        monkeypatch.setenv("PSENGINE_SEGMENTS", value)
        caplog.clear()
        session = entered(server.addresses[0], 0, SPECS[:1], job=f"variable {value}")
        try:
            flat = session.segments.allocate(SPECS[0].numel, torch.float32)
            session.push(0, flat.fill_(1.0), [torch.zeros(SPECS[0].numel)]).wait()
            assert (sharing(session) > 0) == is_shared
            assert ("shares memory with this worker" in caplog.text) == is_shared
        finally:
            session.close()
    monkeypatch.setenv("PSENGINE_SEGMENTS", "off")
    with pytest.raises(EnvironmentVariableError, match=r"PSENGINE_SEGMENTS .* \(expected 0 to 1, got 'off'\)"):
        entered(server.addresses[0], 0, SPECS[:1], job="variable off")
