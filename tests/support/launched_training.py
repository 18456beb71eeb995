"""A small training that cli/test_run.py and cli/test_advise.py launch.

launched_training.py STEPS [SLOW_RANK SECONDS]
"""

from __future__ import annotations

import sys
import time

import torch

import psengine


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1])
    slow_rank, slow_s = (int(sys.argv[2]), float(sys.argv[3])) if len(sys.argv) > 3 else (-1, 0.0)
    context = psengine.init()
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(slow_s if context.rank == slow_rank else 0.002)
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    psengine.shutdown()


if __name__ == "__main__":
    main()
