"""A forward of the wrapped model: the iteration is announced, buffers are made equal, gradients are expected."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel import distributed as native

from psengine.tensors.outputs import find_tensors, watch_backward
from psengine.tracing.spans import record_forward
from psengine.tracing.timeline import now_ns, recorder
from psengine.wrapper.buffer_sync import BufferSync
from psengine.wrapper.native_features.compilation import stay_out_of_graphs
from psengine.wrapper.native_features.delayed_all_reduce import DelayedAllReduce
from psengine.wrapper.uneven_inputs import UnevenInputs

# Captured at import: a program may replace the native class by ours under its own name. Any: the types of the native
# class's attributes (its Reducer, its Logger) are not ours.
NativeDistributedDataParallel: Any = native.DistributedDataParallel


class ForwardPass(BufferSync, UnevenInputs):
    """The part of ``DistributedDataParallel`` that is run with each batch."""

    device_ids: list[int] | None
    device_type: str
    mixed_precision: Any
    use_side_stream_for_tensor_copies: bool
    find_unused_parameters: bool
    static_graph: bool
    require_backward_grad_sync: bool
    _delayed: DelayedAllReduce | None
    _delay_all_reduce_all_params: bool
    _use_python_reducer: bool
    _lazy_init_ran: bool
    _has_rebuilt_buckets: bool
    _ddp_sink_clone: bool
    _static_graph_delay_allreduce_enqueued: bool
    # Native DDP's.
    _lazy_init: Callable[[], None]
    _register_accum_grad_hook: Callable[[], None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; gradients of its outputs will be exchanged by the next backward (see ``no_sync``)."""
        stay_out_of_graphs()
        started_ns = now_ns() if recorder.is_on else 0
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            output = self._post_forward(output)
        if started_ns and not self._delay_all_reduce_all_params:
            # What is accumulated, or evaluated, before the next exchange belongs to that one.
            is_exchanged = torch.is_grad_enabled() and self.require_backward_grad_sync
            record_forward(started_ns, self.reducer.iteration + (not is_exchanged), (inputs, kwargs), output)
        return output

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return self.module(*inputs, **kwargs)
        previous = NativeDistributedDataParallel._active_ddp_module
        NativeDistributedDataParallel._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        finally:
            NativeDistributedDataParallel._active_ddp_module = previous

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Announce the iteration, rebuild buckets (once), broadcast buffers, move inputs."""
        if self._use_python_reducer:
            return inputs, kwargs
        if not self._lazy_init_ran and not torch.compiler.is_compiling() and not self._delay_all_reduce_all_params:
            self._lazy_init()
        if self._delay_all_reduce_all_params:
            return inputs, kwargs
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.prepare_for_forward()
        work = Join.notify_join_context(self)
        if self._join_config.enable:
            self._check_can_join(self._divide_by_initial_world_size)
            # Of several joinables the first one counts the live ranks; the others divide by all, as over native DDP.
            divides_by_all = work is None or self._divide_by_initial_world_size
            self.reducer.contribution.set_live_ranks_work(work, use_initial_world_size=divides_by_all)
        if torch.is_grad_enabled() and self.reducer._rebuild_buckets():
            self._has_rebuilt_buckets = True
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._any_rank_syncs_gradients(this_rank_syncs=self.require_backward_grad_sync)
        return self._place_inputs(inputs, kwargs)

    def _place_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        """Expect this forward's gradients; where the graph must be searched or counted, watch the outputs."""
        if self._use_python_reducer:
            return output
        if self._delay_all_reduce_all_params:
            self._attach_delayed()
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        searches_graph = self.find_unused_parameters and not self.static_graph
        will_exchange = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = will_exchange
        if will_exchange:
            self.reducer.prepare_for_backward(list(find_tensors(output)) if searches_graph else ())
        elif torch.is_grad_enabled():
            self.reducer.expect_local_backward()
        # A static graph's first exchange may come after backwards inside no_sync, which must not start it
        # (https://github.com/pytorch/pytorch/issues/143580).
        counts_graph = will_exchange and self.reducer.counts_graph
        # A backward that raised has dropped what it had queued.
        self._static_graph_delay_allreduce_enqueued = not counts_graph
        if searches_graph or counts_graph:
            on_start = functools.partial(_start_backward, weakref.ref(self))
            output = watch_backward(output, on_start, clone=self._ddp_sink_clone, required=counts_graph)
        self._attach_delayed()
        return output

    def _attach_delayed(self) -> None:
        if self._delayed is not None:
            self._delayed.attach()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates; the first backward whose *forward* runs outside exchanges the sum."""
        previous = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous


def _start_backward(replica_reference: weakref.ref[ForwardPass]) -> None:
    """Backward reached the outputs: a static graph's first iteration exchanges everything at the very end of it."""
    replica = replica_reference()
    if replica is None or not replica.static_graph or replica._static_graph_delay_allreduce_enqueued:
        return
    torch.autograd.Variable._execution_engine.queue_callback(replica.reducer._delay_all_reduce)
    replica._static_graph_delay_allreduce_enqueued = True
