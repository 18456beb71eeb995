"""The buckets of a backward on their way: packed, handed to the exchange, waited for, written to the gradients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import NonFiniteGradientError
from psengine.gradients.averaging_weight import AveragingWeight
from psengine.gradients.bucket_layout import BucketLayout
from psengine.gradients.error_texts import CREATE_GRAPH_MESSAGE
from psengine.gradients.finite_check import FiniteCheck
from psengine.gradients.graphs import EveryParameter
from psengine.gradients.packing import Packing
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Driver
from psengine.tracing.telemetry import Telemetry
from psengine.tracing.timeline import EXCHANGE, Span, recorder, span

logger = logging.getLogger(__name__)


class BucketsInFlight:
    """Moves the buckets of ``layout`` through a backward.

    Attributes:
        is_packing: whether this backward packs its gradients; else they are final as they are.
        buckets_reduced: how many buckets the last backward exchanged.
        meter: counts steps for Prometheus; None where nobody does.
        writes_gradients: False where a communication hook steps optimizers itself.
        futures: exchanges of buffer communication hooks, which end before backward returns.
    """

    def __init__(
        self,
        strategy: Strategy,
        collective: Collective,
        layout: BucketLayout,
        averaging_weight: AveragingWeight,
        finite_check: FiniteCheck | None,
    ) -> None:
        self.is_packing = True
        self.buckets_reduced = 0
        self.meter: Telemetry | None = None
        self.writes_gradients = True
        self.futures: list[torch.futures.Future[Any]] = []
        self._strategy = strategy
        self._collective = collective
        self._layout = layout
        self._averaging_weight = averaging_weight
        self._finite_check = finite_check
        self._exchanges: dict[int, Span] = {}  # on the timeline, of buckets on their way
        self._driver = Driver(strategy.exchange)
        self._exchanged_bytes = 0
        self._step = 0
        self._warned_create_graph = False

    def begin(self, step: int) -> None:
        """A backward is expected, that of iteration ``step``."""
        self._step = step
        self._driver.clear()
        self.buckets_reduced = self._exchanged_bytes = 0
        # With gradient_as_bucket_view too: views save the copy back, and without an exchange there is none.
        self.is_packing = self._finite_check is not None or self._strategy.needs_packing
        if self._finite_check is not None:
            self._finite_check.begin(self._layout.buckets)

    # ---- during backward ---------------------------------------------------------------------------------------

    def pack_one(self, packing: Packing, position: int) -> None:
        """Pack a large gradient, which is ready, and make progress with the buckets in flight."""
        share = self._averaging_weight.share()
        facts = packing.bucket.facts_of(position) if recorder.is_on else None
        with span("pack", facts, step=self._step):
            self._without_graph(packing.pack_one, position, share)
        if self.buckets_reduced:
            self._collective.progress()

    def _without_graph(self, pack: Callable[..., None], *arguments: Any) -> None:
        """Pack; a backward with ``create_graph`` runs hooks with gradients enabled."""
        if not torch.is_grad_enabled():
            pack(*arguments)
            return
        self._warn_create_graph()
        with torch.no_grad():
            pack(*arguments)

    def hand_over(self, packing: Packing, graph: EveryParameter) -> None:
        """It is this bucket's turn: pack its remaining gradients, and begin the exchange, if there is one."""
        bucket = packing.bucket
        if graph.finds_unused and graph.is_unused_everywhere(bucket.parameter_indices):
            return
        share = self._averaging_weight.share()
        if not self.is_packing:
            return
        with span("pack", bucket.facts, step=self._step):
            self._without_graph(packing.pack_rest, share)
        if recorder.is_on:
            name = self._strategy.capabilities.exchange_name
            self._exchanges[bucket.index] = span(name, bucket.facts, step=self._step, track=EXCHANGE)
        if self._finite_check is None:
            self._driver.begin(bucket)
        else:
            self._finite_check.note(bucket)
            self._driver.begin(bucket)
            self._finite_check.note(bucket)  # what overflowed where the strategy converted it
        self.buckets_reduced += 1
        self._exchanged_bytes += bucket.size_bytes

    def _warn_create_graph(self) -> None:
        if not self._warned_create_graph:
            self._warned_create_graph = True
            logger.warning(CREATE_GRAPH_MESSAGE)

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
        started_s = 0.0 if self.meter is None else time.monotonic()
        if self._finite_check is not None:
            try:
                self._finite_check.agree(self._layout.buckets[0].device)
            except NonFiniteGradientError:
                for bucket in self._layout.buckets:
                    self._driver.result(bucket)  # the ranks stay in step, so that a caller may catch the error
                    self._strategy.give_back(bucket)
                raise
        remainder = self._strategy.finish()
        with torch.no_grad():
            for packing in self._layout.packings:
                if self.is_packing:
                    self._collect(packing, graph)
                elif misses_gradients and self._strategy.capabilities.defines_gradients:
                    # As among several ranks, an undefined gradient counts as zero.
                    packing.create_missing(graph.unused_positions(packing.bucket.parameter_indices))
            remainder.wait()
            for bucket, result in self._strategy.superseded():
                self._write(self._layout.packings[bucket.index], result, graph)
        futures, self.futures = self.futures, []
        for future in futures:
            self._collective.wait_for(future, "buffer communication hook")
        if self.meter is not None:
            self.meter.step_ended(time.monotonic() - started_s, self._exchanged_bytes, self._collective.world_size)

    def _collect(self, packing: Packing, graph: EveryParameter) -> None:
        bucket = packing.bucket
        with span("wait", bucket.facts, step=self._step):
            result = self._driver.result(bucket)
        exchange = self._exchanges.pop(bucket.index, None)
        if result is not None:
            if exchange is not None:
                exchange.close()
            self._write(packing, result, graph)

    def _write(self, packing: Packing, result: torch.Tensor, graph: EveryParameter) -> None:
        bucket = packing.bucket
        if self.writes_gradients:
            with span("unpack", bucket.facts, step=self._step):
                unused = graph.unused_positions(bucket.parameter_indices) if graph.finds_unused else None
                packing.unpack(result, unused)
                if unused is not None:
                    self._strategy.give_back(bucket, unused)

    # ---- a rank without data, inside join ----------------------------------------------------------------------

    def shadow(self, graph: EveryParameter) -> None:
        """Take part in one backward of other ranks, contributing zeros, in the order they exchange."""
        self._averaging_weight.expect_backward(has_data=False)
        graph.agree(has_data=False)
        self._averaging_weight.share()
        self._driver.clear()
        with torch.no_grad():
            for packing in self._layout.packings:
                if not graph.is_unused_everywhere(packing.bucket.parameter_indices):
                    packing.fill_with_zeros()
                    self._driver.begin(packing.bucket)
            graph.shadow_end()
            if self._finite_check is not None:
                self._finite_check.agree(self._layout.buckets[0].device)
            remainder = self._strategy.finish()
            for bucket in self._layout.buckets:
                self._driver.result(bucket)
            remainder.wait()
        self._strategy.shadow_step()
