"""A model under psengine beside the same model under native DDP."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Native

import psengine


class Net(nn.Module):
    """Two layers; ``body`` is used, ``spare`` only on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x, use_spare=False):
        y = self.body(x)
        return self.spare(y) if use_spare else y


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build()


def assert_same_gradients(ours, native):
    for (name, p), q in zip(ours.named_parameters(), native.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        elif q.grad.is_sparse:
            assert torch.equal(p.grad.to_dense(), q.grad.to_dense()), name
        else:
            assert torch.equal(p.grad, q.grad), name


def pair(build, **options):
    """The same model under psengine and under native DDP."""
    collective = options.pop("collective", None)
    ours = psengine.DistributedDataParallel(seeded(build), **options, collective=collective)
    return ours, Native(seeded(build), **options)
