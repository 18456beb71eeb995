"""What a complete set of contributions leads to, and where a chunk's weights live: the other half of its rule.

average.py   the average goes back; the weights are in the workers
step.py      an optimizer steps, and weights go back; the weights are here
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.exchange import Contribution, Progress, Update
from psengine.parameter_server.server.rules.payload_pins import PayloadPins
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.protocol.layout import ChunkKind, ChunkSpec


class Answer(NamedTuple):
    """What a worker gets for its contribution: see ``Reply``. The payload is what the job's codec makes of values."""

    version: int
    payload: torch.Tensor
    pins: PayloadPins
    body: dict[str, Any]


class Outcome(ABC):
    """Of one chunk at one shard.

    Args:
        spec: what the chunk is.
        values: 1-D, the chunk's values; owned and mutated here. None where nobody has brought any.
        progress: how far the chunk is; shared with the gathering.
        payloads: makes of answers what travels.
        statistics: counters, mutated.
    """

    # Whether the weights that are trained are here; else they are in the workers, who deposit copies for each other.
    holds_weights: ClassVar[bool]
    # Which chunks workers push.
    pushed_kinds: ClassVar[frozenset[ChunkKind]]

    def __init__(
        self,
        spec: ChunkSpec,
        values: torch.Tensor | None,
        progress: Progress,
        payloads: ChunkPayloads,
        statistics: JobStatistics,
    ) -> None:
        self.spec = spec
        self.values = values
        self.progress = progress
        self.payloads = payloads
        self.statistics = statistics
        self.optimizer: ChunkOptimizer | None = None

    @staticmethod
    def options(rule: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of its own, from a rule as in HELLO."""
        return {}

    @property
    def takes_optimizer(self) -> bool:
        """Whether CONFIGURE may attach one."""
        return False

    @property
    def is_ready(self) -> bool:
        """Whether a contribution can be taken in."""
        return True

    @abstractmethod
    def configure(self, spec: OptimizerSpec) -> None:
        """Attach the optimizer; a repetition of the same is no change.

        Raises:
            ValueError: another one is attached.
        """

    @abstractmethod
    def check(self, contribution: Contribution) -> None:
        """Raise ProtocolError for a contribution that ``conclude`` would fail for."""

    @abstractmethod
    def accepts(self, values: torch.Tensor) -> bool:
        """Whether a contribution with these values may count; what is not finite is noted."""

    @abstractmethod
    def conclude(self, sequence: int, update: Update) -> None:
        """A set is complete, that of exchange ``sequence``. An error leaves everything as it was."""

    @abstractmethod
    def can_answer(self, first: int, last: int) -> bool:
        """Whether the answers of exchanges ``first`` to ``last`` can be given, all of which may have ended."""

    @abstractmethod
    def answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Answer:
        """What worker ``rank`` gets for exchange ``sequence``, perhaps again."""

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
        """(version, values) as PULL reads them.

        Raises:
            ProtocolError: there are none.
        """

    @abstractmethod
    def store(self, values: torch.Tensor, version: int) -> None:
        """STORE: overwrite the values."""

    @abstractmethod
    def note_base(self, rank: int) -> int:
        """Worker ``rank`` computes its next gradient from the values as they are: their version, 0 if unknown here."""

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
