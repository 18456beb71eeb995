"""Which pushes are one step, when it is complete, and what a new view takes back."""

from __future__ import annotations

import torch

from psengine.parameter_server.client.operation import Parking, Push
from psengine.parameter_server.client.steps import Steps
from psengine.protocol.messages import Message, MessageType


class Desk:
    """A worker's steps, whose answers the test gives."""

    def __init__(self, *, is_shared):
        self.closed = []
        self.steps = Steps(self.closed.append, is_shared=is_shared)
        self.parking = Parking(lambda: 0.0)

    def push(self, key):
        step = self.steps.step_for(key)
        message = Message(MessageType.PUSH, key=key, sequence=step.number, payload=torch.zeros(1))
        averages = self.steps._is_shared
        push = Push(message, self.parking, 10.0, spec=None, step=step, link=None, is_shared=averages)
        self.steps.begin(push)
        return push

    def answer(self, push):
        push.finish(Message(MessageType.UPDATED, key=push.key, sequence=push.step.number))
        self.steps.answered(push)

    def close(self):
        """The I/O thread hears that steps have ended."""
        for step in self.closed:
            step.is_closed = True
        self.steps.advance()


def test_a_step_ends_when_it_is_ended_or_a_chunk_comes_again():
    desk = Desk(is_shared=True)
    first, second = desk.push(0), desk.push(1)
    assert first.step is second.step
    desk.steps.end()
    assert [desk.push(1).step.number, desk.push(2).step.number, desk.push(1).step.number] == [2, 2, 3]
    assert [step.number for step in desk.closed] == [1, 2]


def test_averages_count_once_all_of_a_step_are_there_and_it_has_ended():
    desk = Desk(is_shared=True)
    pushes = [desk.push(0), desk.push(1)]
    for push in pushes:
        desk.answer(push)
    assert not pushes[0].is_done, "another chunk may follow"
    desk.steps.end()
    desk.close()
    assert all(push.is_done and push.message.payload is None for push in pushes)
    assert (desk.steps.completed, desk.steps.kept) == (1, pushes[0].step)


def test_updates_count_one_by_one():
    desk = Desk(is_shared=False)
    pushes = [desk.push(0), desk.push(1)]
    desk.answer(pushes[0])
    assert [push.is_done for push in pushes] == [True, False]


def test_a_frozen_step_completes_later_or_is_taken_back():
    desk = Desk(is_shared=True)
    pushes = [desk.push(0), desk.push(1)]
    desk.steps.end()
    desk.steps.is_frozen = True
    for push in pushes:
        desk.answer(push)
    desk.close()
    assert (desk.steps.completed, pushes[0].is_done) == (0, False)
    assert desk.steps.take_back(2) == [], "an earlier step keeps its answers"
    assert desk.steps.take_back(1) == pushes
    assert pushes[0].message.payload is not None
    desk.steps.is_frozen = False
    desk.steps.advance()
    assert desk.steps.completed == 0
    for push in pushes:
        desk.answer(push)
    assert desk.steps.completed == 1


def test_where_servers_average_a_push_that_fails_ends_its_step():
    desk = Desk(is_shared=True)
    pushes = [desk.push(0), desk.push(1)]
    pushes[0].fail(RuntimeError("lost"))
    assert desk.steps.failed(pushes[0]) == [pushes[1]]
    assert desk.steps.has_failed


def test_a_worker_that_took_over_state_begins_at_its_view_s_step():
    desk = Desk(is_shared=True)
    desk.push(0)
    desk.steps.begin_at(8, anew=True)
    assert (desk.steps.completed, len(desk.steps.open), desk.push(0).step.number) == (7, 0, 8)
    desk.steps.begin_at(5, anew=False)
    desk.steps.end()
    assert desk.push(0).step.number == 9


def test_pushes_of_steps_that_others_completed_before_a_worker_came_do_not_count():
    desk = Desk(is_shared=True)
    desk.steps.begin_at(3, anew=True, from_step=4)
    pushes = [desk.push(0), desk.push(0)]
    for push in pushes:
        push.message.dtype = torch.float32
        desk.answer(push)
    desk.steps.end()
    desk.close()
    assert [push.counts for push in pushes] == [False, True]
