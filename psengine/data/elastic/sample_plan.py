"""Which samples a virtual worker takes in a step, and with which random numbers.

Both are functions of the seed, the step and the virtual worker, and of no process.

One epoch of 9 samples, for 3 virtual workers and ``batch_size=2``::

    permutation       p0 p1 │ p2 p3 │ p4 p5 ║ p6 │ p7 │ p8
    virtual worker      0   │   1   │   2   ║ 0  │ 1  │ 2
    step              1                     ║ 2               the samples that are left, split evenly

With 8 samples there is no step 2: the first two virtual workers would have a sample, the third none. So p6 and p7 join
step 1, in which two virtual workers take three samples.

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

import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from psengine.errors import ConfigurationError

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


class SamplePlan:
    """The samples of every step of a training, by a pure function; each sample is in one step of an epoch.

    Args:
        length: number of samples of the dataset.
        virtual_workers: V.
        batch_size: samples that a virtual worker takes in a full step.
        seed: of the permutations.
        shuffle: permute, differently in each epoch; else keep the dataset's order.
        drop_last: leave out the samples of an epoch that fill no step.

    Attributes:
        steps_per_epoch: how many steps an epoch has.

    Raises:
        ConfigurationError: an epoch would have no step in which each virtual worker has a sample.
    """

    def __init__(
        self, length: int, virtual_workers: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self._virtual_workers, self._global_batch = virtual_workers, virtual_workers * batch_size
        self._seed, self._shuffle = seed, shuffle
        full, rest = divmod(length, self._global_batch)
        least = self._global_batch if drop_last else virtual_workers
        if length < least:
            raise ConfigurationError(
                f"every virtual worker needs samples in each step (expected a dataset of at least {least} samples for"
                f" {virtual_workers} virtual workers, batch_size={batch_size} and drop_last={drop_last}, got {length})"
            )
        self._length = length - rest if drop_last else length
        has_more = rest >= virtual_workers or full == 0
        self.steps_per_epoch = full + (has_more and not drop_last)
        # That of the step's epoch, and that of the batches which are fetched ahead.
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 0, of a step, counted from 1 over all epochs."""
        return (step - 1) // self.steps_per_epoch

    def steps_of(self, epoch: int) -> range:
        """The steps of an epoch."""
        first = epoch * self.steps_per_epoch + 1
        return range(first, first + self.steps_per_epoch)

    def samples(self, step: int, virtual_worker: int) -> list[int]:
        """The indices that a virtual worker takes in a step, in order."""
        epoch = self.epoch_of(step)
        steps = self.steps_of(epoch)
        begin = (step - steps.start) * self._global_batch
        end = self._length if step == steps[-1] else begin + self._global_batch
        least, more = divmod(end - begin, self._virtual_workers)
        begin += virtual_worker * least + min(virtual_worker, more)
        mine = range(begin, begin + least + (virtual_worker < more))
        return self._permutation(epoch)[mine.start : mine.stop].tolist() if self._shuffle else list(mine)

    def _permute(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(random_key("permutation", self._seed, epoch))
        return torch.randperm(self._length, generator=generator)
