"""From autograd's hooks to the strategy: which gradients are ready, which bucket is full, when backward is over.

The life of one backward pass; every rank reduces the same buckets in the same order::

    forward      prepare_for_forward  rebuild_buckets (once)  prepare_for_backward ── which parameters are unused?
    backward     hook(p9) hook(p8) │ bucket 0 full ─► strategy.reduce(0)
                 hook(p7) ...      │ bucket 1 full ─► strategy.reduce(1)          exchange overlaps with backward
    end          strategy.finish() ─ reduction 0.wait() ─ unpack ─ reduction 1.wait() ─ unpack

The rules (when buckets are rebuilt, what counts as unused, which error says what) are native DDP's:
torch/csrc/distributed/c10d/reducer.cpp. Methods with a leading underscore that others call carry the names that
Lightning, Join and torch's communication hooks call on native DDP's reducer.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from psengine.collectives.base import Collective
from psengine.errors import ReductionError
from psengine.gradients.bucket_layout import BucketLayout
from psengine.gradients.distributed_autograd import refuse_distributed_autograd
from psengine.gradients.error_texts import (
    CREATE_GRAPH_MESSAGE,
    LOCAL_BACKWARD_MESSAGE,
    converted_message,
    graph_changed_message,
    marked_twice_message,
    newly_used_message,
    unfinished_reduction_message,
)
from psengine.gradients.finite_check import FiniteCheck
from psengine.gradients.hooks import AccumulationNodes, ShortWay, counting_hook
from psengine.gradients.packing import Packing
from psengine.gradients.static_graph import UNEXPECTED, StaticGraph
from psengine.gradients.usage import ParameterUsage
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Reduction, Step
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share
from psengine.tracing.backward_timer import BackwardTimer
from psengine.tracing.spans import ExchangeSpans
from psengine.tracing.timeline import now_ns, recorder

logger = logging.getLogger(__name__)


class Reducer:
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
        self._finite_check = (
            FiniteCheck(self.names, collective, tells_others=strategy.capabilities.gathers) if check_finite else None
        )
        self._collective = collective
        self._rebuild_limits_bytes = list(rebuild_limits_bytes)
        self._find_unused = find_unused_parameters
        self._as_view = gradient_as_bucket_view
        self._skip_unused_buckets = skip_all_reduce_unused_params and find_unused_parameters
        self._static_graph = StaticGraph(self.names)
        self._optimizer_in_backward = False
        self._mixed_precision_dtype: torch.dtype | None = None
        self._run_allreduce_hook = run_allreduce_hook
        self._on_error = on_error
        # Models split over several devices run backward, and so the hooks, in one thread per device.
        self._lock = threading.RLock()

        self.iteration = 0
        self.has_rebuilt_buckets = False
        self._layout_is_final = strategy.capabilities.keeps_first_layout
        self.buckets_reduced = 0
        self._layout = BucketLayout(
            self.parameters,
            self.names,
            expects_sparse,
            strategy,
            as_view=gradient_as_bucket_view,
            counts_non_finite=check_finite,
        )
        self._create_buckets(initial_limits_bytes)
        self.initial_bucket_sizes = ", ".join(str(bucket.size_bytes) for bucket in self.buckets)
        self._is_packing = True

        self._expect_hooks = False
        self._next_bucket = 0
        self._reductions: list[Reduction | None] = []
        self._spans = ExchangeSpans(strategy.capabilities.exchange_name)
        self._ready = bytearray(len(self.parameters))
        # By parameter: the bucket to count down in a hook's short way, None for the long way, False for no way at all
        # (see counting_hook).
        self._no_short_way: ShortWay = [None] * len(self.parameters)
        self._no_way: ShortWay = [False] * len(self.parameters)
        self._short_way = list(self._no_short_way if find_unused_parameters else self._no_way)
        self._is_multi_device = len({p.device for p in self.parameters}) > 1
        self._share: Share | None = None
        self._arrival_order: list[int] = []
        self._ready_order: list[int] = []
        self._has_marked_unused = False
        self._warned_create_graph = False
        # Forwards came twice without a backward: where two backwards follow, the second one is not exchanged.
        self._may_forget_a_backward = False
        self._warned_local_backward = False
        self._live_ranks_work: tuple[Any, bool] | None = None
        self._batch_weight: float | None = None
        self._has_weighed = False
        self.shadows_weights = False  # inside join: whether the others weigh this iteration's gradients
        self._post_backward_futures: list[torch.futures.Future[Any]] = []

        self._nodes = AccumulationNodes(self.parameters)
        self.usage = ParameterUsage(self._nodes.nodes, self.parameters[0].device, strategy)

    def listen(self) -> None:
        """Begin to listen to autograd."""
        make_hook = functools.partial(
            counting_hook, self._short_way, self._ready, self._autograd_hook, self._reduce_full_buckets
        )
        self._nodes.listen(make_hook)

    # ---- layout ------------------------------------------------------------------------------------------------

    def _create_buckets(self, limits_bytes: Sequence[int], order: Sequence[int] | None = None) -> None:
        self.buckets = self._layout.create(limits_bytes, order)
        self._locators = self._layout.locators

    def _should_rebuild(self) -> bool:
        return (self._static_graph.is_promised or not self._find_unused) and not self._layout_is_final

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
        order = self._agree_on_order(self._arrival_order)
        self.has_rebuilt_buckets = self._layout_is_final = True
        self._arrival_order = []
        self._create_buckets(self._rebuild_limits_bytes, order)
        logger.info("Reducer buckets have been rebuilt in this iteration: %s", self.buckets)
        return True

    def _agree_on_order(self, order: Sequence[int]) -> list[int]:
        assert len(order) == len(self.parameters), f"{len(order)} of {len(self.parameters)} gradients arrived"
        agreed = torch.tensor(order, dtype=torch.int64, device=self.parameters[0].device)
        self._collective.broadcast([agreed], 0, what="order of gradients").wait()
        return [int(index) for index in agreed.tolist()]

    # ---- around forward ----------------------------------------------------------------------------------------

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
        self._static_graph.is_promised = True
        self._short_way[:] = self._no_short_way  # usage is recorded from now on

    _set_static_graph = set_static_graph

    @property
    def knows_static_graph(self) -> bool:
        """Whether a static graph's first iteration is over."""
        return self._static_graph.is_known

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
        self._reductions = []
        self._share = None
        if self._has_weighed:
            self.strategy.weigh(self._batch_weight)
        self._is_packing = self._as_view or self.strategy.needs_packing or self._finite_check is not None
        if self._finite_check is not None:
            self._finite_check.begin(self.buckets)
        self._ready[:] = bytes(len(self.parameters))
        self._has_marked_unused = False
        if self._must_take_long_way():
            self._ready_order = []
            self._short_way[:] = self._no_short_way
        else:
            self._short_way[:] = self._layout.small_parameter_buckets
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        if self._static_graph.is_promised:
            self._static_graph.begin()
        elif self._find_unused:
            self.usage.search(outputs)
            self._check_listening([index for index in self.usage.unused if self._nodes.was_converted(index)])
            if self._skip_unused_buckets:
                self.usage.agree_before_backward()

    def _ensure_prior_reduction_finished(self) -> None:
        if not (self._expect_hooks and any(self._ready)):
            return
        missing = {index: self.names[index] for index, is_ready in enumerate(self._ready) if not is_ready}
        self._check_listening(missing)
        if self._static_graph.is_promised:
            self._fail(graph_changed_message(self._collective.rank, missing))
        self._fail(unfinished_reduction_message(self._collective.rank, missing, find_unused=self._find_unused))

    def _check_listening(self, indices: Iterable[int]) -> None:
        """Raise where one of these parameters has lost its hook."""
        # Mixed precision converts parameters all the time, and calls our hooks itself.
        for index in self._nodes.replaced(indices) if self._mixed_precision_dtype is None else ():
            self._fail(converted_message(self.names[index], self._collective.rank, self._nodes.describe_change(index)))

    def _fail(self, message: str) -> NoReturn:
        if self._on_error is not None:
            self._on_error(message)
        raise ReductionError(message)

    def _check_reducer_finalized(self) -> None:
        """Raise unless the last backward was finished (``_check_reducer_finalized`` of the wrapper)."""
        self._ensure_prior_reduction_finished()

    # ---- during backward ---------------------------------------------------------------------------------------

    def _must_take_long_way(self) -> bool:
        """Whether this backward's hooks have more to do than to count."""
        return (
            self._static_graph.is_promised
            or self._find_unused
            or not self._layout_is_final
            or self.timer.is_sampling
            or self._is_multi_device
        )

    def _autograd_hook(self, index: int, *_: Any) -> None:
        """A parameter's gradient was accumulated (or is undefined). Runs in autograd's thread."""
        with self._lock:
            # Inside no_sync too: what a micro-batch accumulates has to be exchanged, whoever uses the parameter last.
            if self._is_recording_usage() and self.parameters[index].grad is not None:
                self.usage.used[index] = 1
            if not self._expect_hooks:
                self._warn_local_backward()
                return
            if self._static_graph.is_promised:
                self._count_static_hook(index)
                return
            if self._find_unused:
                self._mark_unused_ready()
            elif not self._layout_is_final:
                self._arrival_order.append(index)
            self._mark_ready(index)

    def _mark_unused_ready(self) -> None:
        """At the first hook of a backward: parameters that will get no gradient must not hold up their buckets."""
        if not self._has_marked_unused:
            self._has_marked_unused = True
            for unused_index in self.usage.unused:
                self._mark_ready(unused_index)

    def _is_recording_usage(self) -> bool:
        """A static graph's usage is that of its first iteration; otherwise it is recorded where it may vary."""
        return not self._static_graph.is_known if self._static_graph.is_promised else self._find_unused

    def _count_static_hook(self, index: int) -> None:
        if not self._static_graph.is_known:
            self._static_graph.count(index)
            return
        self._mark_unused_ready()
        left = self._static_graph.expect(index)
        if left == UNEXPECTED:
            self._fail(newly_used_message(self.names[index], self._collective.rank))
        if left == 0:
            if not self._layout_is_final:
                self._arrival_order.append(index)
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        if self._ready[index]:
            self._fail(marked_twice_message(index, self.names[index], has_marked_unused=self._has_marked_unused))
        self._ready[index] = 1
        if self._short_way[index] is None and len(self._ready_order) < len(self.parameters):
            self._ready_order.append(index)
        packing, position = self._locators[index]
        if self._is_packing and packing.is_eager(position):
            self._pack_one(packing, position)
            if self._reductions:
                self._collective.progress()
        packing.bucket.pending -= 1
        if packing.bucket.pending == 0:
            self._reduce_full_buckets()

    def _pack_one(self, packing: Packing, position: int) -> None:
        started_ns = now_ns() if recorder.is_on else 0
        if torch.is_grad_enabled():
            self._warn_create_graph()
            with torch.no_grad():
                packing.pack_one(position, self._get_share())
        else:
            packing.pack_one(position, self._get_share())
        if started_ns:
            recorder.add("pack", started_ns, step=self.iteration, args=packing.bucket.facts_of(position))

    def _warn_create_graph(self) -> None:
        if not self._warned_create_graph:
            self._warned_create_graph = True
            # Logged, not warned: native DDP's comes from C++, which no warnings filter turns into an error.
            logger.warning(CREATE_GRAPH_MESSAGE)

    def expect_local_backward(self) -> None:
        """A forward inside no_sync: what its backward leaves local is meant to be."""
        self._may_forget_a_backward = False

    def _warn_local_backward(self) -> None:
        if self._may_forget_a_backward:
            self._may_forget_a_backward = False
            self._warned_local_backward = True
            logger.warning(LOCAL_BACKWARD_MESSAGE)

    def _reduce_full_buckets(self) -> None:
        """Start every bucket whose turn it is; buckets start in index order on all ranks, or the ranks would differ."""
        if self.buckets[self._next_bucket].pending > 0:
            return
        if self._next_bucket == 0:
            self.timer.start_communication()
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].pending == 0:
            self._reductions.append(self._reduce(self.buckets[self._next_bucket]))
            self._next_bucket += 1
        if self._next_bucket == len(self.buckets):
            if self._find_unused and not self._static_graph.is_promised:
                self.usage.reduce()
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize_from_engine)

    def _reduce(self, bucket: Bucket) -> Reduction | None:
        """Pack what is not packed yet and hand the bucket over; None where there is nothing to exchange."""
        if self.usage.is_unused_everywhere(bucket.parameter_indices):
            return None
        share = self._get_share()
        if not self._is_packing:
            return None
        if torch.is_grad_enabled():
            self._warn_create_graph()
        started_ns = now_ns() if recorder.is_on else 0
        with torch.no_grad():
            self._layout.packings[bucket.index].pack_rest(share)
        if started_ns:
            self._spans.packed(bucket, started_ns, self.iteration)
        if self._finite_check is None:
            return self.strategy.reduce(bucket)
        self._finite_check.note(bucket)
        reduction = self.strategy.reduce(bucket)
        self._finite_check.note(bucket)  # what overflowed where the strategy converted it
        return reduction

    def _get_share(self) -> Share:
        """What this rank's gradients count in this backward; ranks that ran out of data may be left out."""
        if self._share is None:
            live_world_size = self._collective.world_size
            in_join = self._live_ranks_work is not None
            if self._live_ranks_work is not None:
                work, use_initial_world_size = self._live_ranks_work
                if not use_initial_world_size:
                    work.wait()
                    live_world_size = int(work.result()[0].item())
            self._share = self.strategy.begin(Step(live_world_size=live_world_size, in_join=in_join))
        return self._share

    def _delay_all_reduce(self) -> None:
        """End of static graph's first backward: only now is known who is used how often, so everything goes now."""
        with self._lock:
            self.usage.reduce()
            self.usage.unused = self._static_graph.learn()
            with torch.no_grad():
                for packing in self._layout.packings if self._is_packing else ():
                    for position in packing.bucket.eager_runs:
                        self._pack_one(packing, position)
            self.timer.start_communication()
            self._reductions = [self._reduce(bucket) for bucket in self.buckets]
            self._next_bucket = len(self.buckets)
            self._finalize()

    # ---- the end of backward -----------------------------------------------------------------------------------

    def _finalize_from_engine(self) -> None:
        with self._lock:
            if self._static_graph.is_promised and self._should_rebuild():
                self._arrival_order.extend(self.usage.unused)
            self._finalize()

    def _finalize(self) -> None:
        """Wait for every bucket in order and write the results to the gradients."""
        self.timer.end_backward()
        # Cleared first: after an error the next forward must not report an unfinished reduction instead of it.
        self._stop_expecting_hooks()
        reductions, self._reductions = self._reductions, []
        self.buckets_reduced = 0
        if self._finite_check is not None:
            self._check_finite(reductions)
        remainder = self.strategy.finish()
        with torch.no_grad():
            for bucket, reduction in zip(self.buckets, reductions, strict=True):
                if reduction is None:
                    self._create_missing_gradients(bucket)
                else:
                    self.buckets_reduced += 1
                    self._collect(bucket, reduction)
            remainder.wait()
            for bucket, reduction in zip(self.buckets, reductions, strict=True):
                if reduction is not None and reduction.is_superseded:
                    self._collect(bucket, reduction)
        for future in self._post_backward_futures:
            self._collective.wait_for(future, "buffer communication hook")
        self._post_backward_futures = []
        self.usage.settle(forget=not self._static_graph.is_promised)
        self._live_ranks_work = None
        self.timer.end_communication()

    def _collect(self, bucket: Bucket, reduction: Reduction) -> None:
        """Wait for a bucket's result and write it to the gradients."""
        result = self._spans.wait(reduction.wait, bucket, self.iteration) if recorder.is_on else reduction.wait()
        if result is not None and not self._optimizer_in_backward:
            started_ns = now_ns() if recorder.is_on else 0
            self._layout.packings[bucket.index].unpack(result, self._unused_positions(bucket))
            if started_ns:
                recorder.add("unpack", started_ns, step=self.iteration, args=bucket.facts)

    def _check_finite(self, reductions: Sequence[Reduction | None]) -> None:
        """Before any average is written: raise on every rank alike where a gradient of one is not finite."""
        assert self._finite_check is not None
        error = self._finite_check.agree(self.parameters[0].device)
        if error is None:
            return
        for reduction in reductions:
            if reduction is not None:
                reduction.drop()  # the ranks stay in step, for those who catch the error and go on
        self.usage.settle(forget=not self._static_graph.is_promised)
        self._live_ranks_work = None
        if self._on_error is not None:
            self._on_error(str(error))
        raise error

    def _create_missing_gradients(self, bucket: Bucket) -> None:
        """Of a bucket that had nobody to go to: an undefined gradient counts as zero, as it does among several."""
        has_all = all(parameter.grad is not None for parameter in bucket.parameters)
        if self._is_packing or bucket.sparse or has_all or not self.strategy.capabilities.defines_gradients:
            return
        skip = self._unused_positions(bucket) or [False] * len(bucket.parameters)
        for position, parameter in enumerate(bucket.parameters):
            if parameter.grad is None and not skip[position]:
                parameter.grad = torch.zeros_like(bucket.views[position])

    def _unused_positions(self, bucket: Bucket) -> list[bool] | None:
        if self._find_unused or self._static_graph.is_promised:
            return self.usage.unused_positions(bucket.parameter_indices)
        return None

    def _stop_expecting_hooks(self) -> None:
        self._expect_hooks = False
        takes_long_way = self._is_recording_usage() or self._may_forget_a_backward
        self._short_way[:] = self._no_short_way if takes_long_way else self._no_way

    # ---- for join, communication hooks and frameworks ----------------------------------------------------------

    @property
    def batch_weight(self) -> float | None:
        """By what the strategy weighs the gradients of the next exchanged backward; see ``Strategy.weigh``."""
        return self._batch_weight

    @batch_weight.setter
    def batch_weight(self, weight: float | None) -> None:
        self._batch_weight = weight
        self._has_weighed = self._has_weighed or weight is not None

    def set_live_ranks_work(self, work: Any, *, use_initial_world_size: bool) -> None:
        """Inside ``join``: ``work`` will count the ranks that still have data, to divide by unless told otherwise."""
        self._live_ranks_work = (work, use_initial_world_size)

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.set_live_ranks_work(work, use_initial_world_size=use_static_world_size)

    def shadow_backward(self) -> None:
        """Take part in one backward of ranks that still have data, contributing zeros, in the order they exchange."""
        is_first_of_static_graph = self._static_graph.is_first_iteration
        if self.shadows_weights or self._has_weighed:
            self.strategy.weigh(0.0 if self.shadows_weights else None)
        if self._skip_unused_buckets:
            self.usage.shadow_agreement()
        if is_first_of_static_graph:
            self.usage.shadow()
            self._static_graph.is_known = True
        reductions = []
        self.strategy.begin(Step(live_world_size=self._collective.world_size, in_join=True))
        with torch.no_grad():
            for bucket in self.buckets:
                if not self.usage.is_unused_everywhere(bucket.parameter_indices):
                    self._layout.packings[bucket.index].fill_with_zeros()
                    reductions.append(self.strategy.reduce(bucket))
            if self._find_unused and not self._static_graph.is_promised:
                self.usage.shadow()
            if self._finite_check is not None:
                self._finite_check.add_shadow(self.parameters[0].device)
            remainder = self.strategy.finish()
            for reduction in reductions:
                reduction.wait()
            remainder.wait()
        self.usage.settle(forget=not self._static_graph.is_promised)
        if not is_first_of_static_graph:
            self._push_all_rebuilt_params()

    def _push_all_rebuilt_params(self) -> None:
        """A rank without data takes part in the rebuild too; its own order is overwritten by rank 0's."""
        if self._should_rebuild() and not self._arrival_order:
            self._arrival_order = list(range(len(self.parameters)))

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for ``futures`` (of a buffer communication hook) before backward returns."""
        self._post_backward_futures.extend(futures)

    def _get_local_used_map(self) -> torch.Tensor:
        """By index, how many ranks used each parameter in the last backward that agreed on it: int32."""
        return self.usage.summed()

    def _set_optimizer_in_backward(self) -> None:
        """The communication hook steps optimizers itself; gradients are not written back."""
        self._optimizer_in_backward = True

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._mixed_precision_dtype = dtype
        self._layout.adopt_replaced_gradients()

    def _ddp_graph_static(self) -> bool:
        """Whether every search so far found the same parameters unused, so that ``static_graph`` would have served."""
        return self.usage.never_changed

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to autograd; gradients stay local from now on."""
        self._nodes.stop_listening()

    def _reset_state(self) -> None:
        """Forget a half-finished iteration and rebuild buckets anew, for a changed group of ranks."""
        self._stop_expecting_hooks()
        self.has_rebuilt_buckets = False
        self._layout_is_final = self.strategy.capabilities.keeps_first_layout
        self._arrival_order = []
        self._reductions = []
        self.usage = ParameterUsage(self._nodes.nodes, self.parameters[0].device, self.strategy)
        self._live_ranks_work = None

    def update_group(self, collective: Collective) -> None:
        """Go on in another group of ranks, to which the strategy has been moved already."""
        self._collective = collective
        if self._finite_check is not None:
            self._finite_check.collective = collective
        self.strategy.lay_out(self.buckets)  # which it exchanges over another collective now

    def previous_ready_order(self) -> list[int]:
        """Indices of parameters in the order they became ready in the last backward that recorded it, a sampled one."""
        return list(self._ready_order)
