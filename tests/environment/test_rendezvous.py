"""Ranks that cannot meet: what the log says while they wait, and the error at the end. Real ranks and real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from support.processes import free_port, run_ranks

import psengine
from psengine.environment import rendezvous
from psengine.errors import CollectiveError, ServerLostError
from psengine.parameter_server.client import reachability

# RFC 6761: no such name will ever resolve.
NO_HOST = "node-0.invalid"


class Lines(logging.Handler):
    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def place(rank: int, **variables: object) -> list[str]:
    """Place this process as torchrun does unless ``variables`` say otherwise; return the list of warnings to come."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_")):
            del os.environ[name]
    if "SLURM_PROCID" not in variables:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update({name: str(value) for name, value in variables.items()})
    return Lines(rendezvous.logger).lines


def fail(timeout_s: float, words_after_s: float = 0.3) -> tuple[str, float]:
    rendezvous.WORDS_AFTER_S = (words_after_s,)
    rendezvous.GRACE_S = 0.2
    started_s = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        psengine.init("gloo", timeout=timedelta(seconds=timeout_s))
    assert not dist.is_initialized()
    assert threading.current_thread() is threading.main_thread()
    return str(caught.value), time.monotonic() - started_s


def slurm_without_a_name(rank, world_size):
    variables = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2}
    rendezvous.LAUNCHERS_NAME_S = 0.6
    said = place(rank, **variables, SLURM_LOCALID=rank, SLURM_STEP_NODELIST=NO_HOST)
    return *fail(600.0), said


def test_the_first_host_of_slurm_that_does_not_resolve_ends_every_rank_within_seconds():
    for message, waited_s, said in run_ranks(slurm_without_a_name, 2, init_group=False):
        assert waited_s < 60
        for text in (message, said[0]):
            assert f"{NO_HOST!r} (the first of SLURM_STEP_NODELIST={NO_HOST}) does not resolve" in text
        assert "port from the job's name, 'slurm 7.0'" in message
        assert f"Fix: make {NO_HOST} known to every host" in message
        assert "set MASTER_ADDR" in message


def wait_in_vain(rank, world_size, as_rank, address, port, timeout_s=1.0, words_after_s=0.3):
    said = place(as_rank, MASTER_ADDR=address, MASTER_PORT=port)
    return *fail(timeout_s, words_after_s), said


def test_a_name_in_master_addr_may_still_come_and_is_said_at_once():
    ((message, waited_s, said),) = run_ranks(wait_in_vain, 1, 1, NO_HOST, free_port(), 1.5, 60.0, init_group=False)
    assert waited_s > 0.9
    for text in (message, said[0]):
        assert f"{NO_HOST!r} (MASTER_ADDR) does not resolve" in text


@pytest.mark.parametrize("address", ["127.0.0.1", slow("[::1]"), slow("::1")])
def test_nobody_listens(address):
    port = free_port()
    ((message, _, said),) = run_ranks(wait_in_vain, 1, 1, address, port, init_group=False)
    bare = address.strip("[]")
    named = f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
    for text in (message, said[0]):
        assert f"nobody can be reached at {named} (host from MASTER_ADDR, port from MASTER_PORT): {bare}: " in text
    assert "rank 1 of 2 (torchrun) has waited for" in said[0]
    assert "Fix: check that" in message


def test_rank_0_says_that_it_waits():
    port = free_port()
    ((message, _, said),) = run_ranks(wait_in_vain, 1, 0, "127.0.0.1", port, init_group=False)
    assert f"this rank listens at 127.0.0.1:{port}, and not all other ranks have come" in said[0]
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in message


def start_late(rank, world_size, port):
    said = place(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    rendezvous.WORDS_AFTER_S = (0.2, 0.5)
    if rank == 0:
        time.sleep(1.0)
    context = psengine.init("gloo", timeout=timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total)
    psengine.shutdown()
    return context.rank, total.item(), said


def test_a_rank_0_that_starts_late_is_waited_for_with_words():
    (rank_0, of_rank_0, _), (rank_1, of_rank_1, said) = run_ranks(start_late, 2, free_port(), init_group=False)
    assert (rank_0, rank_1, of_rank_0, of_rank_1) == (0, 1, 2.0, 2.0)
    assert len(said) == 2
    assert all("nobody can be reached at 127.0.0.1" in line for line in said)


@contextlib.contextmanager
def another_program(manner: str) -> Iterator[int]:
    """Listens at a port, and is no store: it is silent, closes at once, or speaks first."""
    accepted: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    accepted.append(connection)
                    if manner == "closes":
                        connection.close()
                    elif manner == "speaks":
                        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


@pytest.mark.parametrize("manner", ["is silent", slow("closes"), slow("speaks")])
def test_another_program_has_the_port(manner):
    with another_program(manner) as port:
        ((message, _, said),) = run_ranks(wait_in_vain, 1, 1, "127.0.0.1", port, init_group=False)
        if manner == "is silent":
            ((refusal, waited_s, _),) = run_ranks(wait_in_vain, 1, 0, "127.0.0.1", port, 30.0, init_group=False)
            assert waited_s < 20  # rank 0 does not wait for the port
            assert "address already in use" in refusal
            assert f"that port {port} is free there" in refusal
    assert f"somebody listens at 127.0.0.1:{port}, but has not answered as a store" in said[0]
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in message
    assert "MASTER_PORT chooses another" in message


def test_words_become_rarer():
    at_s, times = 0.0, []
    while at_s < 250:
        at_s = rendezvous.words_at_s(at_s)
        times.append(at_s)
    assert times == [5, 15, 30, 60, 120, 180, 240, 300]


def name_a_server(rank, world_size, address):
    os.environ["PSENGINE_SERVERS"] = address
    reachability.SILENCE_S = 0.1
    said = Lines(logging.getLogger("psengine.parameter_server.client.reachability")).lines
    with pytest.raises(ServerLostError) as caught:
        psengine.connect(role="reader", connect_timeout_s=1.0).layout()
    return str(caught.value), said


def test_a_server_that_cannot_be_reached_is_said_at_once_and_in_the_error():
    address = f"tcp://{NO_HOST}:7077"
    ((message, said),) = run_ranks(name_a_server, 1, address, init_group=False)
    assert f"{address} cannot be reached: the host name {NO_HOST!r} does not resolve here" in said[0]
    assert "PSENGINE_SERVERS" in said[0]
    assert f"The last problem was: the host name {NO_HOST!r} does not resolve here" in message
    address = f"tcp://127.0.0.1:{free_port()}"
    ((message, (line,)),) = run_ranks(name_a_server, 1, address, init_group=False)
    assert f"{address} cannot be reached: nobody can be reached there (127.0.0.1: " in line
    assert "start psengine-server there" in line
    assert "The last problem was: nobody can be reached there" in message
