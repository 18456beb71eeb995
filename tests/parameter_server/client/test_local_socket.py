"""Clients of the server's own user go through the Unix socket beside its address."""

from __future__ import annotations

import torch
from support.server_process import running_server
from support.worker_sessions import entered

from psengine.environment.local_sockets import socket_beside
from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind

NUMEL = 100_000
SPECS = cut(ChunkKind.PARAMETER, [("w", (NUMEL,), (1,), NUMEL)], torch.float32, 0)


def exchange(session: WorkerSession, value: float) -> float:
    landing = torch.zeros(NUMEL)
    wait_all([session.push(0, torch.full((NUMEL,), value), [landing])])
    assert torch.equal(landing, landing[:1].expand(NUMEL))
    return landing[0].item()


def ways(session: WorkerSession) -> set[str]:
    return {line.way for line in session.job_connection.transport._lines.values()}


def test_a_client_on_loopback_goes_through_the_socket_and_survives_a_restart():
    with running_server() as server, entered(server.addresses[0], 0, SPECS) as session:
        beside = {socket_beside(address) for address in server.addresses}
        assert ways(session) == beside
        assert exchange(session, 1.0) == 1.0
        server.kill()
        with running_server(bind=server.addresses[0]):
            assert exchange(session, 2.0) == 2.0
            assert ways(session) == beside


def test_a_server_on_ipc_has_no_second_one(tmp_path):
    with (
        running_server(bind=f"ipc://{tmp_path}/socket") as server,
        entered(server.addresses[0], 0, SPECS) as session,
    ):
        assert exchange(session, 5.0) == 5.0
        assert ways(session) == set(server.addresses)
