"""A server that stood still: what workers said meanwhile is unread, which is not their silence."""

from __future__ import annotations

import logging

import pytest
import torch
from support.shard_world import Worker, World, push_all, spec, team

from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import ErrorCode, MessageType

# lease 5 s, a heartbeat each second.
PAUSE_S = 60.0


def stand_still(world, seconds=PAUSE_S):
    """The server's process is stopped and goes on: a tick comes before what is queued is read."""
    world.now_s += seconds
    world._post(world.shard.tick(world.now_s), True)


def members_of(world):
    (job,) = world.shard.status(world.now_s).jobs.values()
    return [worker.rank for worker in job.workers]


def told(world):
    return [(event.kind, event.worker) for event in world.shard.events.events()]


@pytest.fixture
def world():
    return World()


@pytest.fixture
def workers(world):
    """Three of an averaging job, after one exchange."""
    workers = team(world, 3, [spec(0, 4)])
    exchange(workers, 1)
    return workers


def exchange(workers, sequence):
    for worker in workers:
        worker.push(0, sequence, torch.full((4,), float(worker.rank)))
    return [worker.take(MessageType.UPDATED) for worker in workers]


class TestLeases:
    def test_all_are_members_afterwards_and_averages_are_of_all(self, world, workers):
        stand_still(world)
        assert members_of(world) == [0, 1, 2]
        for (answer,) in exchange(workers, 2):
            assert answer.body["contributors"] == 3
            assert payload_tensor(answer).tolist() == [1.0] * 4

    def test_the_rest_of_the_lease_is_what_it_was(self, world, workers):
        world.advance(3, *workers[1:])
        stand_still(world)
        world.advance(1.5, *workers[1:])
        assert members_of(world) == [0, 1, 2]
        world.advance(1, *workers[1:])
        assert members_of(world) == [1, 2]

    def test_who_died_meanwhile_is_out_a_lease_later(self, world, workers):
        stand_still(world)
        survivors = [workers[0], workers[2]]
        push_all(survivors, 2, torch.full((4,), 4.0))
        world.advance(4.5, *survivors)
        assert members_of(world) == [0, 1, 2]
        world.advance(1, *survivors)
        assert members_of(world) == [0, 2]
        for worker in survivors:
            (answer,) = worker.take(MessageType.UPDATED)
            assert (answer.body["contributors"], payload_tensor(answer)[0].item()) == (2, 4.0)

    def test_a_server_that_never_gets_enough_time_finds_the_dead_all_the_same(self, world, workers):
        for _ in range(60):
            stand_still(world, 2.0)
            workers[0].heartbeat()
            workers[2].heartbeat()
        assert members_of(world) == [0, 2]


class TestWhoIsWho:
    def test_a_claim_to_the_rank_of_a_living_worker_does_not_ripen(self, world, workers):
        newcomer = Worker(world, 1, world_size=3)
        assert newcomer.hello() == "wait"
        world.advance(0.5, *workers)
        assert newcomer.hello() == "wait"
        world.now_s += 2.4
        assert newcomer.hello() == "wait"
        assert newcomer.claim(*workers) == ErrorCode.DUPLICATE_RANK

    def test_a_server_that_forgot_the_job_waits_for_all_whom_its_workers_name(self, world, workers):
        world.start(8)
        workers[0].members, workers[1].members = [0, 1], [0, 1, 2]
        assert workers[0].hello() == "initialise"
        stand_still(world)
        workers[1].hello()
        assert members_of(world) == [0, 1, 2]


class TestTelling:
    def test_the_server_is_named_and_no_worker(self, world, workers, caplog):
        with caplog.at_level(logging.WARNING):
            stand_still(world)
        assert told(world) == [("joined", 0), ("joined", 1), ("joined", 2), ("stood_still", None)]
        text = world.shard.events.events()[-1].text
        assert text.startswith(f"shard 0 stood still for {PAUSE_S:.1f} s")
        assert [record.getMessage() for record in caplog.records] == [text]

    def test_short_pauses_and_those_that_concern_nobody_are_not_told(self, world):
        stand_still(world)
        team(world, 1, [spec(0, 4)])
        stand_still(world, 1.5)
        assert told(world) == [("joined", 0)]
