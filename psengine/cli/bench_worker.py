"""A rank of ``psengine bench``.

The rules are those of ``benchmarks/``: candidates take turns within one process group, who begins rotates, a repetition
counts with the slowest rank's time, and every candidate's result is checked.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for, default_group
from psengine.kernels import native
from psengine.verify.ranks import Place
from psengine.verify.target import NativeDistributedDataParallel
from psengine.verify.zoo import mlp
from psengine.wrapper.ddp import DistributedDataParallel

GLOO, IN_PLACE, STAGED = "gloo", "psengine in place", "psengine staged"
PLAIN, NATIVE, SYNC = "plain backward", "native DDP", "psengine sync"
COPY, ECHO, PUSH_PULL = "copy in memory", "echo", "push-pull"
WARM_UP_TURNS = 3
LARGE_BYTES, SMALL_REPEATS = 2**20, 20
ECHO_BYTES = 64
MODEL_WIDTHS, MODEL_ROWS = (784, 1024, 1024, 1024, 10), 64
# A power of two, so that weights after n exchanges are known to the bit.
LEARNING_RATE = 2.0**-10
CPU = torch.device("cpu")


class WrongResultError(ArithmeticError):
    """A candidate's result is wrong."""


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: for each candidate, the seconds of every turn; ratios are to ``reference``."""

    name: str
    size_bytes: int | None
    reference: str
    seconds: dict[str, list[float]]


def run(place: Place, sizes_bytes: Sequence[int], model_bytes: int, turns: int, server: str | None) -> list[Part]:
    """Measure every part; that of the server, where there is one, on rank 0 alone."""
    torch.set_num_threads(1)
    collective: Collective | None = None
    if native.has_shared_memory():
        collective = collective_for(default_group(), "shared_memory")
        collective.connect()
    parts = []
    for size_bytes in sizes_bytes:
        place.note(f"the all-reduce of {size_bytes} bytes")
        seconds = measure_all_reduce(place, collective, size_bytes, turns)
        parts.append(Part("all-reduce", size_bytes, GLOO, seconds))
    place.note("the training step")
    parts.append(Part("training step", None, NATIVE, measure_step(place, collective, turns)))
    if server is not None:
        place.note("the server's round trip")
        if place.rank == 0:
            parts += measure_server(server, model_bytes, turns)
        dist.barrier()
    return parts


def measure_all_reduce(
    place: Place, collective: Collective | None, size_bytes: int, turns: int
) -> dict[str, list[float]]:
    """Seconds of summing a float32 tensor that each rank has just written, as after a backward.

    A small tensor is summed many times in a turn, because ranks leave a barrier microseconds apart.
    """
    repeats = 1 if size_bytes >= LARGE_BYTES else SMALL_REPEATS
    numel = size_bytes // 4
    own = torch.empty(numel)
    candidates: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {GLOO: (own, lambda: dist.all_reduce(own))}
    if collective is not None:
        shared, ours = collective.allocate(numel, torch.float32, CPU), collective
        candidates[IN_PLACE] = (shared, lambda: ours.sum(shared))
        candidates[STAGED] = (own, lambda: ours.sum(own))

    def prepare(name: str) -> Callable[[], object]:
        tensor, reduce = candidates[name]
        tensor.copy_(addends[place.rank])
        return reduce

    # Small integers: their sum is exact, in whatever order.
    addends = [
        torch.arange(numel, dtype=torch.int64).add(3 * rank).remainder(97).float() for rank in range(place.world_size)
    ]
    expected = torch.stack(addends).sum(0)
    for name, (tensor, _) in candidates.items():
        prepare(name)()
        _check(torch.equal(tensor, expected), f"all-reduce of {size_bytes} bytes by {name}")

    def repeat(name: str) -> Callable[[], object]:
        reduce = prepare(name)
        return lambda: [reduce() for _ in range(repeats)]

    seconds = _take_turns(list(candidates), repeat, _barrier_of(collective), turns)
    return {name: [duration_s / repeats for duration_s in own] for name, own in seconds.items()}


def _barrier_of(collective: Collective | None) -> Callable[[], object]:
    """Shared memory's barrier where it can be had: ranks leave it microseconds apart."""
    return dist.barrier if collective is None else lambda: collective.barrier().wait()


def measure_step(place: Place, collective: Collective | None, turns: int) -> dict[str, list[float]]:
    """Seconds of forward and backward, exchange included; the plain one ends when both ranks are done."""
    barrier = _barrier_of(collective)
    models: dict[str, nn.Module] = {}
    for name, wrap in ((PLAIN, nn.Sequential), (NATIVE, NativeDistributedDataParallel), (SYNC, _sync)):
        torch.manual_seed(0)
        models[name] = wrap(mlp(*MODEL_WIDTHS))
    torch.manual_seed(1 + place.rank)
    inputs, targets = torch.randn(MODEL_ROWS, MODEL_WIDTHS[0]), torch.randint(MODEL_WIDTHS[-1], (MODEL_ROWS,))

    def prepare(name: str) -> Callable[[], object]:
        model = models[name]

        def step() -> None:
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(inputs), targets).backward()
            if name == PLAIN:
                barrier()

        return step

    for name in models:
        prepare(name)()
    for plain, averaged, ours in zip(*(model.parameters() for model in models.values()), strict=True):
        assert plain.grad is not None
        mean = plain.grad.clone()
        dist.all_reduce(mean)
        mean /= place.world_size
        _check(torch.allclose(averaged.grad, mean, rtol=1e-4, atol=1e-7), f"gradients of {NATIVE}")
        _check(torch.equal(ours.grad, averaged.grad), f"gradients of {SYNC}")
    return _take_turns(list(models), prepare, barrier, turns)


def measure_server(address: str, model_bytes: int, turns: int) -> list[Part]:
    """Seconds that one worker takes to push gradients to a server that applies SGD, and to pull the weights."""
    from psengine.parameter_server.client.client import connect

    weights = torch.nn.Parameter(torch.zeros(model_bytes // 4))
    gradient = torch.arange(weights.numel(), dtype=torch.int64).remainder(5).float()
    copied = torch.empty_like(gradient)
    with connect(address, job="bench") as client, torch.no_grad():
        client.register({"weights": weights}, optimizer=torch.optim.SGD([weights], lr=LEARNING_RATE))

        def push_pull() -> None:
            client.push_pull({"weights": gradient}, into={"weights": weights})

        rounds = [
            (_seconds_of(lambda: copied.copy_(gradient)), client.echo(ECHO_BYTES), _seconds_of(push_pull))
            for _ in range(WARM_UP_TURNS + turns)
        ]
        expected = -LEARNING_RATE * len(rounds) * gradient
        if not torch.equal(weights, expected):
            raise WrongResultError("weights from the server: wrong result")
    copies, echoes, pushes = (list(column) for column in zip(*rounds[WARM_UP_TURNS:], strict=True))
    return [
        Part("server", model_bytes, COPY, {COPY: copies, PUSH_PULL: pushes}),
        Part("server", ECHO_BYTES, ECHO, {ECHO: echoes}),
    ]


def _take_turns(
    names: list[str], prepare: Callable[[str], Callable[[], object]], barrier: Callable[[], object], turns: int
) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each turn; in a turn every candidate runs once."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for turn in range(-WARM_UP_TURNS, turns):
        order = [names[(turn + place) % len(names)] for place in range(len(names))]
        for name in order if turn // len(names) % 2 == 0 else reversed(order):
            work = prepare(name)
            barrier()
            duration_s = _seconds_of(work)
            if turn >= 0:
                seconds[name].append(duration_s)
    gc.enable()
    durations = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(durations, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, durations.tolist(), strict=True))


def _seconds_of(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def _sync(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, strategy="sync")


def _check(is_right: bool, what: str) -> None:
    """Raise on every rank where a result is wrong on any."""
    wrong = torch.tensor([int(not is_right)])
    dist.all_reduce(wrong)
    if wrong.item():
        raise WrongResultError(f"{what}: wrong result")
