"""What a worker holds of a chunk, in jobs whose codec encodes the difference to the current weights.

    server   weights - held ─ encode ─► payload ─┬─────────► worker   held += decode(payload)
             held += decode(payload) ◄───────────┘

Both ends add the same values, so they hold the same bits, and what a payload leaves out is part of the next difference:
no residual is needed. A worker says with each push which step's answer it holds. If the server does not know that
one (a first push, a server that restarted), it answers whole weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psengine.parameter_server.server.rules.payloads import ChunkPayloads


@dataclass(slots=True)
class HeldWeights:
    """Of one worker. Kept too where stale gradients are corrected, for which nothing is added."""

    version: int  # of the weights that were answered
    values: torch.Tensor  # what the worker holds; mutated by the next difference
    step: int | None  # whose answer brought them; None: it may hold something else
    # That answer's; never changed, because it may still be on its way, or have to go again. None: the values' own.
    payload: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Memory of both tensors."""
        return self.values.nbytes + (0 if self.payload is None else self.payload.nbytes)


def next_held(
    held: HeldWeights | None, step: int, version: int, weights: torch.Tensor, payloads: ChunkPayloads, *, repeated: bool
) -> HeldWeights:
    """What a worker holds with the answer of a step; a repeat is what the first answer was, if that is known.

    If it is not, the worker may have either of two answers, and the next difference is of neither.
    """
    if held is not None and held.step == step:
        return held
    if not payloads.answers_differences:
        return HeldWeights(version, weights.clone(), step)
    if held is None or held.step is None or repeated:
        return HeldWeights(version, payloads.wide(weights), None if repeated else step, weights.clone())
    payload = payloads.encode_difference(weights, held.values)
    return HeldWeights(version, held.values, step, payload)
