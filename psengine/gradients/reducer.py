"""From autograd's hooks to the strategy: which gradients are ready, which bucket is full, when backward is over.

The life of one backward pass; every rank reduces the same buckets in the same order::

    forward      prepare_for_forward  rebuild_buckets (once)  prepare_for_backward ── which parameters are unused?
    backward     hook(p9) hook(p8) │ bucket 0 full ─► its exchange begins
                 hook(p7) ...      │ bucket 1 full ─► its exchange begins         exchange overlaps with backward
    end          strategy.finish() ─ result of 0 ─ unpack ─ result of 1 ─ unpack

The rules (when buckets are rebuilt, what counts as unused, which error says what) are native DDP's:
torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NoReturn

import torch

from psengine.errors import NonFiniteGradientError, ReductionError
from psengine.gradients import error_texts
from psengine.gradients.frozen import FrozenParameters
from psengine.gradients.graphs import EveryParameter, SearchedGraph, StaticGraph
from psengine.gradients.hooks import AccumulationNodes, is_in_distributed_autograd, outside_transforms
from psengine.gradients.in_flight import BucketsInFlight, FiniteCheck
from psengine.gradients.packing import Packing, make_packing
from psengine.gradients.ready_counter import ReadyCounter
from psengine.gradients.step_guard import StepGuard
from psengine.strategies.base import Strategy
from psengine.strategies.life_cycle import Replica
from psengine.strategies.replica_watch import ReplicaWatch
from psengine.tensors.bucket import Bucket
from psengine.tensors.bucket_plan import plan_buckets
from psengine.tensors.share import NOTHING, WHOLE
from psengine.tracing.backwards import Backwards

logger = logging.getLogger(__name__)


class Reducer:
    """Exchanges the gradients of a replica's parameters through ``strategy`` while backward runs.

    Args:
        replica: this process's.
        strategy: already prepared for it.
        initial_limits_bytes: bucket caps before the first rebuild; see ``plan_buckets``.
        rebuild_limits_bytes: bucket caps when buckets are rebuilt in the order gradients arrive.
        find_unused_parameters: walk the graph from the outputs to find parameters that will get no gradient.
        static_graph: every iteration uses the same parameters equally often; the first one finds out which and how.
        gradient_as_bucket_view: let gradients be views of the buckets.
        skip_all_reduce_unused_params: agree before backward which parameters no rank uses, and skip buckets that hold
            no others; only with ``find_unused_parameters``.
        batched_grad_copy: divide copies as native DDP does with it; see ``Bucket``.
        check_finite: raise at the end of backward where a gradient of some rank is not finite.
        converts_parameters: mixed precision's hooks convert parameters in every iteration, and replace gradients.
        lay_out_again: see ``FrozenParameters``.
        watch: compares this replica with the others.
        on_error: gets the text of each error before it is raised.

    Attributes:
        watched: who watches the backwards.
        buckets: in the order they are reduced.
        in_flight: the buckets on their way.
        frozen: parameters in no bucket.
        graph: which hooks will fire.
        guard: watches that optimizers step on exchanged gradients.
        completed_steps: backwards whose gradients were exchanged.
        ready_order: indices in the order in which parameters became ready in the last backward that was timed.
    """

    def __init__(
        self,
        replica: Replica,
        strategy: Strategy,
        *,
        initial_limits_bytes: Sequence[int],
        rebuild_limits_bytes: Sequence[int],
        find_unused_parameters: bool,
        static_graph: bool,
        gradient_as_bucket_view: bool,
        skip_all_reduce_unused_params: bool,
        batched_grad_copy: bool,
        check_finite: bool,
        converts_parameters: bool,
        lay_out_again: Callable[[Set[str]], None],
        watch: ReplicaWatch,
        on_error: Callable[[str], None],
    ) -> None:
        self.parameters = list(replica.parameters.values())
        self.names = list(replica.parameters)
        self._find = replica.find
        self.strategy = strategy
        self._collective = collective = replica.collective
        self.watch = watch
        self.watched = Backwards(strategy.capabilities.exchange_name)
        # Of the present layout: caps of the buckets, and the order of gradients.
        self._layout: tuple[Sequence[int], Sequence[int] | None] = initial_limits_bytes, None
        self._rebuild_limits_bytes = list(rebuild_limits_bytes)
        self._on_error = on_error
        # Models split over several devices run backward, and so the hooks, in one thread per device.
        self._lock = threading.RLock()
        self._device = self.parameters[0].device
        self._is_multi_device = len({p.device for p in self.parameters}) > 1

        self.iteration = self.completed_steps = self._exchanges = 0
        self.has_rebuilt_buckets = False
        self._layout_is_final = strategy.capabilities.keeps_first_layout
        self._is_sparse = [name in replica.sparse for name in self.names]
        self._keeps_dtype = gradient_as_bucket_view
        self._make_bucket = functools.partial(
            Bucket,
            parameters=self.parameters,
            names=self.names,
            counts_non_finite=check_finite,
            divides_copies=batched_grad_copy,
        )
        self._make_packing = functools.partial(
            make_packing,
            as_view=gradient_as_bucket_view,
            adopts=converts_parameters,
        )
        finite_check = (
            FiniteCheck(self.names, collective, tells_others=strategy.capabilities.averages_gradients)
            if check_finite
            else None
        )
        # Mixed precision replaces gradients in each step.
        frozen = {} if converts_parameters else replica.frozen
        self.frozen = FrozenParameters(frozen, strategy, collective, self._device, lay_out_again)
        self.in_flight = BucketsInFlight(strategy, collective, self.frozen, finite_check)
        self._ready_counter = ReadyCounter(len(self.parameters))
        self.guard = StepGuard(self.names)
        strategy.serve(self)
        self._lay_out(initial_limits_bytes)
        self.initial_bucket_sizes_bytes = [bucket.size_bytes for bucket in self.buckets]

        self._expects_hooks = False
        self._next_bucket = 0
        self.ready_order: list[int] = []
        self._misses_gradients = False  # a hook of this backward found none

        self._converts_parameters = converts_parameters
        self._nodes = AccumulationNodes(self.parameters)
        self.graph = EveryParameter(self.names)
        if static_graph:
            self._set_static_graph()
        elif find_unused_parameters:
            skips = skip_all_reduce_unused_params
            self.graph = SearchedGraph(self.names, self._device, strategy, self._nodes.nodes, skips_buckets=skips)
        self._stop_expecting_hooks()

    def listen(self) -> None:
        """Begin to listen to autograd."""
        called = self._autograd_hook, self._reduce_full_buckets
        self._nodes.listen(functools.partial(self._ready_counter.hook, *called))
        self.guard.listen(self)

    @property
    def rank(self) -> int:
        """Of this replica, in its group or at its servers."""
        at_servers = self.strategy.worker_rank
        return self._collective.rank if at_servers is None else at_servers

    @property
    def exchanges_gradients(self) -> bool:
        """Whether a backward exchanges gradients; not among a single rank, nor where only steps exchange."""
        strategy = self.strategy
        return strategy.is_in_service and not strategy.capabilities.has_virtual_workers and strategy.needs_packing

    @property
    def awaits_exchange(self) -> bool:
        """Whether a backward runs in this thread whose gradients are not exchanged yet."""
        return self._expects_hooks and torch._C._current_graph_task_id() >= 0

    @property
    def is_in_backward(self) -> bool:
        """Whether some gradients of a backward have come, and not all."""
        return self._expects_hooks and self._ready_counter.has_begun

    # ---- layout ------------------------------------------------------------------------------------------------

    def _lay_out(self, limits_bytes: Sequence[int], order: Sequence[int] | None = None) -> None:
        """Make buckets of at most ``limits_bytes``, and tell the strategy of them; see ``plan_buckets``.

        Args:
            limits_bytes: caps.
            order: indices of parameters as their gradients arrived; None guesses that they arrive in reverse.
        """
        self._layout = limits_bytes, order
        plans = plan_buckets(self.parameters, limits_bytes, self._is_sparse, order)
        ordered = plans[::-1] if order is None else plans
        self._slots = [self._make_packings(ordered, slot) for slot in range(self.strategy.slots)]
        self.pack_in(0)
        # By parameter, its bucket where its hook may just count: a large gradient is packed at once.
        counted: list[int | None] = [None] * len(self.parameters)
        for bucket in self.buckets:
            for position, index in enumerate(bucket.parameter_indices):
                if not bucket.sparse and position not in bucket.eager_runs:
                    counted[index] = bucket.index
        self._ready_counter.lay_out(counted, [len(bucket.parameters) for bucket in self.buckets])
        self.strategy.lay_out(self.buckets)

    def _make_packings(
        self, plans: Sequence[tuple[int, ...]], slot: int
    ) -> tuple[list[Packing], dict[int, tuple[Packing, int]]]:
        """What moves each bucket's gradients; and by parameter, the packing of its bucket and its position there."""
        packings = [
            self._make_packing(
                self._make_bucket(
                    index,
                    plan,
                    sparse=self._is_sparse[plan[0]],
                    allocate=functools.partial(self._allocate, index, slot),
                )
            )
            for index, plan in enumerate(plans)
        ]
        return packings, {
            index: (packing, position)
            for packing in packings
            for position, index in enumerate(packing.bucket.parameter_indices)
        }

    def _allocate(self, index: int, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for bucket ``index``."""
        if slot > 0:
            return self.strategy.slot_memory(index, slot)
        return self.strategy.allocate(numel, dtype, device, keeps_dtype=self._keeps_dtype)

    @outside_transforms
    def _rebuild_buckets(self) -> bool:
        """Once, between the first and the second iteration: lay out buckets in the order gradients arrived on rank 0.

        Every rank calls it before forward, when no gradient is in flight. Returns whether buckets were rebuilt, which
        is the same on every rank.

        Raises:
            ReductionError: the previous backward did not reach every parameter.
        """
        self._check_reducer_finalized()
        order = self.arrival_order
        if order is None or not self.awaits_order or self.strategy.capabilities.orders_buckets:
            return False
        agreed = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._collective.broadcast([agreed], 0, what="order of gradients").wait()
        self.lay_out_again(agreed.tolist())
        return True

    # ---- for a strategy that exchanges at another time than in a backward: see strategies/exchange.Gradients -------

    @property
    def arrival_order(self) -> list[int] | None:
        """See ``Gradients``; last those that never arrive."""
        if len(self.ready_order) < len(self.parameters):
            return None
        arrived = [index for index in self.ready_order if index not in self.graph.unused]
        return [*arrived, *self.graph.unused]

    @property
    def awaits_order(self) -> bool:
        """See ``Gradients``."""
        return self.graph.may_rebuild and not self._layout_is_final

    def pack_in(self, slot: int) -> None:
        """See ``Gradients``."""
        self.in_flight.packings, self._locators = self._slots[slot]
        self.buckets = [packing.bucket for packing in self.in_flight.packings]

    def lay_out_again(self, order: Sequence[int] | None = None) -> None:
        """See ``Gradients``."""
        if order is None:
            self._lay_out(*self._layout)
            return
        self.has_rebuilt_buckets = self._layout_is_final = True
        self._lay_out(self._rebuild_limits_bytes, order)
        logger.info("Reducer buckets have been rebuilt in this iteration: %s", self.buckets)

    def write(self, bucket: Bucket, result: torch.Tensor, used: Sequence[float] | None) -> None:
        """See ``Gradients``."""
        unused = None if used is None else [not used[index] for index in bucket.parameter_indices]
        with torch.no_grad():
            self.in_flight.packings[bucket.index].unpack(result, unused)

    def compare_replicas(self, *, abstains: bool = False) -> None:
        """See ``Strategy.compare_replicas``; nothing inside the capture of a CUDA graph."""
        if not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.strategy.compare_replicas(self.watch, self._exchanges, abstains=abstains)

    # ---- around forward ----------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Promise that every iteration uses the same parameters equally often; the first one finds out which and how.

        Raises:
            ReductionError: training has begun.
        """
        if self.iteration > 0:
            self._fail(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is"
                f" constructed. (expected iteration 0, got {self.iteration})"
            )
        self.graph = StaticGraph(self.names, self._device, self.strategy)
        self._ready_counter.call()  # usage is recorded from now on

    @outside_transforms
    def prepare_for_forward(self) -> None:
        """Count an iteration whose gradients will be exchanged.

        Raises:
            ReductionError: the model was converted since it was wrapped, or gradients would not come to ``.grad``.
        """
        if is_in_distributed_autograd():
            self._fail(error_texts.DISTRIBUTED_AUTOGRAD_MESSAGE)
        # One parameter stands for all: where only others were converted, the next forward misses their gradients.
        if self._nodes.was_converted(0):
            self._check_listening(range(len(self.parameters)))
        elif self._expects_hooks:
            self._check_listening([0])  # no gradient came since the last forward: converted there and back?
        self.iteration += 1
        self.watched.begin_step(self.iteration)

    @outside_transforms
    def prepare_for_backward(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        """Expect one gradient for each parameter; with ``find_unused_parameters``, for those ``outputs`` depend on."""
        self._expects_hooks = True
        self._next_bucket = 0
        self.in_flight.begin(self.watched.begin(self.iteration))
        self.in_flight.observe("expected")
        only_counts = self._layout_is_final and not (
            self.graph.takes_long_way or self.watched.is_sampling or self._is_multi_device
        )
        if not only_counts:
            self.ready_order = []
        self._misses_gradients = False
        self._ready_counter.begin(only_counts=only_counts)
        if unreached := self.graph.begin(outputs):
            self._check_listening([index for index in unreached if self._nodes.was_converted(index)])
        self.graph.agree(has_data=True)

    def _check_reducer_finalized(self) -> None:
        """Raise where the last backward did not reach every parameter."""
        if not self.is_in_backward:
            return
        missing = {index: self.names[index] for index in self._ready_counter.missing()}
        self._check_listening(missing)
        for index, name in missing.items():
            if self._find(name) is not self.parameters[index]:
                self._fail(error_texts.replaced_message(name, self._collective.rank))
        self._fail(self.graph.describe_missing(self._collective.rank, missing))

    def _check_listening(self, indices: Iterable[int]) -> None:
        """Raise where one of these parameters has lost its hook."""
        for index in () if self._converts_parameters else self._nodes.replaced(indices):
            self._fail(error_texts.converted_message(self.names[index], self._collective.rank))

    def _fail(self, message: str) -> NoReturn:
        self._on_error(message)
        raise ReductionError(message)

    # ---- during backward ---------------------------------------------------------------------------------------

    def _autograd_hook(self, index: int, *_: Any) -> None:
        """A parameter's gradient was accumulated (or is undefined). Runs in autograd's thread."""
        with self._lock:
            if self.graph.records_usage and self.parameters[index].grad is not None:
                self.graph.used[index] = 1
            if not self._expects_hooks:
                if self.graph.counted_nothing:
                    self._fail(self.graph.describe_repetition(self._collective.rank, index))
                self._note_stray(index)
                return
            if self.parameters[index].grad is None:
                self._misses_gradients = True
            if self.graph.is_being_counted:
                self.graph.count(index)
                return
            left = self._ready_counter.left
            if left[index] <= 0:
                left[index] = -1  # this backward has begun, even where no other hook has fired
                self._fail(self.graph.describe_repetition(self._collective.rank, index))
            for unused in self.graph.unused_now():
                left[unused] = 0
                self._mark_ready(unused)
            left[index] -= 1
            if left[index] == 0:
                self._mark_ready(index)

    def _note_stray(self, index: int) -> None:
        """A gradient was accumulated outside of an exchange. One is enough: the others' hooks need not be called."""
        if self.guard.stray is None:
            self.guard.stray = index
            if not self.graph.records_usage:
                self._ready_counter.ignore()

    def _mark_ready(self, index: int) -> None:
        if len(self.ready_order) < len(self.parameters):
            self.ready_order.append(index)
        packing, position = self._locators[index]
        if self.in_flight.is_packing and position in packing.bucket.eager_runs:
            self.in_flight.pack_one(packing, position)
        pending = self._ready_counter.pending
        pending[packing.bucket.index] -= 1
        if pending[packing.bucket.index] == 0:
            self._reduce_full_buckets()

    def _reduce_full_buckets(self) -> None:
        """Start every bucket whose turn it is. Buckets start in index order, which is the same on all ranks."""
        pending = self._ready_counter.pending
        if pending[self._next_bucket] > 0:
            return
        packings = self.in_flight.packings
        while self._next_bucket < len(packings) and pending[self._next_bucket] == 0:
            self.in_flight.hand_over(packings[self._next_bucket], self.graph)
            self._next_bucket += 1
        if self._next_bucket == len(packings):
            self.graph.agree_at_end(has_data=True)
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize)

    def _delay_all_reduce(self) -> None:
        """The end of a static graph's first backward: the usage of all parameters is known, all buckets go now."""
        with self._lock, torch.no_grad():
            assert isinstance(self.graph, StaticGraph), "only a static graph delays its first exchange"
            self.graph.learn()
            self._ready_counter.expect(self.graph.counts)
            for index in range(len(self.parameters)):
                self._mark_ready(index)
            self.ready_order = []  # that was no order of arrival

    # ---- the end of backward -----------------------------------------------------------------------------------

    def _finalize(self) -> None:
        """Wait for every bucket in order and write the results to the gradients."""
        with self._lock:
            # Cleared first: after an error the next forward must not report an unfinished reduction instead of it.
            self._stop_expecting_hooks()
            try:
                self.in_flight.land(self.graph, misses_gradients=self._misses_gradients)
            except NonFiniteGradientError as error:
                self._settle()
                self._on_error(str(error))
                raise
            self._settle()
            self.completed_steps += 1
            self._exchanges += 1
            self.guard.exchanged()
            self.frozen.look(self.in_flight.share or WHOLE)

    def _settle(self) -> None:
        if self.graph.finds_unused:
            self.graph.settle()
        self.in_flight.averaging_weight.settle()

    def _stop_expecting_hooks(self) -> None:
        self._expects_hooks = False
        self._ready_counter.call()  # the first stray gradient, or the use of each parameter, is noted

    # ---- for join ----------------------------------------------------------------------------------------------

    def shadow_backward(self) -> None:
        """Take part in one backward of ranks that still have data, contributing zeros, in the order they exchange."""
        is_counted = self.graph.is_being_counted
        self.in_flight.shadow(self.graph)
        self._settle()
        self._exchanges += 1
        self.frozen.look(NOTHING)
        if not is_counted and self.awaits_order:
            # All ranks rebuild; rank 0's order overwrites this one.
            self.ready_order = self.ready_order or list(range(len(self.parameters)))

    # ---- what torch's own hooks and native DDP's inherited methods call --------------------------------------------

    # Sums a communication hook's bucket over ranks; a future of its buffer.
    _run_allreduce_hook: Callable[[Any], Any]

    def _set_forward_pass_work_handle(self, work: Any, divides_by_all: bool) -> None:
        """Inside ``join``, of the first of several models: ``work`` counts the ranks that have data."""
        self.in_flight.averaging_weight.live_ranks_work = None if divides_by_all else work

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.watched.sample_rate = rate

    def _set_sparse_metadata(self, _indices: Any) -> None:
        """A hint of native DDP's for NCCL only; sparse gradients here carry their own indices."""

    def _push_all_rebuilt_params(self) -> None:
        """``shadow_backward`` has done it."""

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to autograd; gradients stay local from now on."""
        self.guard.stop_listening()
        self._nodes.stop_listening()

    def _set_optimizer_in_backward(self) -> None:
        """The communication hook steps optimizers itself; gradients are not written back."""
        self.in_flight.writes_gradients = False

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for ``futures`` (of a buffer communication hook) before backward returns."""
        self.in_flight.futures.extend(futures)

    def _get_local_used_map(self) -> torch.Tensor:
        """By index, how many ranks used each parameter in the last backward that agreed on it: int32."""
        return self.graph.summed

    def _ddp_graph_static(self) -> bool:
        """Whether every search so far found the same parameters unused, so that ``static_graph`` would have served."""
        return self.graph.never_changed
