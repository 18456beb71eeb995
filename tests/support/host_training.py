"""One replica on an emulated host, trained undisturbed and then again while a test harms the host.

    python host_training.py PLAN.json RANK

Lines of the output, for each strategy of the plan::

    STRATEGY step N                        so many steps of the second training are over
    STRATEGY {"undisturbed": [...], "disturbed": [...]}     the weights after each training
    STRATEGY {"error": "...", "ranks": []}                  or how it failed

Gradients do not depend on weights, and without a codec all sums are exact in float32. So the weights are the same
whatever the order in which gradients come, and a gradient that is lost or counted twice shows.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import psengine
from support.holding import held
from support.waiting import eventually

DEADLINE_S = 120.0


class Linear(torch.nn.Module):
    """Its loss is ``factor`` times a sum of the weights, each times a number of its own."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = ((120, columns), (columns,), (50, columns))
        self.weights = torch.nn.ParameterList(torch.randint(-64, 64, shape) / 64 for shape in shapes)
        self._slopes = [torch.randint(-32, 32, shape) / 32 for shape in shapes]

    def forward(self, factor: float) -> torch.Tensor:
        return factor * sum((w * slope).sum() for w, slope in zip(self.weights, self._slopes, strict=True))


class Training:
    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._folder = Path(plan["folder"])

    def run(self, strategy: str) -> dict[str, Any]:
        """Both trainings of a strategy."""
        try:
            is_endless = self._plan["steps"] is None
            undisturbed = [] if is_endless else self._train(strategy, "undisturbed", lambda step: None)
            disturbed = self._train(strategy, "disturbed", lambda step: self._tell(strategy, step))
        except psengine.PSEngineError as error:
            return {"error": f"{type(error).__name__}: {error}", "ranks": getattr(error, "ranks", ())}
        return {"undisturbed": undisturbed, "disturbed": disturbed}

    def _tell(self, strategy: str, step: int) -> None:
        print(strategy, "step", step, flush=True)
        time.sleep(self._plan["pause_s"])
        held(step + 1, self._plan["holds"].get(strategy, ""))

    def _train(self, strategy: str, name: str, after_step: Callable[[int], None]) -> list[float]:
        job = None
        if not self._plan["has_group"]:
            job = "".join(filter(str.isalnum, strategy)) + name
            strategy += f"{',' if ':' in strategy else ':'}job={job},timeout_s={self._plan['timeout_s']}"
        model = psengine.DistributedDataParallel(
            Linear(self._plan["columns"]),
            strategy=strategy,
            collective=self._plan["collective"],
            bucket_cap_mb=self._plan["columns"] * 3e-4,  # two buckets
        )
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1 / 64), model)
        for step in range(1, (self._plan["steps"] or sys.maxsize) + 1):
            optimizer.zero_grad()
            model(float((self._rank + 1) * (1 + step % 3))).backward()
            optimizer.step()
            after_step(step)
        weights = list(model.parameters())
        if job is not None and strategy.startswith("async"):
            self._meet(f"{job} done")  # until then workers hold what the servers had at their last push
            with psengine.connect(job=job, role="reader") as reader:
                pulled = reader.pull()
            weights = [pulled[key] for key, _ in model.module.named_parameters()]
        values = torch.cat([w.detach().flatten() for w in weights]).tolist()
        model.leave()
        return values

    def _meet(self, what: str) -> None:
        """Until all replicas are here; over the file system, which no link harms."""
        (self._folder / f"{what} {self._rank}").touch()
        places = [self._folder / f"{what} {rank}" for rank in range(self._plan["size"])]
        eventually(lambda: all(place.exists() for place in places), f"all reach {what}", timeout_s=DEADLINE_S)


def main() -> None:
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    if plan["has_group"]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=plan["timeout_s"]))
    for strategy in plan["strategies"]:
        print(strategy, json.dumps(Training(plan, rank).run(strategy)), flush=True)
    # Rank 0 has the rendezvous store, which others may still ask. The test ends them.
    time.sleep(DEADLINE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
