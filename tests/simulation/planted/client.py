"""Bugs of clients."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.control import Control
from psengine.parameter_server.client.job_connection import JobConnection
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.steps import Steps
from psengine.protocol.messages import MessageType
from simulation.planted.registry import constant, plant, then


def _without(kind: MessageType) -> Any:
    def make(send: Any) -> Any:
        return lambda self, message: message.type is kind or send(self, message)

    return make


def _open_nothing(greet: Any) -> Any:
    def one(self: Link, now_s: float) -> None:
        sent, self.sent = self.sent, {}
        greet(self, now_s)
        self.sent = sent

    return one


def _commits_at_once(confirm: Any) -> Any:
    def one(self: JobConnection, step: Any) -> None:
        if self.options.has_decisions and step.is_closed and step.pushes:
            self.control.commit("step", step=step.number, abstained=not step.has_values)

    return one


def _never_of_lives(commit: Any) -> Any:
    return lambda self, what, **fields: what == "life" or commit(self, what, **fields)


def _never(channel: Channel) -> None:
    channel.retry_at_s = float("inf")


def _ahead(prepare: Any) -> Any:
    def one(self: JobConnection, number: int) -> None:
        self.steps.completed += 1
        prepare(self, number)
        self.steps.completed -= 1

    return one


plant("a client does not freeze", JobConnection, "freeze", constant(None))
plant("a client keeps releases to itself", Link, "send", _without(MessageType.RELEASE))
plant("a client keeps views to itself", Link, "send", _without(MessageType.VIEW))
plant("a client does not push again what a view took back", Steps, "take_back", constant([]))
plant("a client commits a step before the shards have it", JobConnection, "confirm", _commits_at_once)
plant("a client says after a restart that nothing is open", Link, "say_hello", _open_nothing)
plant("a client does not send again what is missing", Link, "requeue", constant(None))
plant("a client does not tell of a shard's new life", Control, "commit", _never_of_lives)
plant("a donor returns no averages", JobConnection, "_return_results", constant(None))
plant("a client sends no heartbeats", Control, "beat", constant(None))
plant("a client does not open a connection again", Channel, "disconnected", then(_never))
plant("a client says that it has completed one step more", JobConnection, "prepare", _ahead)
