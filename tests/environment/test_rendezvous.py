"""Ranks that cannot meet: what the log says while they wait, and the error at the end. Real ranks and real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

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
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def placed(rank: int, **variables: object) -> Iterator[list[str]]:
    """As torchrun places this process unless ``variables`` say otherwise; yields the warnings."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_")):
            del os.environ[name]
    if "SLURM_PROCID" not in variables:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update({name: str(value) for name, value in variables.items()})
    log = Lines()
    rendezvous.logger.addHandler(log)
    yield log.lines


def fail(timeout_s: float, words_after_s: float = 0.3) -> tuple[str, float]:
    rendezvous.WORDS_AFTER_S = (words_after_s,)
    rendezvous.GRACE_S = 0.2
    started_s = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        psengine.init("gloo", timeout_s=timeout_s)
    assert not dist.is_initialized()
    assert threading.current_thread() is threading.main_thread()
    return str(caught.value), time.monotonic() - started_s


def slurm_without_a_name(rank, world_size):
    variables = {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_NODELIST": NO_HOST,
    }
    rendezvous.LAUNCHERS_NAME_S = 0.6
    with placed(rank, **variables) as said:
        return *fail(600.0), said


def test_the_first_host_of_slurm_that_does_not_resolve_ends_every_rank_within_seconds():
    for message, waited_s, said in run_ranks(slurm_without_a_name, 2, init_group=False):
        assert waited_s < 60
        for text in (message, said[0]):
            assert f"{NO_HOST!r} (the first of SLURM_STEP_NODELIST={NO_HOST}) does not resolve" in text
        assert "port from the job's name, 'slurm 7.0'" in message
        assert f"Fix: make {NO_HOST} known to every host" in message
        assert "set MASTER_ADDR" in message


def given_without_a_name(rank, world_size, port):
    with placed(rank, MASTER_ADDR=NO_HOST, MASTER_PORT=port) as said:
        return *fail(1.5, words_after_s=60.0), said


def test_a_name_in_master_addr_may_still_come_and_is_said_at_once():
    for message, waited_s, said in run_ranks(given_without_a_name, 2, free_port(), init_group=False):
        assert waited_s > 0.9
        assert f"{NO_HOST!r} (MASTER_ADDR) does not resolve" in said[0]
        assert f"{NO_HOST!r} (MASTER_ADDR) does not resolve" in message


@pytest.mark.parametrize("address", ["127.0.0.1", slow("[::1]"), slow("::1")])
def test_nobody_listens(address):
    port = free_port()
    ((message, said),) = run_ranks(nobody_listens, 1, address, port, init_group=False)
    bare = address.strip("[]")
    named = f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
    for text in (message, said[0]):
        assert f"nobody can be reached at {named} (host from MASTER_ADDR, port from MASTER_PORT): {bare}: " in text
    assert "rank 1 of 2 (torchrun) has waited for" in said[0]
    assert "Fix: check that" in message


def nobody_listens(rank, world_size, address, port):
    with placed(1, MASTER_ADDR=address, MASTER_PORT=port) as said:
        message, _ = fail(1.0)
        return message, said


def alone_at_the_meeting(rank, world_size, port):
    with placed(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) as said:
        message, _ = fail(1.0)
        return message, said


@pytest.mark.slow
def test_rank_0_says_that_it_waits():
    port = free_port()
    ((message, said),) = run_ranks(alone_at_the_meeting, 1, port, init_group=False)
    assert f"this rank listens at 127.0.0.1:{port}, and not all other ranks have come" in said[0]
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in message


def start_late(rank, world_size, port):
    with placed(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) as said:
        rendezvous.WORDS_AFTER_S = (0.2, 0.5)
        if rank == 0:
            time.sleep(1.0)
        context = psengine.init("gloo", timeout_s=60)
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


def meet_another_program(rank, world_size, port):
    with placed(1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) as said:
        message, _ = fail(1.0)
        return message, said


@pytest.mark.parametrize(
    "manner", ["is silent", *(pytest.param(manner, marks=pytest.mark.slow) for manner in ("closes", "speaks"))]
)
def test_another_program_has_the_port(manner):
    with another_program(manner) as port:
        ((message, said),) = run_ranks(meet_another_program, 1, port, init_group=False, deadline_s=60)
    assert f"somebody listens at 127.0.0.1:{port}, but has not answered as a store" in said[0]
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in message
    assert "MASTER_PORT chooses another" in message


def listen_where_another_does(rank, world_size, port):
    with placed(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port):
        return fail(30.0)


def test_rank_0_does_not_wait_for_a_port_that_another_program_has():
    with another_program("is silent") as port:
        ((message, waited_s),) = run_ranks(listen_where_another_does, 1, port, init_group=False)
    assert waited_s < 20
    assert "address already in use" in message
    assert f"that port {port} is free there" in message


def test_words_become_rarer():
    at_s, times = 0.0, []
    while at_s < 250:
        at_s = rendezvous.words_at_s(at_s)
        times.append(at_s)
    assert times == [5, 15, 30, 60, 120, 180, 240, 300]


def name_a_server(rank, world_size):
    os.environ["PSENGINE_SERVERS"] = f"tcp://{NO_HOST}:7077"
    log = Lines()
    logging.getLogger("psengine.parameter_server.client.reachability").addHandler(log)
    with pytest.raises(ServerLostError) as caught:
        psengine.connect(role="reader", connect_timeout_s=1.0).layout()
    return str(caught.value), log.lines


def test_a_server_whose_host_does_not_resolve_is_said_at_once_and_in_the_error():
    ((message, said),) = run_ranks(name_a_server, 1, init_group=False)
    assert f"tcp://{NO_HOST}:7077 cannot be reached: the host name {NO_HOST!r} does not resolve here" in said[0]
    assert "PSENGINE_SERVERS" in said[0]
    assert f"The last problem was: the host name {NO_HOST!r} does not resolve here" in message


def name_a_port_without_a_server(rank, world_size, port):
    reachability.SILENCE_S = 0.1
    log = Lines()
    logging.getLogger("psengine.parameter_server.client.reachability").addHandler(log)
    with pytest.raises(ServerLostError) as caught:
        psengine.connect(f"tcp://127.0.0.1:{port}", role="reader", connect_timeout_s=1.0).layout()
    return str(caught.value), log.lines


def test_a_server_that_does_not_run_is_said_within_seconds_and_in_the_error():
    port = free_port()
    ((message, said),) = run_ranks(name_a_port_without_a_server, 1, port, init_group=False)
    (line,) = said
    assert f"tcp://127.0.0.1:{port} cannot be reached: nobody can be reached there (127.0.0.1: " in line
    assert "start psengine-server there" in line
    assert "The last problem was: nobody can be reached there" in message
