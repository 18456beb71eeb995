"""A collective whose waits end where the group is to change: nobody waits for a member that is gone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, Intermediate, Work
from psengine.collectives.forwarding import Forwarding
from psengine.errors import CollectiveError


class GuardedCollective(Forwarding):
    """Passes operations on to ``inner``; a wait raises CollectiveError soon after ``has_news`` returns True."""

    def __init__(self, inner: Collective, has_news: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._has_news = has_news

    def _guarded(self, work: Work) -> Work:
        guarded = GuardedWork(work, self._has_news)
        return Intermediate(guarded) if isinstance(work, Intermediate) else guarded

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        return self._guarded(super().all_reduce(flat, scale, what=what))

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        return self._guarded(super().all_gather(output, tensor, what=what))

    @override
    def all_to_all(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        sizes: Sequence[int],
        *,
        senders: Sequence[int] | None = None,
        what: str = "tensor",
    ) -> Work:
        return self._guarded(super().all_to_all(output, flat, sizes, senders=senders, what=what))

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        return self._guarded(super().broadcast(tensors, source_rank, what=what))

    @override
    def barrier(self) -> Work:
        return self._guarded(super().barrier())

    @override
    def sum_contributions(
        self, memory: torch.Tensor, owners: Sequence[tuple[int, int]], *, what: str = "contributions"
    ) -> Generator[Work, None, None]:
        for work in super().sum_contributions(memory, owners, what=what):
            yield self._guarded(work)


class GuardedWork(Work):
    """See ``GuardedCollective``."""

    def __init__(self, work: Work, has_news: Callable[[], bool]) -> None:
        self._work, self._has_news = work, has_news

    @override
    def wait(self) -> None:
        if not self._work.wait_unless(self._has_news):
            raise CollectiveError("the group of workers changes: one of them died, was put out, or another one comes")

    @override
    def wait_unless(self, is_interrupted: Callable[[], bool]) -> bool:
        return self._work.wait_unless(lambda: is_interrupted() or self._has_news())
