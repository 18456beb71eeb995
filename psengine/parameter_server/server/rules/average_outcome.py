"""Outcome "average": the average goes back to the workers, which hold the weights.

An exchange has one result, kept until every live worker has it, so that no two workers get different ones. A server
that restarted has no results; a worker that is further on returns them (RESULT_WANTED). ``values`` are what a worker
last deposited for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from psengine.codecs.base import CodecState
from psengine.errors import ProtocolError
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.server.rules.exchange import PayloadPins, Reply, Update
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode


class _Result(NamedTuple):
    """An average, which is made once and never changed while somebody may ask for it."""

    payload: torch.Tensor
    contributors: int  # the number of gradients
    pins: PayloadPins  # of the payload's memory


class AverageOutcome(Outcome):
    """See the module's text."""

    holds_weights = False
    pushed_kinds = frozenset({ChunkKind.PARAMETER, ChunkKind.BUFFER, ChunkKind.USAGE})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.values_version = 0
        # What payloads of averages left out, for the next one; made with the first.
        self._state: CodecState | None = None
        *_, options = arguments
        self._waits_for_all = options.get("quorum") is None
        # Averages that some live worker may still ask for, as they travel.
        self._results: dict[int, _Result] = {}

    @override
    def accepts(self, values: torch.Tensor) -> bool:
        return True  # passed on, as native DDP does

    @property
    @override
    def lends(self) -> bool:
        # With a quorum the averages of several exchanges are kept for those who are late.
        return self.spec.kind in self.pushed_kinds and self._waits_for_all and not self.payloads.encodes_answers

    @override
    def places(self, workers: int) -> int:
        return 2  # who contributes to an exchange has read all averages but the last

    @override
    def result_memory(self) -> torch.Tensor:
        kept = [id(result.pins) for result in self._results.values()]
        for memory in self._memories:
            if not memory.pins.are_held() and id(memory.pins) not in kept:
                return memory.values
        return super().result_memory()

    @override
    def conclude(self, sequence: int, update: Update) -> None:
        average = update.values
        if average is None:
            average = torch.zeros(self.spec.numel, dtype=self.spec.dtype)
        elif self._state is None:
            self._state = self.payloads.make_state()
        # A value that is not finite stays so in every sum.
        is_spoiled = not is_finite(average)
        if is_spoiled:
            self.statistics.non_finite += sum(
                one.values is not None and not is_finite(one.values) for one in update.contributions
            )
        pins = next((memory.pins for memory in self._memories if memory.values is average), PayloadPins())
        # Encoded once, so that all workers get the same bits. Where nobody contributed, the residual waits.
        payload = self.payloads.encode(average, None if update.values is None else self._state)
        if is_spoiled and self._state is not None:
            self._state.give_back()  # workers skip a step with this average, and their residuals are as before too
        self._results[sequence] = _Result(payload, len(update.contributions), pins)

    @override
    def can_answer(self, first: int, last: int) -> bool:
        if last - first >= len(self._results):
            return last < first
        return all(sequence in self._results for sequence in range(first, last + 1))

    @override
    def answer(self, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        payload, contributors, pins = self._results[sequence]
        return self._updated(rank, sequence, sequence, payload, pins, contributors=contributors)

    @override
    def take_result(self, sequence: int, payload: torch.Tensor, contributors: int) -> bool:
        self._results[sequence] = _Result(payload.clone(), contributors, PayloadPins())
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
        self._state = None

    @override
    def extra_bytes(self) -> int:
        lent_bytes = max(0, len(self._memories) - 1) * self.spec.size_bytes
        state_bytes = 0 if self._state is None else self._state.size_bytes
        return state_bytes + max(lent_bytes, len(self._results) * self.payloads.answer_bytes)

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
