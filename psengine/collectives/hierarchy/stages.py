"""An all-reduce on its way through its stages; ``collective.py`` has the algorithm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from psengine.collectives.base import Work
from psengine.collectives.c10d import C10dWork, all_to_all_of
from psengine.collectives.hierarchy.levels import Levels
from psengine.collectives.operands import flat_bytes
from psengine.collectives.shared_memory.collective import SharedMemoryWork

# In their order, and the one after the last.
SUM, TRADE, COLLECT, SPREAD, LAST = range(5)
# 16-bit sums are carried in these.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Sum(Work):
    """An all-reduce on its way through the stages.

    Args:
        levels: the channels.
        flat: contiguous, of real numbers; gets the sum.
        scale: of each addend.
        what: its name in errors.
        number: the same on every rank.
        complete: waits for an operation and for those before it, which must enter each stage first.

    Attributes:
        stage: the one it is in.
        what: its name in errors.
    """

    def __init__(
        self,
        levels: Levels,
        flat: torch.Tensor,
        scale: float,
        what: str,
        number: int,
        complete: Callable[[Sum], None],
    ) -> None:
        self.stage = SUM
        self.what = what
        self._complete = complete
        self._levels = levels
        self._flat = flat
        self._number = number
        # Elements of a part; a lane has as many parts as there are hosts. Parts at the tensor's end are shorter.
        self._part_numel = -(-flat.numel() // (levels.lanes * len(levels.hosts)))
        self._traded = flat.new_empty(0)
        self._gathered: torch.Tensor | None = None
        self._work: SharedMemoryWork | C10dWork | None = None
        if levels.sums is not None:
            begun = levels.sums.all_reduce(flat, scale, what=what)
            assert isinstance(begun, SharedMemoryWork)
            self._work = begun
        elif scale != 1.0:
            flat.mul_(scale)

    @override
    def wait(self) -> None:
        self._complete(self)

    def advance(self, before: int) -> None:
        """Go through the stages that are over, at most to stage ``before``, where the operation before this one is."""
        while self.stage < before and (self._work is None or self._work.is_done()):
            if self._work is not None:
                self._work.wait()
                self._work = None
            self.stage += 1
            if self._flat.numel() > 0 and len(self._levels.hosts) > 1 and self.stage != LAST:
                self._work = (self._trade, self._collect, self._spread)[self.stage - TRADE]()

    def wait_for_stage(self) -> None:
        """Wait until the stage is over."""
        for memory in (self._levels.sums, self._levels.spreads):
            if memory is not None:
                memory.number = self._number
        if self._work is not None:
            self._work.wait()

    def _slice(self, lane: int) -> torch.Tensor:
        """The elements that ranks at place ``lane`` exchange."""
        numel = self._part_numel * len(self._levels.hosts)
        return self._flat[lane * numel : (lane + 1) * numel]

    def _sizes(self) -> list[int]:
        """By host, how many elements of this rank's slice it adds."""
        left = self._slice(self._levels.place).numel()
        return [
            max(0, min(self._part_numel, left - host * self._part_numel)) for host in range(len(self._levels.hosts))
        ]

    def _trade(self) -> C10dWork | None:
        levels = self._levels
        if levels.trades is None:
            return None
        own, sizes = self._slice(levels.place), self._sizes()
        received = [sizes[levels.host]] * len(sizes)
        self._traded = own.new_empty(sum(received))
        exchange = all_to_all_of(levels.trades)
        return levels.everybody.begin(
            lambda: [exchange(self._traded, own, received, sizes)], self.what, own.device, operation=self._number
        )

    def _collect(self) -> C10dWork | None:
        levels, collects = self._levels, self._levels.collects
        if collects is None:
            return None
        own, sizes = self._slice(levels.place), self._sizes()
        part = self._added(self._traded.view(len(sizes), -1))
        self._traded = part  # kept until it is sent
        gathered = own
        if own.numel() < self._part_numel * len(sizes):  # gloo gathers equal parts
            gathered = self._gathered = own.new_empty(self._part_numel * len(sizes))
            part = self._traded = torch.cat([part, part.new_zeros(self._part_numel - part.numel())])
        parts = list(flat_bytes(gathered).view(len(sizes), -1).unbind())
        return levels.everybody.begin(
            lambda: [collects.allgather([parts], [flat_bytes(part)])],
            self.what,
            own.device,
            finish=None if gathered is own else lambda: own.copy_(gathered[: own.numel()]),
            operation=self._number,
        )

    def _added(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of the hosts' rows, in the order of hosts."""
        total = rows[0].to(_WIDE.get(rows.dtype, rows.dtype), copy=True)
        for row in rows[1:]:
            total.add_(row)
        return total.to(rows.dtype)

    def _spread(self) -> SharedMemoryWork | None:
        levels = self._levels
        self._traded, self._gathered = self._flat.new_empty(0), None
        if levels.spreads is None:
            return None
        slices = [self._slice(lane) for lane in range(levels.lanes)]
        work: Work | None = None
        for lane, values in enumerate(slices):
            if values.numel() > 0:
                # They complete in the order of calls, so the last one stands for all.
                work = levels.spreads.broadcast([values], lane, what=self.what)
        assert work is None or isinstance(work, SharedMemoryWork)
        return work
