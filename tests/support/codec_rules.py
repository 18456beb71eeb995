"""The codecs' rules in NumPy: what arrives of an array of float32, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def _blocks(values: np.ndarray, numel: int) -> np.ndarray:
    padded = np.zeros(-(-len(values) // numel) * numel, dtype=np.float32)
    padded[: len(values)] = values
    return padded.reshape(-1, numel)


def int8(values: np.ndarray) -> np.ndarray:
    blocks = _blocks(values, 256)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    steps = np.rint(blocks * np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest)))
    return (steps * (largest / np.float32(127))).reshape(-1)[: len(values)]


def fp4(values: np.ndarray) -> np.ndarray:
    blocks = _blocks(values, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = np.exp2(np.maximum(np.ceil(np.log2(np.maximum(largest.astype(np.float64), 1e-40) / 6)), -126))
    scaled = np.abs(blocks / scale)
    below = np.clip(np.searchsorted(E2M1, scaled, side="right") - 1, 0, 6)
    low, high = E2M1[below], E2M1[below + 1]
    is_tie, is_nearer_high = scaled - low == high - scaled, scaled - low > high - scaled
    codes = below + (is_nearer_high | (is_tie & (below % 2 == 1)))
    return (np.copysign(E2M1[codes] * scale, blocks)).astype(np.float32).reshape(-1)[: len(values)]


def onebit(values: np.ndarray) -> np.ndarray:
    blocks = _blocks(values, 512)
    counts = np.full((len(blocks), 1), 512)
    counts[-1] = len(values) - 512 * (len(blocks) - 1)
    # Added in sixteen lanes, and the lanes by halves.
    lanes = np.zeros((len(blocks), 16), dtype=np.float32)
    for part in np.split(np.abs(blocks), 32, axis=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    scale = lanes / counts.astype(np.float32)
    return np.copysign(scale, blocks).reshape(-1)[: len(values)]


def topk(ratio: float) -> Callable[[np.ndarray], np.ndarray]:
    def rule(values: np.ndarray) -> np.ndarray:
        taken = np.argsort(-np.abs(values), kind="stable")[: max(1, int(np.ceil(ratio * len(values))))]
        arrived = np.zeros_like(values)
        arrived[taken] = values[taken]
        return arrived

    return rule


RULES = {"int8": int8, "fp4": fp4, "onebit": onebit, "topk": topk(0.01)}


class WithFeedback:
    """A rule that adds what it left out to the next values."""

    def __init__(self, rule: Callable[[np.ndarray], np.ndarray]) -> None:
        self.rule = rule
        self.residual = np.float32(0)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        corrected = values + self.residual
        arrived = self.rule(corrected)
        self.residual = corrected - arrived
        return arrived


class Average:
    """The average over ranks: what arrives of each is added in their order; what arrives of the sum, for "topk" all."""

    def __init__(self, name: str, world_size: int) -> None:
        self.up = [WithFeedback(RULES[name]) for _ in range(world_size)]
        self.down = (lambda total: total) if name == "topk" else WithFeedback(RULES[name])

    def __call__(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        total = np.zeros_like(shares[0])
        for index, (rule, share) in enumerate(zip(self.up, shares, strict=True)):
            total = rule(share) if index == 0 else total + rule(share)
        return self.down(total)

    def lay_out_anew(self) -> None:
        """Owners of slices, of whole 512 values, take what was left out of the sum to their own residuals."""
        if not isinstance(self.down, WithFeedback):
            return
        second, self.down.residual = self.down.residual, np.float32(0)
        numel = -(-len(second) // (512 * len(self.up))) * 512
        for rank, rule in enumerate(self.up):
            rule.residual[rank * numel : (rank + 1) * numel] += second[rank * numel : (rank + 1) * numel]
