"""The client's core against a shard's, in one thread under a simulated clock."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from support.client_world import Simulation
from support.shard_world import APPLY, AVERAGE, SGD, spec

from psengine.errors import FencedError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.flow import Flow, SteppedFlow
from psengine.parameter_server.client.state_requests import StateRequest
from psengine.parameter_server.client.worker_session import Push, WorkerSession

LEASE_S = 5.0
SPECS = [spec(0, 4), spec(1, 2)]


@pytest.fixture
def simulation(monkeypatch):
    """One in which neither a clock nor randomness nor a thread of the process can be taken."""

    def taken(*_):
        raise AssertionError("taken from the process instead of given")

    simulation = Simulation(lease_s=LEASE_S)
    with monkeypatch.context() as patches:
        for module, name in (
            (time, "monotonic"),
            (time, "sleep"),
            (random, "SystemRandom"),
            (threading.Thread, "start"),
        ):
            patches.setattr(module, name, taken)
        yield simulation
        simulation.close()


def enter(simulation: Simulation, session: WorkerSession, value: float = 0.0) -> str:
    """HELLO, and what the lead's answer asks for."""
    membership = session._membership
    welcome = simulation.run(handshake.enter(membership))
    flow = join.take_part(membership, welcome.state, SPECS, lambda one: torch.full((one.numel,), value))
    return simulation.run(flow)


def push(session: WorkerSession, value: float, key: int = 0) -> tuple[Push, torch.Tensor]:
    landing = torch.zeros(SPECS[key].numel)
    session.keep_result(key)
    return session.push(key, torch.full((SPECS[key].numel,), value), [landing]), landing


def average(simulation: Simulation, *pushed: tuple[WorkerSession, float]) -> list[float]:
    """What each gets for its push."""
    pushes = [push(session, value) for session, value in pushed]
    simulation.until(lambda: all(one.is_done for one, _ in pushes))
    assert [one.wait().contributors for one, _ in pushes] == [len(pushed)] * len(pushed)
    return [landing[0].item() for _, landing in pushes]


def let_in(simulation: Simulation, donor: WorkerSession, joiner: WorkerSession, flow: Flow[str]) -> None:
    """``flow`` of a joiner, to whom ``donor`` gives the values 7."""

    def donate() -> Flow[None]:
        while (request := donor._membership.state_requests.take()) is None:
            yield 0.1
        for one in SPECS:
            yield [donor.store(one.key, torch.full((one.numel,), 7.0))]
        yield from join.admit(donor._membership, request)
        donor._membership.state_requests.forget(request)

    assert simulation.run(flow, donate()) == "joined"
    pulled = joiner.pull(0)
    simulation.until(lambda: pulled.is_done)
    assert pulled.wait().values.tolist() == [7.0] * 4
    for one in SPECS:
        joiner.set_sequence(one.key, joiner.version(one.key))


def test_a_job_from_its_first_hello_to_a_lost_lease(simulation):
    first, second = (simulation.client(rank, rule=AVERAGE) for rank in range(2))
    assert enter(simulation, first) == "initialised"
    assert average(simulation, (first, 3.0)) == [3.0]
    assert simulation.run(handshake.enter(second._membership)).state == "join"
    let_in(simulation, first, second, join.take_part(second._membership, "join", SPECS, lambda one: torch.zeros(0)))
    assert average(simulation, (first, 1.0), (second, 3.0)) == [2.0, 2.0]

    # Nothing of worker 1 arrives for longer than its lease: the other goes on alone.
    simulation.transports[1].is_cut = True
    waiting = push(first, 5.0)[0]
    simulation.wait(LEASE_S - 1)
    assert not waiting.is_done
    simulation.until(lambda: waiting.is_done, limit_s=3.0)
    assert waiting.wait().contributors == 1

    simulation.transports[1].is_cut = False
    simulation.until(lambda: second.fenced is not None)
    with pytest.raises(FencedError, match="worker 1 of job 'default' was away for longer than its lease"):
        push(second, 1.0)
    let_in(simulation, first, second, join.rejoin(second._membership))
    assert second.fenced is None
    # Its exchanges have other numbers now: a PROGRESS with the old ones would hold up everybody's leave.
    [body] = second._membership.links[0].ledger.to_bodies([])
    assert [(entry[0], entry[2]) for entry in body["chunks"]] == [(0, 0)]
    assert average(simulation, (first, 2.0), (second, 4.0)) == [3.0, 3.0]


@pytest.mark.parametrize("asks_first", [True, False], ids=["before it knows", "once it knows"])
def test_a_donor_that_lost_its_lease_is_fenced_and_admits_nobody(simulation, asks_first):
    donor, other, joiner = (simulation.client(rank, rule=AVERAGE) for rank in range(3))
    assert enter(simulation, donor) == "initialised"
    assert enter(simulation, other) == "ready"
    assert average(simulation, (donor, 1.0), (other, 3.0)) == [2.0, 2.0]
    assert simulation.run(handshake.enter(joiner._membership)).state == "join"
    joining = SteppedFlow(join.take_part(joiner._membership, "join", SPECS, lambda one: torch.zeros(0)))
    joining.step(simulation.world.now_s)
    simulation.wait(1.0)
    request = donor._membership.state_requests.take()
    assert request is not None

    simulation.transports[0].is_cut = True
    assert average(simulation, (other, 5.0)) == [5.0]  # once the donor's lease ran out
    admitting = SteppedFlow(join.admit(donor._membership, request))
    if asks_first:
        admitting.step(simulation.world.now_s)
    simulation.transports[0].is_cut = False
    simulation.until(lambda: donor.fenced is not None)
    admitting.step(simulation.world.now_s)
    simulation.wait(1.0)
    admitting.step(simulation.world.now_s)
    assert isinstance(admitting.error, FencedError)
    assert "worker 0 of job 'default' was away for longer than its lease" in str(admitting.error)
    assert joiner._membership.identity.worker not in simulation.world.shard.jobs.find("default").membership.live_ranks


def test_a_donor_for_whom_no_exchange_waits_any_more_is_fenced(simulation):
    donor, other = (simulation.client(rank, rule=AVERAGE) for rank in range(2))
    enter(simulation, donor)
    enter(simulation, other)
    average(simulation, (donor, 1.0), (other, 3.0))
    # As where the worker is lost that had let this one in.
    simulation.world.shard.jobs.find("default").membership.demote(0)
    with pytest.raises(FencedError, match="worker 0 of job 'default' was away for longer than its lease"):
        simulation.run(join.admit(donor._membership, StateRequest(2, 1)))
    with pytest.raises(FencedError):
        push(donor, 1.0)


def test_a_restarted_server_is_told_the_layout_again(simulation):
    session = simulation.client(0, rule=AVERAGE)
    enter(simulation, session)
    assert average(simulation, (session, 3.0)) == [3.0]
    before = session._membership.identity.incarnation
    simulation.world.start(epoch=8)
    assert average(simulation, (session, 4.0)) == [4.0]
    assert session._membership.links[0].epoch == 8
    assert session._membership.identity.incarnation >= before
    names = [name for _, _, name in simulation.said]
    assert names.count("REGISTER") == 2 * len(SPECS)


def test_weights_that_a_server_lost_end_the_job(simulation):
    session = simulation.client(0, rule=APPLY)
    enter(simulation, session, value=1.0)
    body = {"optimizer": "SGD", "groups": [SGD], "runs": [[0, 4, 0]]}
    configured = session.configure(0, body)
    simulation.until(lambda: configured.is_done)
    one, landing = push_gradient(session)
    simulation.until(lambda: one.is_done)
    assert one.wait().refused is None
    assert landing.tolist() == pytest.approx([0.9] * 4)
    simulation.world.start(epoch=8)
    simulation.wait(2.0)
    with pytest.raises(ServerRefusedError, match="restarted without a snapshot"):
        push_gradient(session)


def push_gradient(session: WorkerSession) -> tuple[Push, torch.Tensor]:
    landing = torch.zeros(4)
    return session.push(0, torch.ones(4), [landing], groups=[SGD]), landing


def test_a_server_that_never_answers_is_given_up_at_the_deadline(simulation):
    session = simulation.client(0, rule=AVERAGE, connect_timeout_s=30.0)
    flow = handshake.enter(session._membership)
    simulation.transports[0].is_cut = True
    began_s = simulation.world.now_s
    with pytest.raises(ServerLostError, match="never heard from"):
        simulation.run(flow)
    assert simulation.world.now_s - began_s == pytest.approx(30.0, abs=0.2)


def test_the_same_program_says_the_same_again():
    def said() -> list[tuple[float, bytes, str]]:
        simulation = Simulation(lease_s=LEASE_S)
        session = simulation.client(0, rule=AVERAGE)
        enter(simulation, session)
        average(simulation, (session, 3.0))
        simulation.wait(3.0)
        simulation.close()
        return simulation.said

    first = said()
    assert len(first) > 12
    assert said() == first


def test_the_recovery_of_a_worker_that_knows_no_chunk_seals_no_empty_job(simulation):
    worker = simulation.client(0, rule=AVERAGE)
    assert simulation.run(handshake.enter(worker._membership)).state == "initialise"
    worker._membership.lost_membership("what was said of an earlier JOIN comes a second time")
    simulation.wait(1.0)
    assert enter(simulation, worker) == "initialised"
