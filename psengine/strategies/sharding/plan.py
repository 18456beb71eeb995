"""Which rank steps which part of the parameters. Pure.

Parameters of one dtype stand one after the other in flat memory, each at the start of a cache line. Blocks of one size
tile that memory, and ranks take them in turn, so that each bucket of gradients has parts of every rank::

    parameters  |  0.weight                         |0.bias|..|  1.weight              |..........|   .. unused
    blocks      |  rank 0  |  rank 1  |  rank 0  |  rank 1  |  rank 0  |  rank 1  |

The plan depends on the parameters and the world size only, not on how gradients are put into buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Fused kernels round alike in whole cache lines only; see flat_optimizers/kernel_windows.py.
LINE_BYTES = 64
# A block's values, gradients and state stay in a core's second-level cache between the passes of a step. Smaller blocks
# cost SGD more calls, larger ones cost Adam more cache misses (benchmarks/step_overhead).
MAX_BLOCK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one parameter that one rank steps.

    Attributes:
        parameter: its index.
        start: the first element, counted in the parameter's memory order.
        numel: how many.
        flat_start: where the first element stands in the flat memory.
        owner: the rank.
    """

    parameter: int
    start: int
    numel: int
    flat_start: int
    owner: int


class SharePlan:
    """The places of parameters of one dtype, and the rank of each block.

    Args:
        numels: by parameter.
        itemsize: bytes of an element.
        world_size: number of ranks.

    Attributes:
        offsets: by parameter, where it begins in the flat memory.
        block_numel: elements of a block.
        block_count: blocks in all; a multiple of the world size.
        numel: elements of the flat memory, those that no parameter uses included.
    """

    def __init__(self, numels: Sequence[int], itemsize: int, world_size: int) -> None:
        line = LINE_BYTES // itemsize
        self.world_size = world_size
        self.offsets: list[int] = []
        end = 0
        for numel in numels:
            self.offsets.append(end)
            end += _round_up(numel, line)
        self._numels = list(numels)
        rounds = max(1, -(-end // (world_size * (MAX_BLOCK_BYTES // itemsize))))
        self.block_count = rounds * world_size
        self.block_numel = max(line, _round_up(-(-end // self.block_count), line))
        self.numel = self.block_count * self.block_numel

    def owner_of(self, block: int) -> int:
        """The rank that steps the block."""
        return block % self.world_size

    def pieces_of(self, parameter: int) -> Iterator[Piece]:
        """The pieces of one parameter, in order."""
        offset, numel = self.offsets[parameter], self._numels[parameter]
        start = 0
        while start < numel:
            block = (offset + start) // self.block_numel
            end = min(numel, (block + 1) * self.block_numel - offset)
            yield Piece(parameter, start, end - start, offset + start, self.owner_of(block))
            start = end

    def pieces_by_block(self) -> list[list[Piece]]:
        """By block, its pieces in order."""
        blocks: list[list[Piece]] = [[] for _ in range(self.block_count)]
        for parameter in range(len(self._numels)):
            for piece in self.pieces_of(parameter):
                blocks[piece.flat_start // self.block_numel].append(piece)
        return blocks


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
