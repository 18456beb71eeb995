"""The first and the last lines of every native twin: what ``psengine.init()`` and ``psengine.shutdown()`` do."""

import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def in_native_world(train: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``train`` run in a group with the other ranks that torchrun started; its first argument is the device."""

    @functools.wraps(train)
    def run(*arguments: Any) -> Any:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            return train(device, *arguments)
        finally:
            # A model that outlives the group's end keeps its threads, and may wait for them for ever when it goes.
            gc.collect()
            dist.destroy_process_group()

    return run
