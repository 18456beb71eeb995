"""Stands in for Hugging Face's ``evaluate``: the metric of glue's mrpc, accuracy and F1."""

from __future__ import annotations

from typing import Any


def load(path: str, name: str) -> Metric:
    if (path, name) != ("glue", "mrpc"):
        raise NotImplementedError(f"the stand-in has glue, mrpc only (got {path}, {name})")
    return Metric()


class Metric:
    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        pairs, self._pairs = self._pairs, []
        hits = sum(a == b == 1 for a, b in pairs)
        positives = sum((a == 1) + (b == 1) for a, b in pairs)
        return {
            "accuracy": sum(a == b for a, b in pairs) / len(pairs),
            "f1": 2 * hits / positives if positives else 0.0,
        }
