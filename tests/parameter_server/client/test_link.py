"""A link by a clock of ours: nothing is sent twice that was not lost, and whatever was lost is sent again."""

from __future__ import annotations

import copy
from collections import Counter, deque

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.shard_world import APPLY, AVERAGE, SGD, Worker, World, rule_of, spec

from psengine.parameter_server.client.link import Identity, Link
from psengine.parameter_server.client.operation import Parking, Push, Request
from psengine.protocol.messages import ErrorCode, Message, MessageType

T = MessageType
NUMEL = 4


class Desk:
    """A link whose messages go nowhere: the test answers them."""

    def __init__(self, timeout_s=1e6):
        self.sent = []
        self.is_connected = True
        self.now_s = 0.0
        self.timeout_s = timeout_s
        self.losses = []
        self.link = Link(0, "tcp://a:1", Identity(1, 0, 5), self.transmit, self.losses.append)
        self.link.pushes.is_paused = False
        self.link.epoch = 7
        self.ids = iter(range(1 << 40, 1 << 41))
        self.parking = Parking(lambda: self.now_s)

    def transmit(self, message):
        if self.is_connected:
            self.sent.append(copy.copy(message))
        return self.is_connected

    def begin(self, operation):
        self.link.begin(operation, self.now_s)
        return operation

    def pull(self, key=0):
        message = Message(T.PULL, key=key, sequence=next(self.ids))
        return self.begin(Request(message, lambda: f"PULL of {key}", self.parking, self.timeout_s))

    def push(self, key=0, sequence=1):
        message = Message(T.PUSH, key=key, sequence=sequence, payload=torch.ones(NUMEL))
        message.dtype, message.numel = torch.float32, NUMEL
        return self.begin(Push(message, lambda: f"push of {key}", self.parking, self.timeout_s, (), None))

    def wait(self, seconds):
        """Time passes, a tick each 100 ms; what was sent meanwhile."""
        before = len(self.sent)
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.link.tick(self.now_s)
        return self.sent[before:]

    def answer(self, kind, key=0, sequence=1, **body):
        """An answer comes; what is sent because of it."""
        before = len(self.sent)
        payload = torch.zeros(NUMEL) if kind in (T.UPDATED, T.VALUES) else None
        self.link.receive(Message(kind, key=key, sequence=sequence, body=body, payload=payload), self.now_s)
        return [message.type for message in self.sent[before:]]

    def echo(self, marker):
        """A marker comes back; what is sent because of it."""
        before = len(self.sent)
        self.link.receive(Message(T.ECHOED, sequence=marker.sequence, payload=marker.payload), self.now_s)
        return [message.type for message in self.sent[before:]]


# ---- a link and a shard, and a connection between them that keeps its order, drops and is cut ----------------------


class Lane:
    """One worker: its link, its connection, and what was sent and lost of each type."""

    def __init__(self, world, rank, size, rule):
        self.world = world
        self.client = Worker(world, rank, rule=rule, world_size=size)
        self.up = deque()
        self.sent, self.lost = Counter(), Counter()
        self.generation = 0
        self.done = 0
        self.push = self.pull = None

    def enter(self):
        client = self.client
        if client.hello() == "initialise":
            client.register(spec(0, NUMEL))
            client.seal([spec(0, NUMEL)])
            if client.rule["name"] == "apply":
                client.configure(0, NUMEL, groups=[SGD])
        client.take()
        self.link = Link(0, "tcp://a:1", Identity(1, client.rank, client.incarnation), self.transmit, lambda text: None)
        self.link.epoch, self.link.pushes.is_paused = client.epoch, False

    @property
    def route(self):
        return f"{self.client.route.decode()} data {self.generation}".encode()

    @property
    def down(self):
        return self.world.sent.setdefault(self.route, [])

    def transmit(self, message):
        message = copy.copy(message)
        message.job = next(iter(self.world.shard.jobs.by_number))
        if message.payload is not None:
            message.dtype, message.numel = message.payload.dtype, message.payload.numel()
        self.sent[message.type] += 1
        self.up.append(message)
        return True

    def now(self):
        return self.world.now_s

    def act(self):
        """The next exchange, and a pull, where the last are over."""
        if self.push is None or self.push.is_done:
            self.done += 1
            message = Message(T.PUSH, key=0, sequence=self.done, payload=torch.ones(NUMEL))
            message.dtype, message.numel = torch.float32, NUMEL
            self.push = Push(message, lambda: "push", Parking(self.now), 1e9, (), None)
            self.link.begin(self.push, self.now())
        if self.pull is None or self.pull.is_done:
            message = Message(T.PULL, key=0, sequence=(1 << 40) + self.done)
            self.pull = Request(message, lambda: "pull", Parking(self.now), 1e9)
            self.asked = getattr(self, "asked", 0) + 1
            self.link.begin(self.pull, self.now())

    def deliver_up(self):
        if self.up:
            self.world.deliver(self.route, self.up.popleft())

    def deliver_down(self):
        if self.down:
            self.link.receive(self.down.pop(0), self.now())

    def drop_up(self):
        if self.up:
            self.lost[self.up.popleft().type] += 1

    def drop_down(self):
        if self.down:
            self.lost[self.down.pop(0).type] += 1

    def cut(self):
        """The connection ends with all that is on it; what the server sends to it from now on is lost too."""
        self.lost.update(message.type for message in (*self.up, *self.down))
        self.up.clear()
        self.down.clear()
        self.generation += 1
        self.link.connected(self.now())

    def lost_by_old_connections(self):
        routes = [f"{self.client.route.decode()} data {n}".encode() for n in range(self.generation)]
        return Counter(message.type for route in routes for message in self.world.sent.get(route, []))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["act", "act", *["deliver_up", "deliver_down"] * 4, "drop_up", "drop_down", "cut", "wait"]),
        st.integers(0, 1),
        st.integers(1, 40),
    ),
    max_size=120,
)


@pytest.mark.parametrize("rule", [AVERAGE, APPLY], ids=["average", "apply"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, lossless=st.booleans())
def test_every_copy_is_for_a_loss_and_every_update_counts_once(rule, steps, lossless):
    world = World(codec=False, lease_s=1e9)
    counted = Counter()
    lanes = [Lane(world, rank, 2, rule) for rank in range(2)]
    for lane in lanes:
        lane.enter()
    deliver = world.shard.handle

    def count(sender, message, now_s):
        outgoing = deliver(sender, message, now_s)
        counted.update((one.route.split(b" ")[0], one.message.type) for one in outgoing)
        return outgoing

    world.shard.handle = count
    for what, which, amount in steps:
        lane = lanes[which]
        if what == "wait":
            world.now_s += amount / 2
            for each in lanes:
                each.link.tick(world.now_s)
        elif not (lossless and what in ("drop_up", "drop_down", "cut")):
            for _ in range(amount % 4 + 1 if what.startswith("deliver") else 1):
                getattr(lane, what)()
    last = max(lane.done for lane in lanes)
    for _ in range(200):
        world.now_s += 1.0
        for lane in lanes:
            lane.link.tick(world.now_s)
            while lane.up or lane.down:
                lane.deliver_up()
                lane.deliver_down()
            if lane.done < last:
                lane.act()
        if all(lane.done == last and not lane.link.open_operations() for lane in lanes):
            break
    assert all(lane.done == last and not lane.link.open_operations() for lane in lanes), "something was never recovered"
    for lane in lanes:
        lost = lane.lost + lane.lost_by_old_connections()
        if not last:
            continue
        assert lane.sent[T.PUSH] == last + lost[T.PUSH]
        answers = {kind: counted[lane.client.route, kind] for kind in (T.UPDATED, T.VALUES)}
        assert answers[T.UPDATED] == last + lost[T.UPDATED]
        assert answers[T.VALUES] == lane.asked + lost[T.VALUES]
    if last and rule is APPLY:
        assert rule_of(world).version == 2 * last
    elif last:
        assert world.shard.status(world.now_s).jobs["demo"].averaged == last


def refusal(incarnation, sequence=1 << 63):
    """What a server says of a message of that incarnation."""
    body = {"code": ErrorCode.FENCED, "text": "silent for more than its lease"}
    return Message(T.ERROR, epoch=7, worker=0, incarnation=incarnation, sequence=sequence, body=body)


def test_what_is_said_of_a_former_incarnation_is_no_new_loss():
    desk = Desk()
    desk.link.ledger.welcomed(7, "memory")
    push = desk.push()
    desk.link.receive(refusal(incarnation=4), desk.now_s)
    assert desk.losses == []
    assert not push.is_done
    desk.link.receive(refusal(incarnation=5), desk.now_s)
    assert len(desk.losses) == 1


def test_a_hello_is_not_given_up_for_what_was_sent_before_it():
    desk = Desk()
    desk.link.ledger.welcomed(7, "memory")
    desk.link.pause()
    hello, seal = (
        desk.begin(Request(Message(kind, sequence=next(desk.ids)), lambda: "", desk.parking, 10.0, is_urgent=True))
        for kind in (T.HELLO, T.SEAL)
    )
    desk.link.receive(refusal(incarnation=5), desk.now_s)
    assert not hello.is_done
    assert seal.error is not None
    assert desk.losses == [], "the recovery is under way"
