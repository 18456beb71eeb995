"""Train a small GPT on the source of Python's standard library, on one process or many, under any strategy.

python examples/train_gpt.py                                                one process
psengine run --workers 2 examples/train_gpt.py                              two, averaging gradients
psengine run --workers 2 --strategy async examples/train_gpt.py             two, each in its own time, over a server
psengine run --workers 2 examples/train_gpt.py --native                     native DistributedDataParallel, to compare

Says the loss on other files, in bits per byte, every --evaluate-every steps, and writes some Python at the end.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from image_options import OptionParser, positive_float, positive_int, seed
from rank_errors import on_all_ranks, run_to_the_end, wait_for_all_ranks
from small_gpt import BYTES, SmallGPT, continue_text
from text_data import Text, load_text, random_batch
from torch import nn
from torch.nn import functional as F

import psengine

MAX_BYTES = 8_000_000
VALIDATION_BATCHES = 8


def main() -> int:
    return run_to_the_end(train)


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--text", type=Path, metavar="DIR", help="Python files to learn from (default: the standard library's)")
    add("--strategy", metavar="NAME", help="default: PSENGINE_STRATEGY, else sync")
    add("--native", action="store_true", help="native DistributedDataParallel in the place of psengine's")
    add("--steps", type=positive_int, default=300, metavar="N", help="of each worker (default: 300)")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="of each worker (default: 16)")
    add("--layers", type=positive_int, default=4, metavar="N", help="default: 4")
    add("--width", type=positive_int, default=128, metavar="N", help="a multiple of 4 (default: 128)")
    add("--context", type=positive_int, default=128, metavar="N", help="bytes the model sees (default: 128)")
    add("--learning-rate", type=positive_float, default=0.002, metavar="X", help="of AdamW (default: 0.002)")
    add("--evaluate-every", type=positive_int, default=50, metavar="N", help="steps (default: 50)")
    add("--seed", type=seed, default=0, metavar="N", help="default: 0")
    options = parser.parse_args()
    if options.width % 4:
        parser.error(f"--width is shared by 4 heads (expected a multiple of 4, got {options.width})")
    if options.native and options.strategy:
        parser.error("--native has no strategy: leave out --strategy")
    return options


def train() -> int:
    options = parse_options()
    context = psengine.init()
    text = on_all_ranks(lambda: load_text(options.text, MAX_BYTES))
    torch.manual_seed(options.seed)
    network = SmallGPT(layers=options.layers, width=options.width, context_length=options.context).to(context.device)
    model, optimizer = on_all_ranks(lambda: wrap(network, options))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    if context.is_main_process:
        parameters = sum(parameter.numel() for parameter in network.parameters())
        print(
            f"{len(text.train) / 1e6:.1f} MB of {text.file_count} files; {parameters / 1e6:.1f} M parameters; world"
            f" size {context.world_size}, on {context.device}",
            flush=True,
        )
    # Another place in the text for each worker.
    places = torch.Generator().manual_seed(1_000_003 * options.seed + context.worker)
    started_s = time.monotonic()
    for step in range(1, options.steps + 1):
        tokens, targets = random_batch(text.train, options.batch_size, options.context, places)
        optimizer.zero_grad()
        scores = model(tokens.to(context.device))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.to(context.device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if not options.native:
            model.report(loss=loss, samples=len(tokens))  # for the servers' dashboard
        if step % options.evaluate_every == 0 or step == options.steps:
            losses = {"train": loss.detach(), "validation": validation_loss(network, text, options, context)}
            bits = {name: float(value) / math.log(2) for name, value in psengine.mean(losses).items()}
            if context.is_main_process:
                rate = step * options.batch_size * options.context * context.world_size / (time.monotonic() - started_s)
                print(
                    f"step {step}/{options.steps}  train {bits['train']:.3f}  validation {bits['validation']:.3f} bits"
                    f" per byte  {rate:,.0f} bytes/s",
                    flush=True,
                )
    if context.is_main_process:
        print("---\n" + continue_text(network.eval(), b"def main(", 300, torch.Generator().manual_seed(options.seed)))
    wait_for_all_ranks()
    return 0


def wrap(
    network: nn.Module, options: argparse.Namespace
) -> tuple[nn.parallel.DistributedDataParallel, torch.optim.Optimizer]:
    if options.native:
        model = nn.parallel.DistributedDataParallel(network)
        return model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model = psengine.DistributedDataParallel(network, strategy=options.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    return model, psengine.DistributedOptimizer(optimizer, model)


def learning_rate_factor(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    progress = min(1.0, step / steps)
    return min(1.0, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validation_loss(
    network: SmallGPT, text: Text, options: argparse.Namespace, context: psengine.Context
) -> torch.Tensor:
    """Of the same pieces each time; every worker takes its own."""
    places = torch.Generator().manual_seed(context.worker)
    total = torch.zeros((), device=context.device)
    for _ in range(VALIDATION_BATCHES):
        tokens, targets = random_batch(text.validation, options.batch_size, options.context, places)
        scores = network(tokens.to(context.device)).reshape(-1, BYTES)
        total += F.cross_entropy(scores, targets.to(context.device).flatten())
    return total / VALIDATION_BATCHES


if __name__ == "__main__":
    exit_code = main()
    psengine.shutdown()
    sys.exit(exit_code)
