"""One of the two trainings that are compared: a wrapped target that takes one step at a time."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psengine.strategies.base import Strategy
from psengine.strategies.registry import resolve_strategy
from psengine.verify.ranks import Place
from psengine.verify.settings import NATIVE
from psengine.verify.target import NativeDistributedDataParallel, Target, TargetError, type_of
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

MAX_NUMPY_SEED = 2**32 - 1


@dataclass(frozen=True)
class Exchange:
    """A way of exchanging gradients.

    Attributes:
        name: as the user wrote it: "native" for native DDP, or a strategy.
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
        target: made for this training; its model is moved to the place's device and trained in place.
        name: the target's name, for messages.
        seed: the seed ``target`` was built from; the steps' generators are seeded by it and the rank.
        place: of this rank.
    """

    def __init__(self, exchange: Exchange, target: Target, name: str, seed: int, place: Place) -> None:
        self.loss = torch.zeros(())
        self._target = target
        self._rule = f"target {name!r}"
        self._place = place
        self._optimizer: Any = None
        self._batch: Any = None
        target.model.to(place.device)
        self._strategy: Strategy | None = None
        if exchange.name == NATIVE:
            self._wrapped: Any = NativeDistributedDataParallel(target.model, **target.ddp_options)
        else:
            self._strategy = resolve_strategy(exchange.specification)
            self._wrapped = DistributedDataParallel(target.model, strategy=self._strategy, **target.ddp_options)
        self.carries_buffers = self._strategy is not None and self._strategy.capabilities.carries_buffers
        try:
            self._optimizer = target.optimizer_fn(list(self._wrapped.parameters()))
            if not isinstance(self._optimizer, torch.optim.Optimizer):
                raise TargetError(f"{self._rule}: optimizer_fn returns an optimizer (got {type_of(self._optimizer)})")
            closure = inspect.signature(self._optimizer.step).parameters.get("closure")
            self._needs_closure = closure is not None and closure.default is inspect.Parameter.empty
            if self._strategy is not None:
                self._optimizer = DistributedOptimizer(self._optimizer, self._wrapped)
        except BaseException:
            self.close()
            raise
        self._was_called = False
        self._wrapped.register_forward_pre_hook(self._note_call)
        # Ranks draw different numbers from here on, as in a script that adds its rank to its seed.
        seed_all(seed + 1 + place.rank)
        self._random = _random_state(place.device)

    def _note_call(self, _wrapped: torch.nn.Module, _inputs: Any) -> None:
        # A forward without a graph exchanges nothing.
        self._was_called = self._was_called or torch.is_grad_enabled()

    def step(self, index: int) -> None:
        """Zero the gradients, forward, backward, optimizer step; ``loss`` is the step's."""
        _restore_random_state(self._random, self._place.device)
        batch = self._target.batch_fn(index, self._place.rank, self._place.world_size)
        self._batch = _moved(batch, self._place.device)
        if self._needs_closure:
            # The optimizer evaluates the loss several times (LBFGS); the gradients left are the last ones.
            self.loss = self._optimizer.step(self._forward_backward).detach()
        else:
            self.loss = self._forward_backward().detach()
            self._optimizer.step()
        self._random = _random_state(self._place.device)

    def _forward_backward(self) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = self._checked_loss(self._batch)
        loss.backward()
        return loss

    def _checked_loss(self, batch: Any) -> torch.Tensor:
        self._was_called = False
        loss = self._target.loss_fn(self._wrapped, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type_of(loss)
            raise TargetError(
                f"{self._rule}: loss_fn returns one number, a tensor that requires grad (got {got}). Fix: return a mean"
                " that is not detached, and no .item()."
            )
        if not self._was_called:
            raise TargetError(
                f"{self._rule}: loss_fn computes the loss with the model it is given, which exchanges the gradients"
                " (expected a call of model(...) with gradients enabled in each step, got none, so nothing would be"
                " compared). Fix: call the argument itself, not the plain module from outside, model.module or"
                " model.forward."
            )
        return loss

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


def seed_all(seed: int) -> None:
    """Seed torch's and Python's generators and, where NumPy is loaded, its global one."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & MAX_NUMPY_SEED)


def _random_state(device: torch.device) -> tuple[Any, ...]:
    """The state of the generators that ``seed_all`` seeds, that of ``device`` among them."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return torch.get_rng_state(), on_device, random.getstate(), numpy


def _restore_random_state(state: tuple[Any, ...], device: torch.device) -> None:
    on_cpu, on_device, python, numpy = state
    torch.set_rng_state(on_cpu)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


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
