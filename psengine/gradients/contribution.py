"""What this rank's gradients count in a backward: by its samples, or by how many ranks have data."""

from __future__ import annotations

from typing import Any

from psengine.collectives.base import Collective
from psengine.strategies.exchange import Exchange, Step
from psengine.tensors.share import Share


class Contribution:
    """Asks the exchange for this rank's share, once for each backward.

    Args:
        exchange: decides who divides.
        collective: the group of replicas.

    Attributes:
        shadows_weights: inside ``join``, whether the other ranks weigh the gradients of this iteration.
    """

    def __init__(self, exchange: Exchange, collective: Collective) -> None:
        self.collective = collective
        self.shadows_weights = False
        self._exchange = exchange
        self._weight: float | None = None
        self._has_weighed = False
        self._share: Share | None = None
        self._live_ranks_work: tuple[Any, bool] | None = None

    @property
    def weight(self) -> float | None:
        """By what the gradients of the next exchanged backward are weighed; see ``Exchange.weigh``."""
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._weight = weight
        self._has_weighed = self._has_weighed or weight is not None

    def set_live_ranks_work(self, work: Any, *, use_initial_world_size: bool) -> None:
        """Inside ``join``: ``work`` will count the ranks that still have data, to divide by unless told otherwise."""
        self._live_ranks_work = (work, use_initial_world_size)

    def expect_backward(self) -> None:
        """Forward ends; the ranks' weights travel while backward begins."""
        self._share = None
        if self._has_weighed:
            self._exchange.weigh(self._weight)

    def share(self) -> Share:
        """What this rank's gradients count; ranks that ran out of data may be left out of the count."""
        if self._share is None:
            live_world_size = self.collective.world_size
            in_join = self._live_ranks_work is not None
            if self._live_ranks_work is not None:
                work, use_initial_world_size = self._live_ranks_work
                if not use_initial_world_size:
                    work.wait()
                    live_world_size = int(work.result()[0].item())
            self._share = self._exchange.begin(Step(live_world_size=live_world_size, in_join=in_join))
        return self._share

    def expect_nothing(self) -> None:
        """``expect_backward`` of a rank without data."""
        if self.shadows_weights or self._has_weighed:
            self._exchange.weigh(0.0 if self.shadows_weights else None)

    def share_nothing(self) -> None:
        """``share`` of a rank without data."""
        self._exchange.begin(Step(live_world_size=self.collective.world_size, in_join=True))

    def settle(self) -> None:
        """The end of a backward."""
        self._live_ranks_work = None
