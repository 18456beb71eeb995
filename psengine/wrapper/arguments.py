"""What DistributedDataParallel accepts, and the words in which it refuses the rest; native DDP's where it has some."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.nn.parameter import UninitializedParameter

from psengine.collectives import registry
from psengine.environment.context import world_place
from psengine.environment.launchers import read_worker
from psengine.environment.variables import default_replica_check, inherited_variables
from psengine.errors import ArgumentTypeError, ConfigurationError, ModuleError, ReductionError
from psengine.strategies.base import Strategy
from psengine.strategies.replica_watch import CHOICES
from psengine.tensors.leaves import is_real_scalar, to_float


def check_module(module: Any) -> None:
    """Refuse what cannot be wrapped: other types, and modules that are wrapped already."""
    if not isinstance(module, torch.nn.Module):
        raise ModuleError(f"DistributedDataParallel wraps a torch.nn.Module (got {type(module).__name__})")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ModuleError(
            f"the module is wrapped already (got {type(module).__module__}.{type(module).__qualname__}); its gradients"
            " would be averaged twice. Wrap model.module, or use the wrapped model as it is."
        )


def choose_process_group(
    wrapper: Any, module: torch.nn.Module, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup | None:
    """The group of replicas, from the group, the 1-D mesh or the default; records the mesh on ``wrapper``.

    A mesh that is a slice of a larger one means tensor parallelism inside the replica; its parameters are turned into
    local tensors for the exchange, as native DDP does.
    """
    if process_group is not None and device_mesh is not None:
        raise ModuleError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        return default_group(wrapper.strategy) if process_group is None else process_group
    if device_mesh.ndim != 1:
        raise ModuleError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    wrapper.device_mesh = device_mesh
    if device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def default_group(strategy: Strategy) -> dist.ProcessGroup | None:
    """The default process group; None where there is none and ``strategy`` needs none."""
    group: dist.ProcessGroup | None = registry.default_group()
    if group is None and strategy.capabilities.needs_process_group:
        raise ModuleError(
            "Default process group has not been initialized, please make sure to call init_process_group (or"
            " psengine.init()) before wrapping a model."
        )
    return group


def check_delayed(
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None, trigger: Any, strategy: Strategy
) -> None:
    """Refuse ``delay_all_reduce_named_params`` by halves, and without a group."""
    if (named_parameters is None) != (trigger is None):
        raise ConfigurationError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    if named_parameters:
        check_has_group(strategy, "delay_all_reduce_named_params", "Fix: leave it out.")


def choose_replica_check(choice: str | None) -> str:
    """What ``check_replicas=choice`` means.

    Raises:
        ConfigurationError: nothing.
    """
    chosen = default_replica_check() if choice is None else choice
    if chosen not in CHOICES:
        raise ConfigurationError(f"check_replicas (expected one of {', '.join(map(repr, CHOICES))}, got {chosen!r})")
    return chosen


def check_virtual_workers(wrapper: Any, *, static_graph: bool) -> None:
    """Refuse what virtual workers, whose contributions stay apart until a step ends, cannot have."""
    if not wrapper.strategy.capabilities.has_virtual_workers:
        return
    # What is given, and what to write in its place.
    refused = {
        "static_graph=True": static_graph,
        "gradient_as_bucket_view=True": wrapper.gradient_as_bucket_view,
        "skip_all_reduce_unused_params=True": wrapper.skip_all_reduce_unused_params,
        "check_finite=True": wrapper.check_finite,
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(wrapper._delay_all_reduce_params),
        "forward_sync_buffers=False": not wrapper.forward_sync_buffers,
    }
    refused |= {
        f"torch.nn.SyncBatchNorm (layer {name!r})": True
        for name, layer in wrapper.module.named_modules()
        if isinstance(layer, torch.nn.SyncBatchNorm)
    }
    refused |= {f"tables on servers ({name!r})": True for name in wrapper._tables.layers}
    for what, is_given in refused.items():
        if is_given:
            raise ConfigurationError(
                f"strategy {wrapper.strategy!r} keeps the gradients of each batch apart until the step ends (expected"
                f" a model without {what}). Fix: leave it out; or leave out virtual_workers=."
            )


def check_all_in_buckets(wrapper: Any, what: str) -> None:
    """Refuse ``what`` looks at, or weighs, every gradient where some do not pass through buckets."""
    if wrapper._delay_all_reduce_params or wrapper._use_python_reducer:
        raise ConfigurationError(
            f"{what} is for gradients that pass through psengine's buckets (expected no delay_all_reduce_named_params,"
            " and torch._dynamo.config.optimize_ddp other than 'python_reducer', got one of them)"
        )


def check_meets_others(strategy: Strategy) -> None:
    """Refuse a strategy under which an independent worker would train alone, unnoticed."""
    worker, workers = read_worker(inherited_variables())
    is_alone = worker is not None and workers != 1 and world_place()[1] == 1
    if is_alone and strategy.capabilities.needs_process_group:
        raise ConfigurationError(
            f"independent worker {worker} would train alone (expected a strategy over servers, got {strategy.name!r}"
            f" with PSENGINE_WORKER={worker}). Fix: strategy='async' or 'sync-server'; or unset PSENGINE_WORKER."
        )


def check_has_group(strategy: Strategy, what: str, instead: str) -> None:
    """Refuse ``what`` needs a process group where the strategy has none; ``instead`` says what to do."""
    if not strategy.capabilities.needs_process_group:
        raise ConfigurationError(f"{what} is for strategies over collectives (got {strategy.name!r}). {instead}")


def check_can_join(wrapper: Any, *, divides_by_all: bool) -> None:
    """Refuse ``join`` where zeros from a rank without data would be applied, or counted in the wrong average."""
    strategy: Strategy = wrapper.strategy
    if wrapper._tables:
        raise ConfigurationError(
            "inside join, other workers would wait for the rows of a rank without data (expected a model without"
            " tables on servers, got some). Fix: give every rank as many batches."
        )
    knows_absent = strategy.capabilities.workers_step and not strategy.capabilities.has_virtual_workers
    if wrapper.process_group is None or not knows_absent:
        check_has_group(
            strategy,
            "join",
            "A worker without data leaves the servers instead: call model.leave(), and the others go on without it.",
        )
    if strategy.capabilities.counts_absent and not divides_by_all:
        raise ConfigurationError(
            f"strategy {strategy.name!r} divides by all ranks inside join (expected divide_by_initial_world_size=True,"
            " got False). Fix: leave it True, or use strategy='sync'."
        )


def check_can_transform(wrapper: Any) -> None:
    """Refuse a forward inside a torch.func transform, which may not write to the model, where buffers are broadcast."""
    if wrapper._collective.world_size > 1 and wrapper.will_sync_module_buffers():
        raise ReductionError(
            "a forward inside a torch.func transform cannot broadcast the model's buffers (expected a model without"
            f" buffers, got {next(wrapper.module.named_buffers())[0]!r}). Fix: transform model.module; or wrap the"
            " model with forward_sync_buffers=False."
        )


def check_strategy_state(name: str, strategy: Strategy, key: str) -> None:
    """Refuse a checkpoint that holds another strategy's state."""
    if name != strategy.name:
        raise ConfigurationError(
            f"the checkpoint holds the state of another strategy (expected {strategy.name!r}, got {name!r})."
            f" Fix: wrap the model with strategy={name!r}, or remove {key!r} from the checkpoint."
        )


def check_parameters(parameters: Sequence[torch.nn.Parameter], delayed: Sequence[torch.nn.Parameter]) -> None:
    """At least one parameter to exchange, all of them materialised."""
    if not any(p.requires_grad for p in parameters) and not delayed:
        raise ModuleError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
            " Fix: beside tables on servers train a dense parameter too, such as a bias."
        )
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise ModuleError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward"
            " pass to correctly initialize the modules"
        )


def check_devices(
    parameters: Sequence[torch.nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[torch.device, list[int] | None, int | None]:
    """The module's (first) device, and for a single-device GPU module the devices of its inputs and its output.

    Raises:
        ConfigurationError: ``device_ids`` or ``output_device`` contradict where the module is.
    """
    if device_ids is not None and (not isinstance(device_ids, (list, tuple)) or len(device_ids) > 1):
        raise ConfigurationError(f"device_ids can only be None or contain a single element. (got {device_ids!r})")
    devices = {p.device for p in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ConfigurationError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters"
            f" locate in {types}."
        )
    device = parameters[0].device
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ConfigurationError(
                "DistributedDataParallel device_ids and output_device arguments only work with"
                " single-device/multiple-device GPU modules or CPU modules, but got device_ids"
                f" {device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return device, None, None
    output_device = device_ids[0] if output_device is None else output_device
    return device, [_get_device_index(d, True) for d in device_ids], _get_device_index(output_device, True)


def check_state(state: Mapping[str, torch.Tensor]) -> None:
    """Every tensor to share must be one that can be received into, on every rank alike."""
    for name, tensor in state.items():
        is_strided = tensor.device.type != "meta" and tensor.layout is torch.strided
        if not is_strided or torch._debug_has_internal_overlap(tensor) == 1:
            raise ModuleError(
                f"{name!r} cannot be received into (expected a strided tensor with a place in memory for each element,"
                f" got {tensor.layout} on {tensor.device}, strides {tensor.stride() if is_strided else None}). Fix:"
                " module.to_empty(device=...) off the meta device, .to_dense() of sparse, .clone() of expanded tensors."
            )


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """(before each forward, at construction) from the two arguments, of which the first is deprecated."""
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated, and ignored beside `forward_sync_buffers`. Use `forward_sync_buffers`"
            " instead; its False still syncs buffers at construction, where that of `broadcast_buffers` does not.",
            FutureWarning,
            stacklevel=3,  # at the caller of DistributedDataParallel(...)
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    return (True, True) if broadcast_buffers is None else (broadcast_buffers, broadcast_buffers)


def checked_weight(value: Any) -> float | None:
    """Return what a user passed to ``batch_weight`` as a float; None stays None.

    Raises:
        ArgumentTypeError: no real number.
        ConfigurationError: negative, or not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or is_real_scalar(value)):
        raise ArgumentTypeError(
            "batch_weight is one real number, such as how many samples this rank's batch has (expected a float or None,"
            f" got {type(value).__name__})"
        )
    weight = to_float(value)
    if not 0 <= weight < math.inf:
        raise ConfigurationError(
            f"batch_weight says how much this rank's gradients count (expected a finite number >= 0, got {weight})."
            " Fix: len(batch); 0 for a batch that is to have no say."
        )
    return weight
