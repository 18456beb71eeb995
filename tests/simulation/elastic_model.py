"""What virtual workers train in a simulated elastic job, and a plain process that plays all of them: the oracle.

A gradient is a function of (step, virtual worker), of the weights, and of the buffers as the step began; a sum's bits
depend on the order of addends, which depends on an element's place in its bucket. Whatever goes wrong ends up in the
weights, in the optimizer's momentum, or in a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from psengine.collectives.solo import SoloCollective
from psengine.strategies.elastic.player import Player
from psengine.strategies.elastic.sync import SyncVirtualWorkers
from psengine.strategies.exchange import Step
from psengine.strategies.life_cycle import Replica
from psengine.strategies.replica_watch import ReplicaWatch
from simulation.groups import ring_sum
from simulation.reference import Values

SIZES = (3, 4, 2, 1)
NUMEL = sum(SIZES)
PLACES = [slice(*ends) for ends in pairwise(accumulate(SIZES, initial=0))]
SOMETIMES_UNUSED = (2, 3)  # parameters
PER_BUCKET = 2  # parameters
SCALES = np.resize([1.0, 1e-8, 1e8], NUMEL)  # of gradients: so a sum's order shows
MOMENTUM, RATES = 0.5, (0.5, 0.25, 0.125)  # powers of two: products are exact
CPU = torch.device("cpu")


class Batches:
    """All that batches decide, by step and virtual worker."""

    def __init__(self, seed: int, steps: int, virtual_workers: int) -> None:
        self.virtual_workers = virtual_workers
        rng = np.random.Generator(np.random.PCG64(seed))
        shape = steps + 1, virtual_workers
        self.gradients = (rng.random((*shape, NUMEL)) - 0.5) * SCALES
        self.means = rng.random((*shape, 2)) - 0.5
        self.uses = rng.random((*shape, len(SIZES))) < 0.4
        self.uses[..., [index for index in range(len(SIZES)) if index not in SOMETIMES_UNUSED]] = True
        self.orders = [[int(index) for index in rng.permutation(len(SIZES))] for _ in range(virtual_workers)]
        self.records = np.where(rng.random(shape) < 0.8, rng.random(shape), np.nan)

    def gradient(self, step: int, virtual_worker: int, weights: Values, mean: Values) -> list[Values | None]:
        """By parameter; None where the batch does not use it."""
        whole = self.gradients[step, virtual_worker] + 0.25 * weights + mean.sum()
        uses = self.uses[step, virtual_worker]
        return [whole[place] if used else None for place, used in zip(PLACES, uses, strict=True)]


def buckets_of(order: Sequence[int]) -> list[list[int]]:
    """Which parameters lie together."""
    return [list(order[first : first + PER_BUCKET]) for first in range(0, len(order), PER_BUCKET)]


FIRST_ORDER = list(reversed(range(len(SIZES))))


def initial_weights(origin: int) -> Values:
    """Those of the process with this number."""
    return np.random.Generator(np.random.PCG64(origin)).random(NUMEL)


@dataclass
class Trained:
    """What there is after a step."""

    weights: Values
    momentum: Values
    mean: Values
    gradients: list[Values | None]


class Reference:
    """The plain process; it begins with the initial values of the process ``origin``."""

    def __init__(self, batches: Batches, origin: int) -> None:
        self._batches = batches
        begin = Trained(initial_weights(origin), np.zeros(NUMEL), np.zeros(2), [])
        self._trained = [begin]

    def after(self, step: int) -> Trained:
        """The state after ``step``."""
        while len(self._trained) <= step:
            self._trained.append(self._next(len(self._trained), self._trained[-1]))
        return self._trained[step]

    def _next(self, step: int, before: Trained) -> Trained:
        batches, count = self._batches, self._batches.virtual_workers
        rows = np.zeros((count, NUMEL))
        for virtual_worker in range(count):
            gradients = batches.gradient(step, virtual_worker, before.weights, before.mean)
            for place, gradient in zip(PLACES, gradients, strict=True):
                if gradient is not None:
                    rows[virtual_worker, place] = gradient * (1.0 / count)
        average = np.zeros(NUMEL)
        for indices in buckets_of(FIRST_ORDER if step == 1 else batches.orders[0]):
            elements = np.concatenate([np.arange(NUMEL)[PLACES[index]] for index in indices])
            average[elements] = ring_sum(rows[:, elements])
        weights, momentum, uses = before.weights.copy(), before.momentum.copy(), batches.uses[step].any(axis=0)
        for place in [place for place, used in zip(PLACES, uses, strict=True) if used]:
            momentum[place] = MOMENTUM * momentum[place] + average[place]
            weights[place] -= RATES[(step - 1) % len(RATES)] * momentum[place]
        seen = [average[place] if used else None for place, used in zip(PLACES, uses, strict=True)]
        return Trained(weights, momentum, 0.5 * before.mean + batches.means[step, 0], seen)


@dataclass(eq=False)
class SimulatedBucket:
    """One; ``memories``: by slot."""

    index: int
    parameters: list[int]
    memories: list[torch.Tensor]

    def describe(self) -> str:
        return f"gradient bucket {self.index} {self.parameters}"


class Reducer:
    """In the place of the real one: ``Gradients`` of a strategy."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.arrival_order: list[int] | None = None
        self.awaits_order = True
        self.strategy: SyncVirtualWorkers | None = None
        self.watch = ReplicaWatch({}, "off", dict)
        self._parameters = parameters
        self._order, self._slot = FIRST_ORDER, 0
        self._buckets: list[SimulatedBucket] = []

    def lay_out_again(self, order: Sequence[int] | None = None) -> None:
        if order is not None:
            self._order, self.awaits_order = list(order), False
        strategy = self.strategy
        assert strategy is not None
        self._buckets = []
        for index, parameters in enumerate(buckets_of(self._order)):
            strategy.allocate(sum(SIZES[one] for one in parameters), torch.float64, CPU)
            memories = [strategy.slot_memory(index, slot) for slot in range(strategy.slots)]
            self._buckets.append(SimulatedBucket(index, parameters, memories))
        strategy.lay_out(self._buckets)  # type: ignore[arg-type]

    def pack_in(self, slot: int) -> None:
        self._slot = slot

    def write(self, bucket: Any, result: torch.Tensor, used: Sequence[float] | None) -> None:
        values = result.split([SIZES[index] for index in bucket.parameters])
        for index, value in zip(bucket.parameters, values, strict=True):
            if used is None or used[index]:
                self._parameters[index].grad = value.clone()

    def backward(self, gradients: Sequence[Values | None], order: list[int], pause) -> None:
        """A batch's; ``pause`` is called between buckets."""
        strategy = self.strategy
        assert strategy is not None
        share = strategy.begin(Step(live_world_size=1))
        self.arrival_order = order
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else torch.from_numpy(gradient)
        for bucket in self._buckets:
            pause()
            parts = [self._parameters[index].grad for index in bucket.parameters]
            zeros = [torch.zeros(SIZES[index], dtype=torch.float64) for index in bucket.parameters]
            packed = torch.cat([zero if part is None else part for zero, part in zip(zeros, parts, strict=True)])
            bucket.memories[self._slot].copy_(packed.mul_(1.0 / share.divisor))
            list(strategy.exchange(bucket))  # type: ignore[arg-type]
        strategy.reduce_usage(torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32))


class Schedule:
    """A registered state: it sets the learning rate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        """After a step of the optimizer."""
        self.steps += 1
        self._optimizer.param_groups[0]["lr"] = RATES[self.steps % len(RATES)]

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.steps = state_dict["steps"]


class Trainee:
    """One process's model, its optimizer and its schedule; ``origin`` is the process's number."""

    def __init__(self, player: Player, origin: int) -> None:
        flat = torch.from_numpy(initial_weights(origin))
        self.weights: Values = flat.numpy()
        self.parameters = [torch.nn.Parameter(flat[place]) for place in PLACES]
        names = {f"p{index}": parameter for index, parameter in enumerate(self.parameters)}
        mean = torch.zeros(2, dtype=torch.float64)
        self.buffers = {"mean": mean, "steps": torch.tensor(0), "origin": torch.tensor(origin)}
        replica = Replica(
            parameters=names,
            buffers=lambda: self.buffers,
            state={**names, **self.buffers},
            collective=SoloCollective(),
            device=CPU,
        )
        self.reducer = Reducer(self.parameters)
        self.reducer.strategy = strategy = SyncVirtualWorkers(virtual_workers=player.virtual_workers)
        strategy._replica, strategy._player = replica, player
        strategy.serve(self.reducer)
        self.reducer.lay_out_again()
        self.optimizer = torch.optim.SGD(self.parameters, lr=RATES[0], momentum=MOMENTUM)
        self.schedule = Schedule(self.optimizer)
        player.state.bind(self.optimizer)
        player.state.register("schedule", self.schedule)

    @property
    def momentum(self) -> Values:
        """Of all parameters, zero where there is none yet."""
        found = [self.optimizer.state.get(one, {}).get("momentum_buffer") for one in self.parameters]
        parts = [np.zeros(size) if one is None else one.numpy() for one, size in zip(found, SIZES, strict=True)]
        return np.concatenate(parts)
