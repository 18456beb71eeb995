"""The inputs and outputs of a chunk's rule: contributions in, replies out. Pure.

A contribution is known by (rank, incarnation, step): one that was seen is a repeat and is never applied again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from psengine.codecs.base import Codec
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import NO_KEY, MessageType
from psengine.protocol.views import View
from psengine.status_port.status_model import JobCounts

if TYPE_CHECKING:
    from psengine.parameter_server.server.rules.apply import Apply

# Larger values are counted together under this one.
LARGEST_STALENESS = 64
# Of one worker: some steps of a model of a hundred chunks, more of a small one.
RECENT_PUSHES = 256


class Contribution(NamedTuple):
    """What a worker brings to one step of a chunk."""

    rank: int
    incarnation: int
    step: int
    base_version: int  # the version of the chunk that the worker computed it from
    # 1-D gradient (or a buffer's values), read-only, valid for as long as it is referenced; None abstains.
    values: torch.Tensor | None
    # The worker's current hyperparameters by group, checked; None: as configured.
    groups: Sequence[Mapping[str, Any]] | None = None
    absent: Sequence[tuple[int, int]] = ()  # [start, end) ranges of elements without a gradient
    # What its gradient counts in an average; 0 abstains. None where the worker weighs nothing.
    weight: float | None = None
    # Whether ``values`` are the worker's own memory, which may change once the worker has its answer.
    is_borrowed: bool = False
    # Of this chunk the worker holds what the answer of this step brought; None: it needs whole weights.
    held: int | None = None
    # Of a table, whose ``values`` are [n, dim]: which rows they are of, ascending; what steps them; what they were
    # divided by; how many steps before its own the worker asked for its rows; how many rows are new; whether a gradient
    # that a worker had scaled was not finite.
    ids: torch.Tensor | None = None
    lr: float = 0.0
    divisor: int = 1
    ahead: int = 0
    new_rows: int = 0
    overflow: bool = False


@dataclass(slots=True)
class Reply:
    """A message for a worker of the job."""

    type: MessageType
    rank: int
    sequence: int  # the step, or the request that it answers
    version: int = 0
    # Its memory may change once the rule is called again, unless there is a ``place``.
    payload: torch.Tensor | None = None
    body: dict[str, Any] = field(default_factory=dict)
    key: int = NO_KEY
    # The payload's memory, where it is sent as it is, without a copy; None has it copied.
    place: Place | None = None


@dataclass
class JobStatistics(JobCounts):
    """What a job's rules count, for status pages and metrics.

    Attributes:
        recent_staleness: by worker, of its last ``RECENT_PUSHES`` pushes.
    """

    recent_staleness: dict[int, deque[int]] = field(default_factory=dict)

    def count_staleness(self, staleness: int, rank: int) -> None:
        """A push of worker ``rank`` was computed from weights ``staleness`` updates ago."""
        self.recent_staleness.setdefault(rank, deque(maxlen=RECENT_PUSHES)).append(staleness)
        self.staleness[min(staleness, LARGEST_STALENESS)] += 1
        self.staleness_sum += staleness
        self.max_staleness = max(self.max_staleness, staleness)


@dataclass(eq=False)
class RuleContext(ABC):
    """A job, as the rules of its chunks see it; they change the statistics and nothing else of it."""

    rule: Mapping[str, Any]  # as in HELLO: name, codec, options
    codec: Codec
    view: View | None = None  # who takes part; None before the first view
    floor: int = 0  # the step that every worker has committed, as last released
    statistics: JobStatistics = field(default_factory=JobStatistics)
    # Told of bytes about to be taken, and for what; raises ProtocolError where there are not enough.
    take_memory: Callable[[int, str], object] = field(default=lambda size_bytes, what: None)

    def use(self, rule: Apply, given: Sequence[Contribution]) -> None:
        """Change a chunk's weights by contributions to it; a replay watches."""
        rule.use(given)

    @abstractmethod
    def discarded(self, push: Contribution, spec: ChunkSpec, why: str) -> None:
        """A contribution to a chunk does not count, and why."""
