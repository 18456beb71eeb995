"""The peer: the storm's program under torchft 0.2.0, one process for a replica, as torchft's README has it.

Each replica has its half of the samples. Batch s of it belongs to step s: a step that is not committed is tried again
with the same samples, so only a step that was committed without a replica leaves out that replica's batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from task import Model, Text, sha256_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

REPLICAS = 2
TIMEOUT = timedelta(seconds=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--host", "--out", "--replica", "--samples", "--batch"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    out, samples, batch, replica = Path(options.out), *map(int, (options.samples, options.batch, options.replica))
    torch.set_num_threads(1)
    logging.getLogger("torchft").setLevel(logging.ERROR)
    torch.manual_seed(0)
    network = Model()
    plain = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def load_state_dict(state: Any) -> None:
        network.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        timeout=TIMEOUT,
    )
    model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, plain)
    text = Text(samples)
    own = torch.randperm(samples, generator=torch.Generator().manual_seed(0))[replica::REPLICAS]
    with (out / f"{options.host}-{os.getpid()}-{time.monotonic_ns()}.events").open("w", buffering=1) as file:

        def note(*event: object) -> None:
            file.write(json.dumps([time.monotonic(), *event]) + "\n")

        note("begin")
        while not (out / "stop").exists():
            step = manager.current_step()
            indices = own[torch.arange(step * batch, (step + 1) * batch) % len(own)].tolist()
            _, inputs, targets = default_collate([text[index] for index in indices])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets.flatten()).backward()
            note("batch", step, indices)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            if manager.current_step() > step:
                note("step", manager.current_step(), manager.num_participants())
        note("end", sha256_of(network))
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main()
