"""Average the loss, count the correct: each sample once. docs/recipes/evaluation.md

torchrun --nproc-per-node=2 examples/recipes/evaluation.py [--native]
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import is_native, make_dataset, make_network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import psengine

BATCH_SIZE = 16


def evaluate() -> dict[str, float]:
    context = psengine.init()
    model = psengine.DistributedDataParallel(make_network().to(context.device))
    totals = psengine.sum(add_up(model.module, psengine.EvaluationSampler(make_dataset()), context.device))
    return means(totals)


@in_native_world
def evaluate_native(device: torch.device) -> dict[str, float]:
    model = DistributedDataParallel(make_network().to(device))
    mine = range(dist.get_rank(), len(make_dataset()), dist.get_world_size())  # a sequence does for a sampler
    totals = add_up(model.module, mine, device)
    flat = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    dist.all_reduce(flat)

    padded = len(DistributedSampler(make_dataset())) * dist.get_world_size()
    print(f"a DistributedSampler would have counted {padded} samples")
    return means(dict(zip(totals, flat.tolist(), strict=True)))


@torch.no_grad()
def add_up(network: nn.Module, sampler: Sampler[int] | Sequence[int], device: torch.device) -> dict[str, float]:
    """Sums over this rank's samples; ``network`` is the module inside, whose forward waits for nobody."""
    network.eval()
    totals = {"loss": 0.0, "correct": 0, "count": 0}
    for inputs, targets in DataLoader(make_dataset(), BATCH_SIZE, sampler=sampler):
        outputs, targets = network(inputs.to(device)), targets.to(device)
        totals["loss"] += nn.functional.mse_loss(outputs, targets, reduction="sum").item()
        totals["correct"] += int((outputs.sign() == targets.sign()).sum())
        totals["count"] += len(inputs)
    return totals


def means(totals: dict[str, float]) -> dict[str, float]:
    count = totals["count"]
    return {"loss": totals["loss"] / count, "accuracy": totals["correct"] / count, "count": count}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    found = evaluate_native() if is_native(__doc__, arguments) else evaluate()
    print(f"loss {found['loss']:.4f}, accuracy {found['accuracy']:.2%} of {found['count']:g} samples")
    return found


if __name__ == "__main__":
    main()
