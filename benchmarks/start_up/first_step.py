"""What the launchers start: one training step of two ranks; rank 0 writes when it was done.

torchrun --standalone --nproc-per-node 2 benchmarks/start_up/first_step.py native FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(which: str, out: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = torch.nn.Linear(64, 8)
    if which == "native":
        model = torch.nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        import psengine

        model = psengine.DistributedDataParallel(module)
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        out.write_text(str(time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
