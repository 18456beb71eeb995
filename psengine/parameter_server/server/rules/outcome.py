"""The outcome of a complete set of contributions, which decides where weights live: the other half of a rule.

average.py   the average goes back; the weights are in the workers
step.py      an optimizer steps, and weights go back; the weights are here
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.exchange import (
    Contribution,
    PayloadPins,
    Progress,
    Reply,
    Update,
    ValueMemory,
)
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode, MessageType


class Outcome(ABC):
    """Of one chunk at one shard.

    Args:
        values: 1-D, the chunk's values; owned and mutated here. None where nobody has brought any.
        statistics: counters, mutated.
        options: the rule as in HELLO.
    """

    # Whether the weights that are trained are here; else they are in the workers, who deposit copies for each other.
    holds_weights: ClassVar[bool]
    # Which chunks workers push.
    pushed_kinds: ClassVar[frozenset[ChunkKind]]

    def __init__(
        self,
        spec: ChunkSpec,
        values: torch.Tensor | None,
        payloads: ChunkPayloads,
        statistics: JobStatistics,
        options: Mapping[str, Any],
    ) -> None:
        self.spec = spec
        self.values = values
        self.progress = Progress()  # shared with the aggregation
        self.payloads = payloads
        self.statistics = statistics
        self.optimizer: ChunkOptimizer | None = None
        # Memory that workers of this host read, where there is some.
        self._memories: Sequence[ValueMemory] = ()

    @property
    def is_ready(self) -> bool:
        """Whether a contribution can be taken in."""
        return True

    def configure(self, spec: OptimizerSpec) -> None:
        """Attach the optimizer; a repetition of the same is no change.

        Raises:
            ProtocolError: another one is attached, or the chunk takes none.
        """
        raise ProtocolError(
            f"{self.spec.describe()} takes no optimizer (expected a parameter of a job whose servers step)",
            ErrorCode.RULE_MISMATCH,
        )

    def check(self, contribution: Contribution) -> None:
        """Raise ProtocolError for a contribution that ``conclude`` would fail for."""
        if self.optimizer is not None:
            self.optimizer.check(contribution.groups, contribution.absent)

    @abstractmethod
    def accepts(self, values: torch.Tensor) -> bool:
        """Whether a contribution with these values may count."""

    @abstractmethod
    def conclude(self, sequence: int, update: Update) -> None:
        """A set is complete, that of exchange ``sequence``. An error leaves everything as it was."""

    @abstractmethod
    def can_answer(self, first: int, last: int) -> bool:
        """Whether the answers of exchanges ``first`` to ``last`` can be given, all of which may have ended."""

    @abstractmethod
    def answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        """UPDATED: the answer of worker ``rank`` for exchange ``sequence``, perhaps again."""

    def take_result(self, sequence: int, payload: torch.Tensor, contributors: int) -> bool:
        """A worker returns what an exchange led to before this server started; whether that is of use here."""
        return False

    @abstractmethod
    def forget_before(self, sequence: int) -> None:
        """Every live worker has the answers of all exchanges before this one."""

    @abstractmethod
    def worker_left(self, rank: int) -> None:
        """A worker is gone."""

    @abstractmethod
    def read(self) -> tuple[int, torch.Tensor]:
        """(version, values) as PULL reads them; ProtocolError where there are none."""

    @abstractmethod
    def store(self, values: torch.Tensor, version: int) -> None:
        """STORE: overwrite the values."""

    def note_base(self, rank: int) -> int:
        """Worker ``rank`` computes its next gradient from the values as they are: their version, 0 if unknown here."""
        return 0

    @property
    @abstractmethod
    def lends(self) -> bool:
        """Whether workers may read answers where they are made."""

    @abstractmethod
    def places(self, workers: int) -> int:
        """In how many memories answers to ``workers`` are made, if one is to be free whenever one is needed."""

    def keep_in(self, memories: Sequence[ValueMemory]) -> None:
        """From now on make answers in one of these, whichever nobody reads; only where it ``lends``."""
        self._memories = memories

    def result_memory(self) -> torch.Tensor:
        """Where a result is to be formed, for ``conclude``: 1-D, uninitialised, like the values."""
        return torch.empty(self.spec.numel, dtype=self.spec.dtype)

    def note_held(self, contribution: Contribution) -> None:  # noqa: B027 - most send all of the values
        """A contribution arrived, which says what its worker holds."""

    def reset(self) -> None:
        """Forget exchanges, and values of long ago: the job goes on from the only worker there is."""
        self.values = None

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
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot's state."""

    def under_way(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See ``ChunkRule.under_way``."""
        return {}, {}

    def go_on(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Take over ``under_way``'s, after ``restore``."""

    def _updated(
        self, rank: int, sequence: int, version: int, payload: torch.Tensor, pins: PayloadPins, **body: Any
    ) -> Reply:
        return Reply(MessageType.UPDATED, rank, sequence, version, payload, body, self.spec.key, pins)
