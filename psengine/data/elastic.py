"""The loop of a training with virtual workers: epochs, steps, and a step's batches.

::

    for epoch in loader.epochs(3):              enter the job, at its epoch
        for step in loader.steps(epoch):        ... and step: the player begins it, loader processes fetch ahead
            for batch in step.batches:          a virtual worker: its samples, fetched with one random state, trained
                ...                             with another; after the last one gradients are averaged

Samples and random numbers are functions of the seed, the step and the virtual worker, and of no process. Python's
``random``, NumPy's global state and torch's default generators are set from a key: 64 bits of BLAKE2b of a text such as
"forward/0/17/3".

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
import itertools
import math
import numbers
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from psengine.data.value_exchange import ValueExchange
from psengine.environment.processes import end_with_parent
from psengine.errors import ArgumentTypeError, ConfigurationError, ReductionError
from psengine.strategies.elastic.player import Player, current_player
from psengine.tensors.leaves import is_real_scalar, to_float

# torch's own alignment of tensors on the CPU.
ALIGNMENT_BYTES = 64
Request = tuple[int, Sequence[int]]


class ElasticLoader:
    """Batches of virtual workers, for a training whose workers may die and join at any time.

    ``for epoch in loader.epochs(3)``, ``for step in loader.steps(epoch)``, ``for batch in step.batches``: then
    gradients are averaged, and ``optimizer.step()`` follows. In each step of an epoch each virtual worker takes
    ``batch_size`` samples; the last step's are split evenly. Each sample is taken once in an epoch, whoever plays the
    virtual workers. With native DDP, or a strategy without virtual workers, each rank of the default process group
    plays one.

    The random state of Python, NumPy (its global one) and torch is set before a batch's samples are fetched, before it
    is yielded, and before the code between: so ``num_workers`` changes no bits, nor does the number of workers. Other
    generators, such as a dataset's own, are not set.

    Args:
        dataset: map-style, the same on every worker.
        batch_size: samples of a virtual worker in a step.
        seed: of the order of samples and of random numbers; the same on every worker.
        shuffle: permute, differently in each epoch; else keep the dataset's order.
        drop_last: leave out the samples that do not fill an epoch's last step. Else fewer samples than virtual workers
            join the step before.
        model: the wrapped model whose virtual workers these are; default: the one wrapped last that has any.
        num_workers: loader processes, which stay until the last epoch is over; 0 fetches in this process.
        fetching: what else torch's ``DataLoader`` takes of this: ``collate_fn``, ``pin_memory``, ``worker_init_fn``,
            ``prefetch_factor``, ``timeout`` and ``multiprocessing_context``.

    Raises:
        ArgumentTypeError: the dataset has no length.
        ConfigurationError: ``batch_size`` is not positive; when an epoch's steps are first asked for: the dataset is
            too short.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        model: torch.nn.Module | None = None,
        num_workers: int = 0,
        **fetching: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ArgumentTypeError(
                f"ElasticLoader takes a map-style dataset with a length (got {type(dataset).__name__})"
            )
        if batch_size < 1:
            raise ConfigurationError(
                f"every virtual worker needs a sample (expected batch_size >= 1, got {batch_size})"
            )
        self._length, self._seed, self._model = len(dataset), seed, model
        self._order: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        self._batches = Batches(dataset, self._request, self._upcoming, num_workers=num_workers, **fetching)
        # The step that begins next, once the job was entered; the last one that is known to be wanted.
        self._next_step = self._last_step = 0
        self._step: Step | None = None
        self._has_left = False

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has, for a scheduler. Asked for after the model was wrapped."""
        return self._plan.steps_per_epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of a training of ``count`` that are not over, from 0 on; enter the job before the first.

        Raises:
            ConfigurationError: the workers differ in seed, batch size, dataset length or virtual workers.
            ReductionError: an epoch's steps, or a step's batches, were not all taken.
        """
        self._enter()
        steps = range(1, count * self.steps_per_epoch + 1)
        self._last_step = steps.stop - 1
        while self._next_step in steps:
            epoch = self._plan.epoch_of(self._next_step)
            set_random_state("epoch", self._seed, epoch)
            yield epoch
            self._check_step_is_over()
            if self._next_step in self._plan.steps_of(epoch):
                raise ReductionError(
                    f"epoch {epoch} was left before its last step (expected {self.steps_per_epoch} steps, got"
                    f" {self._next_step - self._plan.steps_of(epoch).start}). Fix: leave the loop over epochs too."
                )
        self._has_left = True
        self._batches.close()
        self._player.leave()

    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield the steps of ``epoch`` that are not over.

        Raises:
            ReductionError: another epoch is next; or a step's batches were not all taken.
        """
        self._enter()
        self._check_step_is_over()
        steps = self._plan.steps_of(epoch)
        if self._next_step not in steps:
            raise ReductionError(
                f"epochs follow each other (expected steps({self._plan.epoch_of(self._next_step)}), in which step"
                f" {self._next_step} is next, got steps({epoch})). Fix: for epoch in loader.epochs(count)."
            )
        self._last_step = max(self._last_step, steps[-1])
        while self._next_step in steps:
            number = self._next_step
            self._player.begin_step(number)
            self._batches.begin_step(number)
            self._step = Step(number, epoch, self._player, functools.partial(self._play, number))
            self._next_step += 1
            set_random_state("begin", self._seed, number)
            yield self._step
            self._check_step_is_over()

    @functools.cached_property
    def _player(self) -> Player | NativePlayer:
        return current_player(self._model) or NativePlayer()

    @functools.cached_property
    def _plan(self) -> SamplePlan:
        return SamplePlan(self._length, self._player.virtual_workers, **self._order)

    def _enter(self) -> None:
        if self._has_left:
            raise ReductionError("the training is over (expected one loop over epochs, got another after its end)")
        if self._next_step == 0:
            _ = self._plan  # refuses a dataset that is too short, before others wait for this worker
            facts = {f"ElasticLoader's {name}": str(value) for name, value in self._order.items()}
            self._next_step = self._player.enter({"the length of ElasticLoader's dataset": str(self._length)} | facts)

    def _play(self, step: int) -> Iterator[Any]:
        """Yield the batches of the virtual workers that are played here."""
        while (virtual_worker := self._player.next_virtual_worker()) is not None:
            batch = self._batches.fetch(step, virtual_worker)
            set_random_state("forward", self._seed, step, virtual_worker)
            yield batch
        set_random_state("end", self._seed, step)

    def _request(self, step: int, virtual_worker: int) -> Request:
        key = random_key("samples", self._seed, step, virtual_worker)
        return key, self._plan.samples(step, virtual_worker)

    def _upcoming(self, step: int) -> Sequence[int]:
        return self._player.upcoming() if step <= self._last_step else ()

    def _check_step_is_over(self) -> None:
        if self._step is not None and not self._step.is_over:
            raise ReductionError(
                f"step {self._step.number} was left before its batches ended (expected a loop over step.batches that"
                " runs to its end), and other workers wait for it. Fix: leave the loop over steps, at a step's end."
            )


class Step:
    """A step of all virtual workers; what ``ElasticLoader.steps`` yields.

    Attributes:
        number: of the step, counted from 1 over all epochs.
        epoch: of the step, counted from 0.
        is_over: whether the batches have ended, and so gradients are averaged.
    """

    def __init__(
        self, number: int, epoch: int, player: Player | NativePlayer, play: Callable[[], Iterator[Any]]
    ) -> None:
        self.number, self.epoch, self.is_over = number, epoch, False
        self._player, self._play = player, play
        self._has_begun = False
        self._mean: float | None = None

    @property
    def batches(self) -> Iterator[Any]:
        """The batches of the virtual workers that are played here; once they end, gradients are averaged.

        More may come than expected: those of a worker that died in this step.

        Raises:
            ReductionError: they were asked for before.
        """
        if self._has_begun:
            raise ReductionError(f"step {self.number}: batches were taken already (expected one loop, got a second)")
        self._has_begun = True
        yield from self._play()
        values = self._player.recorded
        # sum() adds in another way from Python 3.12 on.
        self._mean = functools.reduce(operator.add, values) / len(values)
        self.is_over = True

    def record(self, value: float | torch.Tensor) -> None:
        """Keep a number of the batch that is trained, such as its loss, for ``mean``; the last one counts.

        Raises:
            ArgumentTypeError: it is no single real number.
            ReductionError: called outside the loop over ``batches``.
        """
        given: Any = value
        if not isinstance(given, numbers.Real) and not is_real_scalar(given):
            raise ArgumentTypeError(f"record() takes one real number (got {value!r}). Fix: record(loss.mean()).")
        if self._player.playing is None:
            raise ReductionError(
                "record() takes a value of one batch (expected a call inside the loop over step.batches, got one"
                " outside). Fix: call record() after backward, and mean() once the loop has ended."
            )
        self._player.record(to_float(value))

    def mean(self) -> float:
        """The mean over all virtual workers of what ``record`` was given, added in their order in float64.

        The same bits on all workers, whoever played whom. NaN where a batch recorded nothing.

        Raises:
            ReductionError: the batches have not ended.
        """
        if self._mean is None:
            raise ReductionError(
                "mean() needs the values of all virtual workers (expected a call after the loop over step.batches, got"
                " one before its end). Fix: record(value) in the loop, mean() after it."
            )
        return self._mean


class NativePlayer:
    """The part of ``strategies.elastic.player.Player`` without virtual workers, as under native DDP.

    Each rank of the default process group plays the virtual worker of its number, and begins with step 1. Gradients are
    averaged by whatever wraps the model: native DDP, or a strategy without virtual workers.
    """

    def __init__(self) -> None:
        self._exchange = ValueExchange("ElasticLoader", None)
        self.virtual_workers = self._exchange.collective.world_size
        self.recorded: list[float] = []
        self.playing: int | None = None
        self._value: float | None = None

    def enter(self, facts: Mapping[str, str]) -> int:
        self._exchange.check(facts)
        return 1

    def begin_step(self, step: int) -> None:
        self.playing = self._value = None

    def upcoming(self) -> Sequence[int]:
        return [self._exchange.collective.rank]

    def next_virtual_worker(self) -> int | None:
        if self.playing is None:
            self.playing = self._exchange.collective.rank
            return self.playing
        self.playing = None
        self.recorded = [math.nan] * self.virtual_workers
        # All ranks run the same program, so all recorded something or none did.
        if self._value is not None:
            value = torch.tensor([self._value], dtype=torch.float64, device=self._exchange.device)
            values = self._exchange.collective.gather(value, what="what Step.record() was given")
            self.recorded = [one.item() for one in values]
        return None

    def record(self, value: float) -> None:
        self._value = value

    def leave(self) -> None:
        pass


class Batches:
    """The batches of virtual workers, fetched ahead in torch's loader processes, or in this one, with the same bits.

    ::

        step               17       18       19         two loader processes, two batches ahead in each
        plays here         2 3      2 3      2 3
        requested          ................             another worker dies in step 17: its virtual worker 5 is fetched
        then plays here    2 3 5    2 3 5    2 3 5      in this process. As step 18 begins, all is requested anew

    It is the batch sampler from which torch takes a request for each batch that loader processes fetch.

    Args:
        dataset: map-style.
        request: the key and the indices of a step's virtual worker.
        upcoming: the virtual workers that are played here in a step; empty after the last step.
        num_workers, fetching: as of torch's ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        request: Callable[[int, int], Request],
        upcoming: Callable[[int], Sequence[int]],
        *,
        num_workers: int,
        **fetching: Any,
    ) -> None:
        self._request, self._upcoming = request, upcoming
        # The step in which requests begin; (step, virtual worker) of those whose batches are to come, in order.
        self._step, self._requested = 0, deque[tuple[int, int]]()
        make_loader: Any = functools.partial(
            DataLoader,
            SeededDataset(dataset),
            generator=torch.Generator(),  # torch draws a seed for its loader processes; not from the training's state
        )
        self._wanted: list[Request] = []
        here = {name: fetching[name] for name in ("collate_fn", "pin_memory") if name in fetching}
        self._here = make_loader(batch_sampler=self._wanted, **here)
        begin = functools.partial(_enter_loader_process, fetching.pop("worker_init_fn", None))
        self._processes = make_loader(
            batch_sampler=self,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            in_order=True,
            worker_init_fn=begin,
            **fetching,
        )
        self._fetched: Iterator[Any] = iter(())
        # A first call keeps MKL from choosing fewer threads: not only where batches are fetched in this process.
        torch.set_num_threads(torch.get_num_threads())

    def __iter__(self) -> Iterator[Request]:
        self._requested.clear()
        for step, virtual_worker in self._expected():
            self._requested.append((step, virtual_worker))
            yield self._request(step, virtual_worker)

    def _expected(self) -> Iterator[tuple[int, int]]:
        for step in itertools.count(self._step):
            virtual_workers = self._upcoming(step)
            if not virtual_workers:
                return
            for virtual_worker in virtual_workers:
                yield step, virtual_worker

    def begin_step(self, step: int) -> None:
        """A step begins. Where another one plays what was requested, loader processes get new requests."""
        self._step = step
        expected = itertools.islice(self._expected(), max(1, len(self._requested)))
        if self._processes.num_workers > 0 and list(expected) != list(self._requested):
            self._fetched = iter(self._processes)

    def fetch(self, step: int, virtual_worker: int) -> Any:
        """Return a batch. Random state is as the dataset left it, or unchanged."""
        wanted = step, virtual_worker
        if wanted in self._requested:
            found = None
            while found != wanted:  # what comes before it is played by another worker now
                found, batch = self._requested.popleft(), next(self._fetched)
        else:
            self._wanted[:] = [self._request(step, virtual_worker)]
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # as in a loader process: a sum over a large tensor depends on it
            try:
                batch = next(iter(self._here))
            finally:
                torch.set_num_threads(threads)
        return _aligned(batch)

    def close(self) -> None:
        """End the loader processes."""
        self._fetched, self._processes = iter(()), self._here


def _enter_loader_process(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    # It has its parent's sockets, which stay open while it lives: peers would not see that the parent was killed.
    end_with_parent()
    if worker_init_fn is not None:
        worker_init_fn(number)


def _aligned(batch: Any) -> Any:
    """``batch``, in which tensors on the CPU begin where torch has them begin.

    A matrix product's bits depend on it. A tensor over NumPy's memory begins elsewhere, unless it came from another
    process.
    """
    return tree_map_only(torch.Tensor, lambda one: one.clone() if _is_misaligned(one) else one, batch)


def _is_misaligned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.data_ptr() % ALIGNMENT_BYTES != 0


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

    One epoch of 9 samples, for 3 virtual workers and ``batch_size=2``::

        permutation       p0 p1 │ p2 p3 │ p4 p5 ║ p6 │ p7 │ p8
        virtual worker      0   │   1   │   2   ║ 0  │ 1  │ 2
        step              1                     ║ 2               the samples that are left, split evenly

    With 8 samples there is no step 2: the first two virtual workers would have a sample, the third none. So p6 and p7
    join step 1, in which two virtual workers take three samples.

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
