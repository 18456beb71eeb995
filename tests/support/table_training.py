"""A model with two tables, on servers or as ``torch.nn`` has them, and its batches: the same in every process."""

import logging
from typing import Any

import torch
from torch import nn

import psengine

USERS, ITEMS, DIM, PADDING = 97, 61, 12, 3
# Users of one step come from few, so that workers share rows, and a batch has a row several times.
POPULAR = 11


class TwoTables(nn.Module):
    """One table is read twice in a forward, the other one in bags."""

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Linear(2 * DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor, history: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pairs = self.users(ids) * 0.5 + self.users(ids.flip(0) // 2)
        return self.head(torch.cat([pairs, self.items(history, offsets)], dim=1)).square().mean()


def at_servers(optimizer: str = "sgd", *, rule: str = "average", mode: str = "sum", **options: Any) -> TwoTables:
    """With tables on servers, still to be wrapped."""
    options = {"optimizer": optimizer, "lr": 0.1, "rule": rule, "seed": 5, **options}
    return TwoTables(
        psengine.ServerEmbedding(USERS, DIM, padding_idx=PADDING, **options),
        psengine.ServerEmbeddingBag(ITEMS, DIM, mode=mode, std=0.1, **options),
    )


def rows_of(model: TwoTables) -> list[torch.Tensor]:
    """All rows of both tables now."""
    return [model.users.rows(torch.arange(USERS)), model.items.rows(torch.arange(ITEMS))]


def native_twin(model: TwoTables) -> TwoTables:
    """The same with torch's own sparse embeddings, which begin with the rows of ``model``."""
    users, items = rows_of(model)
    twin = TwoTables(
        nn.Embedding(USERS, DIM, padding_idx=PADDING, sparse=True),
        nn.EmbeddingBag(ITEMS, DIM, mode=model.items.mode, sparse=True),
    )
    with torch.no_grad():
        twin.users.weight.copy_(users)
        twin.items.weight.copy_(items)
    twin.head.load_state_dict(model.head.state_dict())
    return twin


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users, items and where bags begin. In step 2 odd ranks have only the row that is not trained, and empty bags."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(0, POPULAR if step % 2 else USERS, (9,), generator=generator)
    history = torch.randint(0, ITEMS, (20,), generator=generator)
    offsets = torch.tensor([0, 3, 3, 7, 8, 12, 13, 17, 19])
    if step == 2 and rank % 2:
        return torch.full((9,), PADDING), history[:0], torch.zeros(9, dtype=torch.int64)
    return ids, history, offsets


def native_optimizers(model: TwoTables, optimizer: str) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Of the dense part, and of the tables."""
    sparse = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
    tables = [model.users.weight, model.items.weight]
    return torch.optim.Adam(model.head.parameters(), lr=0.01), sparse(tables, lr=0.1)


def warnings_of(logger: str) -> list[str]:
    """The warnings that this process's ``logger`` gives from now on, as they come."""
    found: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger(logger).addHandler(Listening(logging.WARNING))
    return found
