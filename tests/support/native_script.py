"""Written for native DDP: psengine appears nowhere. Prints what each rank has of its two models."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
early, late = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))
optimizers = [torch.optim.SGD(early.parameters(), lr=0.1, momentum=0.9)]
models = [DistributedDataParallel(early), nn.parallel.distributed.DistributedDataParallel(late)]
optimizers.append(torch.optim.Adam(models[1].parameters()))
inputs = torch.Generator().manual_seed(dist.get_rank())
for _ in range(8):
    x = torch.randn(16, 8, generator=inputs)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.argmax(1) % 4).backward()
        optimizer.step()
for model, optimizer in zip(models, optimizers, strict=True):
    values = torch.cat([value.flatten() for value in model.state_dict().values()]).numpy()
    print(type(optimizer).__name__, hashlib.sha256(values).hexdigest(), flush=True)
dist.destroy_process_group()
