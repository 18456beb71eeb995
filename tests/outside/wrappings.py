"""Whose class wraps the models of a program that knows nothing of psengine, and what the program is told of GPUs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Who wraps models, and the variables that say how their replicas agree.

    Attributes:
        name: for the ids of tests.
        by: "torch", "psengine" (its class in the place of torch's) or "accelerator" (``PSEngineAccelerator`` in the
            place of accelerate's).
        backend: of torch.distributed's default group; None leaves the choice to the program.
        environment: psengine's settings.
    """

    name: str
    by: str
    backend: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def needs_server(self) -> bool:
        return "server" in self.environment.get("PSENGINE_STRATEGY", "")

    @property
    def needs_shared_memory(self) -> bool:
        return self.backend == "psengine" or self.environment.get("PSENGINE_COLLECTIVE") == "shared_memory"

    def at(self, address: str, job: str) -> Wrapping:
        """The same, whose ranks meet at a server."""
        return replace(self, environment={**self.environment, "PSENGINE_SERVERS": address, "PSENGINE_JOB": job})


_C10D = {"PSENGINE_STRATEGY": "sync", "PSENGINE_COLLECTIVE": "c10d"}
_SHARED_MEMORY = {"PSENGINE_STRATEGY": "sync", "PSENGINE_COLLECTIVE": "shared_memory"}
_SERVER = {"PSENGINE_STRATEGY": "sync-server"}

NATIVE = Wrapping(name="native", by="torch")
C10D = Wrapping(name="sync-c10d", by="psengine", environment=_C10D)
SHARED_MEMORY = Wrapping(name="sync-shared_memory", by="psengine", environment=_SHARED_MEMORY)
SERVER = Wrapping(name="sync-server", by="psengine", environment=_SERVER)
BACKEND = Wrapping(name="native-over-psengine", by="torch", backend="psengine")
ACCELERATOR = Wrapping(name="accelerator-sync", by="accelerator", environment=_SHARED_MEMORY)
ACCELERATOR_SERVER = Wrapping(name="accelerator-sync-server", by="accelerator", environment=_SERVER)

# Ours; NATIVE is the oracle.
WRAPPINGS = (C10D, SHARED_MEMORY, SERVER, BACKEND, ACCELERATOR, ACCELERATOR_SERVER)


def install(wrapping: Wrapping) -> list[torch.nn.Module]:
    """Put ``wrapping``'s class where programs find it; return a list that grows by each module that is wrapped."""
    wrapper_classes: list[Any] = [torch.nn.parallel.DistributedDataParallel]
    if wrapping.by != "torch":
        from psengine.wrapper.ddp import DistributedDataParallel

        wrapper_classes.append(DistributedDataParallel)
    if wrapping.by == "psengine":
        torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
        torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    elif wrapping.by == "accelerator":
        import accelerate

        from psengine.integrations.accelerate import PSEngineAccelerator

        accelerate.Accelerator = accelerate.accelerator.Accelerator = PSEngineAccelerator
    if wrapping.backend is not None:
        import psengine  # noqa: F401  (makes its backend known)

        dist.init_process_group(wrapping.backend)
    wrapped: list[torch.nn.Module] = []
    for wrapper_class in wrapper_classes:
        _prepend_to_constructor(wrapper_class, wrapped)
    return wrapped


def _prepend_to_constructor(wrapper_class: Any, wrapped: list[torch.nn.Module]) -> None:
    # In place, because the class's identity matters to isinstance, pickle and its own class attributes.
    construct = wrapper_class.__init__

    @functools.wraps(construct)
    def construct_on_cpu(
        self: Any,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        wrapped.append(module)
        construct(self, module, None, None, *arguments, **options)

    wrapper_class.__init__ = construct_on_cpu


def start_accelerate(world_size: int, *, pretend_gpus: bool) -> None:
    """Make accelerate's state as its launcher does with ``--cpu``.

    Args:
        world_size: expected of the launcher's variables.
        pretend_gpus: let scripts do what they do on GPUs only, though every tensor stays on the CPU. What they skip
            elsewhere is no matter of the device: uneven inputs, accumulation with every kind of loader, and
            communication hooks in bfloat16, which native DDP takes where there is NCCL.
    """
    import accelerate
    from accelerate.utils import DistributedType

    state = accelerate.PartialState(cpu=True)
    if state.num_processes != world_size:
        raise RuntimeError(f"accelerate has not seen the launcher (expected {world_size} processes, got {state})")
    if pretend_gpus:
        state.distributed_type = DistributedType.MULTI_GPU
        torch.version.cuda = "13.0"
        torch.cuda.nccl.version = lambda: (2, 27)
        dist.is_nccl_available = lambda: True
