"""A small decoder-only transformer over bytes, after GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256


class SmallGPT(nn.Module):
    """Scores of the next byte at each place.

    Takes int64 of shape (batch, length <= context_length); gives shape (batch, length, 256). The embedding of bytes is
    the output layer too.
    """

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4, context_length: int = 128) -> None:
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
        x = x + self.attend(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def continue_text(model: SmallGPT, start: bytes, length: int, generator: torch.Generator) -> str:
    """``start`` and ``length`` more bytes, drawn from what ``model`` expects."""
    device = model.head.weight.device
    tokens = torch.tensor([list(start)])
    for _ in range(length):
        scores = model(tokens[:, -model.context_length :].to(device))[0, -1].cpu() / 0.8
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(0), 1, generator=generator)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
