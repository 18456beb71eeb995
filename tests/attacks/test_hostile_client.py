"""Short forms of the hostile client's attacks: the server serves on, an honest worker loses nothing, nothing grows."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
import zmq
from attacks.hostile_client import (
    ATTACKS,
    NOBODY,
    Peer,
    connect_by_hand,
    endless_messages,
    few_descriptors,
    idle_connections,
    idle_dealers,
    is_cut,
    look_around,
    ordeal,
    slow_readers,
)
from support.shard_world import spec
from support.waiting import eventually

from psengine.parameter_server.client.membership import Membership
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession

SHORT = dict.fromkeys(ATTACKS, 1000) | {idle_connections: 100, slow_readers: 2, endless_messages: 20}


@pytest.fixture(scope="module")
def attacked():
    with ordeal() as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_costs_little_and_changes_nothing(attacked, attack):
    outcome = attacked.run(attack, SHORT[attack])
    assert outcome.counters.sent >= SHORT[attack]
    assert outcome.survived
    assert outcome.changed == 0
    assert outcome.health == "10/10"
    assert outcome.newcomer_s < math.inf
    assert outcome.disk_bytes < 10e6  # a generation has 0.4 MB
    assert outcome.memory_bytes < 512e6
    assert attacked.server.log().count("\n") < 100


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_at_length(attack):
    with ordeal() as made:
        outcome = made.run(attack, ATTACKS[attack])
        assert outcome.survived
        assert outcome.changed == 0
        assert outcome.health == "10/10"
        made.server.terminate()
        assert made.server.wait(30) == 0


# ---- file descriptors ------------------------------------------------------------------------------------------------


def test_idle_connections_leave_descriptors_for_everybody_else(tmp_path):
    """Twice as many as the server may have descriptors."""
    with (
        ordeal(sabotage=partial(few_descriptors, 200)) as made,
        idle_dealers(made.server.addresses[0], 400),
    ):
        descriptors = Path(f"/proc/{made.server.pid}/fd")
        eventually(lambda: len(list(descriptors.iterdir())) > 150)
        eventually(lambda: len(list(descriptors.iterdir())) < 120)
        assert made.push()
        for _ in range(2):
            answer = made.worker.request("SNAPSHOT", timeout_s=10.0)
            assert answer.body.keys() == {"generation"}  # attempts without a descriptor have numbers too
            assert made.push()
        health, newcomer_s = look_around(made.server)
        assert health == "10/10"
        assert newcomer_s < math.inf
        status = made.server.status()
        assert status["descriptor_limit"] == 200
        assert status["connections"] <= 100
        assert status["cut_connections"] >= 100
        assert "connections that are no worker's were cut" in made.server.log()


def test_workers_and_who_has_just_spoken_are_not_cut():
    with ordeal(sabotage=partial(few_descriptors, 200)) as made, ExitStack() as held:
        lost = made.worker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        reader = held.enter_context(Peer(made.server.addresses[0]))
        assert reader.request("STATUS", worker=NOBODY).type.name == "STATUS_REPORT"
        reader_lost = reader.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connections = [held.enter_context(connect_by_hand(made.server.addresses[0])) for _ in range(150)]
        eventually(lambda: any(map(is_cut, connections)))
        assert not lost.poll(0)
        assert not reader_lost.poll(0)
        assert made.push()


def test_a_worker_that_computes_for_long_keeps_both_its_connections(monkeypatch):
    """Only heartbeats come from it, while guests of its own address say more than it does."""
    connected = []
    monkeypatch.setattr(Membership, "connected", lambda core, index, now_s: connected.append(index))
    with ordeal(sabotage=partial(few_descriptors, 200)) as made, ExitStack() as held:
        rule = {"name": "average", "quorum": None}
        options = SessionOptions(
            addresses=(made.server.addresses[0],), job="long", rule=rule, rank=0, uses_local_socket=False
        )
        worker = held.enter_context(WorkerSession(options))
        worker.enter([spec(0, 4)], lambda one: torch.zeros(one.numel))
        worker.push(0, torch.ones(4), []).wait()
        eventually(lambda: sorted(connected) == [0, 1])
        for cut in range(20, 120, 20):
            guests = [held.enter_context(Peer(made.server.addresses[0])) for _ in range(100)]
            for guest in guests:
                guest.send(guest.message("STATUS", worker=NOBODY))
            eventually(lambda least=cut: made.server.status()["cut_connections"] >= least)
        worker.push(0, torch.ones(4), []).wait()
        assert sorted(connected) == [0, 1]


# ---- memory ----------------------------------------------------------------------------------------------------------


def small_allowance():
    from psengine.parameter_server.server.transport import memory_guard

    memory_guard.MIN_ALLOWANCE_BYTES = 64 << 20


def test_who_never_reads_is_cut_and_nobody_else():
    """Alone it has less in its queue than is allowed; several of them have more."""
    with ordeal(values=1_000_000, max_memory_bytes=64 << 20, sabotage=small_allowance) as made, ExitStack() as held:
        lost = made.worker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        greedy = [held.enter_context(Peer(made.server.addresses[0], deaf=True)) for _ in range(3)]
        for peer in greedy:
            peer.job = "honest"
            for _ in range(200):
                peer.send(peer.message("PULL", worker=NOBODY, key=0))
        eventually(lambda: "answers that nobody reads: the connections of 127.0.0.1" in made.server.log())
        assert made.push()
        assert not lost.poll(0)
        assert "all connections" not in made.server.log()
