"""What a row is given: a wrapper, an optimizer, data; and what stays of the run, to be compared."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import psengine

Batch = tuple[Tensor, Tensor]
# Small buckets, so that the small models here have several.
BUCKET_CAP_MB = 0.0002
SERVER_TIMEOUT_S = 20.0
WIDTH, CLASSES = 6, 3


class Plain(nn.Module):
    """The oracle of one worker: no wrapper, but for the names that a script uses of one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@functools.cache
def backend_group() -> dist.ProcessGroup:
    """All ranks, over the backend "psengine"."""
    return dist.new_group(backend="psengine")


@dataclass
class Run:
    """One run of a row in one column, on one rank. A row uses what stands before the underscores.

    Attributes:
        column: "native", "plain", or one of the table's.
        directory: empty, the same for all ranks, for files.
        column_options: of the wrapper, where the row does not set them; native DDP's run has those of the column that
            is compared with it. A ``bucket_cap_mb`` of None is native DDP's default.
    """

    column: str
    job: str
    rank: int
    world_size: int
    directory: Path
    column_options: dict[str, Any] = field(default_factory=dict)
    _modules: list[nn.Module] = field(default_factory=list)
    _notes: list[Tensor] = field(default_factory=list)
    _strategies: list[Any] = field(default_factory=list)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """The model in this column's wrapper; it is compared at the end."""
        options = {**self.column_options, **options}
        if not {"bucket_cap_mb", "bucket_cap_mb_list"} & options.keys():
            options["bucket_cap_mb"] = BUCKET_CAP_MB
        model = self._wrapped(module, options)
        self.compare(model)
        return model

    def compare(self, model: nn.Module) -> None:
        """Compare a model too that ``wrap`` did not make, as a copy."""
        # Not the wrapper, which goes when the row lets go of it.
        self._modules.append(getattr(model, "module", model))

    def optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer as this column's users have it; over c10d they changed nothing but the class of the wrapper."""
        if self.column in ("native", "plain", "c10d", "backend"):
            return optimizer
        return psengine.DistributedOptimizer(optimizer, model)  # type: ignore[arg-type]

    def sgd(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """SGD with momentum over all parameters, where a row is about something else."""
        return self.optimizer(torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options}), model)

    def batches(self, steps: int = 3, size: int = 4) -> Iterator[Batch]:
        """This rank's inputs and labels."""
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            inputs = torch.randn(size, WIDTH, generator=generator)
            yield inputs, torch.randint(CLASSES, (size,), generator=generator)

    def training(
        self, optimizer: torch.optim.Optimizer, steps: int = 3, size: int = 4, batches: Iterable[Batch] | None = None
    ) -> Iterator[Batch]:
        """``batches``, with gradients zeroed before the loop's body and a step after it."""
        for batch in self.batches(steps, size) if batches is None else batches:
            optimizer.zero_grad()
            yield batch
            optimizer.step()

    def note(self, value: Tensor | float) -> None:
        """Compare a loss, or what else the row computed."""
        self._notes.append(torch.as_tensor(value).detach().clone())

    # ---- the runner's ----------------------------------------------------------------------------------------

    def _wrapped(self, module: nn.Module, options: dict[str, Any]) -> nn.Module:
        if self.column == "plain":
            return Plain(module)
        if self.column == "native":
            return NativeDDP(module, **options)
        if self.column == "backend":
            group = {} if {"process_group", "device_mesh"} & options.keys() else {"process_group": backend_group()}
            return NativeDDP(module, **group, **options)
        strategy: Any = "sync"
        if self.column in ("sync_server", "one_worker"):
            kind = psengine.SyncServer if self.column == "sync_server" else psengine.AsyncServer
            strategy = kind(job=f"{self.job}-{len(self._strategies)}", timeout_s=SERVER_TIMEOUT_S)
            self._strategies.append(strategy)
        else:
            options["collective"] = "c10d" if self.column in ("c10d", "batched") else "shared_memory"
        return psengine.DistributedDataParallel(module, **options, strategy=strategy)

    def state(self) -> dict[str, Tensor]:
        """Parameters, gradients, buffers and notes, by name."""
        found: dict[str, Tensor] = {}
        for index, module in enumerate(self._modules):
            owner = f"model {index}, " if len(self._modules) > 1 else ""
            for name, parameter in module.named_parameters():
                found[f"{owner}parameter {name}"] = parameter.detach()
                if parameter.grad is not None:
                    found[f"{owner}gradient of {name}"] = parameter.grad.detach()
            found.update({f"{owner}buffer {name}": buffer for name, buffer in module.named_buffers()})
        found.update({f"note {index}": note for index, note in enumerate(self._notes)})
        # A later run must not change what this one left.
        return {name: tensor.clone() for name, tensor in found.items()}

    def close(self) -> None:
        """Leave the servers."""
        for strategy in self._strategies:
            strategy.close()
