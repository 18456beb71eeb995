"""When an update is applied and when its answer may leave: the rule of one chunk. Two rules implement it.

    averaging.py   an answer leaves once everybody's gradient is there: the average
    applying.py    an update is applied on arrival; its answer, the weights, may be held (bounded staleness)

Both are pure: calls in, replies out. Exactly once: a worker numbers its exchanges of a chunk 1, 2, ...; a number that
was seen is a repeat, never applied again. Who has lost an answer asks for it (``repeat``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from psengine.parameter_server.server.rules.loans import Loans
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import NO_KEY, MessageType


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's contribution to one exchange of a chunk.

    Attributes:
        rank: the worker.
        sequence: the number of the exchange, 1 first.
        base_version: the version of the chunk the worker computed it from.
        values: 1-D gradient (or a buffer's values), read-only, valid for as long as it is referenced; None abstains.
        groups: the worker's current hyperparameters by group, checked; None: as configured.
        absent: [start, end) ranges of elements without a gradient.
        weight: what its gradient counts in an average; 0 abstains. None where the worker weighs nothing.
    """

    rank: int
    sequence: int
    base_version: int
    values: torch.Tensor | None
    groups: Sequence[Mapping[str, Any]] | None = None
    absent: Sequence[tuple[int, int]] = ()
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rule wants sent to a worker.

    Attributes:
        payload: its memory may change once the rule is called again, unless there are ``loans``.
        loans: told when the payload's memory is sent as it is, without a copy; None has it copied.
    """

    type: MessageType
    rank: int
    sequence: int
    version: int = 0
    payload: torch.Tensor | None = None
    body: dict[str, Any] = field(default_factory=dict)
    key: int = NO_KEY
    loans: Loans | None = None


@dataclass(kw_only=True)
class RuleContext:
    """What the rules of all chunks of a job share.

    Attributes:
        live_ranks: who exchanges wait for, ascending.
        missing_ranks: expected workers that have yet to come, ascending: see ``Job.missing_ranks``.
        statistics: counters, mutated by the rules.
    """

    live_ranks: Callable[[], tuple[int, ...]]
    missing_ranks: Callable[[], tuple[int, ...]]
    statistics: JobStatistics


class ChunkRule(ABC):
    """One chunk at one shard.

    Args:
        spec: what the chunk is.
        values: 1-D, the chunk's values; owned and mutated here. None where a job need not store them yet.
        context: what it shares with the job's other chunks.
    """

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> None:
        self.spec = spec
        self.values = values
        self.context = context
        self.version = 0
        self.last_sequence: dict[int, int] = {}

    def reply(
        self,
        type: MessageType,
        rank: int,
        sequence: int,
        version: int = 0,
        payload: torch.Tensor | None = None,
        body: dict[str, Any] | None = None,
        loans: Loans | None = None,
    ) -> Reply:
        """A reply about this chunk."""
        return Reply(type, rank, sequence, version, payload, body or {}, self.spec.key, loans)

    @abstractmethod
    def push(self, push: Push) -> list[Reply]:
        """A contribution arrived, perhaps once more."""

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
    def extra_bytes(self) -> int:
        """Memory beyond ``values``."""

    @abstractmethod
    def to_meta(self) -> dict[str, Any]:
        """What a snapshot keeps beside the tensors; JSON-able."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name to tensor of what a snapshot keeps; not copies."""

    @abstractmethod
    def restore(self, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot's state."""
