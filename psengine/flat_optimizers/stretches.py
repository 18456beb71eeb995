"""One step of each optimizer over a stretch of a chunk: torch's functions, bit for bit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from psengine.flat_optimizers import native_steps

LINE_BYTES = 64


@dataclass(slots=True)
class Stretch:
    """Neighbouring runs that step as one tensor. ``values`` and ``slots`` are views of the chunk's."""

    start: int
    end: int
    group: int
    runs: list[int]
    steps: Tensor
    values: Tensor
    slots: dict[str, Tensor]
    is_fused: bool

    @property
    def needs_copy(self) -> bool:
        """Whether a fused kernel takes the last elements, which fill no cache line, in another way than whole vectors.

        How they are rounded depends on where they lie in memory too.
        """
        return self.is_fused and self.values.nbytes % LINE_BYTES != 0


def step_in_copy(
    step: Callable[[Stretch, Tensor, dict[str, Any]], None],
    stretch: Stretch,
    gradient: Tensor,
    options: dict[str, Any],
) -> None:
    """Take a step over copies, which begin on a cache line as tensors do."""
    slots = {name: slot.clone() for name, slot in stretch.slots.items()}
    copied = replace(stretch, values=stretch.values.clone(), slots=slots)
    step(copied, gradient.clone(), options)
    stretch.values.copy_(copied.values)
    for name, slot in slots.items():
        stretch.slots[name].copy_(slot)


# The functional forms: with SGD on 1 MiB of float32 a class's step() takes twice as long (hooks, profiler ranges, graph
# breaks). For tensors on the CPU torch chooses neither foreach nor fused by itself.


def step_sgd(stretch: Stretch, gradient: Tensor, options: Mapping[str, Any], into: Tensor) -> bool:
    """Write the values after a step of SGD to ``into``, in one pass; False, and nothing is written, where torch steps.

    ``into`` is like the stretch's values, or these themselves.
    """
    if stretch.is_fused:
        return False
    slot = stretch.slots["momentum_buffer"] if options["momentum"] else None
    is_first = slot is not None and not stretch.steps
    if not native_steps.step_sgd(stretch.values, gradient, slot, options, is_first=is_first, into=into):
        return False
    if is_first:
        stretch.steps.fill_(1)
    return True


def _step_sgd(stretch: Stretch, gradient: Tensor, options: dict[str, Any]) -> None:
    if step_sgd(stretch, gradient, options, stretch.values):
        return
    slot = stretch.slots["momentum_buffer"] if options["momentum"] else None
    buffers = [slot if slot is not None and stretch.steps else None]
    sgd([stretch.values], [gradient], buffers, foreach=False, fused=stretch.is_fused, **options)
    if slot is not None and (first := buffers[0]) is not None and first is not slot:
        slot.copy_(first)
        stretch.steps.fill_(1)


def _step_adam(stretch: Stretch, gradient: Tensor, options: dict[str, Any]) -> None:
    beta1, beta2 = options.pop("betas")
    means, squares = [stretch.slots["exp_avg"]], [stretch.slots["exp_avg_sq"]]
    maxima = [stretch.slots["max_exp_avg_sq"]] if options["amsgrad"] else []
    options |= {"beta1": beta1, "beta2": beta2, "foreach": False, "fused": stretch.is_fused}
    adam([stretch.values], [gradient], means, squares, maxima, [stretch.steps], **options)


def _step_adagrad(stretch: Stretch, gradient: Tensor, options: dict[str, Any]) -> None:
    del options["initial_accumulator_value"]
    sums = [stretch.slots["sum"]]
    adagrad([stretch.values], [gradient], sums, [stretch.steps], foreach=False, fused=stretch.is_fused, **options)


def _step_rmsprop(stretch: Stretch, gradient: Tensor, options: dict[str, Any]) -> None:
    squares = [stretch.slots["square_avg"]]
    averages = [stretch.slots["grad_avg"]] if options["centered"] else []
    buffers = [stretch.slots["momentum_buffer"]] if options["momentum"] else []
    rmsprop([stretch.values], [gradient], squares, averages, buffers, [stretch.steps], foreach=False, **options)


# Each mutates the stretch's values, slots and steps; ``options`` is the step's own copy of its group.
STEPS: dict[str, Callable[[Stretch, Tensor, dict[str, Any]], None]] = {
    "SGD": _step_sgd,
    "Adam": _step_adam,
    "AdamW": _step_adam,
    "Adagrad": _step_adagrad,
    "RMSprop": _step_rmsprop,
}
