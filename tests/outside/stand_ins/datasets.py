"""Stands in for Hugging Face's ``datasets``: what accelerate's scripts call, over a small MRPC made on the spot."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

utils = SimpleNamespace(logging=SimpleNamespace(set_verbosity_warning=lambda: None, set_verbosity_error=lambda: None))

# Odd on purpose: the last batch is smaller on every number of ranks.
NUMBER_OF_PAIRS = {"train": 75, "validation": 37}


class Dataset:
    """Rows of equal columns."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self._columns.items()}

    def map(self, function: Callable[[Any], Any], *, batched: bool, remove_columns: list[str], **_: Any) -> Dataset:
        if not batched:
            raise NotImplementedError("the stand-in maps whole columns only: pass batched=True")
        new = dict(function(self._columns))
        kept = {name: values for name, values in self._columns.items() if name not in remove_columns}
        return Dataset({**kept, **new})

    def rename_column(self, old: str, new: str) -> Dataset:
        return Dataset({new if name == old else name: values for name, values in self._columns.items()})


class DatasetDict(dict[str, Dataset]):
    """Splits of a dataset; what is done to it is done to each."""

    def map(self, *arguments: Any, **options: Any) -> DatasetDict:
        return DatasetDict({name: split.map(*arguments, **options) for name, split in self.items()})

    def rename_column(self, old: str, new: str) -> DatasetDict:
        return DatasetDict({name: split.rename_column(old, new) for name, split in self.items()})


def load_dataset(path: str, name: str, *, split: str | None = None) -> Any:
    """MRPC's columns: pairs of sentences, label 1 where the second has the words of the first."""
    if (path, name) != ("nyu-mll/glue", "mrpc"):
        raise NotImplementedError(f"the stand-in has nyu-mll/glue, mrpc only (got {path}, {name})")
    splits = DatasetDict({name: _pairs(name, number) for name, number in NUMBER_OF_PAIRS.items()})
    return splits if split is None else splits[split]


def _pairs(seed: str, number: int) -> Dataset:
    random_words = random.Random(seed)
    words = [f"w{index}" for index in range(40)]
    first = [random_words.choices(words, k=random_words.randint(3, 9)) for _ in range(number)]
    labels = [random_words.randint(0, 1) for _ in range(number)]
    second = [sorted(a) if label else random_words.choices(words, k=6) for a, label in zip(first, labels, strict=True)]
    return Dataset(
        {
            "idx": list(range(number)),
            "sentence1": [" ".join(sentence) for sentence in first],
            "sentence2": [" ".join(sentence) for sentence in second],
            "label": labels,
        }
    )
