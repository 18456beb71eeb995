"""Outcome "average": the average goes back to the workers, which hold the weights.

An exchange has one result, kept until every live worker has it, so that no two workers get different ones. A server
that restarted has no results; a worker that is further on returns them (RESULT_WANTED). ``values`` are what a worker
last deposited for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.server.rules.exchange import PayloadPins, Reply, Update
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode


class AverageOutcome(Outcome):
    """See the module's text."""

    holds_weights = False
    pushed_kinds = frozenset({ChunkKind.PARAMETER, ChunkKind.BUFFER, ChunkKind.USAGE})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.values_version = 0
        # Averages that some live worker may still ask for, as they travel: exchange -> (payload, number of gradients).
        self._results: dict[int, tuple[torch.Tensor, int]] = {}

    @override
    def accepts(self, values: torch.Tensor) -> bool:
        # Passed on, as native DDP does.
        self.statistics.non_finite += not is_finite(values)
        return True

    @override
    def conclude(self, sequence: int, update: Update) -> None:
        average = update.values
        if average is None:
            average = torch.zeros(self.spec.numel, dtype=self.spec.dtype)
        # Encoded once, so that all workers get the same bits.
        self._results[sequence] = (self.payloads.encode(average), len(update.contributions))

    @override
    def can_answer(self, first: int, last: int) -> bool:
        if last - first >= len(self._results):
            return last < first
        return all(sequence in self._results for sequence in range(first, last + 1))

    @override
    def answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        payload, contributors = self._results[sequence]
        # An average is made once and never changed.
        return self._updated(rank, sequence, sequence, payload, PayloadPins(), contributors=contributors)

    @override
    def take_result(self, sequence: int, payload: torch.Tensor, contributors: int) -> bool:
        self._results[sequence] = (payload.clone(), contributors)
        return True

    @override
    def forget_before(self, sequence: int) -> None:
        for old in [known for known in self._results if known < sequence]:
            del self._results[old]

    @override
    def worker_left(self, rank: int) -> None:
        """Nothing is kept for one worker."""

    @override
    def read(self) -> tuple[int, torch.Tensor]:
        if self.values is None:
            raise ProtocolError(f"nobody has deposited values of {self.spec.describe()}", ErrorCode.NOT_READY)
        return self.values_version, self.values

    @override
    def store(self, values: torch.Tensor, version: int) -> None:
        self.values, self.values_version = values.clone(), version

    @override
    def reset(self) -> None:
        super().reset()
        self._results.clear()

    @override
    def extra_bytes(self) -> int:
        return len(self._results) * self.payloads.answer_bytes

    @override
    def to_meta(self) -> dict[str, Any]:
        return {"version": self.progress.version, "values_version": self.values_version}

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.values is None else {"values": self.values}

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        # Exchanges go on at whatever number workers say.
        self.progress.version = 0
        self.values_version = meta["values_version"]
        self.values = tensors.get("values")
