"""What the jobs of all rules have in common: a program for workers, and what the oracle is told of servers."""

from __future__ import annotations

import random
from typing import Any

from psengine.errors import PSEngineError
from psengine.parameter_server.client.flow import Flow
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message


class Job:
    """One job: its methods do nothing where its rule has no such oracle.

    Attributes:
        specs: the model.
        rule: as HELLO says it.
        answered: pushes that were.
        hears_former: it is told also of a leader that does not know yet that another leads.
        excused: servers of whose disk bits have flipped, or whose processes have died with all that they had.
    """

    specs: list[ChunkSpec]
    rule: dict[str, Any]
    hears_former = False

    def __init__(self, world) -> None:
        self.world, self.scenario = world, world.scenario
        self.answered = 0
        self.excused: set[int] = set()
        self._rng = random.Random(f"job {self.scenario.seed}")

    @property
    def keeps_updates(self) -> bool:
        """Whether all that was acknowledged is there."""
        return self.scenario.keeps_updates and not self.excused

    @property
    def is_trained(self) -> bool:
        """Whether servers have values that somebody has trained."""
        return False

    def think_s(self) -> float:
        """How long a worker computes."""
        return self.scenario.think_s * self._rng.random()

    def begin_anew(self) -> None:
        """All workers begin their training once more."""

    def program(self, process) -> Flow[None]:
        """What a worker does, from its start until it may leave."""
        raise NotImplementedError

    def server_started(self, server) -> None:
        """A life begins; what it restored is in its shards."""

    def applied(self, server, shard: Any, message: Message, outgoing: list[Any]) -> None:
        """A shard has taken a message."""

    def coordinated(self, server, message: Message | None, outgoing: list[Any]) -> None:
        """A coordinator has taken a message; None: time has passed."""

    def told(self, server, message: Message) -> None:
        """An answer leaves a server."""

    def heard(self, process, shard: int, message: Message) -> None:
        """A worker is about to take what this shard said."""

    def captured(self, server, shard: Any) -> dict[int, int]:
        """What a snapshot will have of this shard, captured now: versions by chunk."""
        return {}

    def durable(self, server, note: dict[int, int]) -> None:
        """That snapshot is on the disk."""

    def read(self, process, key: int, landing: Any, answer: Message) -> None:
        """A reader got these values of a chunk."""

    def failed(self, process, error: PSEngineError) -> None:
        """A worker's program has raised."""

    def damaged(self, server: int, note: dict[int, int] | None) -> None:
        """The newest snapshot that a server can restore is an older one, or none."""
        self.excused.add(server)
