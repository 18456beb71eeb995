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
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import psengine

BYTES = 256
VALIDATION_BATCHES = 8


class SmallGPT(nn.Module):
    """A decoder-only transformer over bytes, after GPT-2 (Radford et al. 2019).

    Takes int64 of shape (batch, length <= context_length); gives scores of the next byte at each place, shape (batch,
    length, 256). The embedding of bytes is the output layer too.
    """

    def __init__(self, layers: int, width: int, context_length: int, heads: int = 4) -> None:
        super().__init__()
        self.context_length = context_length
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(initialise)
        self.head.weight = self.bytes.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.places(places))))


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.perceptron_norm(x))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The top modules of the standard library, as bytes; every tenth file is for validation."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(paths):
        parts[index % 10 == 9].append(path.read_bytes())
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


def random_batch(
    text: torch.Tensor, options: argparse.Namespace, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of ``text`` at random places, and the same one byte further: int64 of shape (batch, context)."""
    starts = torch.randint(len(text) - options.context - 1, (options.batch_size, 1), generator=generator)
    pieces = text[starts + torch.arange(options.context + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def continue_text(network: SmallGPT, start: bytes, length: int, device: torch.device) -> str:
    """``start`` and ``length`` more bytes, drawn from what the network expects."""
    generator, tokens = torch.Generator().manual_seed(0), torch.tensor([list(start)])
    for _ in range(length):
        scores = network(tokens[:, -network.context_length :].to(device))[0, -1].cpu() / 0.8
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(0), 1, generator=generator)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--strategy", metavar="NAME", help="default: PSENGINE_STRATEGY, else sync")
    add("--native", action="store_true", help="native DistributedDataParallel in the place of psengine's")
    add("--steps", type=int, default=300, metavar="N", help="of each worker (default: 300)")
    add("--batch-size", type=int, default=16, metavar="N", help="of each worker (default: 16)")
    add("--layers", type=int, default=4, metavar="N", help="default: 4")
    add("--width", type=int, default=128, metavar="N", help="a multiple of the 4 heads (default: 128)")
    add("--context", type=int, default=128, metavar="N", help="bytes the model sees (default: 128)")
    add("--learning-rate", type=float, default=0.002, metavar="X", help="of AdamW (default: 0.002)")
    add("--evaluate-every", type=int, default=50, metavar="N", help="steps (default: 50)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with psengine.init() as context:
        train_text, validation_text = load_text()
        torch.manual_seed(0)
        network = SmallGPT(options.layers, options.width, options.context).to(context.device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate)
        if options.native:
            model = nn.parallel.DistributedDataParallel(network)
        else:
            model = psengine.DistributedDataParallel(network, strategy=options.strategy)
            optimizer = psengine.DistributedOptimizer(optimizer, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, options.steps))
        parameters = sum(parameter.numel() for parameter in network.parameters())
        psengine.print(f"{len(train_text) / 1e6:.1f} MB of text; {parameters / 1e6:.1f} M parameters")
        places = torch.Generator().manual_seed(context.worker)  # other places in the text for each worker
        started_s = time.monotonic()
        for step in range(1, options.steps + 1):
            tokens, targets = random_batch(train_text, options, places)
            optimizer.zero_grad()
            loss = cross_entropy(model, tokens, targets, context.device)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % options.evaluate_every == 0 or step == options.steps:
                losses = {"train": loss.item(), "validation": validate(network, validation_text, options, context)}
                bits = {name: value / math.log(2) for name, value in psengine.mean(losses).items()}
                rate = step * options.batch_size * options.context * context.workers / (time.monotonic() - started_s)
                psengine.print(
                    f"step {step}/{options.steps}  train {bits['train']:.3f}  validation {bits['validation']:.3f} bits"
                    f" per byte  {rate:,.0f} bytes/s"
                )
        if context.is_main_process:
            print("---\n" + continue_text(network.eval(), b"def main(", 300, context.device))
        psengine.barrier()


def rate_factor(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine down to a tenth."""
    return min(1.0, (step + 1) / max(1, steps // 20)) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def cross_entropy(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, device: torch.device) -> torch.Tensor:
    return F.cross_entropy(model(tokens.to(device)).flatten(0, 1), targets.to(device).flatten())


@torch.no_grad()
def validate(network: SmallGPT, text: torch.Tensor, options: argparse.Namespace, context: psengine.Context) -> float:
    """Of the same pieces each time; every worker takes its own."""
    places = torch.Generator().manual_seed(context.worker)
    batches = [random_batch(text, options, places) for _ in range(VALIDATION_BATCHES)]
    return sum(cross_entropy(network, *batch, context.device).item() for batch in batches) / VALIDATION_BATCHES


if __name__ == "__main__":
    main()
