"""Trains one model under two wrappers in lockstep and says where, if anywhere, they first differ by a bit."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from parity.models import CASES_BY_NAME, Batch, Case
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

STEPS = 100
MODEL_SEED = 20
_SAME_WIDTH_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Cell:
    """One way to train: ``optimizer`` is "sgd" or "adamw"; ``accumulate`` splits a step into two micro-batches."""

    optimizer: str
    accumulate: bool

    def __str__(self) -> str:
        return f"{self.optimizer}{'-accumulate' if self.accumulate else ''}"


@dataclass(frozen=True)
class Outcome:
    """What one rank saw in one cell; it equals the reference if both texts are None."""

    tensors_compared: int
    final_loss: float
    difference: str | None = None
    error: str | None = None


CELLS = tuple(Cell(optimizer, accumulate) for optimizer in ("sgd", "adamw") for accumulate in (False, True))


def psengine_ddp(module: nn.Module, **options: object) -> nn.Module:
    import psengine
    from psengine.kernels import native

    # Over two ranks every transport adds the same two numbers; over more, gloo's order goes round a ring, and only over
    # gloo are the bits native's.
    for_two = "shared_memory" if native.has_shared_memory() else "auto"
    collective = for_two if dist.get_world_size() == 2 else "c10d"
    return psengine.DistributedDataParallel(module, **options, collective=collective)


def psengine_over_gloo(module: nn.Module, **options: object) -> nn.Module:
    import psengine

    return psengine.DistributedDataParallel(module, **options, collective="c10d")


class OneUlpOff(NativeDDP):
    """Wrong on purpose: in one step, one element of one gradient is the next float."""

    def forward(self, *inputs: object) -> object:
        self.forwards = getattr(self, "forwards", 0) + 1
        return super().forward(*inputs)

    def after_backward(self) -> None:
        if self.forwards == 57 and dist.get_rank() == dist.get_world_size() - 1:
            gradient = next(reversed(list(self.module.parameters()))).grad
            gradient.view(-1)[-1:] = torch.nextafter(gradient.view(-1)[-1:], torch.tensor([math.inf]))


def without_buffer_exchange(module: nn.Module, **options: object) -> nn.Module:
    return NativeDDP(module, **{**options, "forward_sync_buffers": False})


def with_other_buckets(module: nn.Module, **options: object) -> nn.Module:
    return NativeDDP(module, **{**options, "bucket_cap_mb": 25})


class ReducesEveryMicroBatch(NativeDDP):
    """Wrong on purpose: accumulates averages instead of averaging what accumulated."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Wrapper = Callable[..., nn.Module]
WRAPPERS: dict[str, Wrapper] = {
    "native": NativeDDP,
    "psengine": psengine_ddp,
    "psengine over gloo": psengine_over_gloo,
    "one ulp off": OneUlpOff,
    "without buffer exchange": without_buffer_exchange,
    "with other buckets": with_other_buckets,
    "reduces every micro-batch": ReducesEveryMicroBatch,
}


def compare_cells(
    rank: int, world_size: int, case_name: str, cells: Iterable[Cell], candidate: str
) -> dict[Cell, Outcome]:
    """Compare ``candidate`` with native DDP in each cell; the body of a rank.

    After a cell that raises, the group's state is unknown: the cells that follow are left out.
    """
    outcomes: dict[Cell, Outcome] = {}
    for cell in cells:
        try:
            outcomes[cell] = _Comparison(CASES_BY_NAME[case_name], cell, candidate).run(rank)
        except Exception:
            outcomes[cell] = Outcome(0, math.nan, error=traceback.format_exc())
            return outcomes
    dist.barrier()
    return outcomes


class _Comparison:
    def __init__(self, case: Case, cell: Cell, candidate: str) -> None:
        self._case = case
        self._cell = cell
        self._replicas = [_Replica(case, cell, wrap) for wrap in (WRAPPERS["native"], WRAPPERS[candidate])]
        self._tensors_compared = 0
        self._difference: str | None = None

    def run(self, rank: int) -> Outcome:
        native, candidate = self._replicas
        self._compare(-1, "initial", native.parameters_and_buffers(), candidate.parameters_and_buffers())
        losses = (math.nan, math.nan)
        for step in range(STEPS):
            micro_batches = self._micro_batches(step, rank)
            losses = (native.backward(step, micro_batches), candidate.backward(step, micro_batches))
            # A rank that saw a difference goes on all the same: its peers wait for it in the next all-reduce.
            self._compare(step, "gradient", native.gradients(), candidate.gradients())
            for replica in self._replicas:
                replica.step()
            self._compare(step, "after step", native.parameters_and_buffers(), candidate.parameters_and_buffers())
        if not math.isfinite(losses[0]):
            raise AssertionError(f"{self._case.name}: loss {losses[0]} after {STEPS} steps compares nothing")
        return Outcome(self._tensors_compared, losses[0], self._difference)

    def _micro_batches(self, step: int, rank: int) -> list[Batch]:
        count = 2 if self._cell.accumulate and not (self._case.first_step_whole and step == 0) else 1
        return [self._case.batch(2 * step + index, rank) for index in range(count)]

    def _compare(self, step: int, when: str, expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
        if self._difference is not None:
            return
        if expected.keys() != actual.keys():
            names = sorted(expected.keys() ^ actual.keys())
            self._difference = f"step {step}, {when}: only one side has {', '.join(names)}"
            return
        for name, tensor in expected.items():
            difference = describe_difference(tensor, actual[name])
            if difference is not None:
                self._difference = f"step {step}, {when}, {name}: {difference}"
                return
            self._tensors_compared += 1


class _Replica:
    """One wrapped copy of the case's model with its optimizers."""

    def __init__(self, case: Case, cell: Cell, wrap: Wrapper) -> None:
        self._case = case
        self._module = case.build(MODEL_SEED)
        self._model = wrap(self._module, **case.options)
        if case.register is not None:
            case.register(self._model)
        self._optimizers = make_optimizers(self._module, cell.optimizer)

    def backward(self, step: int, micro_batches: list[Batch]) -> float:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=self._case.set_to_none)
        torch.manual_seed(step * 64 + dist.get_rank())  # dropout draws alike in both replicas
        total = 0.0
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            # Only the forward decides whether the backward reduces, but users put both inside.
            with contextlib.nullcontext() if last else self._model.no_sync():
                loss = self._case.forward(self._model, batch, self._case.loss) / len(micro_batches)
                loss.backward()
            total += loss.item()
        getattr(self._model, "after_backward", lambda: None)()
        return total

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}

    def parameters_and_buffers(self) -> dict[str, Tensor]:
        return {
            **{name: parameter.detach() for name, parameter in self._module.named_parameters()},
            **dict(self._module.named_buffers()),
        }


def make_optimizers(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """SGD with momentum for all parameters, or AdamW for dense and SparseAdam for sparse gradients."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=_decay(module))]
    sparse = {m.weight for m in module.modules() if getattr(m, "sparse", False)}
    dense = [p for p in parameters if p not in sparse]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=2e-3)]
    if sparse:
        optimizers.append(torch.optim.SparseAdam([p for p in parameters if p in sparse], lr=2e-3))
    return optimizers


def _decay(module: nn.Module) -> float:
    """Weight decay turns sparse gradients dense, which SGD refuses."""
    return 0.0 if any(getattr(m, "sparse", False) for m in module.modules()) else 1e-4


def describe_difference(expected: Tensor, actual: Tensor) -> str | None:
    """None if both hold the same bits in the same layout; otherwise how they differ."""
    for what in ("dtype", "layout", "shape", "device"):
        if getattr(expected, what) != getattr(actual, what):
            return f"{what} (expected {getattr(expected, what)}, got {getattr(actual, what)})"
    if expected.is_sparse:
        expected, actual = expected.coalesce(), actual.coalesce()
        return describe_difference(expected.indices(), actual.indices()) or describe_difference(
            expected.values(), actual.values()
        )
    if _significant_strides(expected) != _significant_strides(actual):
        return f"strides (expected {expected.stride()}, got {actual.stride()})"
    integers = _SAME_WIDTH_INTEGER[expected.element_size()]
    if torch.equal(expected.view(integers), actual.view(integers)):
        return None
    differing = (expected.view(integers) != actual.view(integers)).reshape(-1).nonzero().flatten()
    first = int(differing[0])
    largest = (expected.double() - actual.double()).abs().max().item()
    return (
        f"{len(differing)} of {expected.numel()} elements differ, by up to {largest:.3g}; the first is element {first}"
        f" (expected {expected.reshape(-1)[first].item()!r}, got {actual.reshape(-1)[first].item()!r})"
    )


def _significant_strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
