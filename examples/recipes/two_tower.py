"""A recommender of two towers, whose tables live on servers. docs/recipes/two_tower.md

psengine run --workers 2 examples/recipes/two_tower.py [--users 100000000] [--native]
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine

DIM, BATCH = 16, 256


class TwoTowers(nn.Module):
    """Whether a user clicks on an item: the product of what each tower makes of a row."""

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = users, items
        self.user_tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.item_tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.user_tower(self.users(users)) * self.item_tower(self.items(items))).sum(1)


def clicks(users: int, items: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Users, items, and whether the one clicked on the other: by two hidden factors of each, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    # By Zipf's law: row k is drawn about k times as rarely as row 1.
    chances = torch.rand(2, BATCH, generator=generator, dtype=torch.float64)
    ids = [(count**chance).long() - 1 for count, chance in zip((users, items), chances, strict=True)]
    likes, is_like = (torch.sin(torch.outer(rows, torch.tensor([1.3, 2.9])) + 0.5) for rows in ids)
    noise = 0.2 * torch.randn(BATCH, generator=generator)
    return *ids, ((likes * is_like).sum(1) + noise > 0).float()


def main(arguments: list[str] | None = None) -> list[list[float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", action="store_true", help="native DDP, with sparse embeddings in each worker")
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    sizes = (options.users, options.items)

    context = psengine.init()
    if options.native:
        tables = [nn.Embedding(rows, DIM, sparse=True) for rows in sizes]
        for table in tables:
            nn.init.zeros_(table.weight)
        optimizers = [torch.optim.Adagrad([table.weight for table in tables], lr=0.1)]
    else:
        how = {"optimizer": "adagrad", "lr": 0.1, "std": 0.0, "rule": "average"}
        tables = [psengine.ServerEmbedding(rows, DIM, **how) for rows in sizes]
        optimizers = []
    network = TwoTowers(*tables)
    dense = [*network.user_tower.parameters(), *network.item_tower.parameters()]
    optimizers.append(torch.optim.Adam(dense, lr=2e-3))
    if options.native:
        model = DistributedDataParallel(network)
    else:
        model = psengine.DistributedDataParallel(network, strategy="sync")
        optimizers = [psengine.DistributedOptimizer(optimizers[0], model)]
    for step in range(options.steps):
        users, items, clicked = clicks(*sizes, seed=step * context.world_size + context.rank)
        model.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    users, items, clicked = clicks(*sizes, seed=-1)
    with torch.no_grad():
        right = ((network(users, items) > 0) == (clicked > 0)).float().mean()
        popular = [table(torch.arange(100)) for table in tables]
    psengine.print(f"loss {psengine.mean(loss.item()):.4f}, {right:.1%} of other clicks foretold")
    return [values.flatten().tolist() for values in (*dense, *popular)]


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
