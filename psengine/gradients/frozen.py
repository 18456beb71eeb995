"""Parameters that were frozen when buckets were laid out are in none: what becomes of those that a program thaws.

::

    step n      backward ── its buckets land ── has any rank a thawed gradient? ── same names? ── average of these
    step n + 1  they are in buckets, as if they had never been frozen
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from psengine.collectives.base import Collective, Work
from psengine.errors import ReductionError, ReplicaMismatchError
from psengine.gradients.error_texts import thawed_message
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Driver
from psengine.strategies.verification import verify_replicas
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share


class FrozenParameters:
    """Looks after a backward for gradients of parameters that were frozen.

    Args:
        parameters: by name, those that needed no gradient when buckets were laid out.
        strategy: exchanges the others.
        collective: of the replicas.
        device: where the replica is.
        lay_out_again: called on every rank, with thawed parameters averaged; gets the names of those without a gradient
            on any rank, which stay outside of buckets.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        strategy: Strategy,
        collective: Collective,
        device: torch.device,
        lay_out_again: Callable[[Set[str]], None],
    ) -> None:
        self._parameters = parameters
        self._strategy = strategy
        self._collective = collective
        self._device = device
        self._lay_out_again = lay_out_again
        # How many of them have a gradient, over all ranks, and its sum on the way.
        self._count = torch.zeros(1, dtype=torch.int64)
        self._work: Work | None = None

    def thawed(self) -> list[str]:
        """The names of those that have a gradient now, which no bucket exchanges."""
        return [name for name, p in self._parameters.items() if p.requires_grad and p.grad is not None]

    def ask(self) -> None:
        """All gradients of a backward are there, on every rank: begin to count thawed parameters, while buckets travel.

        On a GPU the host would wait for the answer in each step. There only ranks that have some meet, and the stall
        inspector finds those that differ.
        """
        is_asked = self._parameters and self._collective.world_size > 1 and self._device.type == "cpu"
        self._work = None
        if is_asked and self._strategy.capabilities.exchanges_thawed:
            self._count.fill_(len(self.thawed()))
            self._work = self._collective.all_reduce(self._count, what="number of thawed parameters")

    def count(self) -> int:
        """What ``ask`` asked; waits for it."""
        if self._work is None:
            return len(self.thawed()) if self._parameters else 0
        work, self._work = self._work, None
        work.wait()
        return int(self._count)

    def look(self, share: Share) -> None:
        """After a backward, on every rank: average the gradients of thawed parameters, from now on in buckets.

        Args:
            share: what this rank contributed in the backward.

        Raises:
            ReductionError: the strategy does not take them.
            ReplicaMismatchError: the ranks have thawed different ones.
        """
        found = self.count()
        if not self._strategy.capabilities.exchanges_thawed:
            if found:
                raise ReductionError(thawed_message(self.thawed()[0], self._collective.rank, self._strategy))
            return
        if found and self._collective.world_size > 1:
            self._exchange(share)

    @torch.no_grad()
    def _exchange(self, share: Share) -> None:
        thawed = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        try:
            verify_replicas(self._collective, thawed, {}, self._device, {})
        except ReplicaMismatchError as error:
            raise ReplicaMismatchError(f"ranks must thaw the same parameters after wrapping: {error}") from None
        used = torch.tensor([p.grad is not None for p in thawed.values()], dtype=torch.int32, device=self._device)
        self._collective.sum(used, what="thawed parameters with a gradient")
        idle = {name for name, count in zip(thawed, used.tolist(), strict=True) if not count}
        names = [name for name in thawed if name not in idle]
        parameters = [thawed[name] for name in names]
        driver = Driver(self._strategy.exchange_thawed)
        allocate = self._collective.allocate
        buckets = [Bucket(i, (i,), parameters, names, sparse=False, allocate=allocate) for i in range(len(names))]
        gradients = []
        for bucket, parameter in zip(buckets, parameters, strict=True):
            # As in a bucket: a gradient that is missing here counts as zero.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            parameter.grad = gradient
            gradients.append(gradient)
            bucket.pack([gradient], share)
            driver.begin(bucket)
        for bucket, gradient in zip(buckets, gradients, strict=True):
            result = driver.result(bucket)
            assert result is not None, "a collective returns what it reduced"
            bucket.unpack([gradient], result)
        self._lay_out_again(idle)
