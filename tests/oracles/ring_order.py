"""What gloo's all-reduce adds, in its order, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.collectives.ring_order import stretches


def add_in_ring_order(
    addends: Sequence[torch.Tensor], output: torch.Tensor, numel: int | None = None, first: int = 0
) -> None:
    """Write to ``output`` what gloo's all-reduce gives for these elements. Mutates ``output``.

    Args:
        addends: by rank, that rank's values of the same elements; contiguous tensors of one dtype and numel.
        output: contiguous, of that dtype and numel. May be the memory of one addend.
        numel: elements of the whole tensor; None: as many as an addend has.
        first: where the addends begin in the whole tensor.
    """
    real = [(torch.view_as_real(a) if a.is_complex() else a).view(-1) for a in addends]
    place = (torch.view_as_real(output) if output.is_complex() else output).view(-1)
    factor = 2 if output.is_complex() else 1
    first *= factor
    whole_numel = place.numel() if numel is None else numel * factor
    for begin, end, ranks in stretches(whole_numel, place.element_size(), len(real), first, first + place.numel()):
        parts = [real[rank][begin - first : end - first] for rank in ranks]
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0]
        for part in parts[2:]:
            total += part
        place[begin - first : end - first] = total
