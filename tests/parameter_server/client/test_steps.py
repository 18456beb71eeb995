"""What a push that fails, and a worker that comes late, mean for steps; simulation/ holds the rest."""

import torch

from psengine.parameter_server.client.operation import Parking, Push
from psengine.parameter_server.client.steps import Steps
from psengine.protocol.messages import Message, MessageType


class Desk:
    """A worker's steps where servers average; the test gives their answers."""

    def __init__(self):
        self.closed = []
        self.steps = Steps(self.closed.append, is_shared=True)
        self.parking = Parking(lambda: 0.0)

    def push(self, key):
        step = self.steps.step_for(key)
        message = Message(MessageType.PUSH, key=key, sequence=step.number, payload=torch.zeros(1))
        push = Push(message, self.parking, 10.0, spec=None, step=step, link=None, is_shared=True)
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


def test_where_servers_average_a_push_that_fails_ends_its_step():
    desk = Desk()
    pushes = [desk.push(0), desk.push(1)]
    pushes[0].fail(RuntimeError("lost"))
    assert desk.steps.failed(pushes[0]) == [pushes[1]]
    assert desk.steps.has_failed


def test_a_worker_that_took_over_state_begins_at_its_view_s_step():
    desk = Desk()
    desk.push(0)
    desk.steps.begin_at(8, anew=True)
    assert (desk.steps.completed, len(desk.steps.open), desk.push(0).step.number) == (7, 0, 8)
    desk.steps.begin_at(5, anew=False)
    desk.steps.end()
    assert desk.push(0).step.number == 9


def test_pushes_of_steps_that_others_completed_before_a_worker_came_do_not_count():
    desk = Desk()
    desk.steps.begin_at(3, anew=True, from_step=4)
    pushes = [desk.push(0), desk.push(0)]
    for push in pushes:
        push.message.dtype = torch.float32
        desk.answer(push)
    desk.steps.end()
    desk.close()
    assert [push.counts for push in pushes] == [False, True]
