"""The collective of several hosts with several ranks each: sums inside hosts in shared memory, then between hosts.

An all-reduce of n elements, K hosts, of which the one with fewest ranks has L; rank l of each host, l < L, carries
slice l between hosts, which its host's other ranks leave to it::

    sum      each host in shared memory: every rank of it has the host's sum           nothing sent
    trade    ranks l of all hosts: all_to_all of slice l, in K parts                   (K-1)/K n a host
             host h adds the K parts that are its own, in the order of hosts
    collect  ranks l of all hosts: all_gather of the added parts                       (K-1)/K n a host
    spread   each host in shared memory: rank l broadcasts slice l                     nothing sent

A ring over all W ranks sends 2 (W-1)/W n over each link between hosts, so two hosts with two ranks each send 0.67 as
much here. gloo's own reduce_scatter would send a whole all-reduce, therefore all_to_all.

The order of additions, from which the bits follow: inside a host that of ranks, then that of hosts, which are numbered
by their lowest rank. 16-bit sums are carried in float32 and rounded once inside the host and once between hosts. The
bits depend on which ranks share a host, and on nothing else: they are the same on every rank and in every run.

Each of the four steps is a stage with a channel of its own (two groups in shared memory, two of gloo), so operations
overlap, and each channel sees them in the order of calls on every rank. Nothing has a thread: stages begin when a rank
begins an operation, makes progress or waits.
"""

from __future__ import annotations

import collections

import torch
from typing_extensions import override

from psengine.collectives.base import Work
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.forwarding import Forwarding
from psengine.collectives.hierarchy.levels import Levels
from psengine.collectives.hierarchy.stages import LAST, Sum
from psengine.collectives.operands import check_flat, real
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.collectives.shared_memory.segments import SharedSegments
from psengine.errors import CollectiveError
from psengine.kernels import native

# Tensors go through the stages in pieces, so that links are busy while hosts add: whole buckets of 25 MB, which leave
# links idle between the stages, take a fifth longer (benchmarks/cluster, 2 x 2 ranks at 1 Gbit/s).
PIECE_BYTES = 4 * 1024 * 1024


class HierarchicalCollective(Forwarding):
    """All-reduces in two levels; the other operations, and tensors that shared memory does not sum, over ``inner``.

    Args:
        inner: the same ranks over torch.distributed; says who is missing after a failure.
    """

    inner: C10dCollective

    def __init__(self, inner: C10dCollective) -> None:
        super().__init__(inner)
        self._segments = SharedSegments() if native.has_shared_memory() else None
        self._levels: Levels | None = None
        self._has_ended = False
        # Begun and not complete, in the order of calls.
        self._under_way: collections.deque[Sum] = collections.deque()

    @override
    def connect(self) -> None:
        """Raises ``SharedMemoryUnavailableError`` on every rank where a channel cannot be made."""
        if self._levels is None:
            self._levels = Levels(self.inner, self._segments)

    @property
    @override
    def scales_for_free(self) -> bool:
        return self._levels is not None and min(map(len, self._levels.hosts)) > 1

    @property
    @override
    def has_ended(self) -> bool:
        levels = self._levels
        return self._has_ended or (levels is not None and levels.has_ended)

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._segments is None or device.type != "cpu":
            return super().allocate(numel, dtype, device)
        return self._segments.allocate(numel, dtype)

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        if not SharedMemoryCollective.sums(flat):
            return self.inner.all_reduce(flat, scale, what=what)
        what = f"all-reduce of {what}"
        check_flat(self, what, flat, scale)
        if self._has_ended:
            raise CollectiveError(
                f"{what} failed on rank {self.rank} of {self.world_size}: the collective is closed, or has failed"
            )
        self.connect()
        assert self._levels is not None
        values, number = real(flat.detach()).view(-1), self.inner.count()
        for piece in values.split(max(1, PIECE_BYTES // values.element_size())):
            try:
                begun = Sum(self._levels, piece, scale, what, number, self._complete)
            except CollectiveError:
                self.close()
                raise
            self._under_way.append(begun)
        self.progress()
        return begun  # which ends after the others

    @override
    def progress(self) -> None:
        """Begin every stage that can begin. An operation enters a stage after those that were called before it."""
        before = LAST
        try:
            for begun in self._under_way:
                begun.advance(before)
                before = begun.stage
        except CollectiveError:
            self.close()
            raise
        while self._under_way and self._under_way[0].stage == LAST:
            self._under_way.popleft()

    def _complete(self, last: Sum) -> None:
        """Wait for ``last`` and the operations before it."""
        while last.stage != LAST:
            first = self._under_way[0]
            try:
                first.wait_for_stage()
            except CollectiveError:
                self.close()
                raise
            self.progress()

    @override
    def close(self) -> None:
        """Tells the ranks of this host that wait for this one."""
        self._has_ended = True
        if self._levels is not None:
            self._levels.close()
