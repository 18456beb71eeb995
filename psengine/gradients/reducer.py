"""From autograd's hooks to the strategy: which gradients are ready, which bucket is full, when backward is over.

The life of one backward pass; every rank reduces the same buckets in the same order::

    forward      prepare_for_forward  rebuild_buckets (once)  prepare_for_backward ── which parameters are unused?
    backward     hook(p9) hook(p8) │ bucket 0 full ─► strategy.reduce(0)
                 hook(p7) ...      │ bucket 1 full ─► strategy.reduce(1)          exchange overlaps with backward
    end          strategy.finish() ─ reduction 0.wait() ─ unpack ─ reduction 1.wait() ─ unpack

The rules (when buckets are rebuilt, what counts as unused, which error says what) are native DDP's:
torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import NonFiniteGradientError, ReductionError
from psengine.gradients.bucket_layout import BucketLayout
from psengine.gradients.contribution import Contribution
from psengine.gradients.distributed_autograd import refuse_distributed_autograd
from psengine.gradients.error_texts import (
    LOCAL_BACKWARD_MESSAGE,
    converted_message,
    marked_twice_message,
    newly_used_message,
)
from psengine.gradients.finite_check import FiniteCheck
from psengine.gradients.flight import Flight
from psengine.gradients.graphs import EveryParameter, SearchedGraph, StaticGraph
from psengine.gradients.hooks import AccumulationNodes, ShortWay, counting_hook
from psengine.gradients.native_names import NativeNames
from psengine.gradients.usage import ParameterUsage
from psengine.strategies.base import Strategy
from psengine.tensors.bucket import Bucket
from psengine.tracing.backward_timer import BackwardTimer
from psengine.tracing.timeline import recorder

logger = logging.getLogger(__name__)


class Reducer(NativeNames):
    """Exchanges the gradients of ``parameters`` through ``strategy`` while backward runs.

    Args:
        parameters: those that require gradients, without duplicates, in model order.
        names: their names, for errors.
        expects_sparse: per parameter, whether its gradient is sparse.
        strategy: already prepared.
        collective: the group of replicas.
        initial_limits_bytes: bucket caps before the first rebuild; see ``plan_buckets``.
        rebuild_limits_bytes: bucket caps when buckets are rebuilt in the order gradients arrive.
        find_unused_parameters: walk the graph from the outputs to find parameters that will get no gradient.
        gradient_as_bucket_view: let gradients be views of the buckets.
        skip_all_reduce_unused_params: agree before backward which parameters no rank uses, and skip buckets that hold
            no others; only with ``find_unused_parameters``.
        check_finite: raise at the end of backward where a gradient of some rank is not finite.
        run_allreduce_hook: sums a communication hook's bucket over ranks; a future of its buffer.
        on_error: told the text of each error before it is raised.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expects_sparse: Sequence[bool],
        strategy: Strategy,
        *,
        collective: Collective,
        initial_limits_bytes: Sequence[int],
        rebuild_limits_bytes: Sequence[int],
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        skip_all_reduce_unused_params: bool = False,
        check_finite: bool = False,
        run_allreduce_hook: Callable[[Any], Any] | None = None,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.strategy = strategy
        self.timer = BackwardTimer()
        self._collective = collective
        self._rebuild_limits_bytes = list(rebuild_limits_bytes)
        self._mixed_precision_dtype: torch.dtype | None = None
        self._run_allreduce_hook = run_allreduce_hook
        self._on_error = on_error
        # Models split over several devices run backward, and so the hooks, in one thread per device.
        self._lock = threading.RLock()

        self.iteration = 0
        self.has_rebuilt_buckets = False
        self._layout_is_final = strategy.capabilities.keeps_first_layout
        self._layout = BucketLayout(
            self.parameters,
            self.names,
            expects_sparse,
            strategy,
            as_view=gradient_as_bucket_view,
            counts_non_finite=check_finite,
        )
        self._layout.create(initial_limits_bytes)
        self.initial_bucket_sizes = ", ".join(str(bucket.size_bytes) for bucket in self.buckets)

        self._expect_hooks = False
        self._next_bucket = 0
        self._ready = bytearray(len(self.parameters))
        # By parameter: the bucket to count down in a hook's short way, None for the long way, False for no way at all
        # (see counting_hook).
        self._no_short_way: ShortWay = [None] * len(self.parameters)
        self._no_way: ShortWay = [False] * len(self.parameters)
        self._short_way = list(self._no_short_way if find_unused_parameters else self._no_way)
        self._is_multi_device = len({p.device for p in self.parameters}) > 1
        self.contribution = Contribution(strategy, collective)
        self._flight = Flight(
            strategy,
            collective,
            self._layout,
            self.contribution,
            FiniteCheck(self.names, collective, tells_others=strategy.capabilities.gathers) if check_finite else None,
            always_packs=gradient_as_bucket_view,
        )
        self._arrival_order: list[int] = []
        self._ready_order: list[int] = []
        # Forwards came twice without a backward: where two backwards follow, the second one is not exchanged.
        self._may_forget_a_backward = False
        self._warned_local_backward = False

        self._nodes = AccumulationNodes(self.parameters)
        usage = self._make_usage()
        self._graph = (
            SearchedGraph(usage, self.names, skips_buckets=skip_all_reduce_unused_params)
            if find_unused_parameters
            else EveryParameter(usage, self.names)
        )

    def _make_usage(self) -> ParameterUsage:
        return ParameterUsage(self._nodes.nodes, self.parameters[0].device, self.strategy)

    @property
    @override
    def usage(self) -> ParameterUsage:
        return self._graph.usage

    def listen(self) -> None:
        """Begin to listen to autograd."""
        make_hook = functools.partial(
            counting_hook, self._short_way, self._ready, self._autograd_hook, self._reduce_full_buckets
        )
        self._nodes.listen(make_hook)

    # ---- layout ------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> list[Bucket]:
        """In the order they are reduced."""
        return self._layout.buckets

    def _should_rebuild(self) -> bool:
        return self._graph.may_rebuild and not self._layout_is_final

    def _rebuild_buckets(self) -> bool:
        """Once, between the first and the second iteration: lay out buckets in the order gradients arrived on rank 0.

        Returns whether buckets were rebuilt; then every rank did. Call it before forward, when no gradient is under
        way, on every rank.

        Raises:
            ReductionError: the previous backward did not reach every parameter.
        """
        self._ensure_prior_reduction_finished()
        if not self._should_rebuild() or not self._arrival_order:
            return False
        order = self._arrival_order
        assert len(order) == len(self.parameters), f"{len(order)} of {len(self.parameters)} gradients arrived"
        agreed = torch.tensor(order, dtype=torch.int64, device=self.parameters[0].device)
        self._collective.broadcast([agreed], 0, what="order of gradients").wait()
        self.has_rebuilt_buckets = self._layout_is_final = True
        self._arrival_order = []
        self._layout.create(self._rebuild_limits_bytes, agreed.tolist())
        logger.info("Reducer buckets have been rebuilt in this iteration: %s", self.buckets)
        return True

    # ---- around forward ----------------------------------------------------------------------------------------

    @override
    def set_static_graph(self) -> None:
        """Promise that every iteration uses the same parameters equally often; the first one finds out which and how.

        Raises:
            ReductionError: training has begun.
        """
        if self.iteration > 0:
            self._fail(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is"
                f" constructed. (expected iteration 0, got {self.iteration})"
            )
        self._graph = StaticGraph(self.usage, self.names)
        self._short_way[:] = self._no_short_way  # usage is recorded from now on

    @property
    def counts_graph(self) -> bool:
        """Whether the coming backward is the first one of a static graph."""
        return self._graph.is_being_counted

    def prepare_for_forward(self) -> None:
        """Count an iteration whose gradients will be exchanged; raise where the model was converted meanwhile."""
        refuse_distributed_autograd(self._fail)
        # One parameter stands for all: where only others were converted, the next forward misses their gradients.
        if self._nodes.was_converted(0):
            self._check_listening(range(len(self.parameters)))
        elif self._expect_hooks:
            self._check_listening([0])  # no gradient came since the last forward: converted there and back?
        self.iteration += 1
        if recorder.is_on:
            recorder.begin_step(self.iteration)
        self.timer.start_forward(self.iteration)

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        """Expect one gradient for each parameter; with ``find_unused_parameters``, for those ``outputs`` depend on."""
        self.timer.start_backward()
        self._may_forget_a_backward = self._expect_hooks and not self._warned_local_backward
        self._expect_hooks = True
        self._next_bucket = 0
        self.contribution.expect_backward()
        self._flight.begin(self.iteration)
        self._ready[:] = bytes(len(self.parameters))
        has_more_to_do = self._graph.takes_long_way or not self._layout_is_final
        if has_more_to_do or self.timer.is_sampling or self._is_multi_device:
            self._ready_order = []
            self._short_way[:] = self._no_short_way
        else:
            self._short_way[:] = self._layout.small_parameter_buckets
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        unreached = self._graph.begin(outputs)
        self._check_listening([index for index in unreached if self._nodes.was_converted(index)])
        self._graph.agree()

    @override
    def _ensure_prior_reduction_finished(self) -> None:
        if not (self._expect_hooks and any(self._ready)):
            return
        missing = {index: self.names[index] for index, is_ready in enumerate(self._ready) if not is_ready}
        self._check_listening(missing)
        self._fail(self._graph.describe_missing(self._collective.rank, missing))

    def _check_listening(self, indices: Iterable[int]) -> None:
        """Raise where one of these parameters has lost its hook."""
        # Mixed precision converts parameters all the time, and calls our hooks itself.
        for index in self._nodes.replaced(indices) if self._mixed_precision_dtype is None else ():
            self._fail(converted_message(self.names[index], self._collective.rank, self._nodes.describe_change(index)))

    def _fail(self, message: str) -> NoReturn:
        if self._on_error is not None:
            self._on_error(message)
        raise ReductionError(message)

    # ---- during backward ---------------------------------------------------------------------------------------

    def _autograd_hook(self, index: int, *_: Any) -> None:
        """A parameter's gradient was accumulated (or is undefined). Runs in autograd's thread."""
        with self._lock:
            if self._graph.records_usage and self.parameters[index].grad is not None:
                self.usage.used[index] = 1
            if not self._expect_hooks:
                if self._may_forget_a_backward:
                    self._may_forget_a_backward, self._warned_local_backward = False, True
                    logger.warning(LOCAL_BACKWARD_MESSAGE)
                return
            for ready_index in self._graph.arrived(index):
                if ready_index == index and self._should_rebuild():
                    self._arrival_order.append(index)
                self._mark_ready(ready_index)
            if self._graph.has_changed:
                self._fail(newly_used_message(self.names[index], self._collective.rank))

    def _mark_ready(self, index: int) -> None:
        if self._ready[index]:
            self._fail(marked_twice_message(index, self.names[index], has_marked_unused=self._graph.has_marked_unused))
        self._ready[index] = 1
        if self._short_way[index] is None and len(self._ready_order) < len(self.parameters):
            self._ready_order.append(index)
        packing, position = self._layout.locators[index]
        if self._flight.is_packing and packing.is_eager(position):
            self._flight.pack_one(packing, position)
        packing.bucket.pending -= 1
        if packing.bucket.pending == 0:
            self._reduce_full_buckets()

    def expect_local_backward(self) -> None:
        """A forward inside no_sync: what its backward leaves local is meant to be."""
        self._may_forget_a_backward = False

    def _reduce_full_buckets(self) -> None:
        """Start every bucket whose turn it is; buckets start in index order on all ranks, or the ranks would differ."""
        if self.buckets[self._next_bucket].pending > 0:
            return
        if self._next_bucket == 0:
            self.timer.start_communication()
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].pending == 0:
            self._flight.hand_over(self._layout.packings[self._next_bucket], self._graph)
            self._next_bucket += 1
        if self._next_bucket == len(self.buckets):
            self._graph.handed_over()
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize_from_engine)

    def _delay_all_reduce(self) -> None:
        """End of static graph's first backward: only now is known who is used how often, so everything goes now."""
        with self._lock:
            assert isinstance(self._graph, StaticGraph), "only a static graph delays its first exchange"
            self._graph.learn()
            with torch.no_grad():
                for packing in self._layout.packings if self._flight.is_packing else ():
                    for position in packing.bucket.eager_runs:
                        self._flight.pack_one(packing, position)
            self.timer.start_communication()
            for packing in self._layout.packings:
                self._flight.hand_over(packing, self._graph)
            self._next_bucket = len(self.buckets)
            self._finalize()

    # ---- the end of backward -----------------------------------------------------------------------------------

    def _finalize_from_engine(self) -> None:
        with self._lock:
            if self._should_rebuild():
                self._arrival_order.extend(self._graph.never_arriving)
            self._finalize()

    def _finalize(self) -> None:
        """Wait for every bucket in order and write the results to the gradients."""
        self.timer.end_backward()
        # Cleared first: after an error the next forward must not report an unfinished reduction instead of it.
        self._stop_expecting_hooks()
        try:
            self._flight.land(self._graph)
        except NonFiniteGradientError as error:
            self._settle()
            if self._on_error is not None:
                self._on_error(str(error))
            raise
        self._settle()
        self.timer.end_communication()

    def _settle(self) -> None:
        self._graph.settle()
        self.contribution.settle()

    def _stop_expecting_hooks(self) -> None:
        self._expect_hooks = False
        takes_long_way = self._graph.records_usage or self._may_forget_a_backward
        self._short_way[:] = self._no_short_way if takes_long_way else self._no_way

    # ---- for join, communication hooks and frameworks ----------------------------------------------------------

    def shadow_backward(self) -> None:
        """Take part in one backward of ranks that still have data, contributing zeros, in the order they exchange."""
        is_counted = self._graph.is_being_counted
        self._flight.shadow(self._graph)
        self._graph.settle()
        if not is_counted and self._should_rebuild() and not self._arrival_order:
            # The rebuild is everybody's; this rank's own order is overwritten by rank 0's.
            self._arrival_order = list(range(len(self.parameters)))

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._mixed_precision_dtype = dtype
        self._layout.adopt_replaced_gradients()

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to autograd; gradients stay local from now on."""
        self._nodes.stop_listening()

    def _reset_state(self) -> None:
        """Forget a half-finished iteration and rebuild buckets anew, for a changed group of ranks."""
        self._graph.restart(self._make_usage())
        self._stop_expecting_hooks()
        self.has_rebuilt_buckets = False
        self._layout_is_final = self.strategy.capabilities.keeps_first_layout
        self._arrival_order = []
        self.contribution.settle()

    def update_group(self, collective: Collective) -> None:
        """Go on in another group of ranks, to which the strategy has been moved already."""
        self._collective = collective
        self._flight.move_to(collective)

    def previous_ready_order(self) -> list[int]:
        """Indices of parameters in the order they became ready in the last backward that recorded it, a sampled one."""
        return list(self._ready_order)
