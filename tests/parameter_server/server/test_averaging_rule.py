"""Rule "average" by itself: the numbers of workers that come, go and return. What a mutation run saw survive."""

from __future__ import annotations

import pytest
import torch
from support.shard_world import AVERAGE, Worker, World, spec, team

from psengine.parameter_server.server.rules.exchange import Contribution, RuleContext
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import job_number
from psengine.protocol.messages import ErrorCode, MessageType


class Room:
    """A rule, and who its exchanges wait for."""

    def __init__(self, *live, quorum=None):
        self.live = tuple(live)
        self.statistics = JobStatistics()
        context = RuleContext(live_ranks=lambda: self.live, missing_ranks=tuple, statistics=self.statistics)
        self.rule = JobRule(AVERAGE | {"quorum": quorum}).make(spec(), torch.zeros(4), context)

    def push(self, rank, sequence, value=1.0, weight=None):
        values = torch.full((4,), value)
        return self.rule.push(Contribution(rank, sequence, base_version=0, values=values, weight=weight))

    def exchange(self, sequence, *ranks):
        replies = [reply for rank in ranks or self.live for reply in self.push(rank, sequence)]
        assert [reply.type for reply in replies] == [MessageType.UPDATED] * len(ranks or self.live)


class TestJoiners:
    def test_a_joiner_goes_on_behind_its_donor(self):
        room = Room(0)
        for sequence in (1, 2, 3):
            room.exchange(sequence)
        room.live = (0, 1)
        room.rule.progress.continue_from(1, 0, was_live=False)
        assert room.rule.progress.last_sequence[1] == room.rule.progress.reached(1) == 3
        room.exchange(4)

    def test_a_joiner_that_never_left_keeps_the_lower_number(self):
        room = Room(0, 1)
        room.exchange(1)
        room.push(1, 2)  # it is one ahead of its donor, and its contribution is here
        room.rule.progress.continue_from(1, 0, was_live=True)
        assert room.rule.progress.last_sequence[1] == 1
        room = Room(0, 1)
        room.exchange(1)
        room.push(0, 2)  # the donor is ahead
        room.rule.progress.continue_from(1, 0, was_live=True)
        assert room.rule.progress.last_sequence[1] == 1

    def test_a_joiner_that_was_gone_takes_the_donors_number_whatever_its_own_was(self):
        room = Room(0, 1)
        room.exchange(1)
        room.live = (0,)
        room.rule.worker_left(1)
        room.exchange(2)
        room.rule.progress.continue_from(1, 0, was_live=False)
        assert room.rule.progress.last_sequence[1] == 2

    def test_without_a_number_of_the_donor_the_joiners_is_forgotten(self):
        room = Room(0, 1)
        room.push(1, 7)
        room.rule.progress.continue_from(1, 0, was_live=True)
        assert room.rule.progress.last_sequence[1] == 7
        room.rule.progress.continue_from(1, 0, was_live=False)
        assert 1 not in room.rule.progress.last_sequence


def test_who_pushes_the_next_exchange_before_it_has_an_answer_still_gets_it():
    """No client of ours does; the server answers all the same."""
    room = Room(0, 1, 2)
    for sequence in (1, 2):
        for rank in (0, 1):
            assert room.push(rank, sequence) == []
    room.live = (0, 1)
    replies = room.rule.worker_left(2)
    assert [(reply.rank, reply.sequence) for reply in replies] == [(0, 1), (1, 1), (0, 2), (1, 2)]


class TestReached:
    def test_a_push_proves_the_average_before_it(self):
        room = Room(0, 1)
        assert room.rule.progress.reached(0) <= 0
        room.exchange(1)
        assert room.rule.progress.reached(0) == 0
        room.push(0, 2)
        assert room.rule.progress.reached(0) == 1

    def test_what_a_worker_says_never_goes_back(self):
        room = Room(0)
        room.rule.note_answered(0, 5)
        room.rule.note_answered(0, 3)
        assert room.rule.progress.reached(0) == 5

    def test_a_new_process_has_what_it_was_given(self):
        room = Room(0)
        room.exchange(1)
        room.exchange(2)
        room.rule.worker_came(1, is_new_process=True)
        assert room.rule.progress.reached(1) == 2


class TestCatchingUp:
    """Worker 1 of a quorum of one is behind by some averages."""

    def after(self, averages, pushed=0):
        room = Room(0, 1, quorum=1)
        room.rule.progress.last_sequence[1] = pushed
        for sequence in range(pushed + 1, averages + 1):
            room.push(0, sequence)
        return room.rule

    def test_every_average_that_it_lacks_must_be_here(self):
        assert self.after(3).can_catch_up(1)
        for lost in (1, 2, 3):
            rule = self.after(3)
            del rule.outcome._results[lost]
            assert not rule.can_catch_up(1)

    def test_nothing_is_lacking_where_nothing_was_averaged(self):
        assert Room(0, 1).rule.can_catch_up(1)

    def test_it_is_repeated_to_whom_it_ended_without(self):
        rule = self.after(2)
        (answer,) = rule.repeat(1, 1)
        assert (answer.type, answer.rank, answer.sequence) == (MessageType.UPDATED, 1, 1)
        assert rule.progress.last_sequence[1] == 1
        (answer,) = rule.repeat(1, 9)
        assert (answer.type, answer.rank, answer.sequence) == (MessageType.MISSING, 1, 9)


def test_weights_scale_out_of_what_gradients_are_added_in():
    room = Room(0, 1)
    room.push(0, 1, value=1e30, weight=1e12)
    replies = room.push(1, 1, value=-1e30, weight=5e11)
    assert replies[0].payload.tolist() == pytest.approx([1e30 / 3] * 4, rel=1e-6)


def test_late_gradients_are_counted():
    room = Room(0, 1, quorum=1)
    room.rule.progress.last_sequence[1] = 0
    for sequence in (1, 2):
        room.push(0, sequence)
    for sequence in (1, 2):
        room.push(1, sequence)
    assert room.statistics.late == 2


def test_a_job_that_begins_anew_counts_from_the_beginning():
    room = Room(0)
    room.exchange(1)
    room.rule.reset()
    assert room.rule.version == 0
    assert room.rule.outcome.values is None
    room.exchange(1)


class TestSnapshots:
    """What a worker deposited, and its number, are kept; exchanges are sent again by whoever takes part."""

    def test_deposited_values_come_back(self):
        world = World()
        (worker,) = team(world, 1, [spec()])
        worker.ask(MessageType.STORE, key=0, payload=torch.full((4,), 3.0), version=6)
        world.start(8, world.shard.durable.capture())
        again = Worker(world, 0, world_size=1, nonce=worker.nonce)
        assert again.hello() == "ready"
        again.take()
        answer = again.pull(0)
        assert (answer.version, payload_tensor(answer).tolist()) == (6, [3.0] * 4)

    def test_a_chunk_without_values_comes_back_without(self):
        world = World()
        worker = Worker(world, 0)
        assert worker.hello() == "initialise"
        worker.register_empty(spec())
        worker.seal([spec()])
        worker.take()
        world.start(8, world.shard.durable.capture())
        again = Worker(world, 0, nonce=worker.nonce)
        assert again.hello() == "ready"
        again.take()
        answer = again.pull(0)
        assert (answer.type, answer.body["code"]) == (MessageType.ERROR, ErrorCode.NOT_READY)

    def test_a_worker_that_was_entering_when_the_snapshot_was_taken_is_waited_for(self):
        """It has taken part since: the others name it. Else a step would be averaged without it."""
        world = World()
        first = Worker(world, 0, world_size=2)
        first.initialise([spec()])
        second = Worker(world, 1, world_size=2)
        states = self.captured_while_entering(world, second)
        world.start(8, states)
        first.members = second.members = [0, 1]
        assert first.hello() == "ready"
        assert first.push(0, 7, torch.ones(4)) == []
        assert second.hello() == "ready"
        second.push(0, 7, torch.full((4,), 3.0))
        (answer,) = first.take(MessageType.UPDATED)
        assert (answer.body["contributors"], payload_tensor(answer).tolist()) == (2, [2.0] * 4)

    def captured_while_entering(self, world, worker):
        """A snapshot that has the worker as a member which exchanges do not wait for yet."""
        assert worker.hello() == "ready"
        worker.take()
        world.shard.jobs.by_number[job_number("demo")].membership.demote(worker.rank)
        return world.shard.durable.capture()
