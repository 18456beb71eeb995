"""Clients on the server's own machine go on over its Unix socket, and come back from it."""

from __future__ import annotations

import torch
from server_process import running_server

from psengine.client.partition import cut
from psengine.client.session import SessionOptions, WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind
from psengine.server.transport import Endpoint

AVERAGE = {"name": "average", "quorum": None}
NUMEL = 100_000


def exchange(session: WorkerSession, value: float) -> float:
    landing = torch.zeros(NUMEL)
    wait_all([session.push(0, torch.full((NUMEL,), value), [landing])])
    assert torch.equal(landing, landing[:1].expand(NUMEL))
    return landing[0].item()


def entered(address: str, **options: object) -> WorkerSession:
    session = WorkerSession(SessionOptions(addresses=[address], rule=AVERAGE, timeout_s=20, **options))
    session.start()
    specs = cut(ChunkKind.PARAMETER, [("w", (NUMEL,), (1,), NUMEL)], torch.float32, 0)
    session.enter(specs, lambda spec: torch.zeros(spec.numel))
    return session


def local_addresses(session: WorkerSession) -> dict[int, str]:
    return session._presence.connection._local


def test_a_client_on_loopback_moves_and_survives_a_restart():
    with running_server() as server:
        address = server.addresses[0]
        session = entered(address)
        try:
            first = dict(local_addresses(session))
            assert first[0].startswith("ipc://@psengine-")
            assert exchange(session, 1.0) == 1.0
            server.kill()
            with running_server(bind=address):
                assert exchange(session, 2.0) == 2.0
                # Another life of the server, another name.
                assert local_addresses(session)[0] != first[0]
        finally:
            session.close()


def test_a_client_may_stay_on_tcp():
    with running_server() as server:
        session = entered(server.addresses[0], uses_local_socket=False)
        try:
            assert exchange(session, 3.0) == 3.0
            assert not local_addresses(session)
        finally:
            session.close()


def advertise_what_is_not_there() -> None:
    Endpoint.open_local = lambda self, name: setattr(self, "local_address", f"ipc://@not-{name}")


def test_a_socket_that_cannot_be_reached_is_given_up():
    with running_server(sabotage=advertise_what_is_not_there) as server:
        session = entered(server.addresses[0])
        try:
            assert exchange(session, 4.0) == 4.0
            assert not local_addresses(session)
        finally:
            session.close()


def test_a_server_on_ipc_offers_no_second_one(tmp_path):
    with running_server(bind=f"ipc://{tmp_path}/socket") as server:
        session = entered(server.addresses[0])
        try:
            assert exchange(session, 5.0) == 5.0
            assert not local_addresses(session)
        finally:
            session.close()
