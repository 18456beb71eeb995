"""One forward of the wrapped model: announce the iteration, make buffers equal, run the module, expect gradients.

What concerns one rank (``no_sync``, the choice of buffers, the hook of ``join``) is inherited from native DDP. Whatever
meets other ranks is overridden, so that it goes through psengine's collective, with its deadlines and its errors.

Inside ``join``, a rank with data and a rank without data meet in this order::

    with data    notify (counted by Join)   rebuild   buffers: who is the source?   sync this time?   buckets, used-map
    joined       (Join counts)              rebuild   buffers: who is the source?   sync this time?   zeros,   zeros
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel import distributed as native

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, ModuleError
from psengine.gradients.reducer import Reducer
from psengine.strategies.base import Strategy
from psengine.strategies.batch_weights import checked_weight
from psengine.strategies.statistics import Statistics
from psengine.tracing.timeline import end_forward, is_profiling, recorder, span
from psengine.wrapper import arguments as checks
from psengine.wrapper.module_state import BufferBroadcast, shared_state
from psengine.wrapper.native_features.compilation import stay_out_of_graphs

# Captured at import: a program may replace the native class by ours under its own name. Any: the types of the native
# class's attributes (its Reducer, its Logger) are not ours.
NativeDistributedDataParallel: Any = native.DistributedDataParallel


class _NeverAssigned:
    """A method in whose place an assignment, which would do nothing, is an error."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, wrapper: Any, kind: type | None = None) -> Callable[..., None]:
        bound: Callable[..., None] = self._method if wrapper is None else MethodType(self._method, wrapper)
        return bound

    def __set__(self, wrapper: Any, value: object) -> None:
        name = self._method.__name__
        raise ConfigurationError(
            f"{name} is a method, called in every step (expected model.{name}({value!r:.60}), got an assignment)."
            f" Fix: model.{name}(len(batch)) before forward."
        )


class ForwardPass(NativeDistributedDataParallel):  # type: ignore[misc]
    """The part of ``DistributedDataParallel`` that runs with each batch."""

    strategy: Strategy
    reducer: Reducer
    process_group: dist.ProcessGroup | None
    require_forward_param_sync: bool
    _static_graph_delay_allreduce_enqueued: bool
    _collective: Collective
    _buffer_broadcast: BufferBroadcast

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; gradients of its outputs will be exchanged by the next backward (see ``no_sync``)."""
        stay_out_of_graphs()
        recorded = None
        if recorder.is_on:
            recorder.settled_ns()
            recorded = span("forward" if torch.is_grad_enabled() else "forward without gradients")
        if is_profiling():
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
                output = self._run(inputs, kwargs)
        else:
            output = self._run(inputs, kwargs)
        if recorded is not None and not self._delay_all_reduce_all_params:
            # What is accumulated, or evaluated, before the next exchange belongs to that one.
            is_exchanged = torch.is_grad_enabled() and self.require_backward_grad_sync
            end_forward(recorded, self.reducer.iteration + (not is_exchanged), (inputs, kwargs), output)
        return output

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Native DDP's own version would import torch._dynamo, which takes seconds.
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
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return inputs, kwargs
        if not self._lazy_init_ran and not torch.compiler.is_compiling():
            self._lazy_init()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.prepare_for_forward()
        work = Join.notify_join_context(self)
        if self._join_config.enable:
            self._check_can_join(self._divide_by_initial_world_size)
            # Of several joinables the first one counts the live ranks; the others divide by all, as over native DDP.
            self.reducer.averaging_weight.join_step(None if self._divide_by_initial_world_size else work)
        if torch.is_grad_enabled() and self.reducer._rebuild_buckets():
            self._has_rebuilt_buckets = True
        if self.modules_buffers and self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
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
        if not self._delay_all_reduce_all_params:
            output = self._expect_backward(output)
        self._clear_grad_buffer()
        return output

    def _expect_backward(self, output: Any) -> Any:
        if self.modules_buffers and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        searches_graph = self.find_unused_parameters and not self.static_graph
        will_exchange = torch.is_grad_enabled() and self.require_backward_grad_sync
        # An assignment to a module's attribute takes a microsecond.
        if self.require_forward_param_sync is not will_exchange:
            self.require_forward_param_sync = will_exchange
        if will_exchange:
            self.reducer.prepare_for_backward(list(native._find_tensors(output)) if searches_graph else ())
        elif torch.is_grad_enabled():
            self.reducer.expect_local_backward()
        # A static graph's first exchange may come after backwards inside no_sync, which must not start it
        # (https://github.com/pytorch/pytorch/issues/143580).
        counts_graph = will_exchange and self.reducer.graph.is_being_counted
        # A backward that raised has dropped what it had queued.
        if self._static_graph_delay_allreduce_enqueued is counts_graph:
            self._static_graph_delay_allreduce_enqueued = not counts_graph
        return self._watch_backward(output, counts_graph) if searches_graph or counts_graph else output

    def _watch_backward(self, output: Any, counts_graph: bool) -> Any:
        """Pass the output's tensors through one node, native DDP's sink.

        The sink leaves gradients of outputs that the loss does not use undefined. Of a static graph's first iteration
        it queues the exchange, so everything depends on it.
        """
        leaves, structure, is_rref = native._tree_flatten_with_rref(output)
        if counts_graph and not any(map(_has_history, leaves)) and any(map(_has_history, native._find_tensors(output))):
            raise ModuleError(
                f"static_graph=True must see backward begin, but the tensors of the output ({type(output).__name__})"
                " stand in a class that torch.utils._pytree does not know. Return a tuple or dict, or register the"
                " class with torch.utils._pytree.register_dataclass or register_pytree_node."
            )
        watched = native._DDPSink.apply(weakref.ref(self), *leaves)
        # Tensors without history must come back as they went in (https://github.com/pytorch/pytorch/issues/60733).
        kept = [new if _has_history(leaf) else leaf for leaf, new in zip(leaves, watched, strict=True)]
        return native._tree_unflatten_with_rref(kept, structure, is_rref)

    # ---- what a training loop says and asks -----------------------------------------------------------------------

    @_NeverAssigned
    def batch_weight(self, weight: float | torch.Tensor | None) -> None:
        """Let the next backward average by samples; call it in every step before forward, on every rank or on none.

        Gradients become those of one process over all ranks' samples: sum(weight * gradient) / sum(weight). The weight
        counts for all that ``no_sync`` accumulated before; the exchange takes it, and a later backward without a
        weight of its own is an error. docs/recipes/uneven_devices.md

        Args:
            weight: how many samples (or tokens) the mean loss of this rank's batch is over. 0 means no say; where all
                ranks have none, gradients are zeros. None: from now on all ranks count alike.

        Raises:
            ArgumentTypeError, ConfigurationError: it is no finite number >= 0, or this model's gradients cannot be
                weighed.
        """
        checks.check_weighable(self)
        self.reducer.averaging_weight.set_weight(checked_weight(weight))

    def report(self, loss: float | torch.Tensor | None = None, samples: int | None = None) -> None:
        """Tell people how training goes here: the servers' dashboard, and Prometheus (PSENGINE_METRICS_PORT).

        It costs no message of its own: what was reported last travels with the next heartbeat.

        Args:
            loss: of this worker's latest step; a tensor of one element, on a device too, is read later.
            samples: how many samples that step took.
        """
        self.strategy.report(loss=loss, samples=samples)
        meter = None if self._delay_all_reduce_all_params else self.reducer.in_flight.meter
        if meter is not None:
            meter.report(loss=loss, samples=samples)

    def statistics(self) -> Statistics:
        """Return how training goes: steps, live workers and, over servers, staleness and bytes.

        Strategies over servers ask them, and wait for the answer; before ``leave()``.

        Raises:
            ReductionError: the model has left its servers.
            ServerLostError: a server does not answer within ``timeout_s``.
        """
        statistics = Statistics(
            strategy=self.strategy.name,
            worker=self._collective.rank,
            live_workers=tuple(range(self._collective.world_size)),
            steps=0 if self._delay_all_reduce_all_params else self.reducer.completed_steps,
        )
        return replace(statistics, **self.strategy.statistics())

    # ---- buffers -----------------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of ``forward_sync_buffers``; native DDP of torch 2.11 reads it."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _sync_buffers(self) -> None:
        # Backwards of earlier forwards may need the buffers' versions; native DDP keeps them only from torch 2.13 on.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.module.buffers())):
            super()._sync_buffers()

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward would broadcast buffers; strategies that carry them with the gradients do not need it."""
        return not self.strategy.capabilities.carries_buffers and bool(super().will_sync_module_buffers())

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcast ``bufs`` (default: the module's buffers) from ``authoritative_rank``; what buffer hooks call."""
        if self._collective.world_size == 1:
            return
        self._buffer_broadcast.run(
            self.modules_buffers if bufs is None else bufs,
            lambda packed: self._collective.broadcast(packed, authoritative_rank, what="buffers").wait(),
            is_source=self._collective.rank == authoritative_rank,
        )

    # ---- join --------------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context manager for ranks with different numbers of batches: those done shadow the others' collectives.

        Args:
            divide_by_initial_world_size: divide gradients by all ranks (every sample weighs the same), else by those
                that still have data.
            enable: False where inputs are known to be even.
            throw_on_early_termination: raise on every rank as soon as one is done; needed where the model has other
                collectives, such as SyncBatchNorm.
        """
        if enable:
            self._check_can_join(divide_by_initial_world_size)
        return super().join(divide_by_initial_world_size, enable, throw_on_early_termination)  # type: ignore[no-any-return]

    def _check_can_join(self, by_all: bool) -> None:
        # In forward too: Join([model]) does not call join(), and tells no joinable whether it is enabled.
        checks.check_can_join(self.strategy, self.process_group is not None, divide_by_initial_world_size=by_all)

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group in which ``Join`` counts."""
        if self.process_group is None:
            self._check_can_join(self._divide_by_initial_world_size)
        assert self.process_group is not None, "strategies over collectives have a group"
        return self.process_group

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest rank of those whose ``rank_cond`` holds; every rank asks and gets the same answer."""
        mine = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        return max(int(t.item()) for t in self._collective.gather(mine, what="join: source of the model"))

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        """Whether any rank's next backward exchanges gradients; every rank asks once per iteration."""
        syncs = self.require_backward_grad_sync and not is_joined_rank
        weighs = syncs and self.reducer.averaging_weight.weight is not None
        flags = torch.tensor([float(syncs), float(weighs)], device=self.device)
        self._collective.sum(flags, what="join: does anybody synchronise gradients")
        syncing_ranks, weighing_ranks = flags.tolist()
        self.reducer.averaging_weight.shadows_weights = weighing_ranks != 0
        return bool(syncing_ranks != 0)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.shadow_backward()

    def _match_unused_params_allreduce(self) -> None:
        """``shadow_backward`` has done it."""

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of the highest rank among those that trained longest."""
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        state = shared_state(self.module, self.parameters_to_ignore, with_buffers=self.forward_sync_buffers)
        self._collective.broadcast(list(state.values()), self._authoritative_rank, what="the final model").wait()


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
