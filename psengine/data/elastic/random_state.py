"""Random numbers that depend on the seed, the step and the virtual worker, and on no process.

Python's ``random``, NumPy's global state and torch's default generators are set from a key: 64 bits of BLAKE2b of a
text such as "forward/0/17/3".

| key | for |
|---|---|
| permutation/SEED/EPOCH | the order of an epoch's samples |
| samples/SEED/STEP/VIRTUAL WORKER | the dataset and ``collate_fn``, in whichever process they run |
| forward/SEED/STEP/VIRTUAL WORKER | forward and backward of a batch |
| epoch/SEED/EPOCH | the code before an epoch's steps |
| begin/SEED/STEP, end/SEED/STEP | the code before a step's batches, and after them |
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

Request = tuple[int, Sequence[int]]


def random_key(purpose: str, *numbers: int) -> int:
    """64 bits that depend on ``purpose`` and ``numbers``; the same on every machine."""
    text = "/".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def set_random_state(purpose: str, *numbers: int) -> None:
    """Set the random state of this process, and of its CUDA devices, from a key."""
    _set_from(random_key(purpose, *numbers))


def _set_from(key: int) -> None:
    random.seed(key)
    # The same generator as Python's: of the same words it would draw the same numbers.
    numpy.random.seed([key & 0xFFFFFFFF, key >> 32, 1])
    # torch.manual_seed does the same and, where CUDA is not in use, formats a traceback at each call.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)


class SeededDataset(Dataset[Any]):
    """``dataset`` for torch's ``DataLoader``, whose batch sampler yields (key, indices).

    The key's random state lasts until the batch is made: ``collate_fn`` is called next, in the same process.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, request: Request) -> Any:
        key, indices = request
        _set_from(key)
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(list(indices))
        return [self._dataset[index] for index in indices]
