"""A collective that passes everything on to another one: the base of those that do only a part themselves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, Work


class Forwarding(Collective):
    """Passes every operation on to ``inner``, a collective of the same ranks. A subclass overrides what it does itself.

    Blocking forms (``sum``, ``gather``, ``gather_bytes``, ``broadcast_bytes``) are made of this collective's own
    operations, so that they too pass through what a subclass overrides.

    Args:
        inner: carries what this collective does not do; not closed with it where others use it too.
    """

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.timeout_s = inner.timeout_s
        self.liveness = inner.liveness

    @property
    @override
    def scales_for_free(self) -> bool:
        return self.inner.scales_for_free

    @override
    def common_memory(self, size_bytes: int) -> Any:
        return self.inner.common_memory(size_bytes)

    @property
    @override
    def has_ended(self) -> bool:
        return self.inner.has_ended

    @override
    def connect(self) -> None:
        self.inner.connect()

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(numel, dtype, device)

    def wrapped(self, work: Work) -> Work:
        """What this collective returns for the work of an operation that it passes on. Default: that work."""
        return work

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        return self.wrapped(self.inner.all_reduce(flat, scale, what=what))

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        return self.wrapped(self.inner.all_gather(output, tensor, what=what))

    @override
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], senders: Sequence[int], *, what: str
    ) -> Work:
        return self.wrapped(self.inner.all_to_all(output, flat, sizes, senders, what=what))

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        return self.wrapped(self.inner.broadcast(tensors, source_rank, what=what))

    @override
    def barrier(self) -> Work:
        return self.wrapped(self.inner.barrier())

    @override
    def sum_contributions(
        self, memory: torch.Tensor, owners: Sequence[tuple[int, int]], *, what: str = "contributions"
    ) -> Generator[Work, None, None]:
        for work in self.inner.sum_contributions(memory, owners, what=what):
            yield self.wrapped(work)

    @override
    def progress(self) -> None:
        self.inner.progress()

    @override
    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        return self.inner.wait_for(future, what)

    @override
    def abandon(self) -> None:
        self.inner.abandon()

    @override
    def close(self) -> None:
        self.inner.close()
