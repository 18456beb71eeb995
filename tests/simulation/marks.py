"""Gradients that name themselves in the weights that they are added to, under each codec without a loss.

::

    digits   push n adds 4^(n mod d) to element n // d      d: as many base-4 digits as the codec's values hold
    signs    push n adds row n of a Hadamard matrix         "onebit" knows no zero

So the weights tell which updates they have, and how often: two bits of one integer for each push.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from simulation.payloads import Values

# Pushes of one chunk.
MOST = 156
WRONG = -1  # values that are no sum of marks


class Marks(Protocol):
    """See the module's text.

    Attributes:
        numel, dtype: of a chunk.
    """

    numel: int
    dtype: torch.dtype

    def mark(self, number: int) -> torch.Tensor:
        """What push ``number`` adds."""

    def updates(self, values: torch.Tensor) -> int:
        """Which updates these weights have: bits 2 n and 2 n + 1 count push n. ``WRONG`` where they are no sum."""

    def weights(self, updates: int) -> Values:
        """The weights that have these updates."""


class Digits:
    """See the module's text.

    Args:
        dtype: of a chunk.
        digits: of one element.
    """

    def __init__(self, dtype: torch.dtype, digits: int) -> None:
        self.dtype, self.numel = dtype, -(-MOST // digits)
        self._digits = digits

    def mark(self, number: int) -> torch.Tensor:
        values = torch.zeros(self.numel, dtype=self.dtype)
        values[number // self._digits] = 4.0 ** (number % self._digits)
        return values

    def updates(self, values: torch.Tensor) -> int:
        found, bits = 0, 2 * self._digits
        if self.numel <= 16:
            for index, value in enumerate(values.tolist()):
                found |= int(value) << (bits * index)
            return found
        array = values.numpy()
        for place in np.flatnonzero(array).tolist():
            value = float(array[place])
            if not 0 < value < 4**self._digits or value != int(value):
                return WRONG
            found |= int(value) << (bits * place)
        return found

    def weights(self, updates: int) -> Values:
        size, mask = 4**self._digits, 4**self._digits - 1
        values = []
        for _ in range(self.numel):
            values.append(float(updates & mask))
            updates //= size
        return np.array(values, dtype=str(self.dtype).removeprefix("torch."))


class Signs:
    """See the module's text."""

    numel, dtype = 256, torch.float32

    def __init__(self) -> None:
        rows = np.ones((1, 1), dtype=np.float32)
        while len(rows) < self.numel:
            rows = np.block([[rows, rows], [rows, -rows]])
        self._rows = np.ascontiguousarray(rows)

    def mark(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[number].copy())

    def updates(self, values: torch.Tensor) -> int:
        counts = self._rows @ values.numpy() / self.numel
        found = 0
        for number in np.flatnonzero(counts).tolist():
            count = float(counts[number])
            if count not in (1.0, 2.0, 3.0):
                return WRONG
            found |= int(count) << (2 * number)
        return found

    def weights(self, updates: int) -> Values:
        counts = np.array([updates >> (2 * number) & 3 for number in range(self.numel)], dtype=np.float32)
        return counts @ self._rows


def marks_for(codec: str) -> Marks:
    """Those that this codec keeps whole; "" is none."""
    name = codec.partition(":")[0]
    if name in ("", "fp32"):
        return Digits(torch.float64, 26 if not name else 12)
    if name in ("bf16", "fp16"):
        return Digits(torch.float32, 4)
    return _SIGNS if name == "onebit" else Digits(torch.float32, 1)


_SIGNS = Signs()
