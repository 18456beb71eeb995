"""When the contributions to an exchange are complete, and when its answers may leave: one half of a chunk's rule.

together.py   everybody who is live has contributed, or a quorum has: one answer for all of them
each.py       each contribution is complete by itself; its answer may be held (bounded staleness)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.exchange import Contribution, Progress, Reply, RuleContext
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.parameter_server.server.rules.payload_pins import PayloadPins
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import MessageType


class Gathering(ABC):
    """Of one chunk at one shard.

    Args:
        spec: what the chunk is.
        outcome: what a complete set leads to.
        progress: how far the chunk is; shared with ``outcome``.
        context: what it shares with the job's other chunks.
    """

    # Whether a single contribution is complete.
    is_single: ClassVar[bool]

    def __init__(self, spec: ChunkSpec, outcome: Outcome, progress: Progress, context: RuleContext) -> None:
        self.spec = spec
        self.outcome = outcome
        self.progress = progress
        self.context = context

    @staticmethod
    def options(rule: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of its own, from a rule as in HELLO."""
        return {}

    @staticmethod
    @abstractmethod
    def awaited(live: Collection[int], came: Collection[int], *, has_started: bool) -> Collection[int] | None:
        """Who of the expected workers need not be waited for: those ``live``, or all that ever ``came``.

        None: nobody is waited for because of being expected.
        """

    @abstractmethod
    def push(self, contribution: Contribution) -> list[Reply]:
        """A contribution arrived, perhaps once more.

        Raises:
            ProtocolError: it makes no sense here; nothing has changed.
        """

    @abstractmethod
    def probe(self, rank: int, sequence: int) -> list[Reply]:
        """A worker asks what became of an exchange: PENDING, MISSING, or SENT where the answer is there. No payload."""

    @abstractmethod
    def repeat(self, rank: int, sequence: int) -> list[Reply]:
        """A worker lost the answer of an exchange: that again, or what ``probe`` says where there is none."""

    @abstractmethod
    def worker_came(self, rank: int, *, is_new_process: bool) -> list[Reply]:
        """A worker became live; a new process numbers its exchanges anew. Others' answers may leave now."""

    @abstractmethod
    def worker_left(self, rank: int) -> list[Reply]:
        """A worker is no longer waited for; others' answers may leave now."""

    @abstractmethod
    def waiting(self) -> dict[int, list[int]]:
        """Per rank whose answer is held, the ranks it waits for."""

    @abstractmethod
    def clocks(self) -> dict[int, int]:
        """Per worker, how many steps it has taken; for people."""

    @abstractmethod
    def stored(self) -> None:
        """Somebody has overwritten the chunk's weights."""

    @abstractmethod
    def restored(self, rank: int) -> tuple[int, int]:
        """The version, and the last exchange of worker ``rank``, that this server started with; (0, 0) without."""

    def note_answered(self, rank: int, sequence: int) -> list[Reply]:
        """Worker ``rank`` says that it has the answer of exchange ``sequence``; others may wait to hear that."""
        self.progress.note_answered(rank, sequence)
        return []

    def supply_result(self, rank: int, sequence: int, payload: torch.Tensor, contributors: int | None) -> list[Reply]:
        """Worker ``rank`` returns the average of an exchange that ended before this server started.

        Raises:
            ProtocolError: nobody who is waited for has it.
        """
        raise ProtocolError(f"{self.spec.describe()}: the result of exchange {sequence} was not asked for")

    def reset(self) -> None:
        """Forget exchanges: the job goes on from the only worker there is."""
        self.progress.reset()

    def held_bytes(self) -> int:
        """Memory of contributions that are kept."""
        return 0

    @abstractmethod
    def to_meta(self) -> dict[str, Any]:
        """What a snapshot keeps of it; JSON-able."""

    @abstractmethod
    def restore(self, meta: Mapping[str, Any]) -> None:
        """Take over a snapshot's state, after the outcome has."""

    def _reply(
        self,
        type: MessageType,
        rank: int,
        sequence: int,
        version: int = 0,
        payload: torch.Tensor | None = None,
        body: dict[str, Any] | None = None,
        pins: PayloadPins | None = None,
    ) -> Reply:
        """A reply about this chunk."""
        return Reply(type, rank, sequence, version, payload, body or {}, self.spec.key, pins)

    def _is_late(self, rank: int, sequence: int) -> bool:
        """Whether that exchange ended without worker ``rank``."""
        return False

    def _answer(
        self, rank: int, sequence: int, refused: Mapping[int, str] | None = None, *, repeated: bool = False
    ) -> Reply:
        """The answer of an exchange; ``refused``: by rank, why its last contribution does not count."""
        answer = self.outcome.answer(rank, sequence, repeated=repeated)
        body = dict(answer.body)
        if refused and rank in refused:
            body["refused"] = refused[rank]
        if self._is_late(rank, sequence):
            body["late"] = True
        return self._reply(MessageType.UPDATED, rank, sequence, answer.version, answer.payload, body, answer.pins)
