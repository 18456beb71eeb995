"""What this rank's gradients count in a backward: by its samples, or by how many ranks have data.

The facts are here; ``Exchange.begin`` makes a ``Share`` of them, and packing divides by it.
"""

from __future__ import annotations

from typing import Any

from psengine.collectives.base import Collective
from psengine.errors import ReductionError
from psengine.strategies.exchange import Exchange, Step


class AveragingWeight:
    """The facts of one backward after another, of which the weights travel through ``exchange``.

    Attributes:
        weight: of the next exchanged backward, which takes it; None: all ranks count alike. See ``Exchange.weigh``.
        in_join: whether the coming backward is inside ``join``.
        live_ranks_work: inside ``join``, counts the ranks to divide by; None: all.
        shadows_weights: inside ``join``, whether the other ranks weigh the gradients of this iteration.
    """

    def __init__(self, exchange: Exchange, collective: Collective) -> None:
        self._collective = collective
        self.weight: float | None = None
        self.shadows_weights = False
        self._exchange = exchange
        # What the last forward began to exchange.
        self._begun: float | None = None
        self._is_due = False
        self._has_data = True
        self.in_join = False
        self.live_ranks_work: Any = None

    def set_weight(self, weight: float | None) -> None:
        """Weigh the next exchanged backward; None ends weighing, until the next weight."""
        self.weight = weight
        self._is_due = False

    def expect_backward(self, *, has_data: bool) -> None:
        """A forward ends, or a rank without data shadows one: begin to exchange weights, while backward begins."""
        self._has_data = has_data
        weight = self.weight
        if not has_data:
            self.in_join = True
            weight = 0.0 if self.shadows_weights else None
        self._begun = weight
        self._exchange.weigh(weight)

    def step(self) -> Step:
        """The backward, whose first gradient is ready.

        Raises:
            ReductionError: the last backward was weighed, and this one has no weight, or has it since after forward.
        """
        if self._is_due and self._has_data:
            raise ReductionError(
                f"rank {self._collective.rank}: the last step's gradients were weighed, and this step has no weight"
                " (expected a call of model.batch_weight in every step, before forward). Fix: that, or"
                " model.batch_weight(None) to let all ranks count alike from now on."
            )
        if self.weight != self._begun and self._has_data:
            raise ReductionError(
                f"rank {self._collective.rank}: model.batch_weight was called after the forward of this backward,"
                f" too late for its gradients (expected weight {self._begun}, as at forward, got {self.weight})."
                " Fix: model.batch_weight(len(batch)) before forward."
            )
        live_world_size = self._collective.world_size
        if self.live_ranks_work is not None:
            self.live_ranks_work.wait()
            live_world_size = int(self.live_ranks_work.result()[0].item())
        return Step(live_world_size=live_world_size, in_join=self.in_join)

    def settle(self) -> None:
        """The end of a backward, which took its weight."""
        if self.weight is not None:
            self.weight, self._is_due = None, True
        self.in_join = False
        self.live_ranks_work = None
