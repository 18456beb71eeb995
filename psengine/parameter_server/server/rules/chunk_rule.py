"""The rule of one chunk: when the contributions to an exchange are complete, and when its answers may leave. Pure.

average.py    everybody who is live has contributed, or a quorum has: one answer for all of them
apply.py      each contribution is complete by itself; its answer may be held (bounded staleness)
merge.py      a quorum of contributions is here, and a window for more is over

The outcome (``outcome.py``) says what a complete set leads to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode, MessageType


class ChunkRule(ABC):
    """Of one chunk at one shard.

    Args:
        outcome: what a complete set leads to; it knows the chunk and how far it is.
        context: shared with the job's other chunks.
        options: the rule as in HELLO.
    """

    # Whether a single contribution is complete.
    is_single: ClassVar[bool]
    # Whether an exchange may end without workers that are stuck in others.
    minds_who_is_stuck: ClassVar[bool] = False

    def __init__(self, outcome: Outcome, context: RuleContext, options: Mapping[str, Any]) -> None:
        self.outcome = outcome
        self.spec, self.progress, self.payloads = outcome.spec, outcome.progress, outcome.payloads
        self.context = context
        # By rank, why its last contribution does not count.
        self._refused: dict[int, str] = {}
        # The version that this server started with; 0 without.
        self.restored_version = 0

    @property
    def version(self) -> int:
        """The chunk's."""
        return self.progress.version

    @property
    def is_trained(self) -> bool:
        """Whether workers push gradients of it."""
        return self.spec.kind is ChunkKind.PARAMETER and self.outcome.is_ready

    def push(self, contribution: Contribution) -> list[Reply]:
        """A contribution arrived, perhaps once more.

        Raises:
            ProtocolError: it makes no sense here; nothing has changed.
        """
        if self.outcome.is_ready:
            return self._gather(contribution)
        text = f"{self.spec.describe()} has no optimizer yet; the worker has to send CONFIGURE first"
        return [self._error(contribution.rank, contribution.sequence, ErrorCode.NOT_READY, text)]

    def _note_refused(self, contribution: Contribution, reason: str) -> None:
        """Remember why a contribution does not count."""
        self._refused[contribution.rank] = reason
        self.context.statistics.refused[reason] += 1
        if reason != "abstained":  # a worker that only asks for weights
            self.context.discarded(contribution, self.spec, reason)

    @abstractmethod
    def _gather(self, contribution: Contribution) -> list[Reply]:
        """See ``push``; the outcome is ready."""

    def tick(self) -> list[Reply]:
        """Some time has passed; answers that may leave because of it."""
        return []

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

    def open_exchange(self, rank: int) -> int:
        """The number of the exchange that worker ``rank`` has contributed to and that has not ended; 0 without."""
        return 0

    @abstractmethod
    def clocks(self) -> dict[int, int]:
        """Per worker, how many steps it has taken; for people."""

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

    def can_catch_up(self, rank: int, reached: int) -> bool:
        """Whether every answer that worker ``rank`` may lack is still here; it has those to ``reached``, it says."""
        return self.outcome.can_answer(max(reached, self.progress.reached(rank)) + 1, self.version)

    def store(self, values: torch.Tensor, version: int) -> None:
        """STORE: overwrite what PULL reads; ``version``: as the worker says."""
        self.outcome.store(values, version)

    def reset(self) -> None:
        """Forget exchanges, and values of long ago: the job goes on from the only worker there is."""
        self.progress.reset()
        self.outcome.reset()

    def size_bytes(self) -> int:
        """Memory of values, contributions that are kept, results, optimizer and backups."""
        values_bytes = self.spec.size_bytes if self.outcome.values is not None else 0
        return values_bytes + self.outcome.extra_bytes()

    def to_meta(self) -> dict[str, Any]:
        """What a snapshot keeps beside the tensors; JSON-able."""
        meta = self.outcome.to_meta()
        # Averages go on at whatever number workers say, and none may have said anything yet.
        return {**meta, "version": max(meta["version"], self.restored_version)}

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot's state."""
        self.outcome.restore(meta, tensors)
        self.restored_version = meta["version"]

    def under_way(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What decides later bits and is in no snapshot, for a log that goes on from one: (JSON-able, tensors)."""
        return self.outcome.under_way()

    def go_on(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over ``under_way``'s, after ``restore``."""
        self.outcome.go_on(meta, tensors)

    def _reply(self, type: MessageType, rank: int, sequence: int, body: dict[str, Any] | None = None) -> Reply:
        return Reply(type, rank, sequence, self.version, body=body or {}, key=self.spec.key)

    def _error(self, rank: int, sequence: int, code: str, text: str) -> Reply:
        return Reply(MessageType.ERROR, rank, sequence, body={"code": code, "text": text}, key=self.spec.key)

    def _answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        """The answer of an exchange."""
        answer = self.outcome.answer(rank, sequence, repeated=repeated)
        if rank in self._refused:
            answer.body["refused"] = self._refused[rank]
        return answer
