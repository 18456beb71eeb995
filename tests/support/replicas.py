"""Workers of an averaging job at one shard that do what their clients would, and what may happen to them."""

from __future__ import annotations

import torch

from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import MessageType
from support.shard_world import AVERAGE, ErrorCode, Worker, World, codes, spec


class Replica:
    """A worker whose weights are the sum of all averages it got; ``act`` does the next thing its client would do."""

    def __init__(self, world, rank, size, rule=AVERAGE):
        self.world, self.size = world, size
        self.client = Worker(world, rank, world_size=size, rule=rule)
        self.weights = torch.zeros(2)
        self.done = 0
        self.is_alive = True
        self.phase = "out"
        self.is_waiting = False
        self.abstains = False
        self.last = None
        self.wanted = []
        self.join_id = 0

    @property
    def rank(self):
        return self.client.rank

    def gradient(self):
        return torch.tensor([float(2 ** (self.rank % 8)), float(self.done + 1) * (self.rank + 1)])

    def act(self):
        if not self.is_alive:
            return
        if self.phase == "out":
            self._enter()
        elif self.phase == "joining":
            self._join()
        elif self.is_waiting:
            self.client.probe(0, self.done + 1)
        else:
            if self.wanted:
                self._donate(self.wanted.pop(0))
            if self.phase == "in":
                self._push()

    def _enter(self):
        client = self.client
        queued = client.take()
        state = client.hello()
        client.take(MessageType.WELCOME)
        client.inbox[:0] = [m for m in queued if m.type is not MessageType.ERROR]
        if state == "initialise":
            client.register(spec(0, 2), self.weights if not self.done else None)
            client.seal([spec(0, 2)])
            client.take(MessageType.OK)
            state = "ready"
        if state == "ready":
            if not self.done and not self.is_waiting:
                values = client.pull(0)
                if values.type is MessageType.ERROR:
                    return
                self.weights = payload_tensor(values).clone()
            self.phase = "in"
        elif state == "join":
            self.phase, self.is_waiting = "joining", False
            self.join_id += 1

    def _join(self):
        queued = self.client.take()
        answers = self.client.send(MessageType.JOIN, sequence=(1 << 42) + self.join_id)
        self.client.inbox[:0] = [m for m in queued if m.type is not MessageType.OK]
        for answer in answers:
            if answer.type is MessageType.ERROR:
                self.phase = "out"

    def _joined(self):
        inbox = self.client.take()
        values = self.client.pull(0)
        self.client.inbox[:0] = inbox
        assert values.type is MessageType.VALUES, values
        self.weights, self.done = payload_tensor(values).clone(), values.version
        self.phase, self.abstains = "in", True

    def _donate(self, wanted):
        inbox = self.client.take()
        self.client.send(MessageType.STORE, key=0, version=self.done, payload=self.weights)
        answers = self.client.send(MessageType.ADMIT, body=wanted)
        self.client.take(MessageType.OK)
        self.client.inbox[:0] = inbox
        if codes(answers):
            self.phase = "out"

    def _push(self):
        self.is_waiting = True
        self.client.push(0, self.done + 1, None if self.abstains else self.gradient())

    def receive(self, lose=False):
        """Take in the oldest message, or lose it."""
        if not self.client.inbox:
            return
        message = self.client.inbox.pop(0)
        if lose or not self.is_alive:
            return
        if message.type is MessageType.UPDATED and self.is_waiting and message.sequence == self.done + 1:
            average = payload_tensor(message).clone()
            self.weights = self.weights + average
            self.done += 1
            self.is_waiting = self.abstains = False
            self.last = average
        elif message.type is MessageType.ERROR and message.body["code"] in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER):
            if self.phase == "in":
                self.phase = "out"
        elif message.type is MessageType.MISSING and self.is_waiting and message.sequence == self.done + 1:
            self._push()
        elif message.type is MessageType.SENT and self.is_waiting and message.sequence == self.done + 1:
            self.client.repeat(0, message.sequence)
        elif message.type is MessageType.STATE_WANTED:
            if message.body not in self.wanted:
                self.wanted.append(message.body)
        elif message.type is MessageType.RESULT_WANTED and message.sequence == self.done and self.last is not None:
            self.client.send(MessageType.RESULT, key=0, sequence=self.done, payload=self.last)
        elif message.type is MessageType.OK and self.phase == "joining":
            if message.sequence == (1 << 42) + self.join_id:
                self._joined()
        elif message.type is MessageType.HEARTBEAT_ACK:
            self.client.members = message.body["members"]

    def beat(self):
        if self.is_alive and self.phase != "out":
            self.client.send(MessageType.HEARTBEAT, sequence=0)


class Play:
    """Replicas at one shard, and what may happen to them."""

    def __init__(self, size, rule=AVERAGE):
        self.size, self.rule = size, rule
        self.world = World(codec=False)
        self.replicas = [Replica(self.world, rank, size, rule) for rank in range(size)]
        self.epoch = 7

    def pass_time(self, seconds, silent=()):
        for _ in range(round(seconds * 2)):
            self.world.now_s += 0.5
            for replica in self.replicas:
                if replica not in silent:
                    replica.beat()
            self.world._post(self.world.shard.tick(self.world.now_s), False)

    def crash(self):
        self.epoch += 1
        self.world.sent.clear()
        self.world.start(self.epoch)

    def do(self, what, rank, count):
        replica = self.replicas[rank % self.size]
        if what == "act":
            replica.act()
        elif what == "receive":
            for _ in range(count):
                replica.receive()
        elif what == "lose":
            replica.receive(lose=True)
        elif what == "silence":
            self.pass_time(6, silent=[replica])
        elif what == "crash":
            self.crash()
        elif what == "die":
            replica.is_alive = False
        elif what == "replace" and not replica.is_alive:
            self.replicas[rank % self.size] = Replica(self.world, rank % self.size, self.size, self.rule)

    def settle(self, exchanges=4, rounds=60):
        """No more faults: everybody gets so many exchanges further."""
        target = max(replica.done for replica in self.replicas) + exchanges
        for rank, replica in enumerate(self.replicas):
            if not replica.is_alive:
                self.replicas[rank] = Replica(self.world, rank, self.size, self.rule)
        self._play_until(lambda: all(r.phase == "in" and r.done >= target for r in self.replicas), rounds, 1 << 60)
        last = max(replica.done + replica.is_waiting for replica in self.replicas)
        self._play_until(lambda: all(r.done == last for r in self.replicas), rounds, last)

    def _play_until(self, is_over, rounds, last):
        for _ in range(rounds):
            if is_over():
                return
            for replica in self.replicas:
                if replica.done < last or replica.phase != "in":
                    replica.act()
                for _ in range(6):
                    replica.receive()
            self.pass_time(1)
        shown = [(r.rank, r.phase, r.done, r.is_waiting) for r in self.replicas]
        raise AssertionError(f"somebody hangs: {shown}")

    def check(self):
        self.settle()
        shown = [(r.rank, r.done, r.weights.tolist()) for r in self.replicas]
        first = self.replicas[0]
        assert all(r.done == first.done and torch.equal(r.weights, first.weights) for r in self.replicas), shown
