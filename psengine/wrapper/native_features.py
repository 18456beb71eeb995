"""What native DDP offers beside its exchange: communication hooks, delayed all-reduces, mixed precision, logging data.

Communication hooks are user code in place of the all-reduce, with native DDP's calling convention.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import distributed as native

from psengine.collectives.base import Collective
from psengine.environment.variables import inherited_variables
from psengine.errors import ArgumentTypeError, CommunicationHookError, ConfigurationError
from psengine.gradients.reducer import Reducer
from psengine.tensors.bucket import Bucket

UserHook = Callable[..., "torch.futures.Future[torch.Tensor]"]
BUILTIN_HOOKS: dict[Any, UserHook] = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
# C++ names, as native DDP prints them.
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_GLOO_VARIABLES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_is_registered = False


class GradBucket:
    """A packed bucket as a communication hook sees it; the interface of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """Place in the order of reduction, 0 first; may change once, when buckets are rebuilt."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The flat gradients, not divided by the world size."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat gradients, for example by a compressed copy."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Per parameter its part of ``buffer()``, row-major whatever the parameter's strides."""
        if self._bucket.sparse:
            return [self._buffer]
        parts = self._buffer.split([parameter.numel() for parameter in self._bucket.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._bucket.parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The bucket's parameters, in the order of ``gradients()``."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last


def check_comm_hook(replica: Any, hook: Any) -> None:
    """Raise unless ``hook`` has the signature ``hook(state, bucket) -> Future[Tensor]``; annotations are optional.

    Raises:
        ArgumentTypeError: not callable.
        ConfigurationError: other parameters, or annotated with other types.
    """
    if not callable(hook):
        replica._log_and_throw(ArgumentTypeError, f"Communication hook must be callable. (got {type(hook).__name__})")
    try:
        signature = inspect.signature(hook, eval_str=True)  # ``from __future__ import annotations`` leaves text
    except (NameError, SyntaxError, TypeError):
        signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is None or bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket, GradBucket):
        replica._log_and_throw(
            ConfigurationError,
            "Communication hook: bucket annotation should be dist.GradBucket. (expected parameters (state, bucket), got"
            f" {signature})",
        )
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        replica._log_and_throw(
            ConfigurationError,
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. (got {returned})",
        )


def bucket_hook(state: object, hook: UserHook, replica_reference: weakref.ref[Any]) -> Callable[[Bucket], Any]:
    """Adapt a user's hook, and its first argument, to what the strategy of a wrapped model calls."""

    def run(bucket: Bucket) -> torch.futures.Future[Any]:
        replica = replica_reference()
        assert replica is not None, "a backward outlived its model"
        future = hook(state, GradBucket(bucket, is_last=bucket.index == len(replica.reducer.buckets) - 1))
        # torch._C.Future is what C++ returns (Work.get_future); torch.futures.Future derives from it.
        if not isinstance(future, torch._C.Future):
            raise CommunicationHookError(
                f"callback must return a torch.futures.Future object, but got {type(future).__module__}."
                f"{type(future).__qualname__} from communication hook {getattr(hook, '__qualname__', hook)!r}. Fix:"
                " future = torch.futures.Future(); future.set_result(gradients); return future"
            )
        return future

    return run


def sum_over_group(replica_reference: weakref.ref[Any], bucket: Any) -> Any:
    """Sum the bucket's buffer, undivided, over the ranks of the wrapped model; a future of the buffer."""
    replica = replica_reference()
    assert replica is not None, "a backward outlived its model"
    work = replica.process_group.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


def delay_all_reduce(replica: Any, trigger: Any, collective: Collective) -> None:
    """Let delayed gradients be views of one flat tensor, all-reduced when the parameter ``trigger`` gets its gradient.

    What ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` ask for: a pipeline stage runs several
    micro-batches and exchanges the gradients of all of them at once.

    Native DDP's ``_clear_grad_buffer`` hands the views out after each forward. The delayed parameters, of one dtype and
    device, are made equal to rank 0's here.
    """
    parameters = replica._delay_all_reduce_params
    sizes = [p.numel() for p in parameters]
    flat = parameters[0].new_zeros(sum(sizes))
    replica._delay_grad_buffer = flat
    replica._delay_grad_views = [v.view(p.shape) for v, p in zip(flat.split(sizes), parameters, strict=True)]
    collective.broadcast([p.detach() for p in parameters], 0, what="delayed parameters").wait()

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        # The trigger may come before the delayed gradients of the same backward, as native DDP allows; the exchange
        # itself is over before backward returns.
        # Divided, as native DDP does: a product with the reciprocal rounds otherwise.
        work = collective.all_reduce(flat.div_(collective.world_size), 1.0, what="delayed gradients")
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]  # for None
        return gradient

    weakref.finalize(replica, trigger.register_hook(reduce).remove).atexit = False


def set_up_mixed_precision(replica: Any) -> None:
    """Add native DDP's casts around forward, and the hook that reduces in the lower precision, to a wrapped model.

    Native's own functions and hooks do the work of its experimental ``mixed_precision``; this connects them to our
    reducer.

    Mutates the module: its buffers are cast, its parameters and submodules get attributes and hooks.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
        _AllreduceUpcastHookState,
        _reducer_allreduce_and_upcast_hook,
    )

    for index, parameter in enumerate(replica.reducer.parameters):
        parameter._idx = index
    native._setup_mixed_precision_params(replica.mixed_precision, replica.module)
    native._cast_buffers(replica.mixed_precision, replica.module)
    # Read by native DDP's forward hooks, which the wrapper inherits.
    replica._mp_stream = torch.Stream()
    replica._submodule_to_event = defaultdict(deque)
    replica.module.register_forward_pre_hook(replica._root_copy_hook, prepend=False, with_kwargs=True)
    for module in replica.module.modules():
        module.register_forward_pre_hook(replica._module_wait_for_copy_hook, prepend=False, with_kwargs=True)
    state = _AllreduceUpcastHookState(ddp_weakref=weakref.ref(replica), upcast_stream=torch.Stream())
    replica.register_comm_hook(state, _reducer_allreduce_and_upcast_hook)


class LoggingData:
    """Facts about one wrapped model as they happen; in the place of ``torch.distributed.Logger``, with its methods."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def set_error_and_log(self, message: str) -> None:
        """Keep the newest error."""
        self.facts.update(has_error=1, error=message)

    def set_runtime_stats_and_log(self) -> None:
        """The reducer measures by itself."""

    def _set_uneven_input_join(self) -> None:
        self.facts["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.facts["static_graph"] = 1


def describe_replica(replica: Any) -> dict[str, Any]:
    """Return the logging data of one wrapped model: text and integers; times in nanoseconds, sizes in bytes."""
    return {
        "iteration": 0,
        **_describe_group(replica.process_group),
        "module_name": type(replica.module).__name__,
        "device_ids": _joined(replica.device_ids or ()),
        "output_device": -1 if replica.output_device is None else replica.output_device,
        "broadcast_buffers": int(replica.forward_sync_buffers),
        "bucket_cap_bytes": replica.bucket_bytes_cap,
        "find_unused_parameters": int(replica.find_unused_parameters),
        "gradient_as_bucket_view": int(replica.gradient_as_bucket_view),
        "is_multi_device_module": int(replica.is_multi_device_module),
        "static_graph": int(replica.static_graph),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in replica.module.modules())),
        "strategy": replica.strategy.name,
        **_describe_buckets(replica.reducer),
        **replica.reducer.watched.published,
        **replica.logger.facts,
    }


def _describe_group(process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    if process_group is None:
        return {"world_size": 1, "rank": 0, "backend_name": "none"}
    backend = dist.get_backend(process_group)
    facts = {"world_size": process_group.size(), "rank": process_group.rank(), "backend_name": backend}
    variables = inherited_variables()
    names = _VARIABLES + _GLOO_VARIABLES if backend == "gloo" else _VARIABLES
    facts |= {name.lower(): variables.get(name, "N/A") for name in names}
    if backend == "gloo":
        facts["gloo_num_threads"] = 2  # torch's own default, which it does not export (ProcessGroupGloo.hpp)
    return facts


def _describe_buckets(reducer: Reducer) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "num_parameter_tensors": len(reducer.parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
        "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in reducer.parameters})),
        "bucket_sizes": _joined(reducer.initial_bucket_sizes_bytes),
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        "num_buckets_reduced": reducer.in_flight.buckets_reduced,
        "unused_parameter_size": sum(reducer.parameters[index].nbytes for index in reducer.graph.unused),
        "prev_iteration_grad_ready_order_indices": _joined(reducer.ready_order),
    }
    if reducer.has_rebuilt_buckets:
        indices = [" ".join(str(i) for i in bucket.parameter_indices) for bucket in reducer.buckets]
        facts["rebuilt_bucket_sizes"] = _joined([bucket.size_bytes for bucket in reducer.buckets])
        facts["rebuilt_per_bucket_param_indices"] = _joined(indices)
    return facts


def _joined(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def stay_out_of_graphs() -> None:
    """Once dynamo is loaded, tell it to run psengine's own frames as plain Python and compile only what they call.

    torch._dynamo is not imported here: loading it takes seconds, and most programs never do.
    Without this it would trace hooks, timers and bucket views piece by piece. Cheap enough for every forward.
    """
    global _is_registered
    if not _is_registered and (rules := getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)) is not None:
        rules.add("psengine")
        _is_registered = True


def traces_gradient_exchange() -> bool:
    """Whether dynamo is set to trace gradient exchange itself (``optimize_ddp = "python_reducer"``)."""
    utils = getattr(sys.modules.get("torch._dynamo"), "utils", None)
    return utils is not None and utils.get_optimize_ddp_mode() == "python_reducer"
