"""What a wrapped model tells of itself, under native DDP's names (``_get_ddp_logging_data``)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from psengine.environment.variables import read_variable
from psengine.gradients.reducer import Reducer
from psengine.strategies.base import Strategy

# C++ names, as native DDP prints them.
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_BACKEND_VARIABLES = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}
# torch's own default, which it does not export to Python (ProcessGroupGloo.hpp).
_GLOO_THREADS = 2


class LoggingData:
    """What happened to one wrapped model (errors, hooks, joins); the rest is read off it when asked.

    Stands in for ``torch.distributed.Logger``, with the methods of it that frameworks call.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def set_error_and_log(self, message: str) -> None:
        """Keep the newest error."""
        self.facts["has_error"] = 1
        self.facts["error"] = message

    def _set_uneven_input_join(self) -> None:
        self.facts["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.facts["static_graph"] = 1


class Describable(Protocol):
    """What is told of a wrapped model."""

    module: torch.nn.Module
    reducer: Reducer
    strategy: Strategy
    logger: LoggingData
    process_group: dist.ProcessGroup | None
    device_ids: Any
    output_device: Any
    forward_sync_buffers: Any
    bucket_bytes_cap: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    is_multi_device_module: bool
    static_graph: bool


def describe_replica(replica: Describable) -> dict[str, Any]:
    """Return the logging data of one wrapped model: text and integers; times in nanoseconds, sizes in bytes."""
    facts: dict[str, Any] = {"iteration": 0}
    facts.update(_describe_group(replica.process_group))
    facts.update(_describe_arguments(replica))
    facts.update(_describe_buckets(replica))
    facts.update(replica.reducer.timer.snapshot())
    facts.update(replica.logger.facts)
    return facts


def _describe_group(process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    if process_group is None:
        return {"world_size": 1, "rank": 0, "backend_name": "none"}
    backend = dist.get_backend(process_group)
    facts: dict[str, Any] = {
        "world_size": process_group.size(),
        "rank": process_group.rank(),
        "backend_name": backend,
    }
    facts.update({name.lower(): _variable(name) for name in _VARIABLES})
    facts.update({key: _variable(name) for key, name in _BACKEND_VARIABLES.get(backend, {}).items()})
    if backend == "gloo":
        facts["gloo_num_threads"] = _GLOO_THREADS
    return facts


def _variable(name: str) -> str:
    value = read_variable(name)
    return "N/A" if value is None else value


def _describe_arguments(replica: Describable) -> dict[str, Any]:
    return {
        "module_name": type(replica.module).__name__,
        "device_ids": ", ".join(str(d) for d in replica.device_ids or ()),
        "output_device": -1 if replica.output_device is None else replica.output_device,
        "broadcast_buffers": int(replica.forward_sync_buffers),
        "bucket_cap_bytes": replica.bucket_bytes_cap,
        "find_unused_parameters": int(replica.find_unused_parameters),
        "gradient_as_bucket_view": int(replica.gradient_as_bucket_view),
        "is_multi_device_module": int(replica.is_multi_device_module),
        "static_graph": int(replica.static_graph),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in replica.module.modules())),
        "strategy": replica.strategy.name,
    }


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _describe_buckets(replica: Describable) -> dict[str, Any]:
    reducer = replica.reducer
    sizes = ", ".join(str(bucket.size_bytes) for bucket in reducer.buckets)
    kinds = sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in reducer.parameters})
    facts: dict[str, Any] = {
        "num_parameter_tensors": len(reducer.parameters),
        "total_parameter_size_bytes": sum(_size_bytes(p) for p in reducer.parameters),
        "dtypes": ", ".join(kinds),
        "bucket_sizes": ", ".join(str(size_bytes) for size_bytes in reducer.initial_bucket_sizes_bytes),
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        "num_buckets_reduced": reducer.flight.buckets_reduced,
        "unused_parameter_size": sum(_size_bytes(reducer.parameters[index]) for index in reducer.graph.usage.unused),
        "prev_iteration_grad_ready_order_indices": ", ".join(str(i) for i in reducer.ready_order),
    }
    if reducer.has_rebuilt_buckets:
        indices = [" ".join(str(i) for i in bucket.parameter_indices) for bucket in reducer.buckets]
        facts["rebuilt_bucket_sizes"] = sizes
        facts["rebuilt_per_bucket_param_indices"] = ", ".join(indices)
    return facts
