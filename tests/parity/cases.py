"""The ways of training in which every bit has to equal native DDP's: models of verify's zoo, as targets of verify."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from psengine.verify.zoo import (
    ZOO,
    Batch,
    Checkpointed,
    Convolutional,
    cross_entropy,
    images,
    mlp,
    routed,
    vectors,
)

NATIVE_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters.keys()
# As this torch calls it.
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in NATIVE_OPTIONS else "broadcast_buffers"
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Cell:
    """How a case is trained: ``optimizer`` is "sgd" or "adamw"; ``accumulate`` splits a step into two micro-batches."""

    optimizer: str
    accumulate: bool

    def __str__(self) -> str:
        return f"{self.optimizer}{'-accumulate' if self.accumulate else ''}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and the way it is trained.

    Attributes:
        module: makes the model.
        batch: makes micro-batch ``index`` of a rank.
        options: keyword options of the wrapper.
        loss: of the wrapped model and a batch.
        hook: communication hook.
        set_to_none: how ``zero_grad`` is called.
        first_step_whole: accumulation begins in the second step.
        core: one of the models of which the quick suite has more than one cell.
        accumulates: whether there is an accumulating cell.
    """

    name: str
    module: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss = cross_entropy
    hook: Any = None
    set_to_none: bool = True
    first_step_whole: bool = False
    core: bool = False
    accumulates: bool = True

    def target(self, cell: Cell) -> tuple[Any, ...]:
        """What a target function of verify returns."""
        module = self.module()

        def batch(step: int, rank: int) -> list[Batch]:
            is_split = cell.accumulate and not (self.first_step_whole and step == 0)
            return [self.batch(2 * step + index, rank) for index in range(2 if is_split else 1)]

        hooked: list[nn.Module] = []

        def loss(model: Any, micro_batches: list[Batch]) -> Tensor:
            if self.hook is not None and not hooked:
                model.register_comm_hook(None, self.hook)
                hooked.append(model)
            *local, last = micro_batches
            for one in local:
                # Only the forward decides whether the backward reduces, but users put both inside.
                with model.no_sync():
                    (self.loss(model, one) / len(micro_batches)).backward()
            return self.loss(model, last) / len(micro_batches)

        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            made = make_optimizer(module, cell.optimizer)
            if not self.set_to_none:
                made.zero_grad = functools.partial(made.zero_grad, set_to_none=False)
            return made

        return module, batch, loss, optimizer, self.options


def make_optimizer(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    """SGD with momentum for all parameters, or AdamW for dense and SparseAdam for sparse gradients."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    sparse = {m.weight for m in module.modules() if getattr(m, "sparse", False)}
    if kind == "sgd":
        # Weight decay turns sparse gradients dense, which SGD refuses.
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.0 if sparse else 1e-4)
    dense = torch.optim.AdamW([p for p in parameters if p not in sparse], lr=2e-3)
    if not sparse:
        return dense
    return Both(dense, torch.optim.SparseAdam([p for p in parameters if p in sparse], lr=2e-3))


class Both(torch.optim.Optimizer):
    """Two optimizers that step one after the other."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()


def twice(model: nn.Module, batch: Batch) -> Tensor:
    """Two forwards, then one backward through both, as in contrastive and adversarial training."""
    inputs, targets = batch
    return cross_entropy(model, batch) + cross_entropy(model, (inputs.flip(0), targets.flip(0)))


def routed_alike(index: int, rank: int) -> Batch:
    """Every rank uses the same experts."""
    inputs, _, targets = routed(index, rank)
    return inputs, routed(index, 0)[1], targets


def small() -> nn.Module:
    return mlp(20, 48, 48, 10)


def of(model: str) -> dict[str, Any]:
    """Model, batches and loss of the zoo's."""
    return {"module": ZOO[model].module, "batch": ZOO[model].batch, "loss": ZOO[model].loss}


SMALL: dict[str, Any] = {"module": small, "batch": vectors(20, 10)}
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"bucket_cap_mb": 0.002, "find_unused_parameters": True}


def channels_last() -> nn.Module:
    return Convolutional(torch.channels_last)


_ALL_CASES = (
    Case(name="mlp", core=True, **SMALL, options={"bucket_cap_mb": 0.0018}),
    Case(name="mlp, default bucket sizes", module=lambda: mlp(20, 400, 400, 400, 10), batch=vectors(20, 10)),
    Case(
        name="mlp, bucket sizes listed",
        module=lambda: mlp(20, 48, 48, 48, 10),
        batch=vectors(20, 10),
        options={"bucket_cap_mb_list": [0.003, 0.012, 0.006]},
    ),
    Case(name="mlp, bucket views", **SMALL, options={"bucket_cap_mb": 0.005, **VIEWS}),
    Case(name="mlp, bucket views kept", **SMALL, options={"bucket_cap_mb": 0.005, **VIEWS}, set_to_none=False),
    Case(name="mlp, gradients kept", **SMALL, options={"bucket_cap_mb": 0.005}, set_to_none=False),
    Case(name="mlp, batched copy", **SMALL, options={"bucket_cap_mb": 0.005, "batched_grad_copy": True}),
    Case(
        name="mlp, half-precision hook",
        **SMALL,
        options={"bucket_cap_mb": 0.005},
        hook=default_hooks.fp16_compress_hook,
    ),
    Case(name="mlp, two forwards", **SMALL, options={"bucket_cap_mb": 0.005}, loss=twice),
    Case(
        name="many buckets",
        module=lambda: mlp(12, *[16] * 7, 4),
        batch=vectors(12, 4),
        options={"bucket_cap_mb": 0.001},
    ),
    Case(name="odd sizes", **of("odd"), options={"bucket_cap_mb": 0.0002}),
    Case(name="mixed dtypes", **of("mixed"), options={"bucket_cap_mb": 0.002}),
    Case(name="batch norm", core=True, **of("cnn"), options={"bucket_cap_mb": 0.002}),
    Case(name="batch norm, own buffers", **of("cnn"), options={"bucket_cap_mb": 0.002, SYNC_BUFFERS: False}),
    Case(name="channels last", module=channels_last, batch=images, options={"bucket_cap_mb": 0.002}),
    Case(
        name="channels last, bucket views",
        module=channels_last,
        batch=images,
        options={"bucket_cap_mb": 0.002, **VIEWS},
    ),
    Case(name="transformer", core=True, **of("transformer"), options={"bucket_cap_mb": 0.02}),
    Case(name="unused parameters", core=True, **of("unused"), options=UNUSED),
    Case(name="unused parameters, bucket views kept", **of("unused"), options={**UNUSED, **VIEWS}, set_to_none=False),
    Case(
        # Where ranks use different parameters, native DDP's skipping sends unequal sizes and gloo aborts the process.
        name="unused parameters, reduction skipped",
        **{**of("unused"), "batch": routed_alike},
        options={**UNUSED, "skip_all_reduce_unused_params": True},
        # Native forgets what no_sync used, skips its bucket and leaves the ranks with different gradients. Ours does
        # not: wrapper/test_ddp.py, test_what_no_sync_accumulates_is_exchanged.
        accumulates=False,
    ),
    Case(name="shared parameters", core=True, **of("tied"), options={"bucket_cap_mb": 0.0005}),
    Case(name="sparse embeddings", core=True, **of("sparse"), options={"bucket_cap_mb": 0.001}),
    Case(name="checkpointed", **of("checkpointed"), options={"bucket_cap_mb": 0.002}),
    Case(
        name="checkpointed, reentrant, static graph",
        core=True,
        module=lambda: Checkpointed(use_reentrant=True, reuse=True),
        batch=vectors(10, 4),
        options={"bucket_cap_mb": 0.002, "static_graph": True},
        first_step_whole=True,  # native DDP counts uses in the first backward and fails on an assertion if it is local
    ),
)

# An older torch's native DDP lacks some options.
CASES = tuple(case for case in _ALL_CASES if case.options.keys() <= NATIVE_OPTIONS)
CASES_BY_NAME = {case.name: case for case in CASES}
