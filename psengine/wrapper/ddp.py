"""DistributedDataParallel: native DDP's interface and semantics over psengine's reducer and strategies.

What concerns one rank (``no_sync``, the choice of buffers, the hook of ``join``) is inherited from native DDP. Whatever
meets other ranks is overridden, so that it goes through psengine's collective, with its deadlines and its errors.

Inside ``join``, a rank with data and a rank without data meet in this order::

    with data    notify (counted by Join)   rebuild   buffers: who is the source?   sync this time?   buckets, used-map
    joined       (Join counts)              rebuild   buffers: who is the source?   sync this time?   zeros,   zeros
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import distributed as native

from psengine.collectives.base import Collective
from psengine.collectives.registry import check_choice, collective_for
from psengine.data.sync_batch_norm import adopt_sync_batchnorm
from psengine.environment.context import shutdown_count
from psengine.environment.uncaught import install_hook
from psengine.environment.variables import default_collective, read_variable
from psengine.errors import ConfigurationError, ModuleError
from psengine.gradients.hooks import is_transformed
from psengine.gradients.reducer import Reducer
from psengine.kernels.freed_memory import keep_freed_memory
from psengine.protocol.layout import OtherNames
from psengine.strategies.base import Strategy, compare_over
from psengine.strategies.buffer_broadcast import BufferBroadcast
from psengine.strategies.life_cycle import Replica
from psengine.strategies.registry import resolve_strategy
from psengine.strategies.replica_watch import ReplicaWatch
from psengine.strategies.statistics import Statistics
from psengine.strategies.stepping import check_whole_state
from psengine.tables import Tables, find_tables
from psengine.tensors.bucket_plan import MIB_BYTES, bucket_limits_bytes
from psengine.tracing.timeline import end_forward, is_profiling, model_wrapped, recorder, span
from psengine.tracing.training_metrics import watch
from psengine.wrapper import arguments as checks
from psengine.wrapper import native_features, switching

# Captured at import: a program may replace the native class by ours under its own name. Any: the types of the native
# class's attributes (its Reducer, its Logger) are not ours.
NativeDistributedDataParallel: Any = native.DistributedDataParallel

# What a strategy keeps, in the wrapped model's ``state_dict``; beside native DDP's keys, "module.weight" and the like.
STRATEGY_STATE_KEY = "_psengine_strategy"
# Models of this process that have values at servers, with how often ``shutdown()`` had been called.
_at_servers: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()


class DistributedDataParallel(NativeDistributedDataParallel):  # type: ignore[misc]
    """Wrap ``module`` so that its replicas synchronise after each backward, in the way ``strategy`` names.

    With ``strategy="sync"`` this is ``torch.nn.parallel.DistributedDataParallel``: the same arguments, numbers (on the
    CPU to the last bit), error messages and attributes. It derives from that class so that ``isinstance`` tests of
    Lightning, accelerate, dynamo and checkpoint code hold, and inherits its experimental corners (mixed precision's
    casts, overlapped optimizers); native DDP's constructor, Reducer and Logger are never used.

    Args:
        module: the model. Its parameters and buffers are overwritten by rank 0's; on the CPU its
            ``torch.nn.SyncBatchNorm`` layers become psengine's, in place.
        device_ids: None, or the one device of a single-device GPU module, to which inputs are moved.
        output_device: where a single-device GPU module's output lives; default ``device_ids[0]``.
        dim: unused, as in native DDP.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also leaves out the initial broadcast.
        init_sync: verify and broadcast parameters and buffers now; False only where they are known to be equal.
        process_group: the replicas; default: all ranks. Not together with ``device_mesh``.
        bucket_cap_mb: bucket size in MiB; default 25, with a first bucket of 1.
        find_unused_parameters: find parameters without a gradient by walking the graph after each forward.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: let gradients be views of the buckets: less memory, no copy back.
        static_graph: promise that the graph never changes; allows reentrant checkpointing and unused parameters.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients are exchanged when
            ``param_to_hook_all_reduce`` gets its own.
        param_to_hook_all_reduce: see there.
        mixed_precision: native DDP's experimental ``_MixedPrecision``.
        device_mesh: a 1-D ``DeviceMesh`` in place of ``process_group``.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: skip buckets that no rank used.
        bucket_cap_mb_list: sizes of the buckets one by one, in MiB.
        batched_grad_copy: divide what was copied, as native DDP then does, instead of scaling while copying; slower.
            Small gradients are always copied in batches.
        forward_sync_buffers: broadcast rank 0's buffers before each forward; default True.
        strategy: how replicas synchronise: a name, "name:option=value", or a ``psengine.Strategy``. Default:
            ``PSENGINE_STRATEGY``, else "sync".
        collective: what carries "sync": "auto" (shared memory where ranks share a host and the module is on the CPU,
            else torch.distributed), "shared_memory", "c10d" or a ``psengine.Collective``. Shared memory adds in gloo's
            order; "hierarchical" inside hosts, then between them. Default: ``PSENGINE_COLLECTIVE``, else "auto".
        check_finite: raise ``NonFiniteGradientError`` from ``backward()`` on every rank, naming parameter and rank,
            where a gradient is NaN or infinite as it travels, before an average is copied to a gradient. Found while
            packing, and told to the others in one small exchange a step; see docs/native.md.
        check_replicas: compare the replicas' parameters while they train, at steps 1, 2, 4, ..., 512 and at every
            multiple of 1,000; once they differ twice in a row, "warn" logs which parameter differs, on which worker,
            since when and why, and "error" raises ``ReplicasDivergedError`` on every rank. "off" compares nothing.
            Default: ``PSENGINE_CHECK_REPLICAS``, else "off". See docs/ddp.md.

    Attributes:
        saves_strategy_state: set to True, ``state_dict`` holds what the strategy keeps besides the model and its
            optimizer, such as the residuals of a codec. Each rank saves its own. By default the keys are native DDP's.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that contradict each other (ValueError, TypeError).
        ModuleError: the module cannot be wrapped (RuntimeError).
        ReplicaMismatchError: the ranks' modules differ; names the parameter and the rank.
    """

    _load_hook: torch.utils.hooks.RemovableHandle | None = None
    _idle: Set[str] = frozenset()  # names of thawed parameters that no rank has used
    _loads_strategy_state = False
    _loaded_after: int | None = None  # so many steps; None: nothing was loaded since the model was wrapped

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        strategy: str | Strategy | None = None,
        collective: str | Collective | None = None,
        check_finite: bool = False,
        check_replicas: str | None = None,
    ) -> None:
        native_features.stay_out_of_graphs()
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        install_hook()
        checks.check_module(module)
        self.strategy = resolve_strategy(strategy)
        delayed = list(delay_all_reduce_named_params or ())
        checks.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, self.strategy)
        self.process_group = checks.choose_process_group(self, module, process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        self._tables = Tables(find_tables(module))
        stand_ins, everywhere = self._tables.stand_ins, module.named_parameters(remove_duplicate=False)
        self.parameters_to_ignore.update(name for name, parameter in everywhere if parameter in stand_ins)
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        checks.check_parameters(self._module_parameters, self._delay_all_reduce_params)

        parameters = self._module_parameters or self._delay_all_reduce_params
        self.device, self.device_ids, self.output_device = checks.check_devices(parameters, device_ids, output_device)
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in parameters}) > 1

        self.module = module
        self.dim = dim
        self.static_graph = False
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.check_finite = check_finite
        self._replica_check = checks.choose_replica_check(check_replicas)
        self.saves_strategy_state = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = read_variable("PYTORCH_DDP_USE_SIDE_STREAM") in (None, "1")
        self.broadcast_bucket_size = 250 * 1024 * 1024  # read by code written for native DDP
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._accum_grad_hooks: list[Any] = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._divide_by_initial_world_size = True
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._static_graph_delay_allreduce_enqueued = False
        self._use_python_reducer = native_features.traces_gradient_exchange()
        if check_finite:
            checks.check_all_in_buckets(self, "check_finite=True")
        self.forward_sync_buffers, init_sync_buffers = checks.choose_buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        self.broadcast_buffers = self.forward_sync_buffers  # native DDP of torch 2.11 reads it
        checks.check_virtual_workers(self, static_graph=static_graph)
        self._bucket_limits_bytes = bucket_limits_bytes(bucket_cap_mb, bucket_cap_mb_list)
        # Names that torch.compile's graph splitter and old code read.
        self.bucket_bytes_cap = max(self._bucket_limits_bytes)
        self.bucket_bytes_cap_list = self._bucket_limits_bytes if bucket_cap_mb_list else []

        if self.device_type == "cpu":
            keep_freed_memory()
            adopt_sync_batchnorm(module)
        self._collective_choice = default_collective() if collective is None else collective
        self._collective = collective_for(self.process_group, self._collective_choice, self.device)
        check_choice(self.process_group, self._collective_choice)
        checks.check_meets_others(self.strategy)
        self._buffer_broadcast = BufferBroadcast()
        self.logger = native_features.LoggingData()
        self._delay_grad_buffer: torch.Tensor | None = None
        self._delay_all_reduce_all_params = False
        if delayed:
            native_features.delay_all_reduce(self, param_to_hook_all_reduce, self._collective)
            self._delay_all_reduce_all_params = not reducible_parameters(module, self.parameters_to_ignore)
        if self._delay_all_reduce_all_params:
            return
        self._start(init_sync=init_sync, init_sync_buffers=init_sync_buffers, static_graph=static_graph)
        exchanges = functools.partial(_exchanges, weakref.ref(self))
        try:
            self._tables.enter(self.strategy, self._collective, self.device, exchanges)
        except BaseException:
            self.strategy.close()
            raise
        weakref.finalize(self, self._tables.close, frees_name=False).atexit = False
        if mixed_precision is not None:
            native_features.set_up_mixed_precision(self)
        if static_graph:
            self._set_static_graph()  # native DDP's: what it says of other arguments
        if self._use_python_reducer:
            # Under compiled autograd, dynamo traces one functional all-reduce per parameter instead of our buckets.
            torch._inductor.config._fuse_ddp_communication = True
            torch._inductor.config._fuse_ddp_bucket_size = self.bucket_bytes_cap // MIB_BYTES
            self._register_accum_grad_hook()

    # ---- construction ------------------------------------------------------------------------------------------

    def _start(self, *, init_sync: bool, init_sync_buffers: bool, static_graph: bool) -> None:
        """Make replicas start equal and begin to listen to autograd."""
        self._assign_modules_buffers()
        replica = self._describe_to_strategy(with_buffers=init_sync_buffers, is_known_equal=not init_sync)
        checks.check_state(replica.state)
        for model, shutdowns in list(_at_servers.items()):
            if shutdowns != shutdown_count():
                model.leave()  # the next one has its place in its job
        self.strategy.prepare(replica)
        if self._load_hook is None:
            hook = LoadHook(weakref.WeakMethod(self._begin_load))
            self._load_hook = self.module.register_load_state_dict_pre_hook(hook)
        rebuilds = not self.strategy.capabilities.keeps_first_layout
        may_rebuild = rebuilds and (static_graph or not self.find_unused_parameters)
        # Buckets that will be rebuilt in arrival order start as one: until that order is known, an all-reduce in the
        # midst of backward could meet other collectives of the model in a different order on another rank.
        starts_as_one = may_rebuild and not self.bucket_bytes_cap_list
        try:
            self.reducer = Reducer(
                replica,
                self.strategy,
                initial_limits_bytes=[sys.maxsize] if starts_as_one else self._bucket_limits_bytes,
                rebuild_limits_bytes=self._bucket_limits_bytes,
                find_unused_parameters=self.find_unused_parameters,
                static_graph=static_graph,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
                batched_grad_copy=self.batched_grad_copy,
                check_finite=self.check_finite,
                converts_parameters=self.mixed_precision is not None,
                lay_out_again=functools.partial(_lay_out_again, weakref.ref(self)),
                watch=self._watch_replicas(replica),
                on_error=self.logger.set_error_and_log,
            )
            self.strategy.join()
            if self.strategy.rendezvous is not None or self._tables.layers:
                _at_servers[self] = shutdown_count()
            self.reducer.watched.meter = watch(self.strategy.name, self.reducer.rank, self._collective.world_size)
        except BaseException:
            self.strategy.close()
            raise
        self.reducer._run_allreduce_hook = functools.partial(native_features.sum_over_group, weakref.ref(self))
        self.reducer.listen()
        # The hooks keep the reducer alive; it must go when this wrapper goes, or a module that is wrapped again would
        # answer to both.
        model_wrapped(self.strategy.worker_rank)
        self._finalizer = weakref.finalize(self, _release, self.reducer, self.strategy)
        self._finalizer.atexit = False

    def _restart(self, *, init_sync: bool, idle: Set[str] = frozenset()) -> None:
        """Go on with another reducer, for another strategy, other ranks, or more parameters, but not those of the names
        ``idle``. Gradients and optimizers stay.
        """
        former, self._idle = self.reducer, idle
        self._finalizer.detach()
        former._remove_autograd_hooks()
        self._has_rebuilt_buckets = False
        self._start(init_sync=init_sync, init_sync_buffers=self.forward_sync_buffers, static_graph=self.static_graph)
        self.reducer.iteration, self.reducer.completed_steps = former.iteration, former.completed_steps
        self.reducer.watch.first_step = former.completed_steps
        self.reducer.in_flight.writes_gradients = former.in_flight.writes_gradients
        for optimizer in list(self._optimizers):
            optimizer._psengine_strategy = self.strategy  # type: ignore[attr-defined]
            optimizer._step_supports_amp_scaling = optimizer._psengine_scales_itself  # type: ignore[attr-defined]
            self.strategy.bind(optimizer)

    def _watch_replicas(self, replica: Replica) -> ReplicaWatch:
        """What compares this replica's parameters with the others'; no DTensors, whose parts differ by design."""
        parameters = {name: p for name, p in replica.parameters.items() if not hasattr(p, "to_local")}
        facts = functools.partial(_facts, weakref.ref(self))
        return ReplicaWatch(parameters, self._replica_check, facts)

    def _describe_to_strategy(self, *, with_buffers: bool, is_known_equal: bool) -> Replica:
        parameters = reducible_parameters(self.module, self.parameters_to_ignore | self._idle)
        # The buffers as they are when the strategy asks; without a reference to this wrapper.
        buffers = functools.partial(named_buffers, self.module, set(self.parameters_to_ignore))
        state = shared_state(self.module, self.parameters_to_ignore, with_buffers=with_buffers)
        others = {name: find_parameter(self.module, name) for name in state if name not in parameters}
        return Replica(
            parameters=parameters,
            frozen={name: parameter for name, parameter in others.items() if parameter is not None},
            buffers=buffers if self.forward_sync_buffers else dict,
            state=state,
            other_names=other_names(self.module, state),
            collective=self._collective,
            device=self.device,
            sparse=[name for name in parameters if has_sparse_gradient(self.module, name)],
            is_known_equal=is_known_equal,
            find=functools.partial(find_parameter, self.module),
            options={**self._tables.options, "check_replicas": "off" if self._replica_check == "off" else "on"},
        )

    # ---- forward ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; gradients of its outputs will be exchanged by the next backward (see ``no_sync``)."""
        native_features.stay_out_of_graphs()
        if is_transformed():
            checks.check_can_transform(self)
        recorded = None
        if recorder.is_on:
            recorder.settled_ns()
            recorded = span("forward" if torch.is_grad_enabled() else "forward without gradients")
        will_exchange = torch.is_grad_enabled() and self.require_backward_grad_sync and not self._join_config.enable
        if will_exchange and not (self._use_python_reducer or self._delay_all_reduce_all_params):
            self.reducer.compare_replicas()
        name = "DistributedDataParallel.forward"
        with torch.autograd.profiler.record_function(name) if is_profiling() else nullcontext():
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        if recorded is not None and not self._delay_all_reduce_all_params:
            # What is accumulated, or evaluated, before the next exchange belongs to that one.
            is_exchanged = torch.is_grad_enabled() and self.require_backward_grad_sync
            end_forward(recorded, self.reducer.iteration + (not is_exchanged), (inputs, kwargs), output)
        return output

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

    def _post_forward(self, output: Any) -> Any:
        """Native DDP's: expect this forward's gradients; where the graph is searched or counted, watch the outputs."""
        if not (self._use_python_reducer or self._delay_all_reduce_all_params):
            self.reducer.guard.accumulates = torch.is_grad_enabled() and not self.require_backward_grad_sync
            self.reducer.in_flight.averaging_weight.in_join = self._join_config.enable
            will_exchange = torch.is_grad_enabled() and self.require_backward_grad_sync
            # A static graph's first exchange may come after backwards inside no_sync, which must not start it
            # (https://github.com/pytorch/pytorch/issues/143580).
            counts_graph = will_exchange and self.reducer.graph.is_being_counted
            if counts_graph:
                _check_seen(output)
            # A backward that raised has dropped what it had queued. An assignment to a module takes a microsecond.
            if self._static_graph_delay_allreduce_enqueued is counts_graph:
                self._static_graph_delay_allreduce_enqueued = not counts_graph
        return super()._post_forward(output)

    # ---- what a training loop says and asks -----------------------------------------------------------------------

    def batch_weight(self, weight: float | torch.Tensor | None) -> None:
        """Let the next backward average by samples; call it in every step before forward, on every rank or on none.

        Gradients become those of one process over all ranks' samples: sum(weight * gradient) / sum(weight). The weight
        counts for all that ``no_sync`` accumulated before; the exchange takes it, and a later backward without a
        weight of its own is an error. docs/recipes/uneven_devices.md

        Args:
            weight: how many samples (or tokens) the mean loss of this rank's batch is over. 0 means no say; where all
                ranks have none, gradients are zeros, and under "sync-server" None: the step is left out. None: from now
                on all ranks count alike.

        Raises:
            ArgumentTypeError, ConfigurationError: it is no finite number >= 0, or this model's gradients cannot be
                weighed.
        """
        checks.check_all_in_buckets(self, "batch_weight")
        self.reducer.in_flight.averaging_weight.set_weight(checks.checked_weight(weight))

    def report(self, loss: float | torch.Tensor | None = None, samples: int | None = None) -> None:
        """Tell people how training goes here: the servers' dashboard, and Prometheus (PSENGINE_METRICS_PORT).

        It costs no message of its own: what was reported last travels with the next heartbeat.

        Args:
            loss: of this worker's latest step; a tensor of one element, on a device too, is read later.
            samples: how many samples that step took.
        """
        self.strategy.report(loss=loss, samples=samples)
        meter = None if self._delay_all_reduce_all_params else self.reducer.watched.meter
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
        buffers = self.modules_buffers if bufs is None else bufs
        self._buffer_broadcast.run(buffers, self._collective, authoritative_rank)

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
        if enable:  # before native DDP notes how to divide, which outlives a refusal
            checks.check_can_join(self, divides_by_all=divide_by_initial_world_size)
        return super().join(divide_by_initial_world_size, enable, throw_on_early_termination)  # type: ignore[no-any-return]

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The group in which ``Join`` counts."""
        if self.process_group is None:
            checks.check_can_join(self, divides_by_all=True)
        return self.process_group

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest rank of those whose ``rank_cond`` holds; every rank asks and gets the same answer."""
        mine = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        return max(int(t.item()) for t in self._collective.gather(mine, what="join: source of the model"))

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        """Whether any rank's next backward exchanges gradients; every rank asks once per iteration."""
        checks.check_can_join(self, divides_by_all=self._divide_by_initial_world_size)
        syncs = self.require_backward_grad_sync and not is_joined_rank
        weighs = syncs and self.reducer.in_flight.averaging_weight.weight is not None
        flags = torch.tensor([float(syncs), float(weighs)], device=self.device)
        self._collective.sum(flags, what="join: does anybody synchronise gradients")
        syncing_ranks, weighing_ranks = flags.tolist()
        self.reducer.in_flight.averaging_weight.shadows_weights = weighing_ranks != 0
        if syncing_ranks:
            self.reducer.compare_replicas(abstains=is_joined_rank)
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

    # ---- hooks and switches ------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` exchange each bucket; it returns a future of the bucket's new flat gradients.

        Gradients reach the hook undivided. Once only, before the first backward. See ``native_features.py``.

        Raises:
            ArgumentTypeError, ConfigurationError: not a hook; see ``check_comm_hook``.
            ReductionError: a hook is registered already.
        """
        native_features.check_comm_hook(self, hook)
        self._install_hook(state, hook, hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._install_hook(self.process_group, native_features.BUILTIN_HOOKS[comm_hook_type], str(comm_hook_type))

    def _install_hook(self, state: object, hook: Callable[..., Any], name: str) -> None:
        if self._delay_all_reduce_all_params:
            raise ModuleError("all parameters are in delay_all_reduce_named_params; there is no bucket for a hook")
        self.strategy.register_comm_hook(native_features.bucket_hook(state, hook, weakref.ref(self)))
        self.reducer.guard.is_early_step_allowed = True  # such a hook may step what it has exchanged
        self._comm_hooks.append((hook, state))
        self.logger.facts["comm_hook"] = name

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with another group of replicas; buckets are rebuilt. Communication hooks must be moved separately."""
        checks.check_has_group(self.strategy, "_update_process_group", "Workers join and leave the servers instead.")
        if dist.distributed_c10d._rank_not_in_group(new_process_group):
            return
        if not isinstance(self._collective_choice, str):
            raise ConfigurationError("the collective object that was passed as collective= cannot change its group")
        for optimizer in self._optimizers:
            check_whole_state(optimizer)
        self.process_group = new_process_group
        self._collective = collective_for(new_process_group, self._collective_choice, self.device)
        self._go_on()

    def _go_on(self, idle: Set[str] = frozenset()) -> None:
        """``_restart`` under the same strategy, which keeps its state."""
        kept = self.strategy.state_dict()
        self.strategy.close()
        self._restart(init_sync=False, idle=idle)
        self.strategy.load_state_dict(self.strategy.state_dict() | kept)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts and times of this replica under native DDP's names."""
        return native_features.describe_replica(self)

    def switch_strategy(self, strategy: str | Strategy) -> None:
        """Go on under another strategy; all ranks call it between two steps, and weights stay as they are.

        Before it changes anything, every rank checks whether the new strategy can serve this model and whether its
        servers are up; they have to be named, or started by ``psengine run --servers``. The old strategy then ends the
        round that is under way, which makes replicas equal where they are not. Optimizers that
        ``psengine.DistributedOptimizer`` returned go on, with their state where both strategies have it.

        Args:
            strategy: as for the constructor.

        Raises:
            ConfigurationError, ServerLostError: it cannot take over, on this rank or another; nothing has changed.
            CollectiveError, ServerError: the old strategy could not end its round; it remains.
            ReductionError: the new strategy failed after all that, as where its server died. The model has no strategy
                then, and its forward raises this error again. ``model.module`` and ``optimizer.state_dict()`` are those
                of the round's end: save them, or wrap the module again.
        """
        switching.switch_strategy(self, strategy)

    def check_replicas(self) -> None:
        """Compare the parameters of all replicas now, bit by bit; all ranks call it, between two steps.

        Raises:
            ReplicasDivergedError: they differ; names the first parameter, the workers, and the cause if it is found.
            ConfigurationError: this strategy keeps replicas apart, or compares them only while they train.
        """
        watch, step = self.reducer.watch, self.reducer.completed_steps
        if not self.strategy.capabilities.needs_process_group or self.strategy.equal_after(step) is None:
            raise ConfigurationError(
                f"strategy {self.strategy!r} does not keep replicas equal here, or compares them itself (expected one"
                " such as 'sync', or 'local' between two rounds). Fix: leave out check_replicas()"
            )
        now = replace(watch, choice="error", verdict=None)
        compare_over(self._collective, now, step - watch.first_step, is_urgent=True)
        watch.equal_step = now.equal_step

    def leave(self) -> None:
        """Take no more part: say goodbye to the servers, so that nobody waits for this worker. Safe to call twice.

        The end of the process does so too. The module keeps its values: evaluate or save ``model.module``. Strategies
        over collectives hold nothing that others wait for; there ranks without data stay inside ``join()``.
        """
        self._tables.close()
        self.strategy.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, also those of tables on servers."""
        super().zero_grad(set_to_none)
        self._tables.drop()

    # ---- checkpoints and copies --------------------------------------------------------------------------------

    def register_state(self, name: str, holder: Any) -> None:
        """Let workers that join, and checkpoints, have ``holder``'s state too; on every worker, before the first step.

        Args:
            name: another one for each holder.
            holder: has ``state_dict`` and ``load_state_dict``: a scheduler, a ``GradScaler``, averaged weights.
                Parameters, buffers and distributed optimizers need no registration.

        Raises:
            ConfigurationError: the strategy has no virtual workers, or the name is taken.
            ArgumentTypeError: ``holder`` is none, or its state has other than tensors, numbers, text and containers.
        """
        self.strategy.player.state.register(name, holder)

    def checkpoint_every(self, steps: int, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint after each multiple of ``steps``, and begin with the newest that any worker has.

        One worker writes, in a thread. The last two stay; a damaged one is named in the log and skipped. Call it on
        every worker, before the first step. A job that begins anew needs another directory.

        Raises:
            ConfigurationError: the strategy has no virtual workers, or ``steps`` is no number of steps.
            OSError: the directory cannot be made.
        """
        self.strategy.player.checkpoint_every(steps, directory)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saves_strategy_state:
            state = {"name": self.strategy.name, "state": self.strategy.state_dict()}
            destination[prefix + STRATEGY_STATE_KEY] = state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *others: Any
    ) -> None:
        entry = state_dict.pop(prefix + STRATEGY_STATE_KEY, None)
        if entry is not None:
            checks.check_strategy_state(entry["name"], self.strategy, STRATEGY_STATE_KEY)
            self.strategy.load_state_dict(entry["state"])
        elif self.saves_strategy_state and strict:
            missing_keys.append(prefix + STRATEGY_STATE_KEY)
        self._loads_strategy_state = entry is not None
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)

    def _begin_load(self) -> None:
        """Called by ``model.load_state_dict`` and by ``model.module.load_state_dict``."""
        self._loaded_after = self.reducer.completed_steps
        if not self._loads_strategy_state:
            self.strategy.restart()
        self._loads_strategy_state = False

    def __getstate__(self) -> dict[str, Any]:
        if self._tables:
            raise ModuleError(
                "a wrapped model with tables on servers cannot be copied, because its tables cannot (expected"
                " model.module, whose copies read the same tables, got the wrapper)"
            )
        if self.process_group is not None or self.strategy.capabilities.needs_process_group:
            self._check_default_group()
        attributes = copy.copy(self.__dict__)
        of_this_process = "process_group reducer logger _tables _collective _buffer_broadcast _optimizers _finalizer"
        for name in of_this_process.split():
            attributes.pop(name, None)
        attributes.pop("_load_hook", None)  # the copy's module has none
        if not isinstance(self._collective_choice, str):
            attributes["_collective_choice"] = "auto"  # the object belongs to this process
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = checks.default_group(state["strategy"])
        torch.nn.Module.__setstate__(self, state)
        self.logger = native_features.LoggingData()
        self._collective = collective_for(self.process_group, self._collective_choice, self.device)
        self._buffer_broadcast = BufferBroadcast()
        self._optimizers = weakref.WeakSet()
        self._tables = Tables({})
        with_buffers = self.forward_sync_buffers and self.strategy.capabilities.carries_buffers
        self._start(init_sync=False, init_sync_buffers=with_buffers, static_graph=self.static_graph)


def _facts(reference: weakref.ref[DistributedDataParallel]) -> dict[str, str]:
    """What this process knows of a replica beside its parameters, for a comparison: name to value."""
    model = reference()
    if model is None:
        return {}
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    facts = {"machine": f"{capability}, {threads} threads, {model.device.type}, torch {torch.__version__}"}
    guard = model.reducer.guard
    done = {
        "the last step on gradients that were not exchanged": guard.last_violation,
        "the last load_state_dict, after step": model._loaded_after,
    }
    facts |= {name: str(value) for name, value in done.items() if value is not None}
    for optimizer in guard.optimizers:
        for index, group in enumerate(optimizer.param_groups):
            plain = {key: value for key, value in group.items() if isinstance(value, float | int | str | tuple)}
            facts |= {f"{key} of {type(optimizer).__name__}'s group {index}": str(plain[key]) for key in plain}
    return facts


def _exchanges(reference: weakref.ref[DistributedDataParallel]) -> int:
    """How many backwards of a model have exchanged gradients."""
    model = reference()
    return 0 if model is None else model.reducer.completed_steps


def _lay_out_again(reference: weakref.ref[DistributedDataParallel], idle: Set[str]) -> None:
    """Parameters of a model were thawed, but not those of the names ``idle``."""
    if (model := reference()) is not None:
        model._go_on(idle)


def _release(reducer: Reducer, strategy: Strategy) -> None:
    reducer._remove_autograd_hooks()
    strategy.abandon()


def _check_seen(output: Any) -> None:
    """Raise where native DDP's sink, through which the tensors of ``output`` go, would not see backward begin."""
    leaves, _, _ = native._tree_flatten_with_rref(output)
    if not any(map(_has_history, leaves)) and any(map(_has_history, native._find_tensors(output))):
        raise ModuleError(
            f"static_graph=True must see backward begin, but the tensors of the output ({type(output).__name__})"
            " stand in a class that torch.utils._pytree does not know. Return a tuple or dict, or register the"
            " class with torch.utils._pytree.register_dataclass or register_pytree_node."
        )


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def reducible_parameters(module: torch.nn.Module, ignored: Set[str]) -> dict[str, torch.nn.Parameter]:
    """Name to parameter, in model order, for those whose gradients are exchanged."""
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and name not in ignored:
            names.setdefault(parameter, name)
    return {name: parameter for parameter, name in names.items()}


def find_parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    """The parameter that ``module`` has under ``name`` now; None where it has none."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        return None


def has_sparse_gradient(module: torch.nn.Module, name: str) -> bool:
    """Whether the parameter ``name`` belongs to an embedding with sparse gradients."""
    owner = module.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and owner.sparse


def named_buffers(module: torch.nn.Module, ignored: Set[str]) -> dict[str, torch.Tensor]:
    """Name to buffer, without duplicates and without the ``ignored`` names."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def shared_state(module: torch.nn.Module, ignored: Set[str], *, with_buffers: bool) -> dict[str, torch.Tensor]:
    """The tensors that must be equal on all replicas, by name: parameters and buffers, detached."""
    state = {name: p for name, p in module.named_parameters() if name not in ignored}
    buffers = named_buffers(module, ignored) if with_buffers else {}
    return {name: tensor.detach() for name, tensor in (state | buffers).items()}


def other_names(module: torch.nn.Module, state: Collection[str]) -> OtherNames:
    """The further names of the tensors in ``state``, and which of them ``module.state_dict()`` leaves out."""
    found = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    first = {id(tensor): name for name, tensor in reversed(found.items()) if name in state}
    tied = {name: first[id(tensor)] for name, tensor in found.items() if name not in state and id(tensor) in first}
    unsaved = {
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    return OtherNames(tied=tied, unsaved=frozenset(unsaved & found.keys()))


class LoadHook:
    """Tells a wrapper that its module begins to load. In copies and pickles of the module it is a function of torch."""

    def __init__(self, begin: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._begin = begin

    def __call__(self, *_: Any) -> None:
        if begin := self._begin():
            begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (torch.nn.Identity,)  # takes whatever a hook is given
