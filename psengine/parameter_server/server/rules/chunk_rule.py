"""The rule of one chunk: when its contributions are complete (gathering), times what they lead to (outcome). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psengine.parameter_server.server.rules.exchange import Contribution, Progress, Reply
from psengine.parameter_server.server.rules.gathering import Gathering
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode, MessageType


class ChunkRule:
    """See the module's text; what needs both halves is here."""

    def __init__(
        self, spec: ChunkSpec, progress: Progress, payloads: ChunkPayloads, gathering: Gathering, outcome: Outcome
    ) -> None:
        self.spec = spec
        self.progress = progress
        self.payloads = payloads
        self.gathering = gathering
        self.outcome = outcome

    @property
    def version(self) -> int:
        """The chunk's; what it counts is the gathering's."""
        return self.progress.version

    @property
    def is_trained(self) -> bool:
        """Whether workers push gradients of it."""
        return self.spec.kind is ChunkKind.PARAMETER and self.outcome.is_ready

    @property
    def is_changed_by_each(self) -> bool:
        """Whether every single push changes what a snapshot keeps of it."""
        is_pushed = self.spec.kind in self.outcome.pushed_kinds and self.outcome.is_ready
        return self.gathering.is_single and is_pushed

    def can_catch_up(self, rank: int) -> bool:
        """Whether every answer that worker ``rank`` may lack is still here."""
        return self.outcome.can_answer(self.progress.last_sequence.get(rank, 0) + 1, self.progress.version)

    def push(self, contribution: Contribution) -> list[Reply]:
        """A contribution arrived, perhaps once more.

        Raises:
            ProtocolError: it makes no sense here; nothing has changed.
        """
        if self.outcome.is_ready:
            return self.gathering.push(contribution)
        text = f"{self.spec.describe()} has no optimizer yet; the worker has to send CONFIGURE first"
        body = {"code": ErrorCode.NOT_READY, "text": text}
        return [Reply(MessageType.ERROR, contribution.rank, contribution.sequence, body=body, key=self.spec.key)]

    def store(self, values: torch.Tensor, version: int) -> None:
        """STORE: overwrite what PULL reads; ``version``: as the worker says."""
        self.outcome.store(values, version)
        self.gathering.stored()

    def reset(self) -> None:
        """Forget exchanges, and values of long ago: the job goes on from the only worker there is."""
        self.gathering.reset()
        self.outcome.reset()

    def size_bytes(self) -> int:
        """Memory of values, contributions that are kept, results, optimizer and backups."""
        values_bytes = self.spec.size_bytes if self.outcome.values is not None else 0
        return values_bytes + self.outcome.extra_bytes() + self.gathering.held_bytes()

    def to_meta(self) -> dict[str, Any]:
        """What a snapshot keeps beside the tensors; JSON-able."""
        return {**self.outcome.to_meta(), **self.gathering.to_meta()}

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot's state."""
        self.outcome.restore(meta, tensors)
        self.gathering.restore(meta)
