"""The buckets of a backward on their way: packed, handed to the exchange, waited for, written to the gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import NonFiniteGradientError
from psengine.gradients.averaging_weight import AveragingWeight
from psengine.gradients.error_texts import CREATE_GRAPH_MESSAGE
from psengine.gradients.finite_check import FiniteCheck
from psengine.gradients.graphs import EveryParameter
from psengine.gradients.packing import Packing
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Driver
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share
from psengine.tracing.backwards import Observe

logger = logging.getLogger(__name__)


class BucketsInFlight:
    """Moves buckets through a backward.

    Attributes:
        packings: by bucket, in the order they are reduced, what moves its gradients.
        averaging_weight: what this rank's gradients count.
        is_packing: whether this backward packs its gradients; else they are final as they are.
        buckets_reduced: how many buckets the last backward exchanged.
        observe: gets the moments of this backward; see ``tracing/backwards.py``.
        writes_gradients: False where a communication hook steps optimizers itself.
        futures: exchanges of buffer communication hooks, which end before backward returns.
    """

    def __init__(self, strategy: Strategy, collective: Collective, finite_check: FiniteCheck | None) -> None:
        self.packings: Sequence[Packing] = ()
        self.averaging_weight = AveragingWeight(strategy, collective)
        self.is_packing = True
        self.buckets_reduced = 0
        self.observe: Observe = _nobody
        self.writes_gradients = True
        self.futures: list[torch.futures.Future[Any]] = []
        self._strategy = strategy
        self._collective = collective
        self._finite_check = finite_check
        self._driver = Driver(strategy.exchange)
        self._share: Share | None = None
        self._warned_create_graph = False

    def begin(self, observe: Observe | None, *, has_data: bool = True) -> None:
        """A backward is expected, of this rank or, inside ``join``, of others."""
        self.observe = observe or _nobody
        self._driver.clear()
        self._share = None
        self.buckets_reduced = 0
        self.averaging_weight.expect_backward(has_data=has_data)
        # With gradient_as_bucket_view too: views save the copy back, and without an exchange there is none.
        self.is_packing = self._finite_check is not None or self._strategy.needs_packing
        if self._finite_check is not None:
            self._finite_check.begin([packing.bucket for packing in self.packings])

    # ---- during backward ---------------------------------------------------------------------------------------

    def _begin_exchange(self) -> Share:
        """The first gradient of a backward is ready: the strategy says what this rank contributes of each."""
        self._share = self._strategy.begin(self.averaging_weight.step())
        return self._share

    def pack_one(self, packing: Packing, position: int) -> None:
        """Pack a large gradient, which is ready, and make progress with the buckets in flight."""
        share = self._share or self._begin_exchange()
        self.observe("pack", packing.bucket, position)
        self._without_graph(packing.pack_one, position, share)
        self.observe("packed", packing.bucket, position)
        if self.buckets_reduced:
            self._collective.progress()

    def _without_graph(self, pack: Callable[..., None], *arguments: Any) -> None:
        """Pack; a backward with ``create_graph`` runs hooks with gradients enabled."""
        if not torch.is_grad_enabled():
            pack(*arguments)
            return
        if not self._warned_create_graph:
            self._warned_create_graph = True
            logger.warning(CREATE_GRAPH_MESSAGE)
        with torch.no_grad():
            pack(*arguments)

    def hand_over(self, packing: Packing, graph: EveryParameter) -> None:
        """It is this bucket's turn: pack its remaining gradients, and begin the exchange, if there is one."""
        bucket = packing.bucket
        self.observe("turn", bucket)
        if graph.finds_unused and graph.is_unused_everywhere(bucket.parameter_indices):
            return
        share = self._share or self._begin_exchange()
        if not self.is_packing:
            return
        self.observe("pack", bucket)
        self._without_graph(packing.pack_rest, share)
        self.observe("exchange", bucket)
        if self._finite_check is None:
            self._driver.begin(bucket)
        else:
            self._finite_check.note(bucket)
            self._driver.begin(bucket)
            self._finite_check.note(bucket)  # what overflowed where the strategy converted it
        self.buckets_reduced += 1

    # ---- the end of backward -----------------------------------------------------------------------------------

    def land(self, graph: EveryParameter, *, misses_gradients: bool) -> None:
        """Wait for every bucket in order, and write the results to the gradients.

        Args:
            graph: of this backward.
            misses_gradients: whether a hook of this backward found its gradient undefined.

        Raises:
            NonFiniteGradientError: some rank's gradient is not finite; every rank raises it, and nothing was written.
            CollectiveError: an exchange failed.
        """
        self.observe("landing")
        if self._finite_check is not None:
            try:
                self._finite_check.agree(self.packings[0].bucket.device)
            except NonFiniteGradientError:
                for packing in self.packings:
                    self._driver.result(packing.bucket)  # the ranks stay in step, so that a caller may catch the error
                    self._strategy.give_back(packing.bucket)
                raise
        remainder = self._strategy.finish()
        with torch.no_grad():
            for packing in self.packings:
                bucket = packing.bucket
                if self.is_packing:
                    self.observe("wait", bucket)
                    result = self._driver.result(bucket)
                    if result is not None:
                        self._write(packing, result, graph)
                    self.observe("written", bucket)
                elif misses_gradients and self._strategy.capabilities.averages_gradients:
                    # As among several ranks, an undefined gradient counts as zero.
                    packing.create_missing(graph.unused_positions(bucket.parameter_indices))
            remainder.wait()
        futures, self.futures = self.futures, []
        for future in futures:
            self._collective.wait_for(future, "buffer communication hook")
        self.observe("landed")

    def _write(self, packing: Packing, result: torch.Tensor, graph: EveryParameter) -> None:
        bucket = packing.bucket
        self.observe("unpack", bucket)
        if self.writes_gradients:
            unused = graph.unused_positions(bucket.parameter_indices) if graph.finds_unused else None
            packing.unpack(result, unused)
            if unused is not None:
                self._strategy.give_back(bucket, unused)

    # ---- a rank without data, inside join ----------------------------------------------------------------------

    def shadow(self, graph: EveryParameter) -> None:
        """Take part in one backward of other ranks, contributing zeros, in the order they exchange."""
        self.begin(None, has_data=False)
        graph.agree(has_data=False)
        self._begin_exchange()
        with torch.no_grad():
            for packing in self.packings:
                if not graph.is_unused_everywhere(packing.bucket.parameter_indices):
                    packing.fill_with_zeros()
                    self._driver.begin(packing.bucket)
            graph.agree_at_end(has_data=False)
            if self._finite_check is not None:
                self._finite_check.agree(self.packings[0].bucket.device)
            remainder = self._strategy.finish()
            for packing in self.packings:
                self._driver.result(packing.bucket)
            remainder.wait()
        self._strategy.shadow_step()


def _nobody(moment: str, bucket: Bucket | None = None, position: int | None = None) -> None:
    """Observes nothing."""
