"""Runs torch's GPU tests of DistributedDataParallel on the CPU: their subject is the reducer, not the device."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from support.native_class import drop_devices
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")


def ignore_gpu_demands() -> None:
    """Make the suite's decorators that skip for want of GPUs do nothing; before ``distributed_test`` is imported."""
    common_distributed.skip_if_no_gpu = _undecorated
    common_distributed.skip_if_lt_x_gpu = lambda x, *, allow_cpu=False: _undecorated


def pretend_gpus(device_count: int, wrapper_class: type[torch.nn.Module]) -> None:
    """Make this process's ``torch.cuda`` harmless and ``wrapper_class`` deaf to ``device_ids`` and ``output_device``.

    Tensors stay on the CPU while ``CudaMeansCpu`` is active. ``torch.cuda.is_available()`` keeps telling the truth.
    """
    torch.cuda.device_count = lambda: device_count
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.stream = contextlib.nullcontext
    torch.accelerator.current_stream = lambda device=None: InstantStream()
    torch.cuda.Stream = InstantStream
    torch.Stream = InstantStream
    torch.Event = InstantEvent
    drop_devices(wrapper_class, [])


class CudaMeansCpu(TorchFunctionMode):
    """Turns every CUDA device in this thread's torch calls into the CPU; where a device may stand, so may a number."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *(_on_cpu(argument) for argument in args[1:]))
        if function is torch._C._nn._parse_to:  # Module.to's arguments
            args = tuple(_on_cpu(argument) for argument in args)
        if function is torch.device and len(args) == 1 and not kwargs:
            return _on_cpu(function(*args) if isinstance(args[0], str) else args[0])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)


class InstantStream(contextlib.nullcontext):
    """A stream on which everything is done as soon as it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def synchronize(self, other: object = None) -> None:
        """Nothing is pending."""

    wait_stream = wait_event = synchronize


class InstantEvent:
    """An event of an ``InstantStream``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        """Nothing is pending."""

    record = wait


def _on_cpu(device: Any) -> Any:
    names_gpu = (
        (isinstance(device, int) and not isinstance(device, bool))
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )
    return CPU if names_gpu else device


def _undecorated(test: Callable[..., None]) -> Callable[..., None]:
    return test
