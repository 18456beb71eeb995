"""The inputs and outputs of a chunk's rule: contributions in, replies out. Pure.

A worker numbers its exchanges of a chunk 1, 2, ...; the number, not the message, is the update. A number that was seen
is a repeat and is never applied again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import NO_KEY, MessageType


class Contribution(NamedTuple):
    """A worker's contribution to one exchange of a chunk."""

    rank: int
    sequence: int
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
    # Of this chunk the worker holds what the answer of this exchange brought; None: it needs whole weights.
    held: int | None = None


class Update(NamedTuple):
    """The result of a complete set of contributions."""

    # 1-D; the average of the gradients (of a buffer the lowest rank's values, of a usage map the sum); None where
    # nobody brought any. Of a single contribution it may be the contribution's own memory.
    values: torch.Tensor | None
    contributions: Sequence[Contribution]  # those that brought values, in the order of ranks
    staleness: int = 0  # by how many versions the oldest of them is older than the chunk


class PayloadPins:
    """Who still reads one tensor's memory: until then it must not change.

    zmq references each buffer that it sends without a copy until its bytes have left, so a weak reference tells.

    Args:
        lender: the memory that workers of this host read, if it is part of that.
        place: its number among the chunk's places there.

    Attributes:
        readers: how many workers were told of the place, and have not left it.
    """

    def __init__(self, lender: object = None, place: int = 0) -> None:
        self.lender = lender
        self.place = place
        self.readers = 0
        self._buffers: list[weakref.ref[memoryview]] = []

    def pin(self, buffer: memoryview) -> None:
        """A socket has taken ``buffer``."""
        self._buffers = [reference for reference in self._buffers if reference() is not None]
        self._buffers.append(weakref.ref(buffer))

    def are_held(self) -> bool:
        """Whether some socket or worker still reads the memory."""
        return self.readers > 0 or any(reference() is not None for reference in self._buffers)


class ValueMemory(NamedTuple):
    """Memory for a chunk's values."""

    values: torch.Tensor  # 1-D
    pins: PayloadPins


@dataclass(slots=True)
class Reply:
    """A message for a worker of the job."""

    type: MessageType
    rank: int
    sequence: int
    version: int = 0
    # Its memory may change once the rule is called again, unless there are ``pins``.
    payload: torch.Tensor | None = None
    body: dict[str, Any] = field(default_factory=dict)
    key: int = NO_KEY
    # Told when the payload's memory is sent as it is, without a copy; None has it copied.
    pins: PayloadPins | None = None


@dataclass(kw_only=True)
class RuleContext:
    """Shared by the rules of all chunks of a job."""

    live_ranks: Callable[[], tuple[int, ...]]  # the ranks that exchanges wait for, ascending
    # Expected workers that have yet to come, ascending: see ``Job.missing_ranks``.
    missing_ranks: Callable[[], tuple[int, ...]]
    statistics: JobStatistics  # counters, mutated by the rules
    # Whether each of these workers brings nothing to any chunk before an exchange has ended that it is part of.
    are_stuck: Callable[[Iterable[int]], bool] = lambda ranks: False
    now_s: Callable[[], float] = lambda: 0.0  # the time that the shard was given last
    exchange_ended: Callable[[], None] = lambda: None  # called whenever an exchange of trained values has ended
    # Called with a contribution to a chunk that does not count: "late", or why it was refused.
    discarded: Callable[[Contribution, ChunkSpec, str], None] = lambda push, spec, why: None


class Progress:
    """How far one chunk and its workers are."""

    def __init__(self) -> None:
        self.version = 0  # of the chunk; the aggregation decides what it counts
        self.last_sequence: dict[int, int] = {}  # by rank, the last exchange that the worker contributed to
        # The last exchange whose answer a worker has: as it said itself, and as it got with another's state.
        self._said: dict[int, int] = {}
        self._given: dict[int, int] = {}

    def begin(self, rank: int) -> None:
        """A new process without state begins at the chunk's version."""
        self.last_sequence[rank] = self._given[rank] = self.version
        self._said.pop(rank, None)

    def note_answered(self, rank: int, sequence: int) -> None:
        """Worker ``rank`` says that it has the answer of exchange ``sequence``."""
        self._said[rank] = max(sequence, self._said.get(rank, 0))

    def said(self, rank: int) -> int:
        """The last exchange whose answer worker ``rank`` says it has; 0 where it said nothing."""
        return self._said.get(rank, 0)

    def answered(self, rank: int) -> int:
        """The last exchange whose answer is known to have come to worker ``rank``: it says so, or has pushed since."""
        return max(self.said(rank), self.last_sequence.get(rank, 0) - 1)

    def reached(self, rank: int) -> int:
        """The same, or that of the state which the worker was given, if that is later."""
        return max(self.answered(rank), self._given.get(rank, 0))

    def is_past(self, rank: int, sequence: int) -> bool:
        """Whether worker ``rank`` has, or had, the answer of that exchange: it says so, or has pushed since."""
        return self.last_sequence.get(rank, 0) > sequence or self.said(rank) >= sequence

    def continue_from(self, rank: int, donor: int, *, was_live: bool) -> None:
        """A joiner has the state of ``donor`` after the donor's last exchange; it takes part in the next.

        ``was_live``: it never left at this shard, or was admitted twice, and may be further on already.
        """
        reached, own = self.last_sequence.get(donor), self.last_sequence.get(rank)
        if reached is not None:
            self.last_sequence[rank] = min(reached, own) if was_live and own is not None else reached
            self._given[rank] = self.last_sequence[rank]
        elif not was_live:
            self.last_sequence.pop(rank, None)

    def reset(self) -> None:
        """The job goes on from the only worker there is, at whatever number that worker says."""
        self.version = 0
        self.last_sequence.clear()
        self._said.clear()
        self._given.clear()
