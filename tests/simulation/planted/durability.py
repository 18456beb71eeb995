"""Bugs of snapshots and logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psengine.parameter_server.server.core.capture import Cuts
from psengine.parameter_server.server.core.journal import Journal
from psengine.parameter_server.server.durability.replay import Replay
from psengine.parameter_server.server.log.log import SegmentWriter
from psengine.parameter_server.server.rules.each import Each
from psengine.parameter_server.server.rules.step import StepOutcome
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from psengine.protocol.messages import MessageType
from simulation import snapshots
from simulation.planted.registry import plant

plant("a snapshot does not await steps under way", Cuts, "awaited", lambda awaited: lambda self, goals, ranks: {})


def _without(*names: str) -> Callable[[Any], Any]:
    def make(to_meta: Any) -> Any:
        return lambda self: {**to_meta(self), **{name: {} for name in names}}

    return make


plant("a snapshot lacks the table of numbers", Each, "to_meta", _without("last_sequence"))


def _version_ahead(to_meta: Any) -> Any:
    return lambda self: {**to_meta(self), "version": self.progress.version + 1}


plant("a snapshot's version is one ahead", StepOutcome, "to_meta", _version_ahead)
plant(
    "a snapshot keeps the values that the server goes on changing",
    StepOutcome,
    "tensors",
    lambda tensors: (
        lambda self: {
            name: _Uncopied.of(tensor) if name == "values" else tensor for name, tensor in tensors(self).items()
        }
    ),
)


class _Uncopied:
    """A tensor whose clone is itself, once."""

    @staticmethod
    def of(tensor: Any) -> Any:
        shown = tensor.view(-1)
        shown.clone = lambda: tensor
        return shown


def _at_once(send: Any) -> Any:
    def one(self: HeldAnswers, route: bytes, frames: Any, *, pins: Any = None, is_urgent: bool = False) -> None:
        send(self, route, frames, pins=pins, is_urgent=True)

    return one


plant("an update is acknowledged before its fsync", HeldAnswers, "send", _at_once)
plant("the log is written and never synced", SegmentWriter, "sync", lambda sync: lambda self: None)
plant("the log is not replayed", Replay, "take", lambda take: lambda self, reader: [None for _ in reader] and None)


def _every_third(message: Any) -> Any:
    def one(self: Journal, job: Any, taken: Any) -> None:
        if taken.type is not MessageType.PUSH or taken.sequence % 3:
            message(self, job, taken)

    return one


plant("every third push is not logged", Journal, "message", _every_third)
plant(
    "segments that the snapshot needs are deleted",
    snapshots,
    "delete_before",
    lambda delete: lambda disk, starts: delete(disk, {shard: first + 1 for shard, first in starts.items()}),
)
