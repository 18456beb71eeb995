"""Workers and servers of one host share memory: the same bits as over sockets, whoever dies, and nothing is left."""

import contextlib
import itertools
import logging
import os
import random
import signal
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.processes import forkserver
from support.server_process import ServerProcess, running_server
from support.shard_world import APPLY, AVERAGE, SGD
from support.waiting import eventually
from support.worker_sessions import crew, entered

from psengine.errors import EnvironmentVariableError, ServerError, ServerLostError
from psengine.parameter_server.client.client import connect
from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.parameter_server.client.worker_session import Push, WorkerSession, wait_all
from psengine.parameter_server.segment import IS_AVAILABLE, Segment
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import Message, MessageType

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
NUMEL = 60_000
SPECS = [
    *cut(ChunkKind.PARAMETER, [("w", (NUMEL,), (1,), NUMEL)], torch.float32, 0, 64 * 1024),
    *cut(ChunkKind.BUFFER, [("running mean", (37,), (1,), 37)], torch.float64, 4),
]
MEMORY: weakref.WeakKeyDictionary[WorkerSession, list[torch.Tensor]] = weakref.WeakKeyDictionary()


def packed(session: WorkerSession, rank: int, step: int) -> list[torch.Tensor]:
    """The gradients of a step, in memory that servers can read."""
    if session not in MEMORY:
        MEMORY[session] = [session.segments.allocate(spec.numel, spec.dtype) for spec in SPECS]
    return [place.copy_(one) for place, one in zip(MEMORY[session], gradient(rank, step), strict=True)]


def gradient(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(spec.numel, generator=generator, dtype=spec.dtype) for spec in SPECS]


def sharing(session: WorkerSession) -> int:
    """How many shards share this worker's memory."""
    segments = session.job_connection.transport.segments
    assert segments is not None
    return len(segments._theirs)


def push_all(session: WorkerSession, rank: int, step: int, landed: list[torch.Tensor], **options: bool) -> list[Push]:
    """A gradient of every chunk; the answers land in new tensors at the end of ``landed``."""
    answers = [torch.zeros(spec.numel, dtype=spec.dtype) for spec in SPECS]
    landed += answers
    pairs = zip(packed(session, rank, step), answers, strict=True)
    return [session.push(key, payload, [landing], **options) for key, (payload, landing) in enumerate(pairs)]


def shared_maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("psengine-worker")


def history(server: ServerProcess, rule: dict[str, object], *, shares: bool) -> list[torch.Tensor]:
    """Every answer to every worker; under "apply" the workers push one after the other."""
    made: list[torch.Tensor] = []
    options = {"job": f"{rule['name']} {shares}", "rule": rule, "uses_segments": shares}
    with crew(server.addresses[0], 2, SPECS, **options) as sessions:
        for spec in SPECS[:-1] if rule is APPLY else ():
            sessions[0].configure(spec.key, {"optimizer": "SGD", "groups": [SGD], "runs": [[0, spec.numel, 0]]}).wait()
        for step in range(4):
            pushes = []
            for rank, session in enumerate(sessions):
                pushes += push_all(session, rank, step, made)
                if rule is APPLY:
                    wait_all(pushes)
            wait_all(pushes)
        assert {sharing(session) for session in sessions} == {len(server.addresses) if shares else 0}
    return made


@pytest.mark.parametrize("rule", [AVERAGE, APPLY], ids=["average", "apply"])
def test_answers_have_the_bits_that_sockets_bring(server, rule):
    shared, sent = (history(server, rule, shares=shares) for shares in (True, False))
    assert len(shared) == len(sent) == 4 * 2 * len(SPECS)
    assert all(map(torch.equal, shared, sent))


def test_after_a_wait_that_failed_servers_see_no_writes_and_the_exchange_has_what_was_pushed():
    with (
        running_server(lease_s=30.0) as server,
        crew(server.addresses[0], 2, SPECS[:1], job="late") as (mine, other),
    ):
        mine.job_connection.options = replace(mine.options, timeout_s=2.0)
        flat = mine.segments.allocate(SPECS[0].numel, torch.float32)
        landing = torch.zeros(SPECS[0].numel)
        push = mine.push(0, flat.fill_(1.0), [landing])
        with pytest.raises(ServerLostError):
            push.wait()
        assert sharing(mine) == 1
        mine.segments.withdraw()
        flat.fill_(100.0)  # the next step's gradients, in the same memory
        assert sharing(mine) == 0
        other.push(0, torch.full_like(flat, 3.0), [landing]).wait()
        assert torch.equal(landing, torch.full_like(landing, 2.0))
        mine.close()  # the other one would wait for it


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_neither_changes_the_memory_nor_keeps_it_shared():
    with (
        running_server(lease_s=30.0) as server,
        entered(server.addresses[0], 0, SPECS[:1]) as session,
        ExitStack() as stack,
    ):
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
                with pytest.raises(ServerError, match=r"fork\(\)"):
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


def test_a_server_on_loopback_is_reached_over_its_unix_socket_also_after_a_restart():
    """Memory is shared over such a socket alone."""
    with running_server() as server, entered(server.addresses[0], 0, SPECS[:1]) as session:
        flat, result = session.segments.allocate(SPECS[0].numel, torch.float32), torch.zeros(SPECS[0].numel)

        def exchange(value: float) -> None:
            session.push(0, flat.fill_(value), [result]).wait()
            assert result.eq(value).all()
            assert sharing(session) == 1

        exchange(1.0)
        server.kill()
        with running_server(bind=server.addresses[0]):
            exchange(2.0)


def push_for_ever(address: str, rank: int) -> None:
    session = entered(address, rank, SPECS, job="killed", world_size=2)
    for step in itertools.count():
        wait_all(push_all(session, rank, step, []))


def test_a_worker_that_is_killed_leaves_no_memory_and_no_half_gradient():
    with running_server() as server:
        victim = forkserver.Process(target=push_for_ever, args=(server.addresses[0], 1), daemon=True)
        victim.start()
        survivor = entered(server.addresses[0], 0, SPECS, job="killed", world_size=2)
        try:
            eventually(lambda: 1 in survivor.members)
            stop_s, is_dead, alone = time.monotonic() + random.uniform(0.05, 0.6), False, 0
            for step in itertools.count():
                wait_all(push_all(survivor, 0, step, answers := []))
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
        with entered(server.addresses[0], 0, SPECS[:1], job=f"variable {value}") as session:
            flat = session.segments.allocate(SPECS[0].numel, torch.float32)
            session.push(0, flat.fill_(1.0), [torch.zeros(SPECS[0].numel)]).wait()
            assert (sharing(session) > 0) == is_shared
            assert ("shares memory with this worker" in caplog.text) == is_shared
    monkeypatch.setenv("PSENGINE_SEGMENTS", "off")
    with pytest.raises(EnvironmentVariableError, match=r"PSENGINE_SEGMENTS .* \(expected 0 to 1, got 'off'\)"):
        entered(server.addresses[0], 0, SPECS[:1], job="variable off")


# ---- a segment by itself ---------------------------------------------------------------------------------------------

SIZE = 8192


def opened(segment):
    return Segment.of_process(os.getpid(), segment.descriptor)


def test_its_owner_alone_writes_and_nobody_changes_its_size():
    made = Segment.make("psengine-worker", SIZE - 100)
    theirs = opened(made)
    made.tensor(64, 4, torch.float32).fill_(3.0)
    assert theirs.tensor(64, 4, torch.float32).tolist() == [3.0] * 4
    other = os.open(f"/proc/self/fd/{made.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(other, b"x", 0)
        for size in (0, SIZE // 2, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(other, size)
    finally:
        os.close(other)


def test_tensors_outlive_it():
    made = Segment.make("psengine-worker", SIZE)
    theirs = opened(made)
    written, read = made.tensor(64, 100, torch.float32), theirs.tensor(64, 100, torch.float32)
    written.copy_(torch.arange(100.0))
    del made, written
    assert torch.equal(read, torch.arange(100.0))
    del theirs
    assert torch.equal(read, torch.arange(100.0))


def test_a_job_without_workers_holds_no_descriptors_and_the_oldest_are_forgotten():
    with running_server(lease_s=1.0, keep_ended_jobs="2") as server:
        for number in range(4):
            job, landed = f"job {number}", []
            with crew(server.addresses[0], 1, SPECS[:1], job=job, rule=APPLY) as (session,):
                runs = [[0, SPECS[0].numel, 0]]
                session.configure(0, {"optimizer": "SGD", "groups": [SGD], "runs": runs}).wait()
                for step in range(3):
                    landed.append(torch.zeros(SPECS[0].numel))
                    payload = session.segments.allocate(SPECS[0].numel, torch.float32).fill_(step + 1)
                    session.push(0, payload, landed[-1:]).wait()
                assert sharing(session) == 1
                assert lent_descriptors(server.pid)
            eventually(lambda: not lent_descriptors(server.pid))
            with connect(server.addresses[0], job=job, role="reader") as reader:
                (values,) = reader.pull().values()
            assert torch.equal(values[: SPECS[0].numel], landed[-1])
        eventually(lambda: sorted(server.status()["jobs"]) == ["job 2", "job 3"])
        assert server.status()["keep_ended_jobs"] == "2"


def lent_descriptors(pid: int) -> int:
    names = (os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink())
    return sum("psengine-server" in name for name in names)
