"""What a wrapped model tells of itself, under native DDP's names (``_get_ddp_logging_data``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from psengine.environment.variables import inherited_variables
from psengine.gradients.reducer import Reducer

# C++ names, as native DDP prints them.
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_GLOO_VARIABLES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")


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
