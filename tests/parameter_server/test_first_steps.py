"""The first steps of sync-server: a server that dies before workers heard of each other still waits for all of them."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import torch
from support.server_process import ServerProcess, running_server
from support.worker_sessions import entered

from psengine.parameter_server.client import recovery
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.handshake import Welcome, shake_hands
from psengine.parameter_server.client.membership import Membership
from psengine.parameter_server.client.worker_session import Push, WorkerSession
from psengine.protocol.messages import Message, MessageType

LEASE_S = 20.0
WORLD_SIZE = 2


def push(session: WorkerSession, value: float, landing: torch.Tensor) -> Push:
    session.keep_result(0)
    return session.push(0, torch.full((4,), value), [landing])


def awaited_by_worker_0(server: ServerProcess) -> list[int]:
    """For whom its average is held."""
    return [rank for job in server.job("job") for worker in job["workers"][:1] for rank in worker["waiting_for"]]


def test_a_server_that_dies_after_the_first_step_waits_for_workers_that_nobody_heard_of(tmp_path, monkeypatch):
    """Worker 0 came first, so that its WELCOME names nobody; worker 1 says HELLO to the new server some time later."""
    address = f"ipc://{tmp_path}/socket"
    landings = [torch.zeros(4) for _ in range(WORLD_SIZE)]
    worker_1_may_come = threading.Event()
    with ExitStack() as context:
        servers = context.enter_context(ExitStack())  # they end after the workers
        server = servers.enter_context(running_server(bind=address, lease_s=LEASE_S))
        sessions = [entered(address, rank, world_size=WORLD_SIZE) for rank in range(WORLD_SIZE)]
        for session in sessions:
            context.callback(session.close)
        first, second = (session._membership for session in sessions)
        received = sessions[0]._membership.received

        def hear(index: int, message: Message, now_s: float) -> None:
            if message.type is not MessageType.HEARTBEAT_ACK:
                received(index, message, now_s)

        def greet_late(membership: Membership) -> Flow[Welcome]:
            while membership is second and not worker_1_may_come.is_set():
                yield 0.05
            return (yield from shake_hands(membership))

        monkeypatch.setattr(sessions[0]._membership, "received", hear)
        monkeypatch.setattr(recovery, "shake_hands", greet_late)
        first.members = ()  # what a heartbeat has said until here
        first.has_roll = False
        pushes = [push(session, 1.0 + 2 * rank, landings[rank]) for rank, session in enumerate(sessions)]
        for one in pushes:
            one.wait()
        server.kill()
        server = servers.enter_context(running_server(bind=address, lease_s=LEASE_S))
        early = push(sessions[0], 1.0, landings[0])
        deadline_s = time.monotonic() + 20.0
        while not early.is_done and awaited_by_worker_0(server) != [1]:
            assert time.monotonic() < deadline_s, server.log()
            time.sleep(0.02)
        assert not early.is_done
        worker_1_may_come.set()
        late = push(sessions[1], 3.0, landings[1])
        early.wait()
        late.wait()
        assert [landing.tolist() for landing in landings] == [[2.0] * 4] * 2
