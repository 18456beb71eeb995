"""The losses of an epoch, over all ranks."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from rank_errors import TrainingError

import psengine
from psengine.environment.installation import install_command


class EpochLosses:
    """The losses of an epoch: checked on all ranks together every few steps, shown on rank 0, averaged at the end.

    One exchange in ``report_every`` steps, because an exchange in each would hold back an asynchronous strategy and
    wait for a GPU.
    """

    def __init__(self, context: psengine.Context, epoch: int, steps: int, report_every: int) -> None:
        self.epoch, self.steps, self.report_every, self.speaks = epoch, steps, report_every, context.is_main_process
        self.bar = progress_bar(f"epoch {epoch}", steps) if self.speaks else None
        self.step = self.samples = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
        self.unchecked: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self.step += 1
        self.samples += samples
        self.loss_sum += loss * samples
        self.unchecked.append(loss)
        if len(self.unchecked) == self.report_every:
            self.report()
        if self.bar is not None:
            self.bar.update()

    def report(self) -> None:
        """Stop all ranks if one had a loss that is not finite; show the mean loss of the latest step."""
        losses = torch.stack(self.unchecked).double().cpu()
        position = int((~losses.isfinite()).int().argmax())  # the first such loss, or the first loss
        everyones = psengine.gather(
            {"position": position, "loss": losses[position].item(), "latest": losses[-1].item()}
        )
        bad_ranks = [rank for rank, loss in enumerate(everyones["loss"]) if not math.isfinite(loss)]
        if bad_ranks:
            position, rank = min((everyones["position"][rank], rank) for rank in bad_ranks)
            loss = everyones["loss"][rank]
            step = self.step - len(losses) + position + 1
            raise TrainingError(
                f"the loss is not finite (expected a finite number on all ranks, got {loss} on rank {rank}, epoch"
                f" {self.epoch}, step {step}). Try a smaller --learning-rate"
            )
        self.unchecked = []
        mean_loss = sum(everyones["latest"]) / len(everyones["latest"])
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{mean_loss:.4f}")
        elif self.speaks and self.step < self.steps:
            print(f"epoch {self.epoch}  step {self.step}/{self.steps}  loss {mean_loss:.4f}", flush=True)

    def finish(self) -> float:
        """Return the mean loss over the samples of all ranks."""
        if self.unchecked:
            self.report()
        if self.bar is not None:
            self.bar.close()
        return float(psengine.mean(self.loss_sum / self.samples, weight=self.samples))


def progress_bar(title: str, steps: int) -> Any:
    """Return a tqdm bar, or None where there is no terminal or no tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"no progress bar without tqdm: {install_command('examples')}", file=sys.stderr)
        return None
    return tqdm(desc=title, total=steps, unit="step", leave=False)
