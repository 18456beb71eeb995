"""One of the two trainings that are compared: a wrapped target that takes one step at a time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import distributed as native

from psengine.strategies.registry import resolve_strategy
from psengine.verify.random_state import RandomState, seed_all
from psengine.verify.target import Target, check_called, check_loss, check_optimizer
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

NATIVE = "native"
# Captured at import: a program may put psengine's class in the native one's place.
NativeDistributedDataParallel: Any = native.DistributedDataParallel


@dataclass(frozen=True)
class Exchange:
    """A way of exchanging gradients.

    Attributes:
        name: as the user wrote it: "native" for native DDP, else a strategy.
        specification: the same for ``psengine.DistributedDataParallel``, with the servers and the job to use.
    """

    name: str
    specification: str


class Training:
    """A target's training under one way of exchanging gradients.

    Each training has its own random state, which it restores before a step and saves after it. So trainings that take
    their steps in turn draw the numbers that each would draw alone.

    Args:
        exchange: how gradients are exchanged.
        target: made for this training; its model is moved to ``device`` and trained in place.
        name: the target's name, for messages.
        seed: the seed ``target`` was built from; the steps' generators are seeded by it and the rank.
        rank, world_size: of the default process group.
        device: where the model and its batches are.
    """

    def __init__(
        self,
        exchange: Exchange,
        target: Target,
        *,
        name: str,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.exchange = exchange
        self.loss = torch.zeros(())
        self._target = target
        self._name = name
        self._place = (rank, world_size)
        self._device = device
        target.model.to(device)
        self._strategy = None if exchange.name == NATIVE else resolve_strategy(exchange.specification)
        self.carries_buffers = self._strategy is not None and self._strategy.capabilities.carries_buffers
        if self._strategy is None:
            self._wrapped = NativeDistributedDataParallel(target.model, **target.ddp_options)
            self._optimizer = self._make_optimizer()
            self._needs_closure = _needs_closure(self._optimizer)
        else:
            self._wrapped = DistributedDataParallel(target.model, strategy=self._strategy, **target.ddp_options)
            try:
                plain = self._make_optimizer()
                self._needs_closure = _needs_closure(plain)
                self._optimizer = DistributedOptimizer(plain, self._wrapped)
            except BaseException:
                self._strategy.close()
                raise
        self._was_called = False
        self._wrapped.register_forward_pre_hook(self._note_call)
        # Ranks draw different numbers from here on, as in a script that adds its rank to its seed.
        seed_all(seed + 1 + rank)
        self._random = RandomState.capture(device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return check_optimizer(self._target.optimizer_fn(list(self._wrapped.parameters())), self._name)

    def _note_call(self, _wrapped: torch.nn.Module, _inputs: Any) -> None:
        # A forward without a graph exchanges nothing.
        self._was_called = self._was_called or torch.is_grad_enabled()

    def step(self, index: int) -> None:
        """Zero the gradients, forward, backward, optimizer step; ``loss`` is the step's."""
        self._random.restore()
        batch = _moved(self._target.batch_fn(index, *self._place), self._device)

        def forward_backward() -> torch.Tensor:
            self._optimizer.zero_grad()
            self._was_called = False
            loss = check_loss(self._target.loss_fn(self._wrapped, batch), self._name)
            check_called(self._was_called, self._name)
            loss.backward()
            return loss

        if self._needs_closure:
            # Of an optimizer that evaluates the loss several times (LBFGS); the gradients left are the last ones.
            self.loss = self._optimizer.step(forward_backward).detach()  # type: ignore[arg-type, attr-defined]
        else:
            self.loss = forward_backward().detach()
            self._optimizer.step()
        self._random = RandomState.capture(self._device)

    def tensors(self, kind: str) -> Mapping[str, torch.Tensor | None]:
        """The tensors of a kind (see ``differences.KINDS``) by name, as they are now."""
        module = self._target.model
        if kind == "loss":
            return {"": self.loss}
        if kind == "buffer":
            return dict(module.named_buffers())
        if kind == "gradient":
            return {name: parameter.grad for name, parameter in module.named_parameters()}
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    def close(self) -> None:
        """Leave servers and let go of the wrapper."""
        if self._strategy is not None:
            self._strategy.close()
        del self._wrapped, self._optimizer


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _moved(batch: Any, device: torch.device) -> Any:
    """``batch`` with the tensors in lists, tuples and dicts on ``device``; others go as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
