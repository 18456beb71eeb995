"""The buckets of a backward on their way: packed, handed to the exchange, waited for, written to the gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import NonFiniteGradientError, ReductionError
from psengine.gradients.error_texts import CREATE_GRAPH_MESSAGE
from psengine.gradients.frozen import FrozenParameters
from psengine.gradients.graphs import EveryParameter
from psengine.gradients.packing import Packing
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Driver, Exchange, Step
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share
from psengine.tracing.backwards import Observe

logger = logging.getLogger(__name__)


class BucketsInFlight:
    """Moves buckets through a backward.

    Attributes:
        packings: by bucket, in the order they are reduced, what moves its gradients.
        averaging_weight: what this rank's gradients count.
        share: what this rank contributes in this backward; None before its first gradient.
        is_packing: whether this backward packs its gradients; else they are final as they are.
        buckets_reduced: how many buckets the last backward exchanged.
        observe: gets the moments of this backward; see ``tracing/backwards.py``.
        writes_gradients: False where a communication hook steps optimizers itself.
        futures: exchanges of buffer communication hooks, which end before backward returns.
    """

    def __init__(
        self,
        strategy: Strategy,
        collective: Collective,
        frozen: FrozenParameters,
        finite_check: FiniteCheck | None,
    ) -> None:
        self.packings: Sequence[Packing] = ()
        self.averaging_weight = AveragingWeight(strategy, collective)
        self.is_packing = True
        self.buckets_reduced = 0
        self.observe: Observe = _nobody
        self.writes_gradients = True
        self.futures: list[torch.futures.Future[Any]] = []
        self._strategy = strategy
        self._collective = collective
        self._frozen = frozen
        self._finite_check = finite_check
        self._driver = Driver(strategy.exchange)
        self.share: Share | None = None
        self._warned_create_graph = False

    def begin(self, observe: Observe | None, *, has_data: bool = True) -> None:
        """A backward is expected, of this rank or, inside ``join``, of others."""
        self.observe = observe or _nobody
        self._driver.clear()
        self.share = None
        self.buckets_reduced = 0
        self.averaging_weight.expect_backward(has_data=has_data)
        # With gradient_as_bucket_view too: views save the copy back, and without an exchange there is none.
        self.is_packing = self._finite_check is not None or self._strategy.needs_packing
        if self._finite_check is not None:
            self._finite_check.begin([packing.bucket for packing in self.packings])

    # ---- during backward ---------------------------------------------------------------------------------------

    def _begin_exchange(self) -> Share:
        """The first gradient of a backward is ready: the strategy says what this rank contributes of each."""
        self.share = self._strategy.begin(self.averaging_weight.step())
        return self.share

    def pack_one(self, packing: Packing, position: int) -> None:
        """Pack a large gradient, which is ready, and make progress with the buckets in flight."""
        share = self.share or self._begin_exchange()
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
        share = self.share or self._begin_exchange()
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
        self._frozen.ask()
        if self._finite_check is not None:
            try:
                self._finite_check.agree(self.packings[0].bucket.device)
            except NonFiniteGradientError:
                self._frozen.count()
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
            self._frozen.ask()
            if self._finite_check is not None:
                self._finite_check.agree(self.packings[0].bucket.device)
            remainder = self._strategy.finish()
            for packing in self.packings:
                self._driver.result(packing.bucket)
            remainder.wait()
        self._strategy.shadow_step()


def _nobody(moment: str, bucket: Bucket | None = None, position: int | None = None) -> None:
    """Observes nothing."""


class AveragingWeight:
    """What this rank's gradients count in a backward: by its samples, or by how many ranks have data.

    ``Exchange.begin`` makes a ``Share`` of it, and packing divides by that. Weights travel through ``exchange``.

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


class FiniteCheck:
    """Which rank's gradient is not finite, in which parameter: exchanged before averages are written.

    Collects what packing counted (``Bucket.take_non_finite_counts``) and lets the ranks tell each other.
    Where the ranks do not wait for each other (``Capabilities.averages_gradients``), the one with the fault raises
    before the bucket leaves.
    """

    def __init__(self, names: Sequence[str], collective: Collective, *, tells_others: bool) -> None:
        self._collective = collective
        self._names = names
        self._tells_others = tells_others
        # By device, which is read once: indices of parameters, and how many of their values are not finite.
        self._found: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A backward is expected; forget an earlier one."""
        self._found = {}
        for bucket in buckets:
            bucket.take_non_finite_counts()

    def note(self, bucket: Bucket) -> None:
        """``bucket`` is packed and about to leave, or was converted when it left.

        Raises:
            NonFiniteGradientError: it holds the fault, and the other ranks cannot be told.
        """
        for position, counts in bucket.take_non_finite_counts():
            indices, parts = self._found.setdefault(counts.device, ([], []))
            indices += bucket.parameter_indices[position : position + counts.numel()]
            parts.append(counts)
        if not self._tells_others:
            self._raise_faults({self._collective.rank: self._take_local_fault()})

    def agree(self, device: torch.device) -> None:
        """Exchange findings; inside ``join`` ranks without data take part.

        Raises:
            NonFiniteGradientError: on every rank, where some rank's gradients are not finite.
        """
        if self._tells_others:
            fault = torch.tensor(self._take_local_fault(), device=device)
            faults = self._collective.gather(fault, what="counts of gradients that are not finite")
            self._raise_faults({rank: row.tolist() for rank, row in enumerate(faults)})

    def _take_local_fault(self) -> list[int]:
        """How many values are not finite, in how many parameters, and the index of the first such parameter."""
        found, self._found = self._found, {}
        counts_by_index = {
            index: count
            for indices, parts in found.values()
            for index, count in zip(indices, torch.cat(parts).tolist(), strict=True)
            if count
        }
        return [sum(counts_by_index.values()), len(counts_by_index), min(counts_by_index, default=0)]

    def _raise_faults(self, faults: dict[int, list[int]]) -> None:
        faulty = {rank: fault for rank, fault in faults.items() if fault[0]}
        if not faulty:
            return
        lines = [
            f"rank {rank}: {values} values, first in parameter {self._names[first]!r}"
            + (f" and {parameters - 1} more" if parameters > 1 else "")
            for rank, (values, parameters, first) in faulty.items()
        ]
        raise NonFiniteGradientError(
            "gradients must be finite, as they travel (check_finite=True), got NaN or infinity on "
            + "; ".join(lines)
            + ". No average was copied to a gradient. torch.autograd.set_detect_anomaly(True) finds the operation.",
            ranks=tuple(faulty),
            parameters=tuple(dict.fromkeys(self._names[first] for _, _, first in faulty.values())),
        )
