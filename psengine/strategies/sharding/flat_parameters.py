"""The replica's parameters as views of flat memory, of which each rank steps one range and all ranks see the whole.

Parameters of one dtype stand one after the other, each at the start of a cache line; a range is W-th of that memory::

    parameters  |  0.weight                         |0.bias|..|  1.weight              |..........|   .. unused
    ranges      |  rank 0                         |  rank 1                        |  rank 2      |
    pieces      |  0.weight[:n]                   |[n:]|0.bias|..| 1.weight[:m]    |  [m:]        |

    one host      one memory that every rank maps     barrier ─ each rank steps its range in place ─ barrier
    otherwise     a memory for each rank              each rank steps its range ─ all-gather of the ranges
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ReductionError
from psengine.kernels.ops import in_memory_order
from psengine.tensors.bucket import view_like

# torch's kernels round the last elements of a tensor, which fill no vector, in another way: so parameters are cut at
# cache lines (also AVX-512's vector), counted from their first element.
LINE_BYTES = 64
# A piece's values, gradient and state stay in a core's second-level cache between the passes of a step.
MAX_PIECE_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive elements of one parameter, in the order of its memory, that one rank steps.

    Attributes:
        parameter: the whole.
        start, end: its elements.
        values: they, in the flat memory; 1-D, or 0-D like the parameter.
        owner: the rank.
    """

    parameter: torch.nn.Parameter
    start: int
    end: int
    values: torch.nn.Parameter
    owner: int

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a ``tensor`` like the parameter that are this piece's: a view where strides are equal."""
        elements = in_memory_order(tensor, self.parameter.shape, self.parameter.stride())
        return elements[self.start : self.end].view(self.values.shape)


class FlatParameters:
    """Moves ``parameters``, by name, to flat memory; all ranks call it, and their values are equal already.

    Attributes:
        pieces: by parameter, its pieces in order.
        own: those of this rank.

    Raises:
        SharedMemoryUnavailableError: a rank has no memory left.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], collective: Collective) -> None:
        self._parameters = parameters
        self._collective = collective
        self.pieces: dict[torch.Tensor, list[Piece]] = {parameter: [] for parameter in parameters.values()}
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters.values():
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        ranges_numel = {dtype: self._range_numel(dtype, members) for dtype, members in by_dtype.items()}
        size_bytes = sum(dtype.itemsize * numel for dtype, numel in ranges_numel.items()) * collective.world_size
        memory = collective.common_memory(size_bytes) if collective.world_size > 1 else None
        self._is_shared = memory is not None
        if memory is None:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # By dtype, the ranges of all ranks.
        self._flats: list[torch.Tensor] = []
        start_byte = 0
        with torch.no_grad():
            for dtype, members in by_dtype.items():
                numel = ranges_numel[dtype] * collective.world_size
                flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=start_byte)
                self._place(members, memory, start_byte, flat)
                self._flats.append(flat)
                start_byte += flat.nbytes
        self.own = {
            parameter: [piece for piece in pieces if piece.owner == collective.rank]
            for parameter, pieces in self.pieces.items()
        }
        self._addresses = [parameter.data_ptr() for parameter in parameters.values()]
        self.end_step()

    def _range_numel(self, dtype: torch.dtype, parameters: list[torch.nn.Parameter]) -> int:
        """Elements of a rank's range: whole lines, at least one."""
        line = LINE_BYTES // dtype.itemsize
        lines = sum(-(-parameter.numel() // line) for parameter in parameters)
        return max(1, -(-lines // self._collective.world_size)) * line

    def _place(self, parameters: list[torch.nn.Parameter], memory: Any, start_byte: int, flat: torch.Tensor) -> None:
        """Move parameters of one dtype to their places in ``flat``, which begins at ``start_byte``."""
        line = LINE_BYTES // flat.itemsize
        offset = 0
        for parameter in parameters:
            numel = parameter.numel()
            if numel:
                # A storage of its own: saving a view would save all of its storage.
                own = torch.frombuffer(
                    memory, dtype=flat.dtype, count=numel, offset=start_byte + offset * flat.itemsize
                )
                view = view_like(own, 0, parameter)
                if not self._is_shared or self._collective.rank == 0:
                    view.copy_(parameter)
                parameter.data = view
            self.pieces[parameter] = list(self._cut(parameter, offset, flat))
            offset += -(-numel // line) * line

    def _cut(self, parameter: torch.nn.Parameter, offset: int, flat: torch.Tensor) -> Iterator[Piece]:
        """The pieces of a parameter that begins at ``offset`` in ``flat``; of an empty one, one that is empty."""
        world_size = self._collective.world_size
        range_numel = flat.numel() // world_size
        max_numel = MAX_PIECE_BYTES // flat.itemsize
        shape = parameter.shape if parameter.dim() == 0 else (-1,)
        start = 0
        while True:
            owner = min((offset + start) // range_numel, world_size - 1)
            end = min(parameter.numel(), (owner + 1) * range_numel - offset, start + max_numel)
            values = torch.nn.Parameter(flat[offset + start : offset + end].view(shape))
            yield Piece(parameter, start, end, values, owner)
            start = end
            if start == parameter.numel():
                return

    def check(self) -> None:
        """Raise where a parameter no longer is in the flat memory."""
        for (name, parameter), address in zip(self._parameters.items(), self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise ReductionError(
                    f"rank {self._collective.rank}: parameter {name!r} was given other memory since"
                    " psengine.DistributedOptimizer was made, and a sharded optimizer steps the memory from before."
                    " Fix: parameter.data.copy_(...) in place; convert the module before it is wrapped."
                )

    def begin_step(self) -> None:
        """Return when this rank may write its range: in shared memory others may read it until they step too."""
        if self._is_shared:
            self._collective.barrier().wait()

    def end_step(self) -> None:
        """After this rank wrote its range: return when all ranges are written, and can be read here."""
        if self._is_shared:
            self._collective.barrier().wait()
        elif self._collective.world_size > 1:
            what = "stepped parameters"
            parts = [flat.chunk(self._collective.world_size)[self._collective.rank] for flat in self._flats]
            works = [
                self._collective.all_gather(flat, part, what=what)
                for flat, part in zip(self._flats, parts, strict=True)
            ]
            for work in works:
                work.wait()
        # The pieces have version counters of their own: graphs from before are out of date.
        torch.autograd.graph.increment_version(list(self.pieces))

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        for parameter, address in zip(self.pieces, self._addresses, strict=True):
            if parameter.numel() and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
