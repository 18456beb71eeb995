"""What a training step costs under each way of exchanging gradients, all measured in turn within one run.

python benchmarks/step_overhead/run.py [--quick] [--models mlp,gpt] [--ranks 1,2] [--candidates plain,native,psengine]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import numbers, parser_of, some_of
from harness.figures import slowest
from harness.ranks import Rank, run_ranks
from harness.record import Record
from harness.turns import Turn, labels_of, take_turns
from step_overhead.models import WORKLOADS

import psengine
from psengine.parameter_server.client.embedded import EmbeddedServer

QUESTION = "What does data-parallel training add to a step?"
WARM_UP_ROUNDS = 5  # buckets are rebuilt before the second forward
PLAIN, NATIVE, NATIVE_VIEWS = "plain", "native", "native-views"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-4),
    "momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
}


# name -> wrap(module). "plain" exchanges nothing and ends with a barrier; overheads are measured against it.
CANDIDATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    PLAIN: lambda module: module,
    NATIVE: DistributedDataParallel,
    "native-psengine-backend": lambda m: DistributedDataParallel(m, process_group=dist.new_group(backend="psengine")),
    "psengine": psengine.DistributedDataParallel,
    "psengine-gloo": partial(psengine.DistributedDataParallel, collective="c10d"),
    NATIVE_VIEWS: partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "psengine-views": partial(psengine.DistributedDataParallel, gradient_as_bucket_view=True),
}

# How many batches a rank has in a step, where gradients are accumulated, or where virtual workers are played.
ACCUMULATED = "accumulated"
VIRTUAL_WORKERS = {"virtual-workers": 1, "virtual-workers-2": 2}


def wrap_with_virtual_workers(module: nn.Module, batches: int) -> nn.Module:
    """As many virtual workers as the ranks have batches in a step."""
    strategy = f"sync:virtual_workers={batches * dist.get_world_size()}"
    return psengine.DistributedDataParallel(module, strategy=strategy)


# These need their optimizer, so it is timed in every candidate beside them.
WITH_OPTIMIZER: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sync-server": partial(psengine.DistributedDataParallel, strategy="sync-server"),
    "async": partial(psengine.DistributedDataParallel, strategy="async"),
    "sharded": partial(psengine.DistributedDataParallel, strategy="sync:shard_optimizer=true"),
    ACCUMULATED: psengine.DistributedDataParallel,
    **{name: partial(wrap_with_virtual_workers, batches=count) for name, count in VIRTUAL_WORKERS.items()},
}
OVER_SERVERS = ("sync-server", "async")


def measure(
    rank: Rank, workload_name: str, candidates: Sequence[str], rounds: int, optimizer: str | None, device: str
) -> dict[str, list[float]]:
    """Seconds of each candidate's steps on this rank."""
    workload = WORKLOADS[workload_name]
    torch.manual_seed(1 + rank.rank)
    inputs, targets = (tensor.to(device) for tensor in workload.batch())
    turns = {
        label: turn_of(name, rank, workload.build, inputs, targets, optimizer)
        for name, label in zip(candidates, labels_of(candidates), strict=True)
    }
    return take_turns(turns, rounds, warm_up=WARM_UP_ROUNDS, barrier=rank.barrier.wait)


def turn_of(
    name: str,
    rank: Rank,
    build: Callable[[], nn.Module],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    optimizer_name: str | None,
) -> Turn:
    """A step of one candidate's own copy of the model."""
    torch.manual_seed(0)
    model = {**CANDIDATES, **WITH_OPTIMIZER}[name](build().to(inputs.device))
    optimizer = None if optimizer_name is None else OPTIMIZERS[optimizer_name](model.parameters())
    if optimizer is not None and isinstance(model, psengine.DistributedDataParallel):
        optimizer = psengine.DistributedOptimizer(optimizer, model)

    loader = psengine.ElasticLoader(range(10**6), collate_fn=lambda _: (inputs, targets))
    steps = loader.steps(next(loader.epochs(1))) if name in VIRTUAL_WORKERS else None

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if name == ACCUMULATED:
            with model.no_sync():
                F.cross_entropy(model(inputs), targets).backward()
        batches = [(inputs, targets)] if steps is None else next(steps).batches
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
        if optimizer is not None:
            optimizer.step()
        if inputs.is_cuda:
            torch.cuda.synchronize()
        if name == PLAIN:
            rank.barrier.spin()

    return Turn(step)


def main() -> None:
    parser = parser_of(__doc__, rounds=100, quick="10 rounds")
    allowed = [*CANDIDATES, *WITH_OPTIMIZER]
    parser.add_argument("--models", type=some_of(list(WORKLOADS)), default=tuple(WORKLOADS), help="comma-separated")
    parser.add_argument("--ranks", type=numbers(1), default=(1, 2), help="default: 1,2")
    parser.add_argument(
        "--candidates",
        type=some_of(allowed),
        default=tuple(CANDIDATES),
        help=f"of {','.join(allowed)}; a name given twice is measured twice, which shows the noise",
    )
    parser.add_argument(
        "--optimizer",
        type=some_of(list(OPTIMIZERS)),
        default=(None,),
        help=f"of {','.join(OPTIMIZERS)}: time its step too, in every candidate",
    )
    parser.add_argument("--device", default="cpu", help="such as cuda, which all ranks share (default: %(default)s)")
    options = parser.parse_args()
    if options.optimizer == (None,) and (wanting := sorted(set(options.candidates) & set(WITH_OPTIMIZER))):
        parser.error(f"argument --candidates: {', '.join(wanting)} steps with its optimizer: add --optimizer SGD")
    rounds = min(10, options.rounds) if options.quick else options.rounds
    record = Record.begin("step_overhead", QUESTION, options, peers=(NATIVE, NATIVE_VIEWS), baseline=PLAIN)
    needs_servers = any(name in OVER_SERVERS for name in options.candidates)
    with EmbeddedServer.start() if needs_servers else nullcontext() as server:
        environment = {} if server is None else {"PSENGINE_SERVERS": ",".join(server.addresses)}
        for workload, world_size, optimizer in product(options.models, options.ranks, options.optimizer):
            labels = {"model": workload, "ranks": world_size, **({"optimizer": optimizer} if optimizer else {})}
            # A server tells the jobs apart.
            environment["PSENGINE_JOB"] = "-".join(map(str, labels.values()))
            arguments = (workload, list(options.candidates), rounds, optimizer, options.device)
            how: dict[str, Any] = {"deadline_s": options.deadline, "environment": environment}
            record.add(labels, slowest(run_ranks(measure, world_size, *arguments, **how)))
    record.finish()


if __name__ == "__main__":
    main()
