"""What each live worker holds of a chunk, in jobs whose codec encodes the difference to the current weights.

    server   weights - held ─ encode ─► payload ─┬─────────► worker   held += decode(payload)
             held += decode(payload) ◄───────────┘

Both ends add the same values, so they hold the same bits, and what a payload leaves out is part of the next difference:
no residual is needed. A worker says with each push which step's answer it holds. If the server does not know that
one (a first push, a worker that rejoined, a server that restarted), it answers whole weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psengine.parameter_server.server.rules.payloads import ChunkPayloads

# Where a worker may hold either of two answers.
NO_STEP = 0


@dataclass(slots=True)
class _Held:
    values: torch.Tensor  # mutated by the next answer
    step: int  # whose answer brought them
    version: int  # of the weights then
    payload: torch.Tensor  # that answer's; never changed, because it may still be on its way, or have to go again


class HeldWeights:
    """Of one chunk, by rank of the worker."""

    def __init__(self, payloads: ChunkPayloads) -> None:
        self._payloads = payloads
        self._held: dict[int, _Held] = {}

    def note(self, rank: int, step: int | None) -> None:
        """Worker ``rank`` says that it holds what the answer of this step brought; None: nothing."""
        held = self._held.get(rank)
        if held is not None and held.step != step:
            del self._held[rank]

    def answer(
        self, rank: int, step: int, version: int, weights: torch.Tensor, *, repeated: bool
    ) -> tuple[int, torch.Tensor]:
        """(version, payload) of the answer of a step; a repeat is what the first answer was, if that is known.

        If it is not, the worker may have either of two answers, and the next difference is of neither.
        """
        held = self._held.get(rank)
        if held is not None and held.step == step:
            return held.version, held.payload
        if held is None or repeated:
            payload = weights.clone()
            known = NO_STEP if repeated else step
            self._held[rank] = _Held(self._payloads.wide(weights), known, version, payload)
            return version, payload
        held.payload = self._payloads.encode_difference(weights, held.values)
        held.step, held.version = step, version
        return version, held.payload

    def values(self, rank: int) -> torch.Tensor:
        """What worker ``rank`` holds after its last answer; mutated by the next."""
        return self._held[rank].values

    def forget(self, rank: int | None = None) -> None:
        """The worker is gone, or all hold something else: they get whole weights."""
        if rank is None:
            self._held.clear()
        else:
            self._held.pop(rank, None)

    def to_meta(self) -> dict[str, Any]:
        """All of it beside the tensors; JSON-able."""
        return {str(rank): (held.step, held.version) for rank, held in self._held.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by name."""
        values = {f"held/{rank}": held.values for rank, held in self._held.items()}
        return values | {f"answer/{rank}": held.payload for rank, held in self._held.items()}

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of ``to_meta`` and ``tensors``."""
        self._held = {
            int(rank): _Held(tensors[f"held/{rank}"], step, version, tensors[f"answer/{rank}"])
            for rank, (step, version) in meta.items()
        }

    @property
    def size_bytes(self) -> int:
        """Memory of what all workers hold, and of their last answers."""
        return sum(held.values.nbytes + held.payload.nbytes for held in self._held.values())
