"""psengine's wrapper in the place of torch's, in programs that were written for GPUs."""

import functools
from typing import Any

import torch
import torch.nn.parallel.distributed
from torch import nn


def replace_native_class() -> Any:
    """Put psengine's class wherever a program finds torch's by name; return it."""
    from psengine.wrapper.ddp import DistributedDataParallel

    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    return DistributedDataParallel


def drop_devices(wrapper_class: Any, wrapped: list[nn.Module]) -> None:
    """Make the class deaf to ``device_ids`` and ``output_device``; ``wrapped`` grows by each module that it wraps."""
    # In place, because the class's identity matters to isinstance, pickle and its own class attributes.
    construct = wrapper_class.__init__

    @functools.wraps(construct)
    def construct_on_cpu(
        self: nn.Module,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        *rest: Any,
        **options: Any,
    ) -> None:
        wrapped.append(module)
        construct(self, module, None, None, *rest, **options)

    wrapper_class.__init__ = construct_on_cpu
