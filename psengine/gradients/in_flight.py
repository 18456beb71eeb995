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
from psengine.strategies.exchange import Reduction
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
        self._reductions: list[Reduction | None] = []
        self._step = 0
        self._warned_create_graph = False

    def begin(self, step: int) -> None:
        """A backward is expected, that of iteration ``step``."""
        self._step = step
        self._reductions = []
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
        if self._reductions:
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
        reduction = None
        if not (graph.finds_unused and graph.is_unused_everywhere(bucket.parameter_indices)):
            share = self._averaging_weight.share()
            if self.is_packing:
                with span("pack", bucket.facts, step=self._step):
                    self._without_graph(packing.pack_rest, share)
                if recorder.is_on:
                    name = self._strategy.capabilities.exchange_name
                    self._exchanges[bucket.index] = span(name, bucket.facts, step=self._step, track=EXCHANGE)
                reduction = self._strategy.reduce(bucket) if self._finite_check is None else self._reduce(packing)
        self._reductions.append(reduction)

    def _reduce(self, packing: Packing) -> Reduction:
        assert self._finite_check is not None, "without a check the strategy is called at once"
        self._finite_check.note(packing.bucket)
        reduction = self._strategy.reduce(packing.bucket)
        self._finite_check.note(packing.bucket)  # what overflowed where the strategy converted it
        return reduction

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
        reductions, self._reductions = self._reductions, []
        self.buckets_reduced = len(reductions) - reductions.count(None)
        if self._finite_check is not None:
            try:
                self._finite_check.agree(self._layout.buckets[0].device)
            except NonFiniteGradientError:
                for reduction in reductions:
                    if reduction is not None:
                        reduction.drop()  # the ranks stay in step, so that a caller may catch the error and go on
                raise
        remainder = self._strategy.finish()
        with torch.no_grad():
            for packing, reduction in zip(self._layout.packings, reductions, strict=True):
                if reduction is not None:
                    self._collect(packing, reduction, graph)
                elif misses_gradients and not self.is_packing and self._strategy.capabilities.defines_gradients:
                    # As among several ranks, an undefined gradient counts as zero.
                    packing.create_missing(graph.unused_positions(packing.bucket.parameter_indices))
            remainder.wait()
            for packing, reduction in zip(self._layout.packings, reductions, strict=True):
                if reduction is not None and reduction.is_superseded:
                    self._collect(packing, reduction, graph)
        futures, self.futures = self.futures, []
        for future in futures:
            self._collective.wait_for(future, "buffer communication hook")
        if self.meter is not None:
            reduced = zip(self._layout.buckets, reductions, strict=True)
            size_bytes = sum(bucket.size_bytes for bucket, reduction in reduced if reduction is not None)
            self.meter.step_ended(time.monotonic() - started_s, size_bytes, self._collective.world_size)

    def _collect(self, packing: Packing, reduction: Reduction, graph: EveryParameter) -> None:
        bucket = packing.bucket
        with span("wait", bucket.facts, step=self._step):
            result = reduction.wait()
        exchange = self._exchanges.pop(bucket.index, None)
        if exchange is not None and result is not None:
            exchange.close()
        if result is not None and self.writes_gradients:
            with span("unpack", bucket.facts, step=self._step):
                unused = graph.unused_positions(bucket.parameter_indices) if graph.finds_unused else None
                packing.unpack(result, unused)
                if unused is not None:
                    reduction.spare(unused)

    # ---- a rank without data, inside join ----------------------------------------------------------------------

    def shadow(self, graph: EveryParameter) -> None:
        """Take part in one backward of other ranks, contributing zeros, in the order they exchange."""
        self._averaging_weight.expect_backward(has_data=False)
        graph.agree(has_data=False)
        self._averaging_weight.share()
        reductions = []
        with torch.no_grad():
            for packing in self._layout.packings:
                if not graph.is_unused_everywhere(packing.bucket.parameter_indices):
                    packing.fill_with_zeros()
                    reductions.append(self._strategy.reduce(packing.bucket))
            graph.shadow_end()
            if self._finite_check is not None:
                self._finite_check.agree(self._layout.buckets[0].device)
            remainder = self._strategy.finish()
            for reduction in reductions:
                reduction.wait()
            remainder.wait()
        self._strategy.shadow_step()

    def move_to(self, collective: Collective) -> None:
        """Go on in another group of replicas."""
        self._collective = self._averaging_weight.collective = collective
        if self._finite_check is not None:
            self._finite_check.collective = collective
        self._strategy.lay_out(self._layout.buckets)  # which it exchanges over another collective now
