"""A shard's thread between its socket, the coordinators, the shard and the log: who gets a message, and what waits."""

from types import SimpleNamespace

import pytest
import zmq

from psengine.parameter_server.server.interfaces import Outgoing, ShardSettings
from psengine.parameter_server.server.transport.endpoint import Endpoint
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.protocol.frames import decode, encode
from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import View, message_of

VIEW = message_of(View(1, 1, (), (1,)), b"k" * 32, 0)


class World:
    """A thread on a real socket between a shard and coordinators that say ``answers``, and a peer of it.

    The log is durable up to ``log.durable``, of records up to ``log.end``.
    """

    def __init__(self, context):
        self.answers, self.heard, self.changed = [], [], None
        self.shard = SimpleNamespace(index=0, epoch=5, settings=ShardSettings(), jobs={}, changes=0, apply=self._take)
        self.shard.memory_bytes = lambda: 0
        coordinators = SimpleNamespace(handle=self._take, tick=lambda now_s: [], take_changed=self._take_changed)
        coordinators.stood_still = lambda pause_s: None  # this machine may be slow
        self.log = SimpleNamespace(end=0, durable=0, failure="", is_open=True, append=self._append)
        endpoint = Endpoint(context, "tcp://127.0.0.1:*")
        self.thread = ShardThread(self.shard, endpoint, ["tcp://here:1"], on_admin=print)
        self.thread.coordinators = coordinators
        self.thread.add_sink(self.log)
        self.peer = context.socket(zmq.DEALER)
        self.peer.setsockopt(zmq.LINGER, 0)
        self.peer.connect(endpoint.address)
        self.thread.start()

    def _take(self, message, sender, now_s=None):
        """By a shard, or by coordinators, who know the time."""
        self.heard.append((message.type.name, "shard" if now_s is None else "coordinators"))
        return [Outgoing(sender.route, answer) for answer in self.answers]

    def _take_changed(self):
        changed, self.changed = self.changed, None
        return changed

    def _append(self, record):
        self.log.end += 1

    def ask(self, kind, **fields):
        """The names of what comes within a moment."""
        self.peer.send_multipart(encode(Message(MessageType[kind], **fields)))
        return self.answered()

    def answered(self):
        found = []
        while self.peer.poll(300):
            found.append(decode(self.peer.recv_multipart()).type.name)
        return found

    def make_durable(self):
        self.log.durable = self.log.end
        self.thread.answers.wake()


@pytest.fixture
def world():
    with zmq.Context() as context:
        made = World(context)
        yield made
        made.thread.end()
        made.thread.join(timeout=60.0)
        made.peer.close()


def test_only_a_member_says_by_its_push_that_it_has_read_an_answer(world):
    found = []
    world.thread.segments.find = found.append
    members = [(0, 50)]
    world.shard.jobs[7] = SimpleNamespace(
        is_from_member=lambda message, sender: (message.worker, message.incarnation) in members
    )
    for job, incarnation in ((7, 51), (8, 50), (7, 50)):
        world.ask("PUSH", job=job, worker=0, incarnation=incarnation, key=0, sequence=9)
    assert world.heard == [("PUSH", "shard")] * 3
    assert [(push.job, push.incarnation) for push in found] == [(7, 50)]


def test_a_decision_waits_until_it_is_in_the_log_and_what_says_nothing_of_it_does_not(world):
    world.answers, world.changed = [VIEW], {"jobs": []}
    assert world.ask("LEAVE", body={"completed": 1}) == []
    assert (world.shard.changes, world.log.end) == (1, 1)
    world.answers = [Message(MessageType.OK)]
    assert world.ask("HEARTBEAT") == ["OK"]
    assert world.ask("LEAVE", body={"completed": 1}) == []
    assert world.ask("LIST", body={"after": -1}) == []
    world.make_durable()
    assert world.answered() == ["VIEW", "OK", "OK"]
    kinds = ("LEAVE", "HEARTBEAT", "LEAVE")
    assert world.heard == [*((kind, "coordinators") for kind in kinds), ("LIST", "shard")]
