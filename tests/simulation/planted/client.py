"""Bugs of clients."""

from __future__ import annotations

from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.chunk_encoder import ChunkEncoder
from psengine.parameter_server.client.control import Control
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.steps import Steps
from psengine.protocol.messages import MessageType
from simulation.planted.registry import Bug, constant, plant, then

plant("a client does not freeze", JobConnection, "freeze", constant(None))
plant("a client does not push again what a view took back", Steps, "take_back", constant([]))
plant("a client does not send again what is missing", Link, "requeue", constant(None))
plant("a gradient that does not count changes a residual", ChunkEncoder, "end", constant(None))
plant("a client sends no heartbeats", Control, "beat", constant(None))


def _unless(kind: MessageType) -> Bug:
    return lambda send, self, message: message.type is kind or send(self, message)


plant("a client keeps releases to itself", Link, "send", _unless(MessageType.RELEASE))
plant("a client keeps views to itself", Link, "send", _unless(MessageType.VIEW))


@plant("a donor returns no averages", JobConnection, "_report_answers")
def _return_nothing(report, self, link):
    if not self.options.averages:
        report(self, link)


@plant("a client says after a restart that nothing is open", Link, "say_hello")
def _open_nothing(greet, self, now_s):
    sent, self.sent = self.sent, {}
    greet(self, now_s)
    self.sent = sent


@plant("a client commits a step before the shards have it", JobConnection, "confirm")
def _commit_at_once(confirm, self, step):
    if self.options.has_decisions and step.is_closed and step.pushes:
        said = {"abstained": not step.has_values, "completed": self.steps.completed}
        self.control.commit("step", step=step.number, **said)


@plant("a client does not tell of a shard's new life", Control, "commit")
def _commit_no_life(commit, self, what, **fields):
    return what == "life" or commit(self, what, **fields)


@plant("a joiner without room is not refused", Control, "commit")
def _keep_to_itself(commit, self, what, **fields):
    return "refused" in fields or commit(self, what, **fields)


def _never(channel):
    channel.retry_at_s = float("inf")


plant("a client does not open a connection again", Channel, "disconnected", then(_never))


@plant("a client says that it has completed one step more", JobConnection, "prepare")
def _prepare_ahead(prepare, self, number):
    self.steps.completed += 1
    prepare(self, number)
    self.steps.completed -= 1
