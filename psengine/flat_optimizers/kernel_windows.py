"""The part of a cut tensor that torch's fused CPU kernels see, so that they round as in the whole tensor. Pure.

A fused kernel takes whole vectors, and the rest at the end in another way; the two round differently. Vectors are
counted from the tensor's first element, and end with a cache line at the latest (64 bytes, also AVX-512's vector)::

    tensor      |----|----|----|----|----|--|        cache lines, and the rest of one
    run               .====.====.==.                 one chunk's part of it
    window           |----|----|----|                the lines it touches; at the tensor's end, the rest too

Elements of the window that are not the run's are zeros, and their results are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from psengine.protocol.layout import Segment

LINE_BYTES = 64

# Of a run: the place of its first element in its tensor, and how many elements the tensor has.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """A run's elements among those that a kernel is shown: ``numel`` in all, the run's from ``offset`` on."""

    numel: int
    offset: int

    def show(self, run: torch.Tensor) -> torch.Tensor:
        """A copy of the run's elements, at their place among zeros."""
        shown = torch.zeros(self.numel, dtype=run.dtype)
        shown[self.offset : self.offset + run.numel()] = run
        return shown

    def take_back(self, shown: torch.Tensor, run: torch.Tensor) -> None:
        """Write to ``run`` what its elements have become."""
        run.copy_(shown[self.offset : self.offset + run.numel()])


def window_of(place: Place, numel: int, itemsize: int) -> Window | None:
    """The window of a run of ``numel`` elements; None where the run itself will do, being whole lines of its tensor.

    How the rest of a line is rounded depends on where it lies in memory too: a copy begins on a line, as tensors do.
    """
    start, tensor_numel = place
    line = LINE_BYTES // itemsize
    first = start - start % line
    whole_lines_numel = tensor_numel - tensor_numel % line
    end = start + numel
    last = tensor_numel if end > whole_lines_numel else end + -end % line
    is_whole_lines = (first, last) == (start, end) and end % line == 0
    return None if is_whole_lines else Window(last - first, start - first)


def places_of(runs: Sequence[tuple[int, int, int]], segments: Sequence[Segment]) -> list[Place]:
    """The place of each run of a chunk in its tensor; a run that is not one segment counts as a tensor by itself."""
    of_segments = dict(_segment_places(segments))
    return [of_segments.get((start, end), (0, end - start)) for start, end, _ in runs]


def _segment_places(segments: Sequence[Segment]) -> Iterator[tuple[tuple[int, int], Place]]:
    start = 0
    for segment in segments:
        end = start + segment.numel
        yield (start, end), (segment.start, math.prod(segment.shape))
        start = end
