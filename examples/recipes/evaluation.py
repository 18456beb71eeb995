"""Average the loss, count the correct: each sample once. docs/recipes/evaluation.md

torchrun --nproc-per-node=2 examples/recipes/evaluation.py [--native]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psengine

BATCH_SIZE = 16


def evaluate(network: nn.Module, dataset: TensorDataset, device: torch.device) -> dict[str, float]:
    loader = DataLoader(dataset, BATCH_SIZE, sampler=psengine.EvaluationSampler(dataset))
    return psengine.sum(add_up(network, loader, device))


def evaluate_native(network: nn.Module, dataset: TensorDataset, device: torch.device) -> dict[str, float]:
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())  # a sequence does for a sampler
    totals = add_up(network, DataLoader(dataset, BATCH_SIZE, sampler=mine), device)
    flat = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    dist.all_reduce(flat)
    padded = len(DistributedSampler(dataset)) * dist.get_world_size()
    print(f"a DistributedSampler would have counted {padded} samples")
    return dict(zip(totals, flat.tolist(), strict=True))


@torch.no_grad()
def add_up(network: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    """Sums over this rank's samples; ``network`` is the module inside the wrapper, whose forward waits for no rank."""
    network.eval()
    totals = {"loss": 0.0, "correct": 0, "count": 0}
    for inputs, targets in loader:
        outputs, targets = network(inputs.to(device)), targets.to(device)
        totals["loss"] += nn.functional.mse_loss(outputs, targets, reduction="sum").item()
        totals["correct"] += int((outputs.sign() == targets.sign()).sum())
        totals["count"] += len(inputs)
    return totals


def main(arguments: list[str] | None = None) -> dict[str, float]:
    context = psengine.init()
    inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    torch.manual_seed(0)
    network = nn.Linear(8, 1).to(context.device)
    way = evaluate_native if "--native" in (arguments or ()) else evaluate
    found = way(network, dataset, context.device)
    mean_loss, accuracy = found["loss"] / found["count"], found["correct"] / found["count"]
    psengine.print(f"loss {mean_loss:.4f}, accuracy {accuracy:.2%} of {found['count']:g} samples")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
